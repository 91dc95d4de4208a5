"""Memory of init, training and lookups, measured in child processes or by XLA."""

import os
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import rsembed as rs
from rsembed.kernels import native
from tests.world import mesh_of

ROWS, DIM, BATCH, LENGTH = 1_000_000, 64, 512, 4
READS_PROC = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads the peak of resident memory from /proc"
)
SPEAKS_TO_THE_ALLOCATOR = pytest.mark.skipif(
    "glibc" not in platform.libc_ver() or native.unavailable_because() is not None,
    reason="needs the native library, which changes settings of glibc's allocator",
)

RULES = ("rs.optimizers.SGD()", "rs.optimizers.Adagrad()", "rs.optimizers.FTRL()")

PROGRAM = """
import ctypes, re, sys
import jax, jax.numpy as jnp
import rsembed as rs

ROWS, DIM, BATCH, LENGTH = map(int, sys.argv[1:5])

def collection_of(rows, optimizer):
    # Every row has random numbers. Uniform numbers are drawn fastest.
    how = {"embedding_dim": DIM, "optimizer": optimizer, "initializer": jax.nn.initializers.uniform()}
    table = rs.TableSpec(name="t", vocabulary_size=rows, **how)
    return rs.EmbeddingCollection(rs.FeatureSpec(name="f", table_spec=table))

def resident(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def peaks(optimizer):
    def step(state, batch):
        def body(state, ids):
            activations = collection_in_use.lookup(state, {"f": ids})
            return collection_in_use.update(state, {"f": ids}, activations), None
        return jax.lax.scan(body, state, batch)[0]

    small, collection = collection_of(64, optimizer), collection_of(ROWS, optimizer)
    batch = jax.random.randint(jax.random.key(1), (4, BATCH, LENGTH), 0, ROWS)
    collection_in_use = small
    warm = jax.jit(step, donate_argnums=0)(small.init(jax.random.key(0)), jnp.zeros((2, BATCH, LENGTH), jnp.int32))
    jax.block_until_ready((warm, batch))
    ctypes.CDLL(None).malloc_trim(0)  # no rule may reuse memory that an earlier rule freed
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    state = jax.block_until_ready(collection.init(jax.random.key(0)))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves((state.tables, state.slots)))
    init = (resident("VmHWM") - before) / nbytes
    collection_in_use = collection
    open("/proc/self/clear_refs", "w").write("5")
    state = jax.block_until_ready(jax.jit(step, donate_argnums=0)(state, batch))
    trained = (resident("VmHWM") - before) / nbytes
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    jax.block_until_ready(rs.for_serving(collection, state, dtype="int8")[1])
    return init, trained, (resident("VmHWM") - before) / (4 * ROWS * DIM)

print(*peaks(eval(sys.argv[5])))
"""


@READS_PROC
@pytest.mark.slow_rows(*RULES[1:])
@pytest.mark.parametrize("rule", RULES)
def test_init_and_training_hold_one_copy_of_the_state_and_an_int8_table_is_written_in_blocks(rule):
    # The child process compiles with the optimizations that users have. With fewer optimizations,
    # XLA needs other buffers and draws random numbers much more slowly.
    quick = ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in quick}
    command = [sys.executable, "-c", PROGRAM, *map(str, (ROWS, DIM, BATCH, LENGTH)), rule]
    output = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert output.returncode == 0, output.stderr
    init, step, serving = map(float, output.stdout.split())
    # The first two are divided by the size of the table with its slots.
    assert init < 1.3
    # Without native kernels, XLA sorts all entries, and needs memory for lists of them.
    assert step < (1.2 if native.unavailable_because() is None else 1.25)
    # The last one is divided by the size of the table in float32. The result is a quarter of it.
    # Compiling takes memory of up to one table.
    assert serving < 1.5


