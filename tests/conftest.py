"""Settings of all tests: eight CPU devices, strict dtypes and ranks, quick compiling, closed figures."""

import contextlib
import gc
import hashlib
import importlib
import importlib.util
import os
import pathlib
import platform
import re
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

ONE_WEEK = 7 * 24 * 60 * 60  # in seconds


def folder_of_programs():
    """Folder for compiled programs, which work only on the same kind of processor."""
    processor = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        first_core, _, _ = cpuinfo.read_text().partition("\n\n")
        # The other lines have numbers that change, such as the frequency.
        is_fixed = re.compile("vendor_id|model|flags|Features|CPU")
        processor = "\n".join(filter(is_fixed.match, first_core.splitlines()))
    name = hashlib.sha256(processor.encode()).hexdigest()[:12]
    return pathlib.Path(__file__).parents[1] / "build" / "compiled-by-tests" / name


def keep_programs():
    """Keeps compiled programs for a week, for this process, its children and later runs.

    If a file is not complete, because another process is writing it, JAX warns and compiles the
    program again. pyproject.toml ignores this warning.
    """
    folder = folder_of_programs()
    folder.mkdir(parents=True, exist_ok=True)
    for program in folder.iterdir():
        # Another process can delete the same program at the same time.
        with contextlib.suppress(FileNotFoundError):
            if time.time() - program.stat().st_mtime > ONE_WEEK:
                program.unlink()
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


# These settings are not environment variables, because notebooks run in child processes and need the
# settings of a user.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
# `import rsembed` sets this, too, but the devices are made before that import.
NPROC_BEFORE = os.environ.get("NPROC")
os.environ.setdefault("NPROC", "32")
# More threads of OpenBLAS in child processes would spin on cores that other tests need.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Without tracebacks, programs are smaller and are lowered faster.
jax.config.update("jax_traceback_in_locations_limit", 0)
matplotlib.use("Agg")

# Tests start these programs with arguments. `annotations` takes a second to import, in each process.
collect_ignore = [
    "bad_calls/annotations.py",
    "checkpoint/process_program.py",
    "parallel/runtime_program.py",
]

# A test runs a compiled program once or twice, so XLA optimizes as little as possible, also in child
# processes and notebooks. Tests with compilers of accelerators cannot do so: these compilers reject
# flags of the CPU compiler.
IS_LEAST = not {"RSEMBED_TEST_TPU", "RSEMBED_TEST_GPU"} & set(os.environ)
if IS_LEAST:
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    keep_programs()
# The last flag: by default, a large program is split into 32 parts, and threads compile them. Here the
# other core is busy with other tests.
QUICK_COMPILES = (
    "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)

# Each of these notebooks compares many models, storages or backends, and compiles a program for each.
LONG_NOTEBOOKS = {
    "04_one_op_many_backends.ipynb",
    "05_optimizers.ipynb",
    "07_tensor_train.ipynb",
    "11_where_rows_live.ipynb",
    "12_movielens.ipynb",
}


def pytest_terminal_summary(terminalreporter):
    """Prints at the end of a run that tests on real data were skipped, also without `-rs`."""
    reasons = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ())}
    for reason in sorted(reasons):
        if "RSEMBED_DATA" in reason:
            terminalreporter.write_line(reason, yellow=True)


def reused(make, times=50):
    """A function that returns each result of `make` several times, in each thread separately."""
    local = threading.local()

    def reuse():
        if getattr(local, "num_uses", times) == times:
            local.result = make()
            local.num_uses = 0
        local.num_uses += 1
        return local.result

    return reuse


# A new MLIR context takes 5 ms, as long as the rest of lowering a small program. Newer versions of JAX
# reuse contexts.
if jax.version.__version_info__ < (0, 12):
    from jax._src.interpreters import mlir

    mlir.make_ir_context = reused(mlir.make_ir_context)

# Compiled programs are many small objects that live long. With the default thresholds, the garbage
# collector took a sixth of the time of collecting the tests.
gc.set_threshold(50_000, 20, 20)


