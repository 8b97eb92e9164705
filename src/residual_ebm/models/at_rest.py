"""A model that is tried out, perhaps in the middle of its training."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

# What a model may raise that meets a cache or a mask it does not know, or changes its scores.
REFUSALS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def at_rest(model: PreTrainedModel) -> Iterator[None]:
    """Within, nothing is dropped out and no random number is spent, in whatever mode each part
    is."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
