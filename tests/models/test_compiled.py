"""Compiled functions give what the plain ones give, and where there is no compiler, the plain ones.

Shapes: R rows, V vocabulary; N rows, K heads of keys, r queries of a head, S own tokens, D size.
"""

import logging

import pytest
import torch
from torch import Tensor

from residual_ebm.models import compiled, shared_prefix, vocabulary
from residual_ebm.models.compiled import compiled_instead_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
MANY = 300


@pytest.fixture
def nothing_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_broken", set())


@pytest.mark.parametrize("size", [7, 256, 1000])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("nothing_broken")
def test_summaries_are_those_of_the_plain_way(size: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(size)
    logits_RV = (4 * torch.randn(MANY, size, generator=draw)).to(dtype)
    logits_RV[:, 3] = -torch.inf
    logits_RV[5, :4] = -torch.inf
    fused, plain = vocabulary._summarise(logits_RV), vocabulary._summarise_in_pieces(logits_RV)
    assert not compiled._broken
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    summary = vocabulary.summarise(logits_RV)
    exact = torch.distributions.Categorical(logits=logits_RV.double().clamp(min=-1e4))
    torch.testing.assert_close(summary.entropy().double(), exact.entropy(), rtol=1e-4, atol=1e-5)
    token_R = logits_RV.argmax(-1)
    torch.testing.assert_close(
        summary.log_prob(logits_RV, token_R).double(), exact.log_prob(token_R), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.usefixtures("nothing_broken")
def test_own_tokens_are_attended_as_in_the_plain_way(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(MANY, 2, *shape, generator=draw).to(dtype)

    for own_tokens in (1, 2, 9):
        arguments = (
            3 * normal(3, 16),
            normal(40, 16)[:, :, :own_tokens],  # a slice of a buffer, as in decoding
            normal(40, 16)[:, :, :own_tokens],
            normal(3, 16),
            normal(3).float(),
            torch.tensor(0.3),
        )
        fused = shared_prefix._merge_own(*arguments)
        assert fused.dtype == dtype
        tolerance = TOLERANCE[dtype]
        plain = shared_prefix._own_by_attention(*arguments)
        torch.testing.assert_close(fused, plain, rtol=tolerance, atol=tolerance)
    assert not compiled._broken


def _double(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.usefixtures("nothing_broken")
def test_without_a_compiler_the_plain_way_is_taken_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(*_arguments: object, **_options: object) -> object:
        def refuse(*_inputs: Tensor) -> None:
            raise RuntimeError("no g++ here\nand much more")

        return refuse

    monkeypatch.setattr(torch, "compile", no_compiler)

    @compiled_instead_of(_double)
    def double(x: Tensor) -> Tensor:
        return x + x

    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(double(torch.ones(MANY)), torch.full((MANY,), 2.0))
    assert [record.getMessage() for record in caplog.records] == [
        "_double is not compiled here: no g++ here and much more"
    ]


@pytest.mark.usefixtures("nothing_broken")
def test_few_rows_are_not_worth_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail)

    @compiled_instead_of(_double)
    def double(x: Tensor) -> Tensor:
        return x + x

    assert torch.equal(double(torch.ones(255)), torch.full((255,), 2.0))
