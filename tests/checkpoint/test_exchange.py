"""Tables leave for other programs and come back, row by row, by name."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import checkpoint
from rsembed.tt import TensorTrain
from rsembed.tt.cores import rows as rows_of_cores


def needs(package):
    is_missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(is_missing, reason=f"needs the package {package}")


ENDINGS = (
    ".npz",
    pytest.param(".safetensors", marks=needs("safetensors")),
    pytest.param(".pt", marks=needs("torch")),
)


def collection_of(*tables):
    return rs.EmbeddingCollection([rs.FeatureSpec(name=table.name, table_spec=table) for table in tables])


def make_tables(**options):
    options |= {"embedding_dim": 4, "optimizer": rs.AdagradOptimizerSpec(0.1)}
    return (
        rs.TableSpec(name="word", vocabulary_size=6, dtype="bfloat16", **options),
        rs.TableSpec(name="user", vocabulary_size=16, storage=rs.Hashed(), **options),
    )


@pytest.mark.parametrize("ending", ENDINGS)
def test_tables_come_back_from_a_file_of_any_format(tmp_path, ending):
    collection = collection_of(*make_tables())
    ids = {"word": np.array([[1], [5]]), "user": np.array([[2**40], [7]])}
    state = collection.init(jax.random.key(0))
    state = collection.update(state, ids, collection.lookup(state, ids))
    expected = collection.tables(state)
    path = tmp_path / f"tables{ending}"
    checkpoint.export_tables(path, expected)
    found = checkpoint.import_tables(path)
    loaded = collection.with_tables(collection.init(jax.random.key(1)), found)
    jax.tree.map(np.testing.assert_array_equal, collection.tables(loaded), expected)
    assert found["word"].dtype == (np.float32 if ending == ".npz" else jnp.bfloat16)
    assert found["user"]["keys"].tolist() == [7, 2**40]
    checkpoint.export_tables(path, {"word": expected["word"][:2]})
    assert list(checkpoint.import_tables(path)) == ["word"] and [file.name for file in tmp_path.iterdir()] == [
        path.name
    ]


def test_names_of_another_program_are_taken_apart_and_the_others_left_out():
    theirs = {f"model.embedding_bags.{name}.weight": np.full((2, 3), k) for k, name in enumerate(("a", "b.c"))}
    theirs |= {"model.dense.bias": np.zeros(3)}
    name = "model.embedding_bags.{table}.weight"
    tables = checkpoint.tables_of_state_dict(theirs, name=name)
    assert sorted(tables) == ["a", "b.c"] and tables["b.c"][0, 0] == 1
    assert sorted(checkpoint.state_dict(tables, name=name)) == sorted(theirs)[1:]
    assert list(checkpoint.tables_of_state_dict({"weight": np.zeros((2, 3))}, name="weight")) == ["table"]
    with pytest.raises(ValueError, match=r"no name fits '\{table\}.weights'; there are \['model.dense.bias'"):
        checkpoint.tables_of_state_dict(theirs, name="{table}.weights")
    with pytest.raises(ValueError, match=r"put \{table\} into it"):
        checkpoint.state_dict(tables, name="weight")


def test_a_whole_table_or_cores_go_into_a_tensor_train(tmp_path):
    storage = TensorTrain((8, 30), (4, 5, 3), (2, 2, 2))
    table = rs.TableSpec(name="item", vocabulary_size=57, embedding_dim=8, storage=storage)
    collection, rng = collection_of(table), np.random.default_rng(0)
    state = collection.init(jax.random.key(0))
    cores = [rng.normal(size=shape).astype(np.float32) for shape in storage.spec_of(table).core_shapes]
    loaded = collection.with_tables(state, {"item": tuple(cores)})
    ids = np.arange(57)[:, None]
    expected = rows_of_cores(storage.spec_of(table), tuple(map(jnp.asarray, cores)), jnp.arange(57))
    np.testing.assert_allclose(collection.lookup(loaded, {"item": ids})["item"], expected, rtol=1e-5)
    checkpoint.save_collection(tmp_path / "saved", collection, loaded)
    from_file = collection.with_tables(state, {"item": checkpoint.load(tmp_path / "saved").tree["tables"]["item"]})
    jax.tree.map(np.testing.assert_array_equal, from_file.tables, loaded.tables)
    # Of these ranks the last is larger than any table needs, and the first can hold this one.
    checkpoint.export_tables(tmp_path / "item.npz", {"item": expected})
    again = collection.with_tables(state, checkpoint.import_tables(tmp_path / "item.npz"))
    np.testing.assert_allclose(collection.lookup(again, {"item": ids})["item"], expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"table 'item' is kept as a tensor train: give a whole table \[57, 8\]"):
        collection.with_tables(state, {"item": expected[1:]})


@needs("torch")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_embedding_bag_of_torch_moves_in_and_out(tmp_path, dtype):
    import torch

    bag = torch.nn.EmbeddingBag(6, 4, mode="sum", dtype=getattr(torch, dtype))
    model = torch.nn.ModuleDict({"word": bag})
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    table = rs.TableSpec(name="word", vocabulary_size=6, embedding_dim=4, dtype=dtype)
    collection = collection_of(table)
    tables = checkpoint.import_tables(tmp_path / "theirs.pt", name="{table}.weight")
    state = collection.with_tables(collection.init(jax.random.key(0)), tables)
    ids = np.array([[1, 5], [0, 0]])
    pooled = model["word"](torch.from_numpy(ids)).detach().float().numpy()
    np.testing.assert_allclose(
        collection.lookup(state, {"word": ids})["word"], pooled, rtol=2e-2 if dtype != "float32" else 1e-6
    )
    checkpoint.export_tables(tmp_path / "ours.pt", collection.tables(state), name="{table}.weight")
    model["word"].weight.data.zero_()
    model.load_state_dict(torch.load(tmp_path / "ours.pt"))
    np.testing.assert_array_equal(model["word"](torch.from_numpy(ids)).detach().float().numpy(), pooled)


def test_an_unknown_ending_and_a_missing_package_are_said(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"tables.csv: the ending says the format; there are .npz, .safetensors"):
        checkpoint.export_tables(tmp_path / "tables.csv", {"a": np.zeros((1, 1))})
    monkeypatch.setitem(__import__("sys").modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"need the package 'safetensors'; install it, or use .npz"):
        checkpoint.export_tables(tmp_path / "a.safetensors", {"a": np.zeros((1, 1))})
    assert not list(tmp_path.iterdir())


def test_a_pickle_in_a_file_is_not_run(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.array([{"x": 1}], object))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        checkpoint.import_tables(tmp_path / "a.npz")
