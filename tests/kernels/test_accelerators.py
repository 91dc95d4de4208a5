"""Kernels for GPUs and SparseCores agree with loops over numpy, interpreted or simulated, and lower for the chips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
import rsembed.optimizers as ro
from rsembed.kernels import api, gpu, library, reference, sparsecore, sparsecore_tiles
from rsembed.kernels.api import backend_evidence
from rsembed.kernels.contract import NO_ROW, Block, JaggedBatch, JaggedGradients, Segment, SegmentGradients, Step
from rsembed.kernels.devices import TARGETS, tracing_for
from rsembed.kernels.traced_rules import evaluate, trace_rule
from tests import oracles
from tests.kernels.cases import NUM_ROWS, ORACLE_STEPS, RAGGED, RULES, assert_close, draw_gradients, draw_table
from tests.kernels.simulator import simulate

pytestmark = [
    # jax 0.12 says so of every copy from a tile's memory that names a semaphore, as `sync_copy` does.
    pytest.mark.filterwarnings("ignore:Destination semaphore is ignored"),
    # From jax 0.11 on; what Pallas offers in its place did not lower with those versions.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

DIM = 12  # fills neither the lanes of a chip nor a power of two


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(sparsecore_tiles, "MAX_CHUNK_ROWS", 8)


def interpreted(function, *args):
    return jax.jit(function)(*args)


def simulated(function, *args, chip="v6e"):
    with tracing_for(chip):
        return simulate(function, *args)


IMPLEMENTATIONS = {"gpu": (gpu, interpreted), "sparsecore": (sparsecore, simulated)}


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request):
    return IMPLEMENTATIONS[request.param]


def test_lookup_agrees_with_loops(kernels):
    """Row 11 holds NaN, and contributes nothing: it is outside, or its weight is 0."""
    module, run = kernels
    table, segments = draw_table(DIM).at[11].set(jnp.nan), []
    for number, s in enumerate([RAGGED["weighted"][k] for k in (0, 2, 3)]):
        if number:
            segments.append(Segment(jnp.where(s.rows == 11, NO_ROW, s.rows), s.offsets, s.weights, s.combiner))
        else:
            segments.append(Segment(s.rows, s.offsets, jnp.where(s.rows == 11, 0.0, s.weights), s.combiner))
    segments += [Segment(jnp.asarray([2, 11]), jnp.asarray([0, 0, 2]), jnp.zeros(2), "mean"), *RAGGED["trimmed"]]
    outputs = run(lambda table: module.lookup(table, segments), table)
    clean = np.nan_to_num(np.asarray(table, np.float64))
    for output, segment in zip(outputs, segments, strict=True):
        assert output.dtype == jnp.float32
        assert_close(output, oracles.pooled_lookup(clean, segment))


def test_nothing_to_look_up_gives_zeros(kernels):
    module, run = kernels
    segments = [*RAGGED["no entry"], RAGGED["no bag"][0]]
    outputs = run(lambda table: module.lookup(table, segments), draw_table(DIM))
    for output, segment in zip(outputs, segments, strict=True):
        np.testing.assert_array_equal(output, np.zeros((segment.num_outputs, DIM)))


@pytest.mark.parametrize("name", ORACLE_STEPS)
def test_update_agrees_with_loops(kernels, name):
    module, run = kernels
    rule, segments = RULES[name], [RAGGED["weighted"][2]]
    table, d_outputs = draw_table(DIM), draw_gradients(segments, DIM)
    slots, hyper = rule.init_slots(table), rule.get_hyperparameters(2)
    new_table, new_slots = run(
        lambda t, s, d, h: module.update(t, s, SegmentGradients(segments, d), Step(h, rule)),
        table,
        slots,
        d_outputs,
        hyper,
    )
    gradients = oracles.combined_row_gradients(NUM_ROWS, segments, d_outputs)
    step, made_of = ORACLE_STEPS[name]
    want_table, want_slots = oracles.stepped_table(table, slots, gradients, step, **made_of)
    assert_close(new_table, want_table)
    for slot, want in zip(new_slots, want_slots, strict=True):
        assert slot.dtype == jnp.float32
        assert_close(slot, want)
    untouched = np.asarray(sorted(set(range(NUM_ROWS)) - set(gradients)), np.int32)
    np.testing.assert_array_equal(new_table[untouched], table[untouched])


def test_apply_rows_skips_padding_and_reads_wide_ids(kernels):
    module, run = kernels
    rule, rows = RULES["rowwise_adagrad"], jnp.asarray([3, -1, NUM_ROWS, 22, NO_ROW, 0], jnp.int32)
    table, gradients = draw_table(DIM), draw_table(DIM, seed=3)[:6]
    slots, hyper = (draw_table(1, seed=4) ** 2,), rule.get_hyperparameters(0)
    stepped = run(lambda t, s, g, h: module.apply_rows(t, s, rows, g, Step(h, rule)), table, slots, gradients, hyper)
    step, made_of = ORACLE_STEPS["rowwise_adagrad"]
    real = {row: np.asarray(gradients[k], np.float64) for k, row in enumerate(rows.tolist()) if 0 <= row < NUM_ROWS}
    want_table, want_slots = oracles.stepped_table(table, slots, real, step, **made_of)
    assert_close(stepped[0], want_table)
    assert_close(stepped[1][0], want_slots[0])


def test_jagged_calls_agree_with_reference():
    """They are put together from the other kernels, for both accelerators alike."""
    tables = [draw_table(DIM), draw_table(8, seed=2)]
    ids, offsets = np.random.default_rng(0).integers(-1, 9, 18), np.asarray([0, 3, 3, 7, 10, 11, 16])
    blocks = (Block(0, 3, 0, 4, 8), Block(3, 3, 1, 0, 7))
    batch = JaggedBatch(jnp.asarray(ids, jnp.int32), jnp.asarray(offsets, jnp.int32), None, "mean", blocks)
    rule, hyper, d_output = RULES["sgd"], (jnp.float32(0.3),), jnp.arange(60, dtype=jnp.float32)

    @jax.jit
    def both(tables):
        arguments = (tables[0], (), JaggedGradients(batch, d_output, 0, (DIM, 8)), Step(hyper, rule))
        return [(m.lookup_jagged(tables, batch), m.update(*arguments)[0]) for m in (gpu, reference)]

    for one, other in zip(*both(tables), strict=True):
        assert_close(one, other)
    for module in (gpu, sparsecore):
        assert module.lookup_jagged.keywords == {"lookup": module.lookup}
        assert module.row_gradients.keywords["lookup"].__module__ == module.__name__  # that of sums of any length


def test_gpu_tables_of_two_bytes_are_rounded_once_per_step():
    rule, segments = RULES["adagrad"], RAGGED["every combiner"][:1]
    table, d_outputs = draw_table(DIM, "bfloat16"), draw_gradients(segments, DIM)
    slots, hyper, rounding = rule.init_slots(draw_table(DIM)), (jnp.float32(0.3),), jax.random.key(5)

    @jax.jit
    def step(table, slots, d_outputs, key):
        arguments, to_nearest = (table, slots, SegmentGradients(segments, d_outputs)), Step(hyper, rule)
        rounded = gpu.update(*arguments, Step(hyper, rule, api.stochastic_rounding(key)))[0]
        return gpu.update(*arguments, to_nearest)[0], rounded, reference.update(*arguments, to_nearest)[0]

    nearest, rounded, want = step(table, slots, d_outputs, rounding)
    assert nearest.dtype == rounded.dtype == table.dtype
    assert_close(nearest, want, "bfloat16")
    assert_close(rounded, want, "bfloat16")  # up or down: next to the nearest, and not always it
    assert np.any(rounded != nearest)


def test_row_gradients_through_a_lookup_are_the_defined_ones():
    segments = RAGGED["every combiner"][1:2] + RAGGED["no entry"][:1] + RAGGED["trimmed"]
    d_outputs = draw_gradients(segments, 3)

    @jax.jit
    def both(d_outputs):
        gradients = SegmentGradients(segments, d_outputs)
        grouped = reference.row_gradients(NUM_ROWS, gradients, lookup=reference.lookup)
        return grouped, reference.row_gradients(NUM_ROWS, gradients)

    for one, other in zip(*both(d_outputs), strict=True):
        assert_close(one, other)


# Rules inside kernels


@pytest.mark.parametrize(("name", "dim", "width"), [("rowwise_adagrad", 12, 8), ("f2a", 16, 16), ("adam", 1, 8)])
def test_a_rule_on_pieces_is_the_rule(name, dim, width):
    rule = ro.F2A(0.1) if name == "f2a" else RULES[name]
    table, gradient = draw_table(dim)[:1], draw_table(dim, seed=1)[:1]
    slots = tuple(slot + 0.5 for slot in rule.init_slots(table))
    hyper = rule.get_hyperparameters(3)
    traced = trace_rule(rule, table, slots, len(hyper), elementwise=gpu._PRIMITIVES)

    def pieces(row):
        padded = jnp.pad(row[0], (0, -dim % width), constant_values=7.0)
        return tuple(padded.reshape(-1, width))

    state = [pieces(a) if a.shape[1] == dim else jnp.full(width, a[0, 0]) for a in (table, *slots)]
    inputs = [*state, pieces(gradient), *(jnp.full(width, value) for value in hyper)]
    stepped = jax.jit(lambda inputs: evaluate(traced, inputs, dim=dim))(inputs)
    new, new_slots = jax.jit(rule.step_rows)(table, slots, gradient, hyper)
    for value, want in zip(stepped, (new, *new_slots), strict=True):
        flat = jnp.concatenate(value) if isinstance(value, tuple) else value
        np.testing.assert_allclose(flat[: want.shape[1]], want[0], rtol=1e-6)


def test_square_roots_without_a_square_root():
    x = jnp.asarray(np.geomspace(1e-37, 1e37, 4001), jnp.float32)
    exact = np.sqrt(np.asarray(x, np.float64))
    np.testing.assert_allclose(sparsecore_tiles.square_root(x), exact, rtol=3e-7)
    np.testing.assert_allclose(sparsecore_tiles.reciprocal_root(x), 1 / exact, rtol=3e-7)
    edges = sparsecore_tiles.square_root(jnp.asarray([0.0, -1.0]))
    assert edges[0] == 0.0 and np.isnan(edges[1])


# Who is chosen, and who refuses


def lookup_text(target=None, implementation=None):
    table, rows = jnp.zeros((8, 16)), jnp.zeros(3, jnp.int32)

    def lookup(table, rows):
        return api.lookup(table, [Segment(rows, None, None, "none")], implementation=implementation)

    def traced():
        return str(jax.make_jaxpr(lookup)(table, rows))

    if target is None:
        return traced()
    with tracing_for(target):
        return traced()


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_that_no_chip_has_run_are_not_chosen_by_themselves(target, monkeypatch):
    monkeypatch.delenv("RSEMBED_KERNELS", raising=False)
    name = "gpu" if target.startswith("h") else "sparsecore"
    assert not {"mpmd_map", "pallas_call"} & set(lookup_text(target).replace("[", " ").split())
    with tracing_for(target):
        assert f"set RSEMBED_KERNELS={name}" in dict(api.implementation_states())[name]
        assert "opt-in here" in dict(backend_evidence())[name]


def test_each_platform_gets_its_own_kernels_where_they_are_asked_for(monkeypatch):
    monkeypatch.setenv("RSEMBED_KERNELS", "sparsecore, gpu")
    assert "mpmd_map" in lookup_text("v6e") and "mpmd_map" in lookup_text("tpu7x")
    assert "pallas_call" in lookup_text("h200")
    assert not {"mpmd_map", "pallas_call"} & set(lookup_text().replace("[", " ").split())
    states = dict(api.implementation_states())
    assert states["sparsecore"] == "the SparseCore kernels run on TPUs, but the computation is for cpu"
    assert states["gpu"] == "the Triton kernels run on NVIDIA GPUs, but the computation is for cpu"
    with tracing_for("v5p"):
        reason = library.shared_library()  # why there is none, where there is none
        other = reason if isinstance(reason, str) else "the computation is for tpu"
        assert dict(api.implementation_states())["native"].endswith(other)
        assert dict(api.implementation_states())["sparsecore"] == "live"
    monkeypatch.setenv("RSEMBED_KERNELS", "gpus")
    with pytest.raises(ValueError, match="RSEMBED_KERNELS names gpus; it knows sparsecore, gpu"):
        lookup_text()


@pytest.mark.parametrize(
    ("target", "name", "call"), [("v6e", "sparsecore", "mpmd_map"), ("h100", "gpu", "pallas_call")]
)
def test_an_implementation_that_is_named_is_taken(target, name, call, monkeypatch):
    monkeypatch.delenv("RSEMBED_KERNELS", raising=False)
    assert call in lookup_text(target, name)


def test_insisting_on_an_accelerator_that_is_not_here_is_refused():
    table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=8)
    features = [rs.FeatureSpec(name="f", table_spec=table)]
    for name in ("gpu", "sparsecore"):
        with pytest.raises(NotImplementedError, match=rf"{name}' cannot run here: .* the computation is for cpu"):
            rs.EmbeddingCollection(features, implementation=name)
    with tracing_for("v6e"):
        rs.EmbeddingCollection(features, implementation="sparsecore")
    with pytest.raises(ValueError, match="unknown device 'v9'; choose one of v5p"), tracing_for("v9"):
        pass


def test_a_chip_without_sparsecores_falls_back():
    device = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "TPU v5 lite: The current TPU does not have SparseCores" in (sparsecore.unavailable_because() or "")


def test_what_kernels_cannot_do_is_named():
    table, rows = jnp.zeros((8, 16)), jnp.zeros(3, jnp.int32)
    ftrl = RULES["ftrl"]
    arguments = ((table, table), rows, jnp.zeros((3, 16)), Step(ftrl.get_hyperparameters(0), ftrl))
    with tracing_for("v6e"):
        with pytest.raises(NotImplementedError, match="row rule ftrl uses the primitive `pow`"):
            sparsecore.apply_rows(table, *arguments)
        with pytest.raises(NotImplementedError, match=r"no implementation can serve apply_rows: sparsecore: .*`pow`"):
            api.apply_rows(table, *arguments, implementation="sparsecore")
        with pytest.raises(NotImplementedError, match="are float32, not bfloat16"):
            sparsecore.lookup(table.astype(jnp.bfloat16), [])
        with pytest.raises(NotImplementedError, match="1 buffers of 8 rows of 8192 numbers do not fit"):
            sparsecore.lookup(jnp.zeros((2, 8192)), [Segment(rows, None, None, "none")])
    with pytest.raises(NotImplementedError, match=r"slot 0 of sgd is int32\[8, 1\]"):
        gpu.apply_rows(table, (jnp.zeros((8, 1), jnp.int32),), rows, table[:3], Step((0.1,), RULES["sgd"]))
    with pytest.raises(NotImplementedError, match="holds rows of up to 8192 numbers, not 9000"):
        gpu.apply_rows(jnp.zeros((2, 9000)), (), rows, jnp.zeros((3, 9000)), Step((0.1,), RULES["sgd"]))


# Lowering, which needs no accelerator


def step_and_shapes(module, name):
    rule, shape = RULES[name], jax.ShapeDtypeStruct
    table = shape((1 << 20, 128), jnp.float32)
    slots = jax.eval_shape(rule.init_slots, table)
    hyper = rule.get_hyperparameters(0)

    def step(table, slots, rows, offsets, d_output):
        segments = [Segment(rows, offsets, None, "mean")]
        (output,) = module.lookup(table, segments)
        return output, module.update(table, slots, SegmentGradients(segments, [d_output]), Step(hyper, rule))

    return step, (
        table, slots, shape((4096,), jnp.int32), shape((513,), jnp.int32), shape((512, 128), jnp.float32)
    )  # fmt: skip


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "h100"])
def test_steps_lower_for_every_chip(target, monkeypatch):
    monkeypatch.setattr(sparsecore_tiles, "MAX_CHUNK_ROWS", 64)
    module, platform, call = (gpu, "cuda", "triton") if target == "h200" else (sparsecore, "tpu", "tpu_custom_call")
    step, shapes = step_and_shapes(module, "rowwise_adagrad")
    with tracing_for(target):
        text = jax.jit(step, donate_argnums=(0, 1)).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    assert text.count(call) >= 2