@pytest.mark.parametrize(
    "optimizer", [rs.optimizers.Adagrad(), rs.optimizers.FTRL()], ids=["fused", "traced"]
)
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (1, {"implementation": "reference"}),
        (1, {"implementation": "native"}),
        (4, {"mesh": mesh_of(4)}),
        (4, {"mesh": mesh_of(4), "exchange_capacity": 64}),
    ],
    ids=["reference", "native", "mesh", "rounds"],
)
def test_compiled_training_has_no_temporary_of_the_size_of_a_table(optimizer, num_devices, options):
    reason = native.unavailable_because()
    if "native" in options.values() and reason is not None:
        pytest.skip(f"needs the native kernels: {reason}")
    table = rs.TableSpec("t", ROWS, DIM, optimizer=optimizer)
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), **options)
    state = jax.eval_shape(collection.init, jax.random.key(0))

    def train(state, batches):
        def body(state, ids):
            activations = collection.lookup(state, {"f": ids})
            return collection.update(state, {"f": ids}, activations), jnp.sum(activations["f"])

        return jax.lax.scan(body, state, batches)

    batches = jax.ShapeDtypeStruct((3, BATCH, LENGTH), jnp.int32)
    memory = jax.jit(train, donate_argnums=0).lower(state, batches).compile().memory_analysis()
    table_bytes = ROWS * DIM * 4 // num_devices
    # The table and its first slot.
    assert memory.alias_size_in_bytes >= 2 * table_bytes
    assert memory.temp_size_in_bytes < 0.1 * table_bytes


LOOKUPS = """
import os, resource
import jax, numpy as np
import rsembed as rs

tables = [rs.TableSpec(name=f"t{k}", vocabulary_size=100, embedding_dim=128) for k in range(16)]
collection = rs.EmbeddingCollection([rs.FeatureSpec(name=f"f{k}", table_spec=own) for k, own in enumerate(tables)])
state = collection.init(jax.random.key(0))
batch = collection.prepare({f"f{k}": np.arange(1024).reshape(1024, 1) % 100 for k in range(16)})
lookup = jax.jit(collection.lookup)
faults = []
for _ in range(60):
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    activations = jax.block_until_ready(lookup(state, batch))
num_pages = sum(leaf.nbytes for leaf in jax.tree.leaves(activations)) // os.sysconf("SC_PAGE_SIZE")
print(np.median(np.diff(faults)[20:]) / num_pages)  # first, the heap of every thread grows
"""


@pytest.mark.slow
@SPEAKS_TO_THE_ALLOCATOR
def test_pages_of_activations_are_used_again_unless_the_user_chose_what_the_allocator_does():

    def share_of_new_pages(**environment):
        command = [sys.executable, "-c", LOOKUPS]
        output = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=240
        )
        assert output.returncode == 0, output.stderr
        return float(output.stdout)

    assert share_of_new_pages() < 0.1
    # A heap returns freed memory only from its end. It depends on the thread that allocates a
    # result, and so on chance, whether the result is at the end of a heap.
    assert any(share_of_new_pages(MALLOC_TRIM_THRESHOLD_="131072") > 0.5 for _ in range(3))


HEAPS = """
import ctypes, resource, sys, threading
from rsembed.kernels import native

assert not isinstance(native.shared_library(), str)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
SIZE, faults = int(sys.argv[1]) << 20, []

def results():
    # Fill a heap, so that the next result needs another heap.
    others = [libc.malloc(SIZE) for _ in range(4)]
    for _ in range(10):
        result = libc.malloc(SIZE)
        libc.memset(result, 1, SIZE)
        libc.free(result)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)

thread = threading.Thread(target=results)
thread.start()
thread.join()
print((faults[-1] - faults[0]) / 9 / (SIZE >> 12))
"""


@pytest.mark.slow_rows("14")
@SPEAKS_TO_THE_ALLOCATOR
@pytest.mark.parametrize("megabytes", (14, 48))
def test_pages_of_results_of_other_threads_are_used_again(megabytes):
    command = [sys.executable, "-c", HEAPS, str(megabytes)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert output.returncode == 0, output.stderr
    assert float(output.stdout) < 0.1
