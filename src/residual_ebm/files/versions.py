"""What a result depends on in its last digits: Python, libraries, the processor."""

import platform
from importlib import metadata

_LIBRARIES = ("torch", "transformers", "tokenizers")


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
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            first, _, _ = file.read().partition("\n\n")
    except OSError:
        return platform.processor()
    told = dict(part.split(":", 1) for part in first.splitlines() if ":" in part)
    said = {field.strip(): value.strip() for field, value in told.items()}
    if "model name" not in said:
        return platform.processor()
    generation = [f"{name} {said[name]}" for name in ("cpu family", "model") if name in said]
    return ", ".join([said["model name"], *generation])
