"""Tables and slots by name: read from a state, and written to a state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed as rs
from rsembed import checkpoint
from rsembed.tt import TensorTrain
from rsembed.tt.cores import rows as rows_of_cores
from tests.world import assert_same, made_mesh

ADAGRAD = rs.optimizers.Adagrad(0.1)


def collection_of(*tables, **options):
    return rs.EmbeddingCollection([rs.FeatureSpec(spec.name, spec) for spec in tables], **options)


@pytest.mark.parametrize(
    ("num_devices", "placement"), [(None, None), (1, "row"), (4, "row"), (4, "replicated")]
)
def test_tables_and_slots_outlive_the_state_they_came_from(num_devices, placement):
    dense = rs.TableSpec("a", 16, 8, optimizer=ADAGRAD)
    train = dataclasses.replace(dense, name="b", storage=TensorTrain((2, 2)))
    placements = {"a": placement, "b": "replicated"} if num_devices else None
    collection = collection_of(dense, train, mesh=made_mesh(num_devices), placement=placements)
    state = collection.init(jax.random.key(0))
    collection.check_state(state)  # builds the template of states
    with jax.transfer_guard_host_to_device("disallow"):
        actual = collection.tables(state), collection.slots(state)
    before = jax.tree.map(np.array, actual)
    for leaf in jax.tree.leaves((state.tables, state.slots)):
        leaf.delete()
    assert_same(actual, before)


STORAGES = {"dense": None, "hashed": rs.Hashed(), "host cached": rs.HostCached(cache_rows=8)}


@pytest.mark.parametrize("source", ["dense", "host cached"])
@pytest.mark.parametrize("target", STORAGES)
def test_a_whole_table_moves_to_any_storage(source, target):
    tables = {"t": np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)}
    expected = tables["t"]
    for storage in (STORAGES[source], STORAGES[target]):
        collection = collection_of(rs.TableSpec("t", 16, 4, storage=storage))
        state = collection.with_tables(collection.init(jax.random.key(0)), tables)
        tables = collection.tables(state)
    rows = tables["t"]["values"] if target == "hashed" else tables["t"]
    assert_array_equal(rows, expected)


def in_npz(path, arrays):
    np.savez(f"{path}.npz", **arrays)
    return dict(np.load(f"{path}.npz"))


def in_safetensors(path, arrays):
    safetensors = pytest.importorskip("safetensors.numpy")
    safetensors.save_file(arrays, path)
    return safetensors.load_file(path)


@pytest.mark.parametrize("through", [in_npz, in_safetensors])
def test_tables_go_through_files_of_other_programs(tmp_path, through):
    word = rs.TableSpec("word", 6, 4, optimizer=ADAGRAD)
    user = dataclasses.replace(word, name="user", storage=rs.Hashed())
    collection = collection_of(word, user)
    ids = {"word": np.array([[1], [5]]), "user": np.array([[2**40], [7]])}
    state = collection.init(jax.random.key(0))
    state = collection.update(state, ids, collection.lookup(state, ids))
    expected = collection.tables(state)
    actual = through(tmp_path / "word", {"encoder.word.weight": np.asarray(expected["word"])})
    users = through(tmp_path / "user", expected["user"])
    tables = {"word": actual["encoder.word.weight"], "user": users}
    loaded = collection.with_tables(collection.init(jax.random.key(1)), tables)
    assert_same(collection.tables(loaded), expected)


def test_a_whole_table_or_cores_go_into_a_tensor_train(tmp_path):
    table = rs.TableSpec("item", 57, 8, storage=TensorTrain((8, 30), (4, 5, 3), (2, 2, 2)))
    collection, rng = collection_of(table), np.random.default_rng(0)
    state = collection.init(jax.random.key(0))
    spec = table.storage.spec_of(table)
    cores = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in spec.core_shapes)
    loaded = collection.with_tables(state, {"item": cores})
    ids = np.arange(57)
    expected = rows_of_cores(spec, cores, jnp.asarray(ids, jnp.int32))
    assert_allclose(collection.lookup(loaded, {"item": ids})["item"], expected, rtol=1e-5)
    checkpoint.save_collection(tmp_path / "saved", collection, loaded)
    tables = checkpoint.load(tmp_path / "saved").tree["tables"]
    from_file = collection.with_tables(state, {"item": tables["item"]})
    assert_same(from_file.tables, loaded.tables)
    # The last of these ranks is larger than any table needs, and the first one is sufficient here.
    again = collection.with_tables(state, {"item": expected})
    assert_allclose(collection.lookup(again, {"item": ids})["item"], expected, atol=1e-4)
