"""Memory that is freed and needed again at once.

Logits over a vocabulary are tens of megabytes a step. By default glibc hands such blocks back to
the system when they are freed, and the next ones are zeroed page by page, which takes several times
as long as computing what goes into them. Kept in the heap, they are used again as they are. With
`REBM_KEEP_MEMORY=0` in the environment everything stays as it was.
"""

import ctypes
import os
import sys
from collections.abc import Callable

KEEP_MEMORY = "REBM_KEEP_MEMORY"
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Large blocks come from the heap, and the heap is not trimmed; nothing without glibc."""
    if os.environ.get(KEEP_MEMORY) == "0":
        return
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """What is free now goes back to the system all the same."""
    malloc_trim = _of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """None on another system, or with musl, which has no such function."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
