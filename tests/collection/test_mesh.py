"""A collection on a mesh gives the numbers of loops, whatever lies where."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import rsembed as rs
from rsembed.kernels.contract import Segment
from tests import oracles

BATCH, DIM, LR = 8, 8, 0.1
WIDTHS = {"a": 3, "b": 2, "c": 1, "d": 2}
READS = {"a": "t", "b": "t", "c": "v", "d": "w"}
SGD, ADAGRAD, ADAM = rs.SGDOptimizerSpec, rs.AdagradOptimizerSpec, rs.AdamOptimizerSpec
ROW_WISE = rs.RowWiseAdagradOptimizerSpec


class Setting(NamedTuple):
    """A mesh, what lies where on it, and the optimizers of tables `t` and `v` (which share a stack) and of `w`."""

    shape: tuple[int, ...]
    placement: str | dict[str, str]
    optimizers: tuple[type, type]
    capacity: int | None = None
    axis: str | None = None


SETTINGS = {
    "2-one-by-one": Setting((2,), "row", (ADAGRAD, ROW_WISE), capacity=1),
    "2x4-row": Setting((2, 4), "row", (SGD, ADAM)),
    "2x4-table": Setting((2, 4), "table", (ADAGRAD, ROW_WISE), capacity=3, axis="y"),
    "8-mixed": Setting((8,), {"t": "table", "v": "replicated", "w": "column"}, (ADAM, ADAGRAD)),
    "4-column": Setting((4,), {"t": "column", "v": "column", "w": "replicated"}, (ADAGRAD, ROW_WISE)),
}
ORACLE_STEPS = {
    SGD: (oracles.sgd_step, {}),
    ADAGRAD: (oracles.adagrad_step, {}),
    ROW_WISE: (oracles.rowwise_adagrad_step, {"epsilon": 1e-8}),
    ADAM: (oracles.adam_step, {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}),
}


def mesh_of(*shape):
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("x", "y")[: len(shape)])


def tables_of(optimizers):
    """Table `t` is read by two features, one of them weighted; `w` has sequence output unless it is row-wise."""
    made_of = {
        "t": (21, optimizers[0], "mean"),
        "v": (5, optimizers[0], "sum"),
        "w": (17, optimizers[1], "sqrtn" if optimizers[1] is ROW_WISE else "none"),
    }
    return {
        name: rs.TableSpec(
            name=name, vocabulary_size=rows, embedding_dim=DIM, optimizer=optimizer(LR), combiner=combiner,
            initializer=jax.nn.initializers.zeros,
        )
        for name, (rows, optimizer, combiner) in made_of.items()
    }  # fmt: skip


@functools.cache
def program(name):
    """The collection of a setting, its initial state and a compiled step."""
    setting = SETTINGS[name]
    tables = tables_of(setting.optimizers)
    collection = rs.EmbeddingCollection(
        [rs.FeatureSpec(name=feature, table_spec=tables[table]) for feature, table in READS.items()],
        mesh=mesh_of(*setting.shape),
        sharding_axis=setting.axis,
        placement=setting.placement,
        exchange_capacity=setting.capacity,
    )

    @jax.jit
    def step(state, batch, d_activations):
        activations, pullback = collection.lookup_vjp(state, batch)
        row_gradients = pullback(d_activations)
        states = collection.apply(state, row_gradients), collection.update(state, batch, d_activations)
        return activations, rs.global_norm(row_gradients), row_gradients.num_touched(), states

    generator = np.random.default_rng(0)
    values = {t: generator.normal(size=(spec.vocabulary_size, DIM)).astype(np.float32) for t, spec in tables.items()}
    begin = jax.jit(lambda key, values: collection.with_tables(collection.init(key), values))
    return collection, begin(jax.random.key(0), values), step


@st.composite
def batches(draw):
    """Ids of every feature: uniform, one hot id, samples of half the devices empty, or nothing at all."""
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["uniform", "skewed", "half empty", "empty"]))
    batch = {}
    for name, width in WIDTHS.items():
        vocabulary = {"t": 21, "v": 5, "w": 17}[READS[name]]
        ids = generator.integers(-1, vocabulary, (BATCH, width)).astype(np.int32)
        if kind == "skewed":
            ids[generator.random(ids.shape) < 0.9] = generator.integers(vocabulary)
        elif kind == "half empty":
            ids[BATCH // 2 :] = -1
        elif kind == "empty":
            ids[:] = -1
        batch[name] = ids
    return batch, generator.random((BATCH, WIDTHS["a"]), np.float32), generator


def segment_of(ids, weights, combiner):
    rows = np.where(ids < 0, 2**31 - 1, ids).reshape(-1)
    offsets = None if combiner == "none" else np.arange(ids.shape[0] + 1) * ids.shape[1]
    return Segment(rows, offsets, weights, combiner)


@pytest.mark.parametrize("name", SETTINGS)
@settings(deadline=None, max_examples=5, derandomize=True)
@given(drawn=st.lists(batches(), min_size=2, max_size=2))
def test_training_on_a_mesh_gives_the_numbers_of_loops(name, drawn):
    tables = tables_of(SETTINGS[name].optimizers)
    collection, state, step = program(name)
    expected = {table: np.float64(values) for table, values in collection.tables(state).items()}
    slots = {table: [np.float64(slot) for slot in own] for table, own in collection.slots(state).items()}
    for number, (ids, weights, generator) in enumerate(drawn):
        segments = {
            f: segment_of(ids[f], weights.reshape(-1) if f == "a" else None, tables[t].combiner)
            for f, t in READS.items()
        }
        d_outputs = {f: generator.normal(size=(s.num_outputs, DIM)).astype(np.float32) for f, s in segments.items()}
        shapes = {f: (BATCH, *([WIDTHS[f]] * (s.offsets is None)), DIM) for f, s in segments.items()}
        batch = collection.prepare({f: (own, weights) if f == "a" else own for f, own in ids.items()})
        activations, norm, num_touched, states = jax.block_until_ready(
            step(state, batch, {f: d.reshape(shapes[f]) for f, d in d_outputs.items()})
        )
        for feature, table in READS.items():
            pooled = oracles.pooled_lookup(expected[table], segments[feature]).reshape(shapes[feature])
            np.testing.assert_allclose(activations[feature], pooled, rtol=1e-5, atol=1e-5)
        square, count = 0.0, 0
        for table, spec in tables.items():
            readers = [feature for feature in READS if READS[feature] == table]
            own = [[values[feature] for feature in readers] for values in (segments, d_outputs)]
            gradients = oracles.combined_row_gradients(spec.vocabulary_size, *own)
            step_row, made_of = ORACLE_STEPS[type(spec.optimizer)]
            made_of = made_of | {"learning_rate": LR} | ({"step": number} if step_row is oracles.adam_step else {})
            expected[table], slots[table] = oracles.stepped_table(
                expected[table], slots[table], gradients, step_row, **made_of
            )
            square, count = square + sum(np.sum(g**2) for g in gradients.values()), count + len(gradients)
        np.testing.assert_allclose(norm, square**0.5, rtol=1e-5, atol=1e-6)
        assert sum(map(int, num_touched.values())) == count
        for state in states:  # applied, then updated; training goes on from the latter
            for table, values in collection.tables(state).items():
                np.testing.assert_allclose(values, expected[table], rtol=1e-4, atol=2e-5)
            for table, own in collection.slots(state).items():
                for slot, loops in zip(own, slots[table], strict=True):
                    np.testing.assert_allclose(slot, loops, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("storage", [None, rs.Hashed()], ids=["dense", "hashed"])
def test_a_mesh_of_one_device_asks_nobody_and_gives_the_bits_of_no_mesh(storage):
    table = rs.TableSpec(name="t", vocabulary_size=21, embedding_dim=DIM, optimizer=ADAGRAD(LR), storage=storage)
    features = [rs.FeatureSpec(name="f", table_spec=table)]
    batch = {"f": np.random.default_rng(0).integers(0, 21, (BATCH, 3), np.int32)}
    found = []
    for mesh in (None, mesh_of(1)):
        collection = rs.EmbeddingCollection(features, mesh=mesh)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        for _ in range(2):
            state = update(state, collection.prepare(batch), {"f": np.ones((BATCH, DIM), np.float32)})
        lookup = jax.jit(functools.partial(collection.lookup, return_statistics=True))
        outputs, statistics = lookup(state, collection.prepare(batch))
        assert (int(statistics.traffic["t"].num_rounds), float(statistics.traffic["t"].num_bytes)) == (0, 0.0)
        found.append((outputs, collection.tables(state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_may_be_set_but_for_one_of_explicit_axes_which_is_refused(axis_type):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(axis_type,))
    table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=2, optimizer=SGD(LR))
    collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)], mesh=mesh)
    expected = collection.lookup(collection.init(jax.random.key(0)), {"f": [[1], [2], [3], [4]]})["f"]
    with jax.set_mesh(mesh):
        if axis_type == AxisType.Explicit:
            with pytest.raises(
                ValueError, match=r"explicit axes \('x',\) is set, .* automatic axes: leave jax.set_mesh"
            ):
                collection.init(jax.random.key(0))
            return
        state = collection.init(jax.random.key(0))
        look_up = jax.jit(lambda state, batch: collection.lookup(state, batch)["f"])
        found = look_up(state, collection.prepare({"f": [[1], [2], [3], [4]]}))
    np.testing.assert_array_equal(found, expected)
