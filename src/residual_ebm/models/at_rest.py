"""A model that is tried out, perhaps in the middle of its training."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel


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
