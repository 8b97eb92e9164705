"""bfloat16 products are right, whatever this machine says about its matrix tiles."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from residual_ebm.models import amx

SHAPES = [(1, 576, 576), (64, 64, 64), (33, 17, 91), (512, 576, 1536), (300, 384, 1152), (7, 3, 2)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products_equal_float32_to_rounding(rows: int, inner: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    a = torch.randn(rows, inner, generator=generator).bfloat16()
    b = torch.randn(columns, inner, generator=generator).bfloat16().requires_grad_()
    product = torch.nn.functional.linear(a, b)
    exact = a.float() @ b.detach().float().T
    assert (product.float() - exact).abs().max() <= 0.01 * exact.abs().max()
    product.sum().backward()
    assert b.grad is not None
    torch.testing.assert_close(
        b.grad.float(), a.float().sum(0).expand(columns, -1), rtol=0.02, atol=0.02 * rows**0.5
    )


@pytest.mark.parametrize("num_queries", [1, 3, 16, 33, 64])
@pytest.mark.parametrize("num_keys", [1, 20, 40, 120])
def test_fused_attention_equals_float32_to_rounding(num_queries: int, num_keys: int) -> None:
    generator = torch.Generator().manual_seed(num_queries)
    query = torch.randn(16, 3, num_queries, 64, generator=generator).bfloat16()
    key = torch.randn(16, 3, num_keys, 64, generator=generator).bfloat16()
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(query.float(), key.float(), key.float())
    torch.testing.assert_close(attend(query, key, key).float(), exact, rtol=0.02, atol=0.03)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def _live() -> None:
    pass


def _raise() -> None:
    raise OSError("CPUID cannot be made to trap here")


@pytest.mark.parametrize(
    ("plain", "answered", "limit"),
    [
        (_live, _die, None),  # nothing to mend: the second attempt is not made
        (_die, _live, None),
        (_die, _die, "AVX512_CORE_FP16"),
        (_die, _raise, "AVX512_CORE_FP16"),
    ],
)
def test_limit_is_the_last_resort(
    monkeypatch: pytest.MonkeyPatch,
    plain: Callable[[], None],
    answered: Callable[[], None],
    limit: str | None,
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(amx, "has_amx", lambda: True)
    monkeypatch.setattr(amx, "_products", plain)
    monkeypatch.setattr(amx, "_products_with_answers", answered)
    amx.mend_amx()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == limit
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)


def test_a_child_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "_PATIENCE", 0.2)
    waited_for: list[int] = []
    wait = amx._wait

    def spy(child: int) -> int | None:
        waited_for.append(child)
        return wait(child)

    monkeypatch.setattr(amx, "_wait", spy)
    begun = time.monotonic()
    assert not amx._survives(lambda: time.sleep(60))
    assert time.monotonic() - begun < 30
    (child,) = waited_for
    with pytest.raises(ChildProcessError):
        os.waitpid(child, os.WNOHANG)  # it is gone, not left behind


def test_a_limit_of_the_user_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(amx, "_products", _die)
    monkeypatch.setattr(amx, "_products_with_answers", _die)
    amx.mend_amx()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert not amx.has_amx()


@pytest.mark.parametrize("limit", [None, "DEFAULT", "all", "AVX10_1_512_AMX", "AVX2"])
def test_which_limits_allow_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None
) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("flags : fpu amx_bf16 amx_tile")
    monkeypatch.setattr(amx, "Path", lambda _: listed)
    if limit is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert amx.has_amx() == (limit != "AVX2")
    listed.write_text("flags : fpu")
    assert not amx.has_amx()


def test_signals_are_as_before_the_import() -> None:
    """A crash after the import is reported and ends the process, as without us."""
    program = (
        "import faulthandler; faulthandler.enable(); import residual_ebm.models, ctypes;"
        " ctypes.string_at(0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
