"""The kernel gives what attention written out in float32 gives, for every shape that it takes.

Shapes: N rows, G prefixes, H heads, K heads of keys and values, D head size, P tokens of a prefix.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import kernels
import pytest
import torch
import toys
from torch import Tensor
from transformers import DynamicCache

from residual_ebm.models import compiled, packed_attention, shared_prefix
from residual_ebm.models.decoding import UNTRUNCATED
from residual_ebm.models.language_model import LanguageModel
from residual_ebm.models.packed_attention import (
    PackedLayer,
    attend_both_ways,
    attend_causal,
    can_attend,
)

kernel = kernels.kernel
needs_kernel = pytest.mark.usefixtures("kernel")
needs_compiler = pytest.mark.usefixtures("can_build")
Step = tuple[Tensor, Tensor, Tensor]  # query (N, H, 1, D), key and value (N, K, 1, D)


@pytest.fixture
def can_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built here may never run, but it loads."""
    if shutil.which("gcc") is None:
        pytest.skip("no compiler here")
    monkeypatch.setattr(packed_attention, "processor_lists", lambda _feature: True)


@pytest.fixture
def new_memory_is_no_number() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=draw)).bfloat16()


def steps_of(
    num_steps: int, num_rows: int, kv_heads: int, repeats: int, size: int, sharp: float = 1.0
) -> list[Step]:
    return [
        (
            random(num_rows, kv_heads * repeats, 1, size, seed=10 * number, scale=sharp),
            random(num_rows, kv_heads, 1, size, seed=10 * number + 1),
            random(num_rows, kv_heads, 1, size, seed=10 * number + 2),
        )
        for number in range(1, 1 + num_steps)
    ]


SMALL = steps_of(1, 4, 1, 2, 16)[0]


