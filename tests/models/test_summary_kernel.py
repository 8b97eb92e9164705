"""The kernel's summary of logits is that of float64.

Shapes: R rows, V vocabulary, K chunks of it.
"""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from residual_ebm.models import summary_kernel, vocabulary
from residual_ebm.models.summary_kernel import CHUNK, can_summarise, summarise_rows
from residual_ebm.models.vocabulary import Summary, draw_by_summary


@pytest.fixture
def kernel() -> None:
    if summary_kernel._kernel() is None:
        pytest.skip("no AVX-512 here, or no compiler")


def random_logits(num_rows: int, size: int, scale: float = 4.0) -> Tensor:
    draw = torch.Generator().manual_seed(size)
    return (scale * torch.randn(num_rows, size, generator=draw) - 20).bfloat16()


def in_float64(logits_RV: Tensor) -> Summary:
    """By the definition of each number."""
    padding = -logits_RV.shape[1] % CHUNK
    logits_RV = torch.nn.functional.pad(logits_RV.double(), (0, padding), value=-torch.inf)
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    score_RV = logits_RV - largest_R1
    mass_RV = score_RV.exp()
    chunked = (len(logits_RV), -1, CHUNK)
    expected_R = torch.where(mass_RV > 0, mass_RV * score_RV, 0.0).sum(-1)
    return Summary(
        largest_R1[:, 0],
        mass_RV.view(chunked).sum(-1),
        expected_R,
        logits_RV.view(chunked).amax(-1).clamp(min=-1e30),
    )


def assert_right(logits_RV: Tensor, rtol: float = 3e-6) -> None:
    assert can_summarise(logits_RV)
    for ours, exact in zip(summarise_rows(logits_RV), in_float64(logits_RV), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=rtol, atol=1e-30)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 60.0])
@pytest.mark.parametrize("size", [1, 15, 16, 255, 256, 257, 1000, 16 * 256, 17 * 256 + 5])
def test_a_summary_is_that_of_float64(size: int, scale: float) -> None:
    rounding_of_large_differences = 1e-7 * scale
    assert_right(random_logits(9, size, scale), 3e-6 + rounding_of_large_differences)


@pytest.mark.usefixtures("kernel")
def test_a_sum_of_masses_is_hardly_off() -> None:
    logits_RV = random_logits(500, 5000, 2.0)
    summary, exact = Summary(*summarise_rows(logits_RV)), in_float64(logits_RV)
    error_R = (summary.total().double() / exact.mass_RK.sum(-1)).log()
    assert float(error_R.abs().max()) < 3e-7


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("place", [0, 255, 256, 599])
def test_of_a_token_that_is_certain_no_log_prob_is_above_zero(place: int) -> None:
    logits_RV = torch.full((3, 600), -40.0).bfloat16()
    logits_RV[:, place] = torch.tensor([0.0, 30.0, -25.0]).bfloat16()
    summary = Summary(*summarise_rows(logits_RV))
    assert (summary.total() >= 1).all()
    assert (summary.log_prob(logits_RV, torch.full((3,), place)) <= 0).all()
    assert (summary.entropy() >= 0).all()


