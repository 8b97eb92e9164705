"""Memory that is freed and needed again at once.

Logits over a vocabulary are tens of megabytes a step. By default glibc hands such blocks back to
the system when they are freed, and the next ones are zeroed page by page, which takes several times
as long as computing what goes into them. Kept in the heap, they are used again as they are.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's malloc.h


def keep_freed_memory() -> None:
    """Large blocks come from the heap, and the heap is not trimmed; nothing without glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
