"""Blocks: what each way of cutting keeps, drops and never crosses.

Shapes: B blocks, T tokens of a block.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from residual_ebm.config import BlockConfig, ContinuationMode
from residual_ebm.files.blocks import (
    Blocks,
    choose_blocks,
    cut_blocks,
    read_blocks,
    read_documents_ids,
    write_blocks,
    write_documents,
)

END = 0
DOCUMENTS = st.lists(st.lists(st.integers(1, 9), max_size=30), max_size=8)
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 6))  # prefix, continuation


def block_config(prefix_length: int, num_new: int, mode: ContinuationMode) -> BlockConfig:
    return BlockConfig(
        prefix_length=prefix_length, length=prefix_length + num_new, continuation=mode
    )


def real_tokens(blocks: Blocks) -> list[list[int]]:
    return [
        ids[:length].tolist() for ids, length in zip(blocks.ids_BT, blocks.length_B, strict=True)
    ]


def small_blocks(num_blocks: int) -> Blocks:
    draw = np.random.default_rng(0)
    return Blocks(
        draw.integers(0, 2**31 - 1, (num_blocks, 7)),
        draw.integers(1, 8, num_blocks),
        np.arange(num_blocks) // 2,
        np.where(np.arange(num_blocks) % 2 == 0, np.nan, -draw.random(num_blocks)),
    )


@given(DOCUMENTS, SHAPES)
def test_fixed_covers_the_stream_in_order(
    documents: list[list[int]], shape: tuple[int, int]
) -> None:
    blocks = cut_blocks(documents, block_config(*shape, "fixed"), END)
    stream = [token for document in documents for token in (*document, END)]
    covered = blocks.ids_BT.reshape(-1).tolist()
    assert covered == stream[: len(covered)]
    assert len(stream) - len(covered) < sum(shape)
    assert (blocks.length_B == sum(shape)).all()


@given(DOCUMENTS, SHAPES)
def test_fixed_block_belongs_to_the_document_where_its_continuation_starts(
    documents: list[list[int]], shape: tuple[int, int]
) -> None:
    blocks = cut_blocks(documents, block_config(*shape, "fixed"), END)
    owners = [number for number, document in enumerate(documents) for _ in (*document, END)]
    for number, owner in enumerate(blocks.document_B.tolist()):
        assert owner == owners[number * sum(shape) + shape[0]]


def test_fixed_may_cross_documents() -> None:
    blocks = cut_blocks([[1, 2, 3], [4], [5, 6, 7]], block_config(2, 2, "fixed"), END)
    assert blocks.ids_BT.tolist() == [[1, 2, 3, END], [4, END, 5, 6]]
    assert blocks.document_B.tolist() == [0, 2]


@given(DOCUMENTS, SHAPES)
def test_until_end_never_crosses_a_document(
    documents: list[list[int]], shape: tuple[int, int]
) -> None:
    """Each document, end-of-text at its end, is its blocks one after the other and a leftover."""
    blocks = cut_blocks(documents, block_config(*shape, "until_end"), END)
    assert (np.diff(blocks.document_B) >= 0).all()
    for number, document in enumerate(documents):
        own = real_tokens(blocks.select(np.flatnonzero(blocks.document_B == number)))
        covered = [token for block in own for token in block]
        whole = [*document, END]
        assert covered == whole[: len(covered)]
        assert len(whole) - len(covered) <= shape[0], "only what has no continuation is dropped"


@given(DOCUMENTS, SHAPES)
def test_until_end_stops_at_the_end_or_at_the_full_length(
    documents: list[list[int]], shape: tuple[int, int]
) -> None:
    blocks = cut_blocks(documents, block_config(*shape, "until_end"), END)
    for ids, length in zip(blocks.ids_BT.tolist(), blocks.length_B.tolist(), strict=True):
        assert shape[0] < length <= sum(shape)
        # The end belongs to the continuation; nothing follows it but padding.
        assert END not in ids[: length - 1]
        assert length == sum(shape) or ids[length - 1] == END
        assert set(ids[length:]) <= {END}


def test_until_end_by_hand() -> None:
    documents = [[1, 2, 3, 4, 5, 6], [1, 2], [1], []]
    blocks = cut_blocks(documents, block_config(2, 2, "until_end"), END)
    # 5 6 is left without its end-of-text cut off: three tokens are more than a prefix of two.
    assert real_tokens(blocks) == [[1, 2, 3, 4], [5, 6, END], [1, 2, END]]
    assert blocks.document_B.tolist() == [0, 0, 1]


def test_until_end_stops_at_an_end_inside_a_document() -> None:
    """Text may spell out end-of-text, which a tokenizer reads as the token itself.

    Samples never go on behind it, so a positive that did would be told by that alone.
    """
    documents = [[1, 2, 3, END, 5, 6, 7, 8]]
    blocks = cut_blocks(documents, block_config(2, 4, "until_end"), END)
    for ids, length in zip(blocks.ids_BT.tolist(), blocks.length_B.tolist(), strict=True):
        assert END not in ids[2 : length - 1]


@pytest.mark.parametrize("mode", ["fixed", "until_end"])
def test_too_little_text_makes_no_blocks(mode: ContinuationMode) -> None:
    too_little: list[list[list[int]]] = [[], [[]], [[1, 2]]]
    for documents in too_little:
        blocks = cut_blocks(documents, block_config(3, 4, mode), END)
        assert len(blocks) == 0
        assert blocks.ids_BT.shape == (0, 7)


def test_nothing_is_known_of_the_true_log_prob_at_first() -> None:
    blocks = cut_blocks([[1, 2, 3]], block_config(1, 1, "fixed"), END)
    assert np.isnan(blocks.true_log_prob_B).all()


def test_select_takes_the_same_rows_of_everything() -> None:
    blocks = small_blocks(6)
    part = blocks.select(np.array([4, 1]))
    np.testing.assert_array_equal(part.ids_BT, blocks.ids_BT[[4, 1]])
    np.testing.assert_array_equal(part.length_B, blocks.length_B[[4, 1]])
    np.testing.assert_array_equal(part.document_B, [2, 0])
    np.testing.assert_array_equal(part.true_log_prob_B, blocks.true_log_prob_B[[4, 1]])


@given(st.integers(0, 50), st.integers(0, 60), st.integers(0, 2**32))
def test_chosen_blocks_are_sorted_and_distinct(num_blocks: int, count: int, seed: int) -> None:
    chosen = choose_blocks(num_blocks, count, seed, "test")
    assert len(chosen) == min(num_blocks, count)
    assert (np.diff(chosen) > 0).all()
    assert set(chosen.tolist()) <= set(range(num_blocks))


def test_choice_is_keyed_by_seed_and_purpose() -> None:
    chosen = choose_blocks(1000, 20, 1, "negatives")
    np.testing.assert_array_equal(chosen, choose_blocks(1000, 20, 1, "negatives"))
    assert chosen.tolist() != choose_blocks(1000, 20, 2, "negatives").tolist()
    assert chosen.tolist() != choose_blocks(1000, 20, 1, "evaluation").tolist()


def test_choice_ignores_the_global_generator() -> None:
    np.random.seed(0)
    chosen = choose_blocks(1000, 20, 1, "negatives")
    np.random.seed(1)
    np.testing.assert_array_equal(chosen, choose_blocks(1000, 20, 1, "negatives"))


def test_choice_is_uniform_over_the_whole_split() -> None:
    counts = np.zeros(20)
    for seed in range(400):
        counts[choose_blocks(20, 5, seed, "test")] += 1
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("num_blocks", [0, 1, 9])
def test_blocks_round_trip(tmp_path: Path, num_blocks: int) -> None:
    blocks = small_blocks(num_blocks)
    write_blocks(tmp_path / "blocks.arrow", blocks)
    read = read_blocks(tmp_path / "blocks.arrow")
    for name in ("ids_BT", "length_B", "document_B", "true_log_prob_B"):
        written, again = getattr(blocks, name), getattr(read, name)
        np.testing.assert_array_equal(again, written)
        assert again.dtype == written.dtype
        assert again.shape == written.shape


def test_same_blocks_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_blocks(tmp_path / name, small_blocks(9))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_documents_round_trip(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [2**31 - 1]]
    write_documents(tmp_path / "documents.arrow", documents)
    read = read_documents_ids(tmp_path / "documents.arrow")
    assert [ids.tolist() for ids in read] == documents
    assert all(ids.dtype == np.int64 for ids in read)
