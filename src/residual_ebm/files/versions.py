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
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor()
