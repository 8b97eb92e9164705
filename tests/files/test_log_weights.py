"""Log-weights on disk: prefix by prefix, however they were cut into shards.

Shapes: P prefixes, N proposals of a prefix.
"""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from residual_ebm.errors import UserError
from residual_ebm.files.log_weights import (
    REAL,
    RealContinuations,
    claim_log_weights,
    read_log_weights,
    read_real,
    write_log_weights,
    write_real,
)
from residual_ebm.files.samples import shard_path


def write_shards(folder: Path, prefix_N: np.ndarray, log_weight_N: np.ndarray, size: int) -> None:
    for number, start in enumerate(range(0, len(prefix_N), size)):
        rows = slice(start, start + size)
        write_log_weights(shard_path(folder, number), prefix_N[rows], log_weight_N[rows])


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    shard_size=st.integers(1, 20),
)
def test_prefixes_come_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], shard_size: int
) -> None:
    folder = tmp_path_factory.mktemp("log_weights")
    prefix_N = np.repeat(np.arange(len(counts)), counts)
    log_weight_N = np.random.default_rng(0).normal(0, 100, len(prefix_N))
    write_shards(folder, prefix_N, log_weight_N, shard_size)
    read = list(read_log_weights(folder))
    assert [prefix for prefix, _ in read] == list(range(len(counts)))
    for prefix, values in read:
        np.testing.assert_array_equal(values, log_weight_N[prefix_N == prefix])
        assert values.dtype == np.float64


def test_many_shards_stay_in_order(tmp_path: Path) -> None:
    write_shards(tmp_path, np.arange(12), np.arange(12.0), 1)
    assert [(prefix, values.tolist()) for prefix, values in read_log_weights(tmp_path)] == [
        (number, [float(number)]) for number in range(12)
    ]


def test_other_files_of_the_folder_are_not_proposals(tmp_path: Path) -> None:
    write_shards(tmp_path, np.zeros(3, int), np.zeros(3), 3)
    write_real(tmp_path / REAL, real_continuations())
    assert [prefix for prefix, _ in read_log_weights(tmp_path)] == [0]


def test_empty_folder_has_no_prefixes(tmp_path: Path) -> None:
    assert list(read_log_weights(tmp_path)) == []


def real_continuations() -> RealContinuations:
    return RealContinuations(
        block_P=np.array([3, 5, 8]),
        document_P=np.array([0, 0, 2]),
        num_tokens_P=np.array([40, 40, 7]),
        lm_log_prob_P=np.array([-120.25, -1e-300, -np.pi]),
        log_weight_P=np.array([0.0, -700.0, 1 / 3]),
    )


def test_real_continuations_round_trip(tmp_path: Path) -> None:
    written = real_continuations()
    write_real(tmp_path / REAL, written)
    read = read_real(tmp_path / REAL)
    for name in ("block_P", "document_P", "num_tokens_P", "lm_log_prob_P", "log_weight_P"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
        assert getattr(read, name).dtype == getattr(written, name).dtype


def test_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is missing"):
        read_real(tmp_path / REAL)


def test_log_weights_belong_to_one_energy(tmp_path: Path) -> None:
    folder = tmp_path / "heat" / "test"
    claim_log_weights(folder, "one")
    write_shards(folder, np.zeros(3, int), np.zeros(3), 3)
    claim_log_weights(folder, "one")
    with pytest.raises(UserError, match=r"are of another energy.*; delete them"):
        claim_log_weights(folder, "other")


def test_log_weights_of_nobody_are_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, np.zeros(3, int), np.zeros(3), 3)
    with pytest.raises(UserError, match="are of another energy"):
        claim_log_weights(tmp_path, "one")
    assert not (tmp_path / "owner.json").exists()
