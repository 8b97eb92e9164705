"""Every number belongs to its key: nothing else changes it, and another key gives another one."""

import numpy as np
import pytest
import torch
from scipy import stats

from residual_ebm.randomness import derive_seed, generator, torch_seed, uniform


@pytest.mark.parametrize("first_sample", [0, 1, 2, 3, 4, 5, 63, 96])
@pytest.mark.parametrize("num_samples", [1, 2, 4, 7])
def test_a_uniform_belongs_to_its_sample_wherever_a_chunk_begins(
    first_sample: int, num_samples: int
) -> None:
    whole = uniform(5, prefix=2, step=7, first_sample=0, num_samples=104)
    part = uniform(5, prefix=2, step=7, first_sample=first_sample, num_samples=num_samples)
    assert part.dtype == np.float64
    assert np.array_equal(part, whole[first_sample : first_sample + num_samples])


def test_samples_far_apart_need_no_numbers_in_between() -> None:
    far = uniform(0, 0, 0, 10**15 + 3, 6)
    assert np.array_equal(far[2:], uniform(0, 0, 0, 10**15 + 5, 4))


def test_each_part_of_the_key_counts() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (2**64 - 1, 0, 0), (0, 2, 1)]
    numbers = np.concatenate([uniform(*key, first_sample=0, num_samples=50) for key in keys])
    assert len(np.unique(numbers)) == len(numbers)


def test_uniforms_are_uniform_along_every_part_of_the_key() -> None:
    samples = uniform(1, 0, 0, 0, 5000)
    assert samples.min() >= 0
    assert samples.max() < 1
    along = {
        "sample": samples,
        "seed": np.concatenate([uniform(seed, 0, 0, 0, 1) for seed in range(2000)]),
        "prefix": np.concatenate([uniform(1, prefix, 0, 0, 1) for prefix in range(2000)]),
        "step": np.concatenate([uniform(1, 0, step, 0, 1) for step in range(2000)]),
    }
    for name, numbers in along.items():
        assert stats.kstest(numbers, "uniform").pvalue > 1e-3, name
        # Neighbours do not know each other.
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / len(numbers) ** 0.5, name


def test_derived_seeds_tell_their_keys_apart() -> None:
    keys: list[tuple[object, ...]] = [
        (),
        ("a",),
        ("a", 1),
        ("a", 11),
        ("a", "1", 1),
        ("a1",),
        ("b",),
    ]
    seeds = {derive_seed(seed, *key) for seed in (0, 1) for key in keys}
    assert len(seeds) == 2 * len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    # Written down once: a run resumed with another version must not draw other numbers.
    assert derive_seed(0, "negatives", "base") == 15343678195370226642


def test_generators_are_keyed_and_start_anew() -> None:
    first, again, other = (generator(3, name).random(5) for name in ("x", "x", "y"))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_global_state_is_neither_read_nor_left_changed() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with torch_seed(0, "weights"):
        one = torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    with torch_seed(0, "weights"):
        two = torch.rand(3)
    with torch_seed(0, "dropout"):
        three = torch.rand(3)
    assert torch.equal(one, two)
    assert not torch.equal(one, three)
    np.random.seed(0)
    assert np.array_equal(uniform(0, 0, 0, 0, 3), uniform(0, 0, 0, 0, 3))
