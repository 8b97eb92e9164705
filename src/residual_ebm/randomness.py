"""Randomness as an argument: every draw is a function of its key, never of global state.

A uniform number belongs to (seed, purpose, prefix, sample, step). It is read from the Philox
counter generator at that very place, so a sample does not depend on the chunk it was drawn in, on
the number of workers, on how many tokens were asked for, or on how often the run was interrupted.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Philox hands out its 64-bit numbers four to a counter value.
_NUMBERS_PER_COUNTER = 4


def derive_seed(seed: int, *key: object) -> int:
    """A 64-bit seed for a named purpose, e.g. `derive_seed(recipe.seed, "negatives", "base")`."""
    text = "\x1f".join([str(seed), *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def uniform(seed: int, prefix: int, step: int, first_sample: int, num_samples: int) -> np.ndarray:
    """Uniforms in [0, 1) of samples first_sample ... first_sample + num_samples - 1, float64."""
    skip = first_sample % _NUMBERS_PER_COUNTER
    counter = np.array([first_sample // _NUMBERS_PER_COUNTER, step, 0, 0], dtype=np.uint64)
    key = np.array([seed % 2**64, prefix % 2**64], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return generator.random(skip + num_samples)[skip:]


def generator(seed: int, *key: object) -> np.random.Generator:
    """A NumPy generator of its own for (seed, key): permutations, choices, bootstrap draws."""
    return np.random.Generator(np.random.Philox(key=derive_seed(seed, *key)))


@contextmanager
def torch_seed(seed: int, *key: object) -> Iterator[None]:
    """Weight initialisation and dropout read torch's global generator: lend them a keyed one."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, *key) % 2**63)
        yield
