"""Kernels for GPUs and SparseCores: rules in kernels, choice of kernels, refusals, and lowering."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed.kernels import api, devices, gpu, sparsecore
from rsembed.kernels.contract import Call, IdList
from rsembed.kernels.devices import TARGETS, tracing_for
from tests.kernels.cases import KNOWN_WARNINGS, RULES, assert_close, step_of, training_step

pytestmark = KNOWN_WARNINGS
AUTO = (jax.sharding.AxisType.Auto,)
ONE_LIST = Call.of([IdList.single(jnp.zeros(3, jnp.int32))], ["sum"])


# Rules in kernels


def test_square_roots_without_a_square_root():
    x = jnp.asarray(np.geomspace(1e-37, 1e37, 4001), jnp.float32)
    exact = np.sqrt(np.asarray(x, np.float64))
    np.testing.assert_allclose(sparsecore.square_root(x), exact, rtol=3e-7)
    np.testing.assert_allclose(sparsecore.reciprocal_root(x), 1 / exact, rtol=3e-7)
    edges = sparsecore.square_root(jnp.asarray([0.0, -1.0]))
    assert edges[0] == 0.0
    assert np.isnan(edges[1])


# Choice of kernels, and refusals


def chosen_for(target=None, implementation=None):
    """Primitives of a traced lookup that call kernels."""
    lookup = functools.partial(api.lookup, call=ONE_LIST, implementation=implementation)
    with tracing_for(target) if target else contextlib.nullcontext():
        program = str(jax.make_jaxpr(lookup)((jnp.zeros((8, 16)),)))
    return [name for name in ("mpmd_map[", "pallas_call[") if name in program]


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_no_chip_has_run_are_not_chosen_by_themselves(target, monkeypatch):
    monkeypatch.delenv("RSEMBED_KERNELS", raising=False)
    name, state, evidence = "sparsecore", "set RSEMBED_KERNELS=sparsecore", "opt-in here"
    kernels, kernels_by_default = ["mpmd_map["], []
    if target.startswith("h"):
        name, state, evidence = "gpu", "live", "runs here"
        kernels = kernels_by_default = ["pallas_call["]
    with tracing_for(target):
        assert state in dict(api.implementation_states())[name]
        assert evidence in dict(api.backend_evidence())[name]
        feature = rs.FeatureSpec("f", rs.TableSpec("t", 9, 8))
        rs.EmbeddingCollection(feature, implementation=name)
    assert chosen_for(target) == kernels_by_default
    assert chosen_for(target, name) == kernels
    monkeypatch.setenv("RSEMBED_KERNELS", "sparsecore")
    assert chosen_for(target) == kernels
    assert not chosen_for()


def test_an_implementation_that_does_not_serve_here_says_why(monkeypatch):
    states = dict(api.implementation_states())
    here = "but the computation is for cpu"
    assert states["sparsecore"] == f"the SparseCore kernels run on TPUs, {here}"
    assert states["gpu"] == f"the Triton kernels run on NVIDIA GPUs, {here}"
    monkeypatch.setenv("RSEMBED_KERNELS", "sparsecore")
    reason = "the computation is for tpu"
    # Without the native library, that is the reason.
    if isinstance(devices.shared_library(), str):
        reason = devices.shared_library()
    with tracing_for("v5p"):
        states = dict(api.implementation_states())
    assert states["native"].endswith(reason)
    assert states["sparsecore"] == "live"
    monkeypatch.setenv("RSEMBED_KERNELS", "gpus")
    with pytest.raises(ValueError, match="RSEMBED_KERNELS names gpus; it knows sparsecore"):
        chosen_for()


def test_a_chip_without_sparsecores_falls_back():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), AUTO, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        reason = sparsecore.unavailable_because()
    assert "TPU v5 lite: The current TPU does not have SparseCores" in reason


def test_what_kernels_cannot_do_is_named():
    table = jnp.zeros((8, 16))
    wide = jnp.zeros((8, 9000))
    rows = jnp.zeros(8, jnp.int32)
    ftrl = table, (table, table), rows, table, step_of(RULES["ftrl"])
    sgd = step_of(RULES["sgd"])
    refuses = functools.partial(pytest.raises, NotImplementedError)
    with tracing_for("v6e"):
        why = "sparsecore: .*row rule ftrl uses the primitive `pow`"
        with refuses(match=f"no implementation can serve apply_rows: {why}"):
            api.apply_rows(*ftrl, implementation="sparsecore")
        with refuses(match="are float32, not bfloat16"):
            sparsecore.lookup((table.astype(jnp.bfloat16),), ONE_LIST)
        with refuses(match="1 buffers of 8 rows of 9000 numbers do not fit"):
            sparsecore.lookup((wide,), ONE_LIST)
    with refuses(match=r"slot 0 of sgd is int32\[8, 1\]"):
        gpu.apply_rows(table, (rows[:, None],), rows, table, sgd)
    with refuses(match="holds rows of up to 8192 numbers, not 9000"):
        gpu.apply_rows(wide, (), rows, wide, sgd)


# Lowering for accelerators, on any machine


def lowered_text(jitted, arguments, platform="cuda"):
    return jitted.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def test_a_program_traced_for_gpus_runs_on_a_cpu_where_its_arrays_are_there():
    """JAX chooses the platform after tracing, so the traced program also has the reference."""
    step, _ = training_step(api, "row_wise_adagrad")
    rows = jnp.arange(16, dtype=jnp.int32) % 5
    arguments = jnp.ones((8, 128)), (jnp.ones((8, 1)),), rows, jnp.arange(0, 17, 4)
    expected = jax.jit(step)(*arguments)
    with tracing_for("h100"):
        assert "triton" in lowered_text(jax.jit(step), arguments)
        actual = jax.jit(step)(*arguments)
    jax.tree.map(assert_close, actual, expected)


def test_a_shard_map_may_check_what_varies_over_a_mesh_of_gpus():
    step, shapes = training_step(api, "row_wise_adagrad")
    mesh = jax.sharding.AbstractMesh((2,), ("x",), AUTO, abstract_device=TARGETS["h100"])
    specs = jax.P(), jax.P(), jax.P("x"), jax.P()
    checked = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P("x"))
    assert "triton" in lowered_text(jax.jit(checked), shapes)


@pytest.mark.slow_rows("v6e")
@pytest.mark.parametrize("target", [name for name in TARGETS if name != "h100"])
def test_steps_lower_for_every_chip(target, monkeypatch):
    monkeypatch.setattr(sparsecore, "MAX_CHUNK_ROWS", 64)
    module, platform, call = sparsecore, "tpu", "tpu_custom_call"
    if target == "h200":
        module, platform, call = gpu, "cuda", "triton"
    step, shapes = training_step(module, "row_wise_adagrad")
    with tracing_for(target):
        text = lowered_text(jax.jit(step, donate_argnums=(0, 1)), shapes, platform)
    assert text.count(call) >= 2
