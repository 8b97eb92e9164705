"""A batch is cut so that every item is in one part, parts are alike and no larger than asked."""

from hypothesis import given
from hypothesis import strategies as st

from residual_ebm.config import TrainingConfig
from residual_ebm.models.parts import parts_of, share_of


def config(batch_size: int, tokens_at_once: int | None) -> TrainingConfig:
    return TrainingConfig(
        steps=1,
        batch_size=batch_size,
        learning_rate=0.1,
        validate_every=1,
        checkpoint_every=1,
        tokens_at_once=tokens_at_once,
    )


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 20_000))
def test_every_item_is_in_one_part_of_about_the_same_size(
    batch_size: int, tokens_per_item: int, tokens_at_once: int
) -> None:
    training = config(batch_size, tokens_at_once)
    parts = parts_of(training, tokens_per_item)
    items = list(range(batch_size))
    assert [item for part in parts for item in items[part]] == items
    sizes = [len(items[part]) for part in parts]
    assert 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    # One item more than fits, at most: what does not divide is spread over all parts.
    assert (max(sizes) - 1) * tokens_per_item < tokens_at_once
    assert abs(sum(share_of(part, training) for part in parts) - 1) < 1e-9


def test_no_more_parts_than_needed() -> None:
    assert parts_of(config(48, 4096), 160) == [slice(0, 24), slice(24, 48)]
    assert parts_of(config(25, 4000), 160) == [slice(0, 25)]


def test_a_batch_is_whole_by_default() -> None:
    assert parts_of(config(1000, None), 1000) == [slice(0, 1000)]
