"""Samples on disk: the plan covers every sample once, and only whole, honest sets are opened.

Shapes: N rows, C tokens of a continuation.
"""

import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residual_ebm.config import SamplingConfig
from residual_ebm.errors import UserError
from residual_ebm.files.samples import (
    SampleRows,
    join_rows,
    open_samples,
    plan_shards,
    read_rows,
    refuse_truncation,
    sample_manifest,
    shard_path,
    write_rows,
)
from residual_ebm.files.storage import MANIFEST, write_manifest

LANGUAGE_MODEL = "fingerprint of P_LM"
NUM_PREFIXES, NUM_SAMPLES, NUM_TOKENS = 6, 4, 5
COLUMNS = ("prefix_N", "sample_N", "ids_NC", "length_N", "lm_log_prob_N")


def sampling(chunk_size: int, chunks_per_shard: int) -> SamplingConfig:
    return SamplingConfig(chunk_size=chunk_size, chunks_per_shard=chunks_per_shard)


def some_rows(first_prefix: int, num_prefixes: int) -> SampleRows:
    draw = np.random.default_rng(first_prefix)
    num_rows = num_prefixes * NUM_SAMPLES
    return SampleRows(
        np.repeat(np.arange(first_prefix, first_prefix + num_prefixes), NUM_SAMPLES),
        np.tile(np.arange(NUM_SAMPLES), num_prefixes),
        draw.integers(0, 2**31 - 1, (num_rows, NUM_TOKENS)),
        draw.integers(1, NUM_TOKENS + 1, num_rows),
        -50 * draw.random(num_rows),
    )


def write_set(folder: Path, truncation: dict[str, Any] | None = None) -> list[SampleRows]:
    """Three shards of two prefixes each."""
    parts = [some_rows(first, 2) for first in range(0, NUM_PREFIXES, 2)]
    for number, rows in enumerate(parts):
        write_rows(shard_path(folder, number), rows)
    block_P = np.arange(NUM_PREFIXES) * 10
    write_manifest(folder, sample_manifest(block_P, NUM_SAMPLES, LANGUAGE_MODEL, truncation))
    return parts


def assert_same_rows(one: SampleRows, other: SampleRows) -> None:
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(one, column), getattr(other, column))
        assert getattr(one, column).dtype == getattr(other, column).dtype


def refusal_of(folder: Path, language_model: str = LANGUAGE_MODEL) -> str:
    with pytest.raises(UserError) as caught:
        open_samples(folder, language_model)
    return str(caught.value)


@settings(deadline=None)
@given(
    num_prefixes=st.integers(0, 40),
    num_samples=st.integers(1, 40),
    chunk_size=st.integers(1, 60),
    chunks_per_shard=st.integers(1, 7),
)
def test_plan_covers_every_sample_once_in_order(
    num_prefixes: int, num_samples: int, chunk_size: int, chunks_per_shard: int
) -> None:
    shards = plan_shards(num_prefixes, num_samples, sampling(chunk_size, chunks_per_shard))
    covered = [
        (chunk.first_prefix + prefix, chunk.first_sample + sample)
        for shard in shards
        for chunk in shard
        for prefix in range(chunk.num_prefixes)
        for sample in range(chunk.num_samples)
    ]
    assert covered == [(p, s) for p in range(num_prefixes) for s in range(num_samples)]
    for shard in shards:
        assert 1 <= len(shard) <= chunks_per_shard
        assert all(1 <= chunk.num_prefixes * chunk.num_samples <= chunk_size for chunk in shard)
    assert all(len(shard) == chunks_per_shard for shard in shards[:-1])


def test_plan_depends_on_its_arguments_alone() -> None:
    plans = []
    for seed in range(2):
        random.seed(seed)
        np.random.seed(seed)
        plans.append(plan_shards(37, 11, sampling(64, 3)))
    assert plans[0] == plans[1]


def test_plan_fills_its_chunks() -> None:
    """Prefixes are decoded together when several fit."""
    assert [len(shard) for shard in plan_shards(100, 4, sampling(40, 2))] == [2, 2, 2, 2, 2]
    assert [len(shard) for shard in plan_shards(3, 100, sampling(40, 2))] == [2, 2, 2, 2, 1]


def test_more_prefixes_leave_earlier_shards_alone() -> None:
    few, many = (plan_shards(count, 4, sampling(16, 2)) for count in (40, 80))
    assert many[: len(few)] == few


def test_rows_round_trip(tmp_path: Path) -> None:
    rows = some_rows(0, 3)
    write_rows(tmp_path / "rows.arrow", rows)
    assert_same_rows(read_rows(tmp_path / "rows.arrow"), rows)


def test_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_rows(tmp_path / name, some_rows(2, 2))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_joined_rows_keep_their_order() -> None:
    joined = join_rows([some_rows(0, 2), some_rows(2, 1)])
    assert joined.prefix_N.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert len(joined) == 12
    np.testing.assert_array_equal(joined.ids_NC[8:], some_rows(2, 1).ids_NC)


def test_set_round_trip(tmp_path: Path) -> None:
    parts = write_set(tmp_path)
    samples = open_samples(tmp_path, LANGUAGE_MODEL)
    assert samples.block_P.tolist() == [0, 10, 20, 30, 40, 50]
    assert samples.samples_per_prefix == NUM_SAMPLES
    assert samples.language_model == LANGUAGE_MODEL
    for read, written in zip(samples.rows(), parts, strict=True):
        assert_same_rows(read, written)


def test_shards_open_with_datasets(tmp_path: Path) -> None:
    parts = write_set(tmp_path)
    dataset = datasets.Dataset.from_file(str(shard_path(tmp_path, 1)))
    assert dataset.num_rows == len(parts[1])
    assert dataset["ids"][3] == parts[1].ids_NC[3].tolist()
    np.testing.assert_array_equal(dataset["lm_log_prob"], parts[1].lm_log_prob_N)


def test_altered_shard_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    path = shard_path(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "shard-00001.arrow: was altered" in refusal_of(tmp_path)


def test_truncated_shard_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    path = shard_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:-8])
    assert "shard-00002.arrow: is truncated" in refusal_of(tmp_path)


def test_missing_shard_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    shard_path(tmp_path, 0).unlink()
    assert "shard-00000.arrow: is missing" in refusal_of(tmp_path)


def test_unfinished_set_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / MANIFEST).unlink()
    assert "manifest.json: is missing" in refusal_of(tmp_path)


def test_samples_of_another_language_model_are_refused(tmp_path: Path) -> None:
    write_set(tmp_path)
    assert "another language model" in refusal_of(tmp_path, "another fingerprint")


@pytest.mark.parametrize("truncation", [{"top_k": 10}, {"top_p": 0.9}, {"top_k": 5, "top_p": 0.5}])
def test_truncated_samples_are_refused(tmp_path: Path, truncation: dict[str, Any]) -> None:
    write_set(tmp_path, truncation)
    message = refusal_of(tmp_path)
    assert all(f"{name}={value}" in message for name, value in truncation.items())
    assert "need samples of P_LM itself" in message


@pytest.mark.parametrize("truncation", [None, {}])
def test_untruncated_samples_are_accepted(
    tmp_path: Path, truncation: dict[str, Any] | None
) -> None:
    refuse_truncation(truncation, "here")
    write_set(tmp_path, truncation)
    assert sum(len(rows) for rows in open_samples(tmp_path, LANGUAGE_MODEL).rows()) > 0
