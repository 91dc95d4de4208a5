"""The native library and its driver, built to stop at forbidden accesses, and what a process needs to load them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rsembed.kernels.devices import LIBRARY, LIBRARY_VARIABLE

DRIVER_VARIABLE, ONLY_VALID_VARIABLE = "RSEMBED_FUZZ_DRIVER", "RSEMBED_FUZZ_ONLY_VALID"
HERE = Path(__file__).parent
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
COMMON_FLAGS = "-O1 -g -fno-omit-frame-pointer"
RUNTIMES = {"address": ("asan", "stdc++"), "thread": ("tsan",)}
"""Libraries that must be there before Python, which does not know them. jaxlib throws exceptions through the second."""


def missing() -> str | None:
    """Why nothing can be built here, or None."""
    absent = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    return f"needs {' and '.join(absent)}" if absent else None


def build(sanitizer: str) -> Path:
    """The folder of both libraries; takes minutes, and nothing while the sources stay as they are.

    Raises: RuntimeError: they cannot be built; says why.
    """
    folder = HERE.parents[1] / "build" / f"fuzz-{sanitizer}"
    settings = {
        "CMAKE_BUILD_TYPE": "Sanitized",  # none that brings flags of its own
        "CMAKE_CXX_COMPILER": "g++",
        "CMAKE_CXX_FLAGS": f"{COMMON_FLAGS} {FLAGS[sanitizer]}",
        "Python_EXECUTABLE": sys.executable,
    }
    configure = [
        "cmake",
        "-S",
        str(HERE),
        "-B",
        str(folder),
        *(f"-D{name}={v}" for name, v in settings.items()),
    ]
    for command in (
        configure,
        ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count())],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder


def environment(sanitizer: str, folder: Path) -> dict[str, str]:
    """Of a process that loads what `build` made.

    No report is suppressed. Leaks are not looked for: those of Python and jaxlib would hide all others. Hostile calls
    let threads write to one place, which harms nobody's memory but is a race, so threads are watched in valid calls.
    """
    names = [["g++", f"-print-file-name=lib{name}.so"] for name in RUNTIMES[sanitizer]]
    libraries = [
        subprocess.run(name, capture_output=True, text=True, check=True).stdout.strip()
        for name in names
    ]
    made = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # jaxlib was not built to be watched, so nothing can be said of memory that it hands from thread to thread.
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
        LIBRARY_VARIABLE: str(folder / "native" / LIBRARY),
        DRIVER_VARIABLE: str(folder / "fuzz_driver.so"),
    }
    return made | ({ONLY_VALID_VARIABLE: "1"} if sanitizer == "thread" else {})
