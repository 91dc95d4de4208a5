"""Meshes of two axes and mixed placements give the numbers of one device; the contract of storages holds those."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import rsembed as rs
from tests.world import assert_same, mesh_of

BATCH, DIM, LR = 8, 8, 0.1
SGD, ADAGRAD, ADAM = rs.optimizers.SGD, rs.optimizers.Adagrad, rs.optimizers.Adam
ROW_WISE = rs.optimizers.RowWiseAdagrad
# The shape of a mesh, the optimizers of tables `t` and `v` (which share a stack) and of `w`, and what lies where.
SETTINGS = {
    "2x4-row": ((2, 4), (SGD, ADAM), {"placement": "row"}),
    "2x4-table": (
        (2, 4),
        (ADAGRAD, ROW_WISE),
        {"placement": "table", "exchange_capacity": 3, "sharding_axis": "y"},
    ),
    "8-mixed": (
        (8,),
        (ADAM, ADAGRAD),
        {"placement": {"t": "table", "v": "replicated", "w": "column"}},
    ),
}


def trained(optimizers, **options):
    """What two steps of four features give; `t` is read by two, one of them weighted, `w` may have sequence output."""
    sequence = "sqrtn" if optimizers[1] is ROW_WISE else "none"
    made_of = {
        "t": (21, optimizers[0], "mean"),
        "v": (5, optimizers[0], "sum"),
        "w": (17, optimizers[1], sequence),
    }
    tables = {
        name: rs.TableSpec(
            name,
            rows,
            DIM,
            optimizer=optimizer(LR),
            combiner=combiner,
        )
        for name, (rows, optimizer, combiner) in made_of.items()
    }
    reads = {"a": ("t", 3), "b": ("t", 2), "c": ("v", 1), "d": ("w", 2)}
    features = [rs.FeatureSpec(name, tables[table]) for name, (table, _) in reads.items()]
    collection, draw, found = (
        rs.EmbeddingCollection(features, **options),
        np.random.default_rng(0),
        [],
    )

    @jax.jit
    def step(state, batch):
        activations, pullback = collection.lookup_vjp(state, batch)
        gradients = jax.tree.map(lambda x: x - 1.0, activations)
        row_gradients = pullback(gradients)
        states = collection.apply(state, row_gradients), collection.update(state, batch, gradients)
        return (
            activations,
            rs.global_norm(row_gradients),
            sum(row_gradients.num_touched().values()),
            states,
        )

    state = collection.init(jax.random.key(0))
    for number in range(2):
        ids = {
            n: draw.integers(-1, tables[t].vocabulary_size, (BATCH, width))
            for n, (t, width) in reads.items()
        }
        ids["b"][number * BATCH // 2 :] = -1  # devices without ids
        batch = ids | {"a": (ids["a"], draw.random(ids["a"].shape, np.float32))}
        *outputs, states = step(state, collection.prepare(batch))
        found.append((outputs, [(collection.tables(own), collection.slots(own)) for own in states]))
        state = states[1]
    return found


@pytest.mark.slow_rows("2x4-row", "8-mixed")
@pytest.mark.parametrize("name", SETTINGS)
def test_training_on_a_mesh_gives_the_numbers_of_one_device(name):
    shape, optimizers, options = SETTINGS[name]
    found, expected = trained(optimizers, mesh=mesh_of(*shape), **options), trained(optimizers)
    for mine, yours in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(mine, yours, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("storage", [None, rs.Hashed()], ids=["dense", "hashed"])
def test_a_mesh_of_one_device_asks_nobody_and_gives_the_bits_of_no_mesh(storage):
    table = rs.TableSpec("t", 21, DIM, optimizer=ADAGRAD(LR), storage=storage)
    features = [rs.FeatureSpec("f", table)]
    batch = {"f": np.random.default_rng(0).integers(0, 21, (BATCH, 3), np.int32)}
    found = []
    for mesh in (None, mesh_of(1)):
        collection = rs.EmbeddingCollection(features, mesh=mesh)
        state, update = collection.init(jax.random.key(0)), jax.jit(collection.update)
        for _ in range(2):
            state = update(
                state, collection.prepare(batch), {"f": np.ones((BATCH, DIM), np.float32)}
            )
        lookup = jax.jit(functools.partial(collection.lookup, return_statistics=True))
        outputs, statistics = lookup(state, collection.prepare(batch))
        assert int(statistics.num_rounds["t"]) == 0
        found.append((outputs, collection.tables(state)))
    assert_same(*found)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_may_be_set_but_for_one_of_explicit_axes_which_is_refused(axis_type):
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(axis_type,))
    table = rs.TableSpec("t", 9, 2, optimizer=SGD(LR))
    collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh)
    expected = collection.lookup(collection.init(jax.random.key(0)), {"f": [[1], [2], [3], [4]]})[
        "f"
    ]
    with jax.set_mesh(mesh):
        if axis_type == AxisType.Explicit:
            with pytest.raises(
                ValueError,
                match=r"explicit axes \('x',\) is set, .* automatic axes: leave jax.set_mesh",
            ):
                collection.init(jax.random.key(0))
            return
        state = collection.init(jax.random.key(0))
        look_up = jax.jit(lambda state, batch: collection.lookup(state, batch)["f"])
        found = look_up(state, collection.prepare({"f": [[1], [2], [3], [4]]}))
    np.testing.assert_array_equal(found, expected)
