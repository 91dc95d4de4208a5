"""What every test runs under: eight CPU devices, strict dtypes and ranks, no figure left open."""

import gc
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import warnings

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

# Settings go through jax and matplotlib, not the environment: notebooks run in child processes of the
# same test run, and must see what a user sees.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("NPROC", "32")  # as `import rsembed` would, but the devices are made before
# Of child processes: its threads wait in a loop, on cores of others.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Of every operation, into programs that nobody reads.
jax.config.update("jax_traceback_in_locations_limit", 0)
matplotlib.use("Agg")

# Tests make the same small programs again and again. This process keeps what it compiled, in a folder of its own: of a
# shared one, an entry could be read half written.
compiled = tempfile.TemporaryDirectory(prefix="rsembed-compiled-")
jax.config.update("jax_compilation_cache_dir", compiled.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Started by tests, with arguments.
collect_ignore = [
    "checkpoint/process_program.py",
    "parallel/runtime_program.py",
]

# A test compiles a program to run it once or twice, so XLA does least for it, in child processes and notebooks too, but
# not where compilers of accelerators are tried, which refuse flags of others.
IS_LEAST = not {"RSEMBED_TEST_TPU", "RSEMBED_TEST_GPU"} & set(os.environ)
if IS_LEAST:
    jax.config.update("jax_disable_most_optimizations", True)
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The last flag: by default code of a page is split into 32 parts, which threads compile while the other core is busy.
QUICK_COMPILES = (
    "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def pytest_terminal_summary(terminalreporter):
    """Says at the end of a run, without `-rs`, that no real data were read."""
    reasons = {str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", ())}
    for reason in sorted(reasons):
        if "RSEMBED_DATA" in reason:
            terminalreporter.write_line(reason, yellow=True)


def reused(make, times=50):
    """In each thread, what `make` made is handed out so often before it makes another."""
    kept = threading.local()

    def one():
        made, left = getattr(kept, "made_and_left", (None, 0))
        kept.made_and_left = (made, left - 1) if left else (make(), times - 1)
        return kept.made_and_left[0]

    return one


# A context of MLIR takes 5 ms to make, as long as the rest of lowering a small program; newer versions of JAX reuse it.
if jax.version.__version_info__ < (0, 12):
    from jax._src.interpreters import mlir

    mlir.make_ir_context = reused(mlir.make_ir_context)

# Compiled programs are many small objects that live on; looking for garbage among them took a sixth of a collection.
gc.set_threshold(50_000, 20, 20)


def flags_known(flags):
    """Those of the flags that the installed XLA knows: it ends a process for any other, so a child asks it."""
    ask = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    answer = subprocess.run(
        ask, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True
    )
    if answer.returncode == 0:
        return flags
    known = " ".join(flag for flag in flags.split() if flag not in answer.stderr.split())
    if known == flags:
        raise pytest.UsageError(f"XLA refuses XLA_FLAGS={flags!r}:\n{answer.stderr}")
    return flags_known(known)


if "RSEMBED_TEST_XLA_FLAGS" not in os.environ:  # asked once, for all processes of a run
    os.environ["RSEMBED_TEST_XLA_FLAGS"] = flags_known(QUICK_COMPILES)
flags_before = os.environ.get("XLA_FLAGS", "")
if os.environ["RSEMBED_TEST_XLA_FLAGS"] not in flags_before:
    os.environ["XLA_FLAGS"] = f"{flags_before} {os.environ['RSEMBED_TEST_XLA_FLAGS']}".strip()
jax.devices("cpu")
if not IS_LEAST:
    os.environ["XLA_FLAGS"] = flags_before


def pytest_sessionstart():
    """Tests of the native kernels may skip where there are none, but not where they were required."""
    from rsembed.kernels import devices, native  # by now the hook that checks shapes is in place

    reason = native.unavailable_because()
    if reason is None:
        return
    if os.environ.get("RSEMBED_REQUIRE_NATIVE") == "1":
        raise pytest.UsageError(f"RSEMBED_REQUIRE_NATIVE=1, but {reason}")
    # It is said once in a process, and would be an error in the first test that computes.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        devices.warn_of_slow_cpu()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks as slow what `slow_rows` names, before pytest selects by marks.

    The notebook on Keras is skipped by name where Keras is missing, which nothing else needs.
    """
    for item in items:
        named = [name for mark in item.iter_markers("slow_rows") for name in mark.args]
        callspec = getattr(item, "callspec", None)
        if callspec is not None and callspec.id in named:
            item.add_marker(pytest.mark.slow)
        if item.path.name == "14_keras.ipynb" and importlib.util.find_spec("keras_rs") is None:
            item.add_marker(
                pytest.mark.skip(reason="needs keras and keras-rs: `make test-clients` runs it")
            )


def sine_waves(key, shape, dtype=jnp.float32):
    """Initial values that are cheap to compile: others for other entries, and for tables of other names and keys."""
    phase = jax.random.key_data(key)[-1] % 6283
    size = int(np.prod(shape))
    # A constant compiles soonest, but a large one is hashed, compressed and written with the program that holds it.
    wave = np if size <= 2**16 else jnp
    entries = wave.sin(wave.arange(size, dtype=np.float32))
    return jnp.asarray(entries.reshape(shape), dtype) * jnp.cos(phase.astype(dtype) / 1000)


@pytest.fixture(autouse=True)
def quick_initial_values(monkeypatch):
    """Of tables that name no initializer: random numbers were more than half of what a small collection compiles.

    Where the library's own values are the claim, a fixture of this name that does nothing stands in the way.
    """
    monkeypatch.setattr("rsembed.specs.default_initializer", sine_waves)


@pytest.fixture(scope="module")
def more_optimizations():
    """Programs as the flags alone have them, for bits that only they keep on any shapes."""
    jax.clear_caches()  # of programs that were compiled without
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", IS_LEAST)


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Programs of earlier modules go before they fill the process's table of memory maps.

    Each takes about thirty, Linux grants 65,530 (`vm.max_map_count`), and LLVM ends a process that gets none with a
    segmentation fault. What is needed again comes from the folder above.
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
