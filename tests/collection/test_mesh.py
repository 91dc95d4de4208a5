"""A collection on a mesh gives the numbers of one device, whatever lies where."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import rsembed as rs
from rsembed.kernels.contract import Segment
from tests import oracles

BATCH, DIM, LR = 8, 8, 0.1
WIDTHS = {"a": 3, "b": 2, "c": 1, "d": 2, "e": 2}


class Setting(NamedTuple):
    shape: tuple[int, ...] = ()
    placement: str | tuple[tuple[str, str], ...] | None = None
    capacity: int | None = None
    axis: str | None = None
    shared_optimizer: type = rs.AdagradOptimizerSpec

    def __str__(self):
        return "-".join(str(part) for part in self if part is not None).replace(" ", "")


# Two tables that share a stack, and two alone. Table `t` is read by two features, one of them weighted.
def tables_of(shared_optimizer):
    def table(name, rows, optimizer, combiner, dim=DIM):
        return rs.TableSpec(name=name, vocabulary_size=rows, embedding_dim=dim, optimizer=optimizer, combiner=combiner)

    return {
        "t": table("t", 21, shared_optimizer(LR), "mean"),
        "v": table("v", 5, shared_optimizer(LR), "sum"),
        "u": table("u", 13, rs.RowWiseAdagradOptimizerSpec(LR), "sqrtn", dim=3),
        "w": table("w", 17, rs.AdamOptimizerSpec(LR), "none"),
    }


READS = {"a": "t", "b": "t", "c": "v", "d": "u", "e": "w"}
ORACLE_STEPS = {
    rs.SGDOptimizerSpec: (oracles.sgd_step, {}),
    rs.AdagradOptimizerSpec: (oracles.adagrad_step, {}),
    rs.RowWiseAdagradOptimizerSpec: (oracles.rowwise_adagrad_step, {"epsilon": 1e-8}),
    rs.AdamOptimizerSpec: (oracles.adam_step, {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}),
}


def mesh_of(*shape):
    return Mesh(np.asarray(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("x", "y")[: len(shape)])


@functools.cache
def collection_of(setting):
    tables = tables_of(setting.shared_optimizer)
    placement = dict(setting.placement) if isinstance(setting.placement, tuple) else setting.placement
    return rs.EmbeddingCollection(
        [rs.FeatureSpec(name=name, table_spec=tables[table]) for name, table in READS.items()],
        mesh=mesh_of(*setting.shape) if setting.shape else None,
        sharding_axis=setting.axis,
        placement=placement,
        exchange_capacity=setting.capacity,
    )


@functools.cache
def program(setting):
    """The initial state, and a step that reports all there is to compare."""
    collection = collection_of(setting)

    @jax.jit
    def step(state, batch, d_activations):
        activations, statistics = collection.lookup(state, batch, return_statistics=True)
        row_gradients = collection.lookup_vjp(state, batch)[1](d_activations)
        applied, updated = collection.apply(state, row_gradients), collection.update(state, batch, d_activations)
        return activations, statistics, rs.global_norm(row_gradients), row_gradients.num_touched(), applied, updated

    return collection.init(jax.random.key(0)), step


SETTINGS = [
    Setting((1,), "row"),
    Setting((2,), "row", capacity=1),
    Setting((2, 2), "row", shared_optimizer=rs.SGDOptimizerSpec),
    Setting((8,), "row"),
    Setting((2, 4), "table", axis="y"),
    Setting((8,), (("t", "table"), ("v", "table"), ("u", "replicated"), ("w", "column")), capacity=2),
    Setting((4,), (("t", "column"), ("v", "column"), ("w", "replicated"))),
]


@st.composite
def batches(draw):
    """Ids and weights of every feature: uniform, one hot id, samples of some devices empty, or nothing at all."""
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    tables = tables_of(rs.SGDOptimizerSpec)
    kind = draw(st.sampled_from(["uniform", "skewed", "half empty", "empty"]))
    batch = {}
    for name, width in WIDTHS.items():
        vocabulary = tables[READS[name]].vocabulary_size
        ids = generator.integers(-1, vocabulary, (BATCH, width)).astype(np.int32)
        if kind == "skewed":
            ids[generator.random(ids.shape) < 0.9] = generator.integers(vocabulary)
        elif kind == "half empty":
            ids[BATCH // 2 :] = -1
        elif kind == "empty":
            ids[:] = -1
        batch[name] = ids
    batch["a"] = batch["a"], generator.random((BATCH, WIDTHS["a"]), np.float32)
    return batch, int(generator.integers(2**31))


def segment_of(value, combiner):
    ids, weights = value if isinstance(value, tuple) else (value, None)
    rows = np.where(ids < 0, 2**31 - 1, ids).reshape(-1)
    offsets = None if combiner == "none" else np.arange(ids.shape[0] + 1) * ids.shape[1]
    return Segment(rows, offsets, None if weights is None else weights.reshape(-1), combiner)


@functools.cache
def initial_tables(shared_optimizer):
    collection = collection_of(Setting(shared_optimizer=shared_optimizer))
    return jax.tree.map(np.asarray, collection.tables(collection.init(jax.random.key(0))))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@settings(deadline=None, max_examples=6, derandomize=True)
@given(drawn=st.lists(batches(), min_size=2, max_size=2))
def test_a_mesh_gives_the_numbers_of_loops(setting, drawn):
    collection, tables = collection_of(setting), tables_of(setting.shared_optimizer)
    state, step = program(setting)
    initial = initial_tables(setting.shared_optimizer)
    for name, values in collection.tables(state).items():
        np.testing.assert_array_equal(values, initial[name])  # to the bit, on any mesh
    expected = {name: np.float64(values) for name, values in initial.items()}
    slots = {name: [np.float64(x) for x in collection.slots(state)[name]] for name in tables}
    for number, (batch, seed) in enumerate(drawn):
        generator = np.random.default_rng(seed)
        segments = {name: segment_of(value, tables[READS[name]].combiner) for name, value in batch.items()}
        shapes = {
            n: (*s.rows.reshape(BATCH, -1).shape, DIM) if s.offsets is None else (BATCH, -1)
            for n, s in segments.items()
        }
        d_activations = {
            n: generator.normal(size=(s.num_outputs, tables[READS[n]].embedding_dim)).astype(np.float32)
            for n, s in segments.items()
        }
        reshaped = {n: d.reshape(shapes[n]) for n, d in d_activations.items()}
        activations, statistics, norm, touched, applied, state = jax.block_until_ready(
            step(state, collection.prepare(batch), reshaped)
        )
        square, num_touched = 0.0, 0
        for name, segment in segments.items():
            pooled = oracles.pooled_lookup(expected[READS[name]], segment)
            np.testing.assert_allclose(activations[name], pooled.reshape(shapes[name]), rtol=1e-5, atol=1e-5)
            ids = batch[name][0] if isinstance(batch[name], tuple) else batch[name]
            assert int(statistics.num_ids[name]) == (ids >= 0).sum()
        for name, table in tables.items():
            readers = [feature for feature in READS if READS[feature] == name]
            gradients = oracles.combined_row_gradients(
                table.vocabulary_size, [segments[f] for f in readers], [d_activations[f] for f in readers]
            )
            step_row, made_of = ORACLE_STEPS[type(table.optimizer)]
            made_of = {**made_of, "learning_rate": LR}
            if step_row is oracles.adam_step:
                made_of["step"] = number
            expected[name], slots[name] = oracles.stepped_table(
                expected[name], slots[name], gradients, step_row, **made_of
            )
            square += sum(np.sum(g**2) for g in gradients.values())
            num_touched += len(gradients)
        np.testing.assert_allclose(norm, square**0.5, rtol=1e-5, atol=1e-6)
        assert sum(int(count) for count in touched.values()) == num_touched
        for result in (applied, state):
            for name, values in collection.tables(result).items():
                np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=2e-5)
            for name, own in collection.slots(result).items():
                for one, two in zip(own, slots[name], strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
