"""Kernels for GPUs and SparseCores: rules inside them, who is chosen and who refuses, and that they lower."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.kernels import api, devices, gpu, sparsecore
from rsembed.kernels.api import backend_evidence
from rsembed.kernels.contract import Call, IdList, Step
from rsembed.kernels.devices import TARGETS, tracing_for
from tests.kernels.cases import RULES, assert_close, training_step

pytestmark = [
    # jax 0.12 says so of every copy from a tile's memory that names a semaphore, as `sync_copy` does.
    pytest.mark.filterwarnings("ignore:Destination semaphore is ignored"),
    # From jax 0.11 on; what Pallas offers in its place did not lower with those versions.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]


# Rules inside kernels


def test_square_roots_without_a_square_root():
    x = jnp.asarray(np.geomspace(1e-37, 1e37, 4001), jnp.float32)
    exact = np.sqrt(np.asarray(x, np.float64))
    np.testing.assert_allclose(sparsecore.square_root(x), exact, rtol=3e-7)
    np.testing.assert_allclose(sparsecore.reciprocal_root(x), 1 / exact, rtol=3e-7)
    edges = sparsecore.square_root(jnp.asarray([0.0, -1.0]))
    assert edges[0] == 0.0 and np.isnan(edges[1])


# Who is chosen, and who refuses


def chosen_for(target=None, implementation=None):
    """The kernels that a lookup is traced to, by the primitives that call them."""
    call = Call.of([IdList.single(jnp.zeros(3, jnp.int32))], ["sum"])
    with tracing_for(target) if target else contextlib.nullcontext():
        lookup = jax.make_jaxpr(
            lambda table: api.lookup((table,), call, implementation=implementation)
        )
        return {"mpmd_map", "pallas_call"} & set(
            re.findall(r"\w+", str(lookup(jnp.zeros((8, 16)))))
        )


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_no_chip_has_run_are_not_chosen_by_themselves(target, monkeypatch):
    monkeypatch.delenv("RSEMBED_KERNELS", raising=False)
    has_run, name = target.startswith("h"), "gpu" if target.startswith("h") else "sparsecore"
    call = {"pallas_call" if has_run else "mpmd_map"}
    with tracing_for(target):
        assert ("live" if has_run else "set RSEMBED_KERNELS=sparsecore") in dict(
            api.implementation_states()
        )[name]
        assert ("runs here" if has_run else "opt-in here") in dict(backend_evidence())[name]
        feature = rs.FeatureSpec("f", rs.TableSpec("t", 9, 8))
        rs.EmbeddingCollection(feature, implementation=name)
    assert chosen_for(target) == (call if has_run else set()) and chosen_for(target, name) == call
    monkeypatch.setenv("RSEMBED_KERNELS", "sparsecore")
    assert chosen_for(target) == call and not chosen_for()


def test_an_implementation_that_does_not_serve_here_says_why(monkeypatch):
    states = dict(api.implementation_states())
    assert (
        states["sparsecore"] == "the SparseCore kernels run on TPUs, but the computation is for cpu"
    )
    assert states["gpu"] == "the Triton kernels run on NVIDIA GPUs, but the computation is for cpu"
    monkeypatch.setenv("RSEMBED_KERNELS", "sparsecore")
    with tracing_for("v5p"):
        reason = devices.shared_library()  # why there is none, where there is none
        other = reason if isinstance(reason, str) else "the computation is for tpu"
        assert dict(api.implementation_states())["native"].endswith(other)
        assert dict(api.implementation_states())["sparsecore"] == "live"
    monkeypatch.setenv("RSEMBED_KERNELS", "gpus")
    with pytest.raises(ValueError, match="RSEMBED_KERNELS names gpus; it knows sparsecore"):
        chosen_for()


def test_a_chip_without_sparsecores_falls_back():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device
    )
    with jax.sharding.use_abstract_mesh(mesh):
        assert "TPU v5 lite: The current TPU does not have SparseCores" in (
            sparsecore.unavailable_because() or ""
        )


def test_what_kernels_cannot_do_is_named():
    table, rows = jnp.zeros((8, 16)), jnp.zeros(3, jnp.int32)
    call, ftrl = Call.of([IdList.single(rows)], ["sum"]), RULES["ftrl"]
    arguments = ((table, table), rows, jnp.zeros((3, 16)), Step(ftrl.get_hyperparameters(0), ftrl))
    with tracing_for("v6e"):
        with pytest.raises(NotImplementedError, match="row rule ftrl uses the primitive `pow`"):
            sparsecore.apply_rows(table, *arguments)
        with pytest.raises(
            NotImplementedError,
            match=r"no implementation can serve apply_rows: sparsecore: .*`pow`",
        ):
            api.apply_rows(table, *arguments, implementation="sparsecore")
        with pytest.raises(NotImplementedError, match="are float32, not bfloat16"):
            sparsecore.lookup((table.astype(jnp.bfloat16),), call)
        with pytest.raises(
            NotImplementedError, match="1 buffers of 8 rows of 8192 numbers do not fit"
        ):
            sparsecore.lookup((jnp.zeros((2, 8192)),), call)
    with pytest.raises(NotImplementedError, match=r"slot 0 of sgd is int32\[8, 1\]"):
        gpu.apply_rows(
            table, (jnp.zeros((8, 1), jnp.int32),), rows, table[:3], Step((0.1,), RULES["sgd"])
        )
    with pytest.raises(NotImplementedError, match="holds rows of up to 8192 numbers, not 9000"):
        gpu.apply_rows(
            jnp.zeros((2, 9000)), (), rows, jnp.zeros((3, 9000)), Step((0.1,), RULES["sgd"])
        )


# Lowering, which needs no accelerator


def test_a_program_traced_for_gpus_runs_on_a_cpu_where_its_arrays_are_there():
    """JAX chooses the device when it compiles; by then a kernel was traced, and the definition beside it."""
    step, shapes = training_step(api, "rowwise_adagrad")
    given = (
        jnp.ones((8, 128)),
        (jnp.ones((8, 1)),),
        jnp.arange(16, dtype=jnp.int32) % 5,
        jnp.arange(0, 17, 4),
    )
    assert jax.tree.structure(shapes) == jax.tree.structure(given)
    expected = jax.jit(step)(*given)
    with tracing_for("h100"):
        assert "triton" in jax.jit(step).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
        found = jax.jit(step)(*given)
    jax.tree.map(assert_close, found, expected)


def test_a_shard_map_may_check_what_varies_over_a_mesh_of_gpus():
    step, shapes = training_step(api, "rowwise_adagrad")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((2,), ("x",), auto, abstract_device=TARGETS["h100"])
    specs = jax.P(), jax.P(), jax.P("x"), jax.P()
    checked = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P("x")))
    assert "triton" in checked.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow_rows("v6e")
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "h100"])
def test_steps_lower_for_every_chip(target, monkeypatch):
    monkeypatch.setattr(sparsecore, "MAX_CHUNK_ROWS", 64)
    module, platform, call = (
        (gpu, "cuda", "triton") if target == "h200" else (sparsecore, "tpu", "tpu_custom_call")
    )
    step, shapes = training_step(module, "rowwise_adagrad")
    with tracing_for(target):
        text = (
            jax.jit(step, donate_argnums=(0, 1))
            .trace(*shapes)
            .lower(lowering_platforms=(platform,))
            .as_text()
        )
    assert text.count(call) >= 2
