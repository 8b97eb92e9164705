"""A batch that goes through a network in parts, whose gradients add up to the batch's.

It takes the memory of one part, and on a CPU what a layer hands to the next stays in the
processor's cache.
"""

import itertools

from residual_ebm.config import TrainingConfig


def parts_of(config: TrainingConfig, tokens_per_item: int) -> list[slice]:
    """Which items of a batch go through together, as many in each part but for one."""
    num_items = config.batch_size
    at_once = config.tokens_at_once or num_items * tokens_per_item
    count = min(num_items, -(-num_items * tokens_per_item // at_once))
    edges = [part * num_items // count for part in range(count + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def share_of(part: slice, config: TrainingConfig) -> float:
    """What a part's mean counts for in the batch's."""
    return (part.stop - part.start) / config.batch_size
