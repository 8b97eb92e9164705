"""C sources of ours, built when they are first needed: in a second, by ctypes and one call of gcc.

An extension of torch would take its headers half a minute. Threads are torch's own where both have
one OpenMP library, as gcc and the packages of PyPI do; others would wait beside each other, which
costs time and nothing else.
"""

import ctypes
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SECONDS = 120  # for what takes one
_logger = logging.getLogger(__name__)


def built(source: Path, flags: Sequence[str], purpose: str) -> ctypes.CDLL | None:
    """None where it cannot be had."""
    if sys.platform != "linux":
        return None
    try:  # a library once loaded needs no file
        command = shlex.split(os.environ.get("CC", "")) or ["gcc"]
        if shutil.which(command[0]) is None:
            return None
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = Path(folder) / f"{source.stem}.so"
            options = ("-O3", *flags, "-fopenmp", "-shared", "-fPIC")
            subprocess.run(
                [*command, *options, str(source), "-o", str(path)],
                check=True,
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
            return ctypes.CDLL(str(path))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = " ".join(str(getattr(error, "stderr", "") or "").split())
        _logger.warning("%s is not built here, torch's is used: %s %s", purpose, error, said[:200])
        return None
