"""Matrix tiles (AMX) that a processor has and a virtual machine half hides.

Some hypervisors list AMX among the features and leave the leaf of CPUID that describes the tiles
empty. oneDNN then sets up a palette of no tiles, and its first bfloat16 product dies with an
illegal instruction, which no `except` catches. The tiles themselves work, and a bfloat16 product on
them takes a fraction of the time of float32.

oneDNN asks for the leaf once and remembers the answer. So on Linux, where CPUID can be made to
trap, the first products are computed with a handler that answers this one leaf as the architecture
defines it (palette 1 has the same shape on every processor). A forked child tries first; whatever
dies there is not done here, and oneDNN is told to stay below AMX instead. All of it happens when
`residual_ebm.models` is imported, before we compute anything.
"""

import ctypes
import faulthandler
import os
import platform
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_LIMIT = "ONEDNN_MAX_CPU_ISA"
_BELOW_AMX = "AVX512_CORE_FP16"
_NO_LIMITS = ("DEFAULT", "ALL")
_PATIENCE = 30.0  # seconds, for what takes a fraction of one

_SYS_ARCH_PRCTL, _ARCH_CPUID_SET = 158, 0x1012
_CPUID = b"\x0f\xa2"
_TRAP_FLAG = 0x100
# Offset of the registers in a signal's context, and their numbers (glibc's ucontext.h, x86-64).
_REGISTERS, _RBX, _RDX, _RAX, _RCX, _RIP, _FLAGS = 40, 11, 12, 13, 14, 16, 17
_NUM_REGISTERS = 23
# (leaf, subleaf) -> EAX, EBX, ECX, EDX. Palette 1: 8 tiles of 16 rows of 64 bytes, 1 KB each.
_TILE_LEAVES = {
    (0x1D, 0): (1, 0, 0, 0),
    (0x1D, 1): (8192 | 1024 << 16, 64 | 8 << 16, 16, 0),
    (0x1E, 0): (0, 16 | 64 << 8, 0, 0),
}


def mend_amx() -> None:
    """Make bfloat16 products safe here, on tiles if they can be had.

    A limit set by the user is left alone, so `ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16` turns all of
    this off.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64" or _LIMIT in os.environ:
        return
    if not has_amx() or _survives(_products):
        return
    if _survives(_products_with_answers):
        _products_with_answers()
    else:
        os.environ[_LIMIT] = _BELOW_AMX


def has_amx() -> bool:
    """Whether the processor lists AMX for bfloat16 and nobody has forbidden it."""
    limit = os.environ.get(_LIMIT, _NO_LIMITS[0]).upper()
    if limit not in _NO_LIMITS and "AMX" not in limit:
        return False
    return processor_lists("amx_bf16")


def processor_lists(feature: str) -> bool:
    """Whether it is among the features that Linux tells of."""
    try:
        return feature in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:
        return False


def _products() -> None:
    """One product of each kind that asks oneDNN for a different kernel."""
    for rows, inner, columns in ((64, 64, 64), (33, 17, 91), (1, 64, 128)):
        a = torch.ones(rows, inner, dtype=torch.bfloat16)
        b = torch.ones(columns, inner, dtype=torch.bfloat16)
        assert float(torch.nn.functional.linear(a, b)[0, 0]) == inner
    batch = torch.ones(2, 48, 32, dtype=torch.bfloat16)
    assert float(torch.bmm(batch, batch.mT)[1, 0, 0]) == 32
    # Fused attention goes another way into oneDNN, with answers of its own to remember.
    query, key = (torch.ones(2, 3, length, 64, dtype=torch.bfloat16) for length in (3, 20))
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, key)
    assert float(attended[1, 2, 0, 0]) == 1


def _products_with_answers() -> None:
    # CPUID traps in this thread only: another one would ask the machine, and its answer be kept.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _tile_leaves_answered():
            _products()
    finally:
        torch.set_num_threads(threads)


def _survives(work: Callable[[], None]) -> bool:
    with warnings.catch_warnings():
        # Forking beside other threads is warned of; the child computes a little and leaves.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        survived = 1
        try:
            faulthandler.disable()  # its death is the answer, not news
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            torch.set_num_threads(1)
            work()
            survived = 0
        finally:
            os._exit(survived)  # never back into the parent's program
    return _wait(child) == 0


def _wait(child: int) -> int | None:
    """Its exit status; a child that hangs, as a fork beside other threads may, has not survived."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return status
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_SA_SIGINFO = 4


@contextmanager
def _tile_leaves_answered() -> Iterator[None]:
    """Let CPUID trap in this thread: the leaves about tiles are answered, others run as they are.

    An instruction let through is single-stepped, so that trapping can be switched on again
    behind it.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def allow_cpuid(allowed: bool) -> int:
        return int(libc.syscall(_SYS_ARCH_PRCTL, _ARCH_CPUID_SET, int(allowed)))

    def registers_of(context: int) -> "ctypes.Array[ctypes.c_uint64]":
        return (ctypes.c_uint64 * _NUM_REGISTERS).from_address(context + _REGISTERS)

    def on_fault(_signal: int, _info: int, context: int) -> None:
        registers = registers_of(context)
        leaf = (registers[_RAX] & 0xFFFFFFFF, registers[_RCX] & 0xFFFFFFFF)
        if ctypes.string_at(registers[_RIP], 2) != _CPUID:
            libc.signal(int(signal.SIGSEGV), None)  # a real fault: it happens again and ends us
        elif leaf in _TILE_LEAVES:
            answer = _TILE_LEAVES[leaf]
            registers[_RAX], registers[_RBX], registers[_RCX], registers[_RDX] = answer
            registers[_RIP] += len(_CPUID)
        else:
            allow_cpuid(True)
            registers[_FLAGS] |= _TRAP_FLAG

    def on_step(_signal: int, _info: int, context: int) -> None:
        registers_of(context)[_FLAGS] &= ~_TRAP_FLAG
        allow_cpuid(False)

    handlers = {signal.SIGSEGV: _Handler(on_fault), signal.SIGTRAP: _Handler(on_step)}
    previous = {number: _SigAction() for number in handlers}
    for number, handler in handlers.items():
        action = _SigAction(handler=ctypes.cast(handler, ctypes.c_void_p).value, flags=_SA_SIGINFO)
        libc.sigaction(int(number), ctypes.byref(action), ctypes.byref(previous[number]))
    try:
        if allow_cpuid(False) != 0:
            raise OSError(ctypes.get_errno(), "CPUID cannot be made to trap here")
        yield
    finally:
        allow_cpuid(True)
        for number, action in previous.items():
            libc.sigaction(int(number), ctypes.byref(action), None)
