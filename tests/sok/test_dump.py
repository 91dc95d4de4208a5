"""Dumps come back on any number of devices, with optimizer state and step; or not at all."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rsembed import sok

DIM = 3


def model(num_devices, *, use_hashtable=True, rows=16, **options):
    sok.Init(mesh=Mesh(np.asarray(jax.devices()[:num_devices]), ("shard",)))
    options = {"optimizer": sok.optimizers.LazyAdam(0.1)} | options
    return sok.All2AllDenseEmbedding(rows, DIM, 1, 1, use_hashtable=use_hashtable, **options)


def train(layer, steps):
    for step in steps:
        keys = (np.arange(8) * (step + 1) % 13).reshape(8, 1, 1)
        out, backward = layer.vjp(keys)
        backward(np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape))


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_training_goes_on_elsewhere_as_if_nothing_had_happened(tmp_path, use_hashtable):
    straight = model(2, use_hashtable=use_hashtable)
    train(straight, range(2))
    sok.dump(tmp_path / "dump", straight)
    train(straight, range(2, 4))
    expected = sok.export_rows(straight.variable)
    restored = model(1, use_hashtable=use_hashtable, rows=32)
    train(restored, [7])  # what it learned before does not matter
    sok.load(tmp_path / "dump", restored)
    assert int(restored.variable.get_value().step) == 2
    train(restored, range(2, 4))
    found = sok.export_rows(restored.variable)
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, err_msg=name)


def test_rows_are_assigned_by_key():
    layer = model(2)
    keys = np.asarray([2**40, 5, 9])
    values = np.arange(9, dtype=np.float32).reshape(3, DIM)
    sok.assign_rows(layer.variable, {"keys": keys, "values": values})
    np.testing.assert_array_equal(
        layer(np.asarray([9, 2**40, 5, 6]).reshape(4, 1, 1))[:, 0, 0], [*values[[2, 0, 1]], np.zeros(DIM)]
    )
    with pytest.raises(ValueError, match="distinct"):
        sok.assign_rows(layer.variable, {"keys": np.asarray([4, 4]), "values": values[:2]})
    with pytest.raises(ValueError, match="'keys' and 'values'"):
        sok.assign_rows(layer.variable, {"values": values})
    with pytest.raises(ValueError, match="free rows"):
        sok.assign_rows(layer.variable, {"keys": np.arange(100) * 2, "values": np.zeros((100, DIM), np.float32)})


def test_a_dump_that_does_not_fit_is_refused(tmp_path):
    sok.dump(tmp_path / "dump", model(2))
    with pytest.raises(FileExistsError):
        sok.dump(tmp_path / "dump", model(2))
    with pytest.raises(ValueError, match=r"holds the tables \['all2all_dense_embedding'\], the model has \['other'\]"):
        sok.load(tmp_path / "dump", model(2, name="other"))
    with pytest.raises(ValueError, match=r"differs from .* in .'optimizer': .'tf_lazy_adam', 'adagrad'"):
        sok.load(tmp_path / "dump", model(2, optimizer=None))
    with pytest.raises(ValueError, match="occur more than once"):
        sok.dump(tmp_path / "more", [model(2).variable, model(2).variable])
    small = model(2, rows=1)
    small(np.asarray([[[3]], [[8]]]), training=True)
    full = model(2)
    train(full, [1])
    sok.dump(tmp_path / "full", full)
    with pytest.raises(ValueError, match="free rows"):
        sok.load(tmp_path / "full", small)
    assert small.variable.num_rows == 2  # what it had learned is still there
    with pytest.raises(ValueError, match="without hash table they must be equal"):
        sok.dump(tmp_path / "static", model(2, use_hashtable=False))
        sok.load(tmp_path / "static", model(2, use_hashtable=False, rows=20))
    with pytest.raises(ValueError, match="does not fit into key_dtype='int32'"):
        rows = {"keys": np.asarray([2**40]), "values": np.ones((1, DIM), np.float32)}
        sok.assign_rows(model(2, key_dtype="int32").variable, rows)
    with pytest.raises(ValueError, match="-1 stands for no key"):
        sok.assign_rows(small.variable, {"keys": np.asarray([-1]), "values": np.ones((1, DIM), np.float32)})
    with pytest.raises(ValueError, match="there is none"):
        sok.dump(tmp_path / "more", [])
