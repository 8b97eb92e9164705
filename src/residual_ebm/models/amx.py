"""Matrix tiles that a processor promises and cannot do.

Some virtual machines advertise AMX, and oneDNN's bfloat16 kernels for it die there with an illegal
instruction, which no `except` catches. So one small product is tried in a forked child; if the
child dies, oneDNN is told to stay below AMX. It reads that limit once, at its first product, so
this runs when `residual_ebm.models` is imported, before we compute anything.
"""

import faulthandler
import os
import sys
import warnings
from pathlib import Path

import torch

_LIMIT = "ONEDNN_MAX_CPU_ISA"
_BELOW_AMX = "AVX512_CORE_FP16"


def avoid_broken_amx() -> None:
    """Limit oneDNN if its AMX kernels crash here; a limit set by the user is left alone."""
    if sys.platform != "linux" or _LIMIT in os.environ or not _promises_amx():
        return
    if not _product_survives():
        os.environ[_LIMIT] = _BELOW_AMX


def _promises_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _product_survives() -> bool:
    with warnings.catch_warnings():
        # Forking beside other threads is warned of; the child computes one product and leaves.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        faulthandler.disable()  # its death is the answer, not news
        survived = 1
        try:
            torch.set_num_threads(1)
            ones = torch.ones(64, 64, dtype=torch.bfloat16)
            torch.mm(ones, ones)
            survived = 0
        finally:
            os._exit(survived)  # never back into the parent's program
    _, status = os.waitpid(child, 0)
    return status == 0