def written_out(prefix: Sequence[Tensor], steps: Sequence[Step], scale: float) -> Tensor:
    """Of the last step's token, (N, 1, H, D), float32."""
    query = steps[-1][0].float()
    repeats = query.shape[1] // prefix[0].shape[1]
    key, value = (
        torch.cat(
            [
                prefix[which].repeat_interleave(len(query) // len(prefix[which]), 0),
                *(step[1 + which] for step in steps),
            ],
            dim=2,
        )
        .float()
        .repeat_interleave(repeats, 1)
        for which in (0, 1)
    )
    return (((query @ key.mT) * scale).softmax(-1) @ value).transpose(1, 2)


def attended(prefix: Sequence[Tensor], steps: Sequence[Step], scale: float) -> list[Tensor]:
    layer = PackedLayer(prefix[0], prefix[1], len(steps))
    return [layer.attend(*step, scale) for step in steps]


def prefix_of(num_prefixes: int, kv_heads: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    shape = (num_prefixes, kv_heads, length, size)
    return random(*shape, seed=1), random(*shape, seed=2)


@needs_kernel
@pytest.mark.parametrize(
    ("num_prefixes", "rows", "kv_heads", "repeats", "size", "length", "num_steps"),
    [
        (1, 50, 3, 3, 64, 120, 18),  # SmolLM2's heads; own tokens past the first sixteen
        (3, 5, 2, 1, 16, 7, 34),  # a head for each query, as few numbers as may be
        (2, 3, 1, 40, 32, 130, 3),  # one head of keys for more queries than go together
        (1, 1, 4, 2, 128, 1, 2),
        (2, 9, 1, 4, 80, 300, 3),
        (2, 4, 1, 2, 192, 200, 3),  # what is left of eight vectors is four, and then one
        (5, 2, 2, 5, 48, 16, 17),  # nothing to pad
    ],
)
@pytest.mark.parametrize("sharp", [0.0, 1.0, 20.0])
@pytest.mark.usefixtures("new_memory_is_no_number")
def test_attention_is_that_of_float32(
    num_prefixes: int,
    rows: int,
    kv_heads: int,
    repeats: int,
    size: int,
    length: int,
    num_steps: int,
    sharp: float,
) -> None:
    prefix = prefix_of(num_prefixes, kv_heads, length, size)
    steps = steps_of(num_steps, num_prefixes * rows, kv_heads, repeats, size, sharp)
    scale = size**-0.5
    for number, out in enumerate(attended(prefix, steps, scale), 1):
        expected = written_out(prefix, steps[:number], scale)
        assert out.shape == expected.shape
        # Masses are rounded, and so is what comes out: 2^-9 of a number each.
        torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
        assert float((out.float() - expected).square().mean().sqrt()) < 2**-9


@needs_kernel
@pytest.mark.parametrize(
    ("num_rows", "kv_heads", "repeats", "size", "length"),
    [
        (3, 3, 3, 64, 120),
        (1, 2, 1, 16, 1),
        (2, 1, 40, 32, 33),
        (4, 2, 2, 128, 16),
        (2, 2, 1, 192, 201),
        (2, 1, 5, 80, 9),
    ],
)
@pytest.mark.parametrize("sharp", [0.0, 1.0, 20.0])
@pytest.mark.usefixtures("new_memory_is_no_number")
def test_causal_attention_is_that_of_float32(
    num_rows: int, kv_heads: int, repeats: int, size: int, length: int, sharp: float
) -> None:
    # As a projection leaves them: token by token in memory, head by head to the eye.
    query = random(num_rows, length, kv_heads * repeats, size, seed=0, scale=sharp).transpose(1, 2)
    key, value = (
        random(num_rows, length, kv_heads, size, seed=seed).transpose(1, 2) for seed in (1, 2)
    )
    score = query.float() @ key.float().repeat_interleave(repeats, 1).mT * size**-0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    mass = score.masked_fill(future, -torch.inf).softmax(-1)
    expected = (mass @ value.float().repeat_interleave(repeats, 1)).transpose(1, 2)
    out = attend_causal(query, key, value, size**-0.5)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    assert float((out.float() - expected).square().mean().sqrt()) < 2**-9
    assert torch.equal(attend_causal(query[:1], key[:1], value[:1], size**-0.5), out[:1])
    with threads(3):
        assert torch.equal(attend_causal(query, key, value, size**-0.5), out)


@needs_kernel
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "repeats", "size"),
    [
        ((176, 150, 161), 12, 1, 32),  # MiniLM's heads
        ((120, 1, 16, 17, 0), 3, 3, 64),
        ((1,), 2, 1, 16),
        ((33, 32), 1, 40, 32),  # more queries of a head of keys than go together
        ((201, 7), 2, 1, 192),
        ((9, 9), 1, 5, 80),
    ],
)
@pytest.mark.parametrize("sharp", [0.0, 1.0, 20.0])
@pytest.mark.usefixtures("new_memory_is_no_number")
def test_attention_both_ways_is_that_of_float32(
    lengths: tuple[int, ...], kv_heads: int, repeats: int, size: int, sharp: float
) -> None:
    shape, length_N = (len(lengths), max(lengths)), torch.tensor(lengths)
    query = random(*shape, kv_heads * repeats, size, seed=0, scale=sharp).transpose(1, 2)
    key, value = (random(*shape, kv_heads, size, seed=seed).transpose(1, 2) for seed in (1, 2))
    own_NL = torch.arange(shape[1]) < length_N[:, None]
    padding_N1L1 = ~own_NL[:, None, :, None]
    # Padding is not even looked at.
    given = [states.masked_fill(padding_N1L1, torch.nan) for states in (query, key, value)]
    scale = size**-0.5
    out = attend_both_ways(given[0], given[1], given[2], length_N, scale)
    assert not out[~own_NL].any()
    score = query.float() @ key.float().repeat_interleave(repeats, 1).mT * scale
    mass = score.masked_fill(~own_NL[:, None, None], -torch.inf).softmax(-1)
    expected = (mass @ value.float().repeat_interleave(repeats, 1)).transpose(1, 2)[own_NL]
    torch.testing.assert_close(out[own_NL].float(), expected, rtol=2**-7, atol=2**-7)
    assert float((out[own_NL].float() - expected).square().mean().sqrt()) < 2**-9
    # Neither rows nor padding beside a row change a bit of it, nor do threads.
    alone = [states[:1, :, : lengths[0]] for states in given]
    by_itself = attend_both_ways(alone[0], alone[1], alone[2], length_N[:1], scale)
    assert torch.equal(by_itself[0], out[0, : lengths[0]])
    with threads(3):
        again = attend_both_ways(given[0], given[1], given[2], length_N, scale)
    assert torch.equal(again, out)


