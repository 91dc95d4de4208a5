"""Builds the native library and its driver with sanitizers, which end a process at a bad access."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rsembed.kernels.devices import LIBRARY, LIBRARY_VARIABLE

DRIVER_VARIABLE = "RSEMBED_FUZZ_DRIVER"
ONLY_VALID_VARIABLE = "RSEMBED_FUZZ_ONLY_VALID"
HERE = Path(__file__).parent
FLAGS = {
    "address": "-fsanitize=address,undefined -fno-sanitize-recover=all",
    "thread": "-fsanitize=thread",
}
COMMON_FLAGS = "-O1 -g -fno-omit-frame-pointer"
RUNTIMES = {"address": ("asan", "stdc++"), "thread": ("tsan",)}
"""Libraries to load before Python, because Python is not linked with them.

jaxlib throws exceptions through the C++ library, so `asan` must find it.
"""


def missing() -> str | None:
    """The reason why nothing can be built on this machine, or None."""
    absent = [tool for tool in ("cmake", "g++") if shutil.which(tool) is None]
    if not absent:
        return None
    return f"needs {' and '.join(absent)}"


def build(sanitizer: str) -> Path:
    """Builds both libraries, and returns their folder.

    The first build takes minutes. Later builds compile only what has changed.

    Raises: RuntimeError: a command of the build failed. The message has its output.
    """
    folder = HERE.parents[1] / "build" / f"fuzz-{sanitizer}"
    settings = {
        # CMake adds no flags for a build type that it does not know.
        "CMAKE_BUILD_TYPE": "Sanitized",
        "CMAKE_CXX_COMPILER": "g++",
        "CMAKE_CXX_FLAGS": f"{COMMON_FLAGS} {FLAGS[sanitizer]}",
        "Python_EXECUTABLE": sys.executable,
    }
    configure = ["cmake", "-S", str(HERE), "-B", str(folder)]
    configure += [f"-D{name}={value}" for name, value in settings.items()]
    compile_all = ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count())]
    for command in (configure, compile_all):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return folder


def environment(sanitizer: str, folder: Path) -> dict[str, str]:
    """Environment variables of a process that loads the libraries in `folder`.

    No report is suppressed. Leaks are not reported, because Python and jaxlib have many. A hostile
    call can make several threads write to the same address of an array. This is a race although no
    other memory is harmed, so the sanitizer of threads runs with valid calls only.
    """
    libraries = []
    for name in RUNTIMES[sanitizer]:
        command = ["g++", f"-print-file-name=lib{name}.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        libraries.append(done.stdout.strip())
    made = {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # jaxlib is built without a sanitizer, so accesses that it synchronizes would be reported.
        "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
        LIBRARY_VARIABLE: str(folder / "native" / LIBRARY),
        DRIVER_VARIABLE: str(folder / "fuzz_driver.so"),
    }
    if sanitizer == "thread":
        made[ONLY_VALID_VARIABLE] = "1"
    return made
