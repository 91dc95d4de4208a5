"""XLA's thread pool has enough threads for the CPU devices, or the library warns."""

import os

import pytest

from rsembed import EmbeddingCollection, FeatureSpec, TableSpec, sok
from rsembed.kernels import devices
from rsembed.parallel import make_mesh
from rsembed.parallel.runtime import _environment_of
from rsembed.sparsecore.mesh_lookup import table_mesh
from tests.kernels.cases import needs_native, run_python

# Steps are dispatched while earlier steps run. The collectives of a step wait for all devices.
STEPS_IN_FLIGHT = """
import os, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from rsembed.parallel import make_mesh

print(os.environ.get("NPROC"))
mesh = make_mesh()

def exchange(x):
    x = jax.lax.all_to_all(jnp.sort(x, axis=0), "shard", split_axis=0, concat_axis=0, tiled=True)
    return jnp.tanh(x) + jax.lax.psum(x.sum(), "shard")

step = jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=P("shard"), out_specs=P("shard")))
x = jax.device_put(jnp.ones((1024, 16)), NamedSharding(mesh, P("shard")))
for _ in range(100):
    x = step(x)
print(x.sum() > 0)
"""
PLAIN = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}


@pytest.fixture
def shared_pool(monkeypatch):
    """Makes CPU devices share a thread pool as before JAX 0.12, with any version of JAX."""
    monkeypatch.setattr(devices, "_SHARED_POOL", True)


def run(program, **environment):
    return run_python("-c", program, environment=PLAIN | environment)


def test_an_import_asks_for_threads_so_that_many_steps_in_flight_over_more_devices_than_cores_end(
    monkeypatch,
):
    monkeypatch.delenv("NPROC", raising=False)
    flags = (
        "--xla_force_host_platform_device_count=4 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=8"
    )
    done = run(STEPS_IN_FLIGHT, XLA_FLAGS=flags)
    num_threads = devices.thread_settings(4).get("NPROC")
    assert done.stdout.splitlines() == [str(num_threads), "True"], done.stderr[-2000:]


LATE = """
import os, jax
jax.devices()
from rsembed.kernels import native
print(os.environ.get("NPROC"), native.instruction_set())
"""


@pytest.mark.slow
@needs_native
def test_a_late_import_asks_for_no_threads_and_takes_the_instructions_that_it_is_told():
    assert run(LATE, RSEMBED_ISA="baseline").stdout.split() == ["None", "baseline"]


def test_threads_suffice_for_devices_that_are_asked_for_later(shared_pool, monkeypatch):
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7), raising=False)
    assert devices.thread_settings(1) == devices.thread_settings(3) == {"NPROC": "16"}
    assert devices.thread_settings(5) == {"NPROC": "20"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert devices.thread_settings(4) == {}
    monkeypatch.setenv("NPROC", "1")
    # A single device never waits for another device.
    assert devices.thread_settings(1) == {}
    # The user's number stays if it is large enough.
    monkeypatch.setenv("NPROC", "6")
    assert devices.thread_settings(3) == {} and devices.thread_settings(4) == {"NPROC": "16"}


FEATURE = FeatureSpec("f", TableSpec("t", 16, 4))
ENTRIES = {
    "collection": lambda mesh: EmbeddingCollection(FEATURE, mesh=mesh),
    "sparsecore": lambda mesh: table_mesh(mesh, "shard"),
    "sok": lambda mesh: sok.Init(mesh=mesh),
    "make_mesh": lambda mesh: make_mesh(),
}


@pytest.mark.parametrize("enter", ENTRIES)
def test_a_mesh_with_too_few_threads_says_what_to_do(enter, shared_pool, monkeypatch):
    mesh = make_mesh()
    monkeypatch.setattr(devices, "_num_threads", 8)
    with pytest.warns(
        RuntimeWarning, match="8 CPU devices .* 8 threads.*NPROC=32, or import rsembed and ask"
    ):
        ENTRIES[enter](mesh)


def test_a_mesh_with_threads_enough_says_nothing(shared_pool, monkeypatch):
    monkeypatch.setattr(devices, "_num_threads", 16)
    make_mesh()
    monkeypatch.setattr(devices, "_num_threads", 1)
    make_mesh(num_devices=1)


def test_launched_processes_get_threads_for_their_devices(shared_pool, monkeypatch):
    monkeypatch.setenv("NPROC", "4")
    assert int(_environment_of(0, 2, 12, "127.0.0.1:1")["NPROC"]) >= 24
    assert _environment_of(0, 2, 2, "127.0.0.1:1")["NPROC"] == "4"