@pytest.mark.usefixtures("kernel")
def test_the_last_token_of_a_chunk_is_drawn_as_often_as_it_is_scored() -> None:
    """Were masses of the chunk and of its tokens to differ, it would get all of the difference."""
    num_tokens = 2 * CHUNK
    logits_1V = torch.full((1, num_tokens), -torch.inf).bfloat16()
    logits_1V[0, 0], logits_1V[0, 1:200], logits_1V[0, CHUNK - 1] = 0.0, -0.8125, -9.0
    logits_1V[0, CHUNK : CHUNK + 200] = -1.0
    summary = vocabulary.summarise(logits_1V)

    def first_from(token: int) -> float:
        """The least uniform number that draws this token or a later one."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            drawn = draw_by_summary(logits_1V, summary, torch.tensor([middle], dtype=torch.float64))
            low, high = (low, middle) if int(drawn) >= token else (middle, high)
        return high

    drawn = first_from(CHUNK) - first_from(CHUNK - 1)
    scored = float(summary.log_prob(logits_1V, torch.tensor([CHUNK - 1])).double().exp())
    assert drawn == pytest.approx(scored, rel=1e-3)


@pytest.mark.usefixtures("kernel")
def test_what_cannot_come_has_no_mass_at_all() -> None:
    logits_RV = random_logits(4, 3 * CHUNK)
    logits_RV[0, ::2] = -torch.inf
    logits_RV[1, :CHUNK] = -torch.inf
    logits_RV[2, CHUNK:] = -torch.inf
    logits_RV[3, CHUNK : 2 * CHUNK] -= 200
    assert_right(logits_RV[:3])
    mass_RK = summarise_rows(logits_RV)[1]
    assert mass_RK[1, 0] == mass_RK[2, 1] == mass_RK[2, 2] == mass_RK[3, 1] == 0
    assert float(mass_RK[0].min()) > 0


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 17, 300, 599])
def test_what_is_no_number_is_not_hidden_and_stays_in_its_row(wrong: float, place: int) -> None:
    logits_RV = random_logits(3, 600)
    before = summarise_rows(logits_RV)
    logits_RV[1, place] = wrong
    after = summarise_rows(logits_RV)
    for ours, theirs in zip(before, after, strict=True):
        assert torch.equal(ours[::2], theirs[::2])
    assert Summary(*after).total()[1].isnan()


@pytest.mark.usefixtures("kernel")
def test_rows_and_threads_beside_a_row_do_not_change_a_bit_of_it() -> None:
    logits_RV = random_logits(33, 5 * CHUNK + 3)
    together = summarise_rows(logits_RV)
    threads = torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        try:
            again = summarise_rows(logits_RV)
        finally:
            torch.set_num_threads(threads)
        assert all(map(torch.equal, again, together))
    for row in range(3):
        alone = summarise_rows(logits_RV[row : row + 1])
        assert all(
            torch.equal(one[0], of_all[row]) for one, of_all in zip(alone, together, strict=True)
        )


@pytest.mark.usefixtures("kernel")
def test_rows_that_lie_apart_in_memory_are_read_where_they_are() -> None:
    logits_RTV = random_logits(8, 300).view(4, 2, 300)
    assert_right(logits_RTV[:, -1])


@pytest.mark.usefixtures("kernel")
def test_it_takes_the_place_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_RV = random_logits(50, 700)
    uniform_R = torch.linspace(0, 1, 50)
    summary = vocabulary.summarise(logits_RV)
    assert all(map(torch.equal, summary, summarise_rows(logits_RV)))
    drawn_R = draw_by_summary(logits_RV, summary, uniform_R)
    monkeypatch.setattr(vocabulary, "can_summarise", lambda _logits: False)
    plain = vocabulary.summarise(logits_RV)
    for ours, theirs in zip(summary, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-30)
    same_R = drawn_R == draw_by_summary(logits_RV, plain, uniform_R)
    assert same_R.float().mean() > 0.9


def test_other_numbers_and_no_rows_are_left_to_torch() -> None:
    logits_RV = random_logits(3, 300)
    assert not can_summarise(logits_RV.float())
    assert not can_summarise(logits_RV[:0])
    assert not can_summarise(logits_RV.to("meta"))
    assert not can_summarise(logits_RV.clone().requires_grad_())


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    "logits", [torch.zeros(3, 4), torch.zeros(4).bfloat16(), torch.zeros(2, 3, 4).bfloat16()]
)
def test_what_does_not_fit_is_refused_before_memory_is_touched(logits: Tensor) -> None:
    with pytest.raises(ValueError, match="does not take"):
        summarise_rows(logits)


def test_without_the_instructions_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_kernel, "processor_lists", lambda _feature: False)
    assert summary_kernel._kernel.__wrapped__() is None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler here")
def test_a_build_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(summary_kernel, "processor_lists", lambda _feature: True)
    monkeypatch.setattr(summary_kernel, "_SOURCE", tmp_path / "gone.c")
    with caplog.at_level(logging.WARNING):
        assert summary_kernel._kernel.__wrapped__() is None
    assert "the summary of logits is not built here" in caplog.text