def pytest_collection_finish():
    """Excludes modules and collected tests from all garbage collections that follow."""
    # On import, hypothesis asks `gc` which objects have random generators. `gc` would not find
    # excluded objects.
    importlib.import_module("hypothesis")
    gc.collect()
    gc.freeze()


def flags_known(flags):
    """The flags that the installed XLA knows.

    XLA ends the process at an unknown flag, so a child process tries the flags.
    """
    command = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    environment = os.environ | {"XLA_FLAGS": flags}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode == 0:
        return flags
    unknown = child.stderr.split()
    known = " ".join(flag for flag in flags.split() if flag not in unknown)
    if known == flags:
        raise pytest.UsageError(f"XLA refuses XLA_FLAGS={flags!r}:\n{child.stderr}")
    return flags_known(known)


# The first process tries the flags for all processes of the run.
if "RSEMBED_TEST_XLA_FLAGS" not in os.environ:
    os.environ["RSEMBED_TEST_XLA_FLAGS"] = flags_known(QUICK_COMPILES)
flags_before = os.environ.get("XLA_FLAGS", "")
if os.environ["RSEMBED_TEST_XLA_FLAGS"] not in flags_before:
    os.environ["XLA_FLAGS"] = f"{flags_before} {os.environ['RSEMBED_TEST_XLA_FLAGS']}".strip()
jax.devices("cpu")
if not IS_LEAST:
    os.environ["XLA_FLAGS"] = flags_before


def pytest_sessionstart():
    """Fails if native kernels are required and missing. Otherwise their tests are skipped."""
    # This import must come after jaxtyping's import hook is installed, which checks shapes.
    from rsembed.kernels import devices, native

    # Child processes, such as notebooks, need the threads of a user. More threads than cores
    # take a twentieth of the processor time of a notebook.
    if NPROC_BEFORE is None:
        os.environ.pop("NPROC", None)
    reason = native.unavailable_because()
    if reason is None:
        return
    if os.environ.get("RSEMBED_REQUIRE_NATIVE") == "1":
        raise pytest.UsageError(f"RSEMBED_REQUIRE_NATIVE=1, but {reason}")
    # The warning appears once per process. In a test, it would be an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        devices.warn_of_slow_cpu(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks long notebooks and the rows that `slow_rows` names as slow, before pytest selects tests.

    Skips the notebook on Keras if Keras is not installed.
    """
    for item in items:
        if item.path.name in LONG_NOTEBOOKS:
            item.add_marker(pytest.mark.slow)
        slow_rows = []
        for mark in item.iter_markers("slow_rows"):
            slow_rows += mark.args
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.id in slow_rows:
            item.add_marker(pytest.mark.slow)
        if item.path.name == "14_keras.ipynb" and importlib.util.find_spec("keras_rs") is None:
            reason = "needs keras and keras-rs: `make test-clients` runs it"
            item.add_marker(pytest.mark.skip(reason=reason))


def sine_waves(key, shape, dtype=jnp.float32):
    """Initial values that compile fast. They differ between entries, and between keys."""
    phase = jax.random.key_data(key)[-1] & 4095
    size = int(np.prod(shape))
    # A constant compiles fastest, but a large constant makes the cached program large.
    wave = np if size <= 2**16 else jnp
    entries = wave.sin(wave.arange(size, dtype=np.float32))
    return jnp.asarray(entries.reshape(shape), dtype) * jnp.cos(phase.astype(dtype) / 650)


@pytest.fixture(autouse=True)
def quick_initial_values(monkeypatch):
    """Initial values of tables without an initializer that compile fast.

    Random numbers are more than half of the code of a small collection. A test of the library's real
    initial values overrides this fixture with one that does nothing.
    """
    monkeypatch.setattr("rsembed.specs.default_initializer", sine_waves)


@pytest.fixture(scope="module")
def more_optimizations():
    """Compiles with more optimizations, for tests of equal bits at different shapes."""
    # Cached programs have fewer optimizations.
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", IS_LEAST)


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Deletes compiled programs before they fill the process's table of memory maps.

    A program takes about 30 maps, Linux allows 65,530 (`vm.max_map_count`), and LLVM ends a process
    that gets no map with a segmentation fault. The cache in the folder still has the programs.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
