"""Meshes with two axes and mixed placements give the numbers of one device."""

import jax
import numpy as np
import pytest

import rsembed as rs
from tests.world import assert_close, made_mesh, mesh_of

BATCH, DIM, LR = 8, 8, 0.1
SGD, ADAGRAD, ADAM = rs.optimizers.SGD, rs.optimizers.Adagrad, rs.optimizers.Adam
ROW_WISE = rs.optimizers.RowWiseAdagrad
# Shape of the mesh, optimizers of tables `t` and `v` (which share a stack) and of `w`, and options.
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
    """Results of two steps with four features.

    Two features read `t`, one of them with weights. `w` has the combiner "none" or "sqrtn".
    """
    sequence = "sqrtn" if optimizers[1] is ROW_WISE else "none"
    t = rs.TableSpec("t", 21, DIM, optimizer=optimizers[0](LR), combiner="mean")
    v = rs.TableSpec("v", 5, DIM, optimizer=optimizers[0](LR))
    w = rs.TableSpec("w", 17, DIM, optimizer=optimizers[1](LR), combiner=sequence)
    reads = {"a": (t, 3), "b": (t, 2), "c": (v, 1), "d": (w, 2)}
    features = [rs.FeatureSpec(name, table) for name, (table, _) in reads.items()]
    collection = rs.EmbeddingCollection(features, **options)

    @jax.jit
    def step(state, batch):
        activations, pullback = collection.lookup_vjp(state, batch)
        d_activations = jax.tree.map(lambda x: x - 1.0, activations)
        gradients = pullback(d_activations)
        num_touched = sum(gradients.num_touched().values())
        applied = collection.apply(state, gradients)
        updated = collection.update(state, batch, d_activations)
        return (activations, rs.global_norm(gradients), num_touched), applied, updated

    state, draw, results = collection.init(jax.random.key(0)), np.random.default_rng(0), []
    for number in range(2):
        batch = {
            name: draw.integers(-1, table.vocabulary_size, (BATCH, width))
            for name, (table, width) in reads.items()
        }
        # Some devices have no ids of this feature.
        batch["b"][number * BATCH // 2 :] = -1
        batch["a"] = (batch["a"], draw.random((BATCH, 3), np.float32))
        outputs, applied, state = step(state, collection.prepare(batch))
        results.append(outputs)
        results += [
            (collection.tables(new_state), collection.slots(new_state))
            for new_state in (applied, state)
        ]
    return results


@pytest.mark.slow_rows("2x4-row", "8-mixed")
@pytest.mark.parametrize("name", SETTINGS)
def test_training_on_a_mesh_gives_the_numbers_of_one_device(name):
    shape, optimizers, options = SETTINGS[name]
    actual = trained(optimizers, mesh=mesh_of(*shape), **options)
    assert_close(actual, trained(optimizers), rtol=1e-4, atol=2e-5)


def collection_on(mesh):
    table = rs.TableSpec("t", 9, 2)
    return rs.EmbeddingCollection(rs.FeatureSpec("f", table), mesh=mesh)


def test_a_mesh_of_automatic_axes_may_be_set():
    mesh = mesh_of(4)
    collection = collection_on(mesh)
    with jax.set_mesh(mesh):
        state = collection.init(jax.random.key(0))
        batch = collection.prepare({"f": [[1], [2], [3], [4]]})
        actual = jax.jit(collection.lookup)(state, batch)["f"]
    np.testing.assert_array_equal(actual, collection.tables(state)["t"][1:5])


def test_a_set_mesh_of_explicit_axes_is_refused():
    mesh = made_mesh(4)
    words = r"explicit axes \('x',\) is set, .* automatic axes: leave jax.set_mesh"
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=words):
        collection_on(mesh).init(jax.random.key(0))
