"""States, state dicts and row gradients know which module they belong to, and tables what they can hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rsembed import checkpoint
from rsembed import tbe as rt
from tests.tbe.oracle import make, tables_of, train
from tests.tbe.test_mesh import mesh_of

Optim, CACHED = rt.OptimType, rt.EmbeddingLocation.MANAGED_CACHING
DEVICE = rt.EmbeddingLocation.DEVICE
IDS, OFFSETS = np.array([3, 1, 1, 4, 0, 2, 1]), np.array([0, 3, 3, 4, 7])


@pytest.mark.parametrize("location", [DEVICE, CACHED])
def test_row_gradients_reach_the_rows_of_their_group(location):
    names, dims = ("b", "a", "c", "d"), (2, 3, 2, 3)
    specs = tuple((10, dim) for dim in dims)
    module = make(specs, location=location, table_names=names, uniform=None, learning_rate=1.0)
    offsets = np.arange(len(names) + 1)
    output, backward = module.vjp(np.arange(len(names)), offsets)
    module.apply(backward.row_gradients(np.ones_like(output)))
    for table, weights in enumerate(tables_of(module)[0]):
        wanted = np.zeros((10, dims[table]))
        wanted[table] = -1.0
        np.testing.assert_array_equal(weights, wanted)


@pytest.mark.parametrize("entries", [np.s_[:, :3], np.s_[:1]], ids=["dim", "rows"])
def test_row_gradients_of_another_shape_are_refused(entries):
    module = make(((10, 4),))
    gradients = module.vjp(np.array([1, 2]), np.array([0, 1, 2]))[1].row_gradients(np.ones((2, 4)))
    spoiled = {name: values[entries] for name, values in gradients.values.items()}
    with pytest.raises(ValueError, match=r"stack 'table_0': rows .* and values .* do not fit each other or the table"):
        module.apply(dataclasses.replace(gradients, values=spoiled))


def test_row_gradients_of_a_module_with_another_rule_may_be_applied():
    source, module = make(((10, 4),), optimizer=Optim.NONE), make(((10, 4),), learning_rate=1.0, uniform=None)
    output, backward = source.vjp(np.array([3]), np.array([0, 1]))
    module.apply(backward(jnp.ones_like(output)))
    assert tables_of(module)[0][0].sum(axis=1).tolist() == [-4.0 if row == 3 else 0.0 for row in range(10)]


OTHERS = {
    "rows": {"specs": ((20, 4), (10, 4))},
    "dim": {"specs": ((10, 8), (20, 8))},
    "tables": {"table_names": ["x", "table_1"]},
    "group": {"learning_rate": [0.1, 0.2]},
    "optimizer": {"optimizer": Optim.LAMB},
    "dtype": {"weights_precision": rt.SparseType.FP16},
    "num_devices": {"mesh": mesh_of(2)},
}
ENTRIES = {
    "lookup": lambda module: module(IDS, OFFSETS),
    "train": lambda module: train(module, IDS, OFFSETS),
    "compiled": lambda module: nnx.jit(lambda m: m(IDS, OFFSETS))(module),
    "state_dict": lambda module: module.state_dict(),
    "weights": lambda module: module.split_embedding_weights(),
    "uniform": lambda module: module.init_embedding_weights_uniform(0, 1),
}


@pytest.mark.parametrize("fact", OTHERS)
def test_states_and_row_gradients_of_another_module_are_refused_by_name(fact):
    arguments = {"specs": ((10, 4), (20, 4)), "optimizer": Optim.ADAM}
    other, module = make(**{**arguments, **OTHERS[fact]}), make(**arguments)
    output, backward = other.vjp(IDS, OFFSETS)
    if fact not in ("optimizer", "dtype"):  # rows and dims are the same
        with pytest.raises(ValueError, match=rf"row gradients do not belong to this module: .*{fact}.*Apply"):
            module.apply(backward.row_gradients(jnp.ones_like(output)))
    nnx.update(module, jax.tree.map(jnp.copy, nnx.state(other)))
    for run in ENTRIES.values():
        with pytest.raises(ValueError, match=f"the state does not belong to this module: .*{fact}.*state_dict"):
            run(module)


def test_the_nnx_state_of_a_module_with_equal_tables_is_taken():
    source, module = (make(((10, 4), (20, 4)), optimizer=Optim.ADAM, uniform=u) for u in ((0, 1), (1, 2)))
    train(source, IDS, OFFSETS)
    nnx.update(module, jax.tree.map(jnp.copy, nnx.state(source)))
    np.testing.assert_array_equal(module(IDS, OFFSETS), source(IDS, OFFSETS))


def test_the_state_dict_of_another_optimizer_is_refused_by_name_although_names_and_shapes_agree():
    adam, lamb = (make(((10, 4),), optimizer=optimizer) for optimizer in (Optim.ADAM, Optim.LAMB))
    saved = adam.state_dict()
    assert saved.keys() == lamb.state_dict().keys()
    with pytest.raises(ValueError, match=r'optimizer is "ADAM", expected "LAMB".*leave out .contents.'):
        lamb.load_state_dict(saved)
    lamb.load_state_dict({name: value for name, value in saved.items() if name != "contents"})
    np.testing.assert_array_equal(tables_of(lamb)[0][0], tables_of(adam)[0][0])


def test_a_checkpoint_of_an_nnx_state_without_its_rows_on_the_host_is_refused(tmp_path):
    whole, cached = make(((10, 4), (20, 4))), make(((10, 4), (20, 4)), location=CACHED)
    checkpoint.save(tmp_path / "whole", {"model": nnx.state(whole)})
    with pytest.raises(
        ValueError, match=r"not whole: rows of tables \['table_0', 'table_1'\] are on the host.*state_dict"
    ):
        checkpoint.save(tmp_path / "cached", {"model": nnx.state(cached)})
    checkpoint.save(tmp_path / "cached", cached.state_dict())
    module = make(((10, 4), (20, 4)), location=CACHED, uniform=(2.0, 3.0))
    module.load_state_dict(checkpoint.load(tmp_path / "cached").tree)
    for found, wanted in zip(tables_of(module)[0], tables_of(cached)[0], strict=True):
        np.testing.assert_array_equal(found, wanted)