@needs_kernel
@pytest.mark.parametrize(
    "length_N",
    [
        torch.tensor([5, 6]),
        torch.tensor([5, -1]),
        torch.tensor([5]),
        torch.tensor([5.0, 5.0]),
        torch.tensor([5, 5], dtype=torch.int32),
    ],
    ids=["longer than the row", "negative", "of fewer rows", "float", "32 bits"],
)
def test_lengths_that_rows_cannot_have_are_refused(length_N: Tensor) -> None:
    states = random(2, 1, 5, 16, seed=0)
    with pytest.raises(ValueError, match="does not take"):
        attend_both_ways(states, states, states, length_N, 1.0)


@needs_kernel
def test_rows_whose_keys_are_of_other_tokens_are_refused() -> None:
    query, key, value = (random(1, 2, 5, 16, seed=seed) for seed in range(3))
    with pytest.raises(ValueError, match="does not take"):
        attend_causal(query, key[:, :, :4], value[:, :, :4], 1.0)


@needs_kernel
def test_rows_and_threads_beside_a_row_do_not_change_a_bit_of_it() -> None:
    prefix = prefix_of(2, 2, 21, 32)
    steps = steps_of(18, 2 * 11, 2, 3, 32)
    whole = attended(prefix, steps, 0.2)
    for row in (0, 10, 11, 21):
        alone = [(q[row : row + 1], k[row : row + 1], v[row : row + 1]) for q, k, v in steps]
        own = [states[row // 11 : row // 11 + 1] for states in prefix]
        for out, expected in zip(attended(own, alone, 0.2), whole, strict=True):
            assert torch.equal(out[0], expected[row])
    with threads(3):
        assert all(map(torch.equal, attended(prefix, steps, 0.2), whole))


@needs_kernel
def test_threads_do_not_write_over_each_other() -> None:
    """There is enough to do for all of them to be at it at once."""
    prefix, steps = prefix_of(1, 3, 120, 64), steps_of(2, 600, 3, 3, 64)
    query, key, value = (
        random(24, heads, 128, 64, seed=seed) for seed, heads in enumerate((9, 3, 3))
    )
    with threads(1):
        after_prefix, causal = attended(prefix, steps, 0.1), attend_causal(query, key, value, 0.1)
    with threads(4):
        assert all(map(torch.equal, attended(prefix, steps, 0.1), after_prefix))
        assert torch.equal(attend_causal(query, key, value, 0.1), causal)


@needs_kernel
@pytest.mark.parametrize("num_early", [1, 2])
@pytest.mark.usefixtures("new_memory_is_no_number")
def test_rows_that_part_take_their_tokens_along(num_early: int) -> None:
    prefix = prefix_of(1, 1, 9, 16)
    early, late = steps_of(num_early, 2, 1, 2, 16), steps_of(3, 4, 1, 2, 16)[2:]
    before_N = torch.tensor([1, 0, 0, 1])
    layer = PackedLayer(*prefix, 3)
    for step in early:
        layer.attend(*step, 1.0)
    layer.follow(before_N)
    apart = [(q[before_N], k[before_N], v[before_N]) for q, k, v in early] + late
    assert torch.equal(layer.attend(*late[0], 1.0), attended(prefix, apart, 1.0)[-1])


@needs_kernel
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["query", "key", "value"])
def test_what_is_no_number_is_not_hidden_and_stays_in_its_row(which: int, wrong: float) -> None:
    prefix = prefix_of(1, 1, 5, 16)
    steps = steps_of(2, 3, 1, 1, 16)
    steps[1][which][1] = wrong
    out = attended(prefix, steps, 1.0)[-1]
    # Where a score is infinite, what is left of the largest is no number.
    expected = torch.full_like(out[1], wrong if which == 2 else torch.nan)
    torch.testing.assert_close(out[1], expected, equal_nan=True)
    assert out[[0, 2]].isfinite().all()


@needs_kernel
@pytest.mark.parametrize(
    "step",
    [
        steps_of(1, 3, 1, 2, 16)[0],  # three rows of two prefixes
        steps_of(1, 4, 2, 1, 16)[0],  # keys that were repeated for their heads
        steps_of(1, 4, 1, 2, 32)[0],
        tuple(states[..., :8] if number == 2 else states for number, states in enumerate(SMALL)),
        tuple(states.float() if number == 1 else states for number, states in enumerate(SMALL)),
        tuple(states.expand(-1, -1, 2, -1) for states in SMALL),
    ],
    ids=["rows", "repeated", "size", "narrow values", "float32", "two tokens"],
)
def test_what_does_not_fit_is_refused_before_memory_is_touched(step: Step) -> None:
    layer = PackedLayer(*prefix_of(2, 1, 5, 16), 3)
    with pytest.raises(ValueError, match="does not take"):
        layer.attend(*step, 1.0)


@needs_kernel
def test_more_tokens_or_other_rows_than_there_is_room_for_are_refused() -> None:
    layer = PackedLayer(*prefix_of(1, 1, 5, 16), 2)
    layer.attend(*SMALL, 1.0)
    with pytest.raises(ValueError, match="does not take"):
        layer.attend(*steps_of(1, 8, 1, 2, 16)[0], 1.0)
    layer.attend(*SMALL, 1.0)
    with pytest.raises(ValueError, match="does not take"):
        layer.attend(*SMALL, 1.0)


@needs_kernel
def test_the_default_type_of_numbers_does_not_matter() -> None:
    prefix, steps = prefix_of(1, 1, 5, 16), steps_of(2, 3, 1, 1, 16)
    expected = attended(prefix, steps, 1.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(map(torch.equal, attended(prefix, steps, 1.0), expected))
    finally:
        torch.set_default_dtype(torch.float32)


@needs_kernel
@pytest.mark.parametrize(
    ("change", "taken"),
    [
        (lambda query: query, True),
        (lambda query: query.float(), False),
        (lambda query: query[..., :8], False),
        (lambda query: query.to("meta"), False),
    ],
)
@torch.no_grad()
def test_other_numbers_sizes_and_devices_are_left_to_torch(
    change: Callable[[Tensor], Tensor], taken: bool
) -> None:
    assert can_attend(change(random(1, 1, 1, 16, seed=0))) is taken


@needs_kernel
def test_where_gradients_are_wanted_torch_attends() -> None:
    assert not can_attend(random(1, 1, 1, 16, seed=0))
    model = toys.causal_model("llama", **FAMILIES["llama"]).bfloat16()
    ids_NT = torch.tensor([[3, 4, 5]])
    shared_prefix.run_after_prefix(model, ids_NT, 2)[0].logits.float().sum().backward()
    assert all(
        weight.grad is not None for name, weight in model.named_parameters() if "v_proj" in name
    )


@needs_kernel
def test_scores_far_below_zero_are_still_above_those_of_padding() -> None:
    query, key, value = (torch.ones(1, 1, 5, 16).bfloat16() for _ in range(3))
    out = attend_causal(1e16 * query, -1e16 * key, value, 1.0)
    torch.testing.assert_close(out.float(), torch.ones(1, 5, 1, 16))


@needs_kernel
@pytest.mark.parametrize("scale", [0.0, -1.0, torch.nan])
def test_a_scale_that_hides_nothing_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="does not take"):
        attend_causal(*SMALL, scale)
    with pytest.raises(ValueError, match="does not take"):
        PackedLayer(*prefix_of(2, 1, 5, 16), 3).attend(*SMALL, scale)


@needs_kernel
@torch.inference_mode()
def test_a_prefix_is_not_kept_in_two_layouts() -> None:
    cache = DynamicCache()
    prefix = prefix_of(2, 1, 5, 16)
    cache.update(*prefix, layer_idx=0)
    after = shared_prefix.AfterPrefix(cache, 3)
    after.own[0].packed.attend(*SMALL, 1.0)
    assert cache.layers[0].keys.shape == prefix[0].shape
    assert cache.layers[0].keys.untyped_storage().nbytes() <= 2
    assert cache.layers[0].values.untyped_storage().nbytes() <= 2
    assert cache.get_seq_length() == 5


@pytest.mark.parametrize("compiler", ["", "  ", "gcc", "gcc -g0 -pipe"])
@needs_compiler
def test_the_compiler_may_be_named_with_arguments(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert packed_attention._kernel.__wrapped__() is not None


def test_without_a_compiler_there_is_no_kernel_and_nothing_to_tell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert packed_attention._kernel.__wrapped__() is None
    assert not caplog.records


@needs_compiler
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("false", "exit status 1"),
        ("gcc --no-such-option", "no-such-option"),
        ("gcc '", "No closing quotation"),
    ],
)
def test_a_build_that_fails_is_told(
    compiler: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert packed_attention._kernel.__wrapped__() is None
    assert reason in caplog.text


@needs_compiler
def test_no_room_for_the_build_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_folder(**_options: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", no_folder)
    assert packed_attention._kernel.__wrapped__() is None
    assert "no space left" in caplog.text


def test_without_the_instructions_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "processor_lists", lambda _feature: False)
    assert packed_attention._kernel.__wrapped__() is None


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 32},
    "gpt_neox": {"hidden_size": 32},
    "qwen3": {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32},
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows the kernel is given, call by call."""
    rows: list[int] = []
    attend = PackedLayer.attend

    def watched(layer: PackedLayer, query: Tensor, *rest: object) -> Tensor:
        rows.append(len(query))
        return attend(layer, query, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PackedLayer, "attend", watched)
    return rows


@needs_kernel
def test_compiled_layers_give_the_kernel_what_plain_ones_do(
    used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by the hundred, whose queries a compiled layer hands over in strides of its own."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    lm = LanguageModel(
        toys.causal_model("llama", hidden_size=512, **sizes).bfloat16(), toys.word_tokenizer()
    )
    given_1C = torch.randint(0, 7, (1, 6), generator=torch.Generator().manual_seed(5))

    def log_probs() -> Tensor:
        decoded = lm.sample_chunk(
            torch.randint(0, 7, (300, 5), generator=torch.Generator().manual_seed(4)),
            prefix_numbers=list(range(300)),
            first_sample=0,
            num_samples=1,
            num_tokens=6,
            seed=0,
            truncation=UNTRUNCATED,
            stop_at_end=False,
            given_ids_GC=given_1C.expand(300, -1),
        )
        return decoded.log_prob_NC[::2]  # of what is given, so that both read the same tokens

    fused = log_probs()
    assert used[-1] == 600
    monkeypatch.setattr(compiled, "_pays", lambda *_: False)
    plain = log_probs()
    assert not compiled._broken
    assert float((fused - plain).abs().median()) < 0.05
    assert float(plain.std()) > 1


@needs_kernel
@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("num_prefixes", [1, 2])
def test_every_family_draws_as_near_to_float32_as_in_torch(
    model_type: str, num_prefixes: int, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = LanguageModel(
        toys.causal_model(model_type, **FAMILIES[model_type]), toys.word_tokenizer()
    )
    half = LanguageModel(
        toys.causal_model(model_type, **FAMILIES[model_type]).bfloat16(), toys.word_tokenizer()
    )
    prefix_GP = torch.randint(0, 7, (num_prefixes, 5), generator=torch.Generator().manual_seed(3))

    def errors() -> Tensor:
        decoded = half.sample_chunk(
            prefix_GP,
            prefix_numbers=list(range(num_prefixes)),
            first_sample=0,
            num_samples=40,
            num_tokens=20,
            seed=0,
            truncation=UNTRUNCATED,
            stop_at_end=False,
        )
        ids_NT = torch.cat([prefix_GP.repeat_interleave(40, 0), decoded.ids_NC], dim=1)
        return (decoded.log_prob_NC - exact.log_prob(ids_NT, 5)).abs()

    half.log_prob(torch.zeros(1, 9, dtype=torch.int64), 5)  # has tried what it allows
    used.clear()
    whole: list[int] = []

    def watched(query: Tensor, *rest: Any) -> Tensor:
        whole.append(len(query))
        return attend_causal(query, *rest)

    monkeypatch.setattr(shared_prefix, "attend_causal", watched)
    by_kernel = errors()
    assert whole[:2] == [num_prefixes] * 2  # layers: the prefixes are read when drawing begins
    assert len(used) == 2 * 19  # layers, and tokens after the first
    assert used[-1] == num_prefixes * 40
    monkeypatch.setattr(shared_prefix, "can_attend", lambda _query: False)
    used.clear()
    in_torch = errors()
    assert not used
    assert by_kernel.median() < 1.5 * in_torch.median() + 0.002
    assert by_kernel.mean() < 1.5 * in_torch.mean() + 0.01
