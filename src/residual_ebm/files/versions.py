"""What a result depends on in its last digits: Python, libraries, the processor."""

import platform
from importlib import metadata
from pathlib import Path

_LIBRARIES = ("torch", "transformers", "tokenizers")
_PROCESSORS = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _LIBRARIES},
        "processor": processor_name(),
    }


def processor_name() -> str:
    """With family and model where they are told: virtual machines call several generations "AMD
    EPYC", of which one multiplies bfloat16 twice as quickly as another."""
    try:
        first, _, _ = _PROCESSORS.read_text("utf-8").partition("\n\n")
    except OSError:
        return platform.processor()
    told = dict(part.split(":", 1) for part in first.splitlines() if ":" in part)
    said = {field.strip(): value.strip() for field, value in told.items()}
    if "model name" not in said:
        return platform.processor()
    generation = [f"{name} {said[name]}" for name in ("cpu family", "model") if name in said]
    return ", ".join([said["model name"], *generation])
