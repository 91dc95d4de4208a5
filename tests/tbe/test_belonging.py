"""States, state dicts and row gradients know which module they belong to; what is refused leaves all as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

from rsembed import checkpoint, tbe as rt
from tests.tbe.oracle import IDS, OFFSETS, make, tables_of, train
from tests.world import assert_same, mesh_of

Optim, CACHED = rt.OptimType, rt.EmbeddingLocation.MANAGED_CACHING
DEVICE, SPECS = rt.EmbeddingLocation.DEVICE, ((10, 4), (20, 4))


@pytest.mark.parametrize("location", [DEVICE, CACHED])
@pytest.mark.parametrize("rule", [Optim.EXACT_SGD, Optim.NONE])
def test_row_gradients_reach_the_rows_of_their_group_also_from_a_module_with_another_rule(
    rule, location
):
    names, dims = ("b", "a", "c", "d"), (2, 3, 2, 3)
    specs, common = (
        tuple((10, dim) for dim in dims),
        {"location": location, "table_names": names, "uniform": None},
    )
    source, module = make(specs, optimizer=rule, **common), make(specs, learning_rate=1.0, **common)
    output, backward = source.vjp(np.arange(len(names)), np.arange(len(names) + 1))
    module.apply(backward.row_gradients(np.ones_like(output)))
    for table, weights in enumerate(tables_of(module)[0]):
        wanted = np.zeros((10, dims[table]))
        wanted[table] = -1.0
        assert_array_equal(weights, wanted)


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
    "new weights": lambda module: module.set_embedding_weights(0, np.zeros(SPECS[0])),
    "rate": lambda module: module.get_learning_rate(),
    "new rate": lambda module: module.set_learning_rate(0.5),
}


@pytest.mark.slow_rows("dim", "rows")
@pytest.mark.parametrize("fact", OTHERS)
def test_states_and_row_gradients_of_another_module_are_refused_by_name(fact):
    arguments = {"specs": SPECS, "optimizer": Optim.ADAM}
    other, module = make(**{**arguments, **OTHERS[fact]}), make(**arguments)
    output, backward = other.vjp(IDS, OFFSETS)
    if fact not in ("optimizer", "dtype"):  # rows and dims are the same
        with pytest.raises(
            ValueError,
            match=rf"row gradients belong to another collection or module: .*{fact}.*Apply",
        ):
            module.apply(backward.row_gradients(jnp.ones_like(output)))
    nnx.update(module, jax.tree.map(jnp.copy, nnx.state(other)))
    for run in ENTRIES.values():
        with pytest.raises(
            ValueError, match=f"the state does not belong to this module: .*{fact}.*state_dict"
        ):
            run(module)


def test_the_nnx_state_of_a_module_with_equal_tables_is_taken():
    source, module = (make(SPECS, optimizer=Optim.ADAM, uniform=u) for u in ((0, 1), (1, 2)))
    train(source, IDS, OFFSETS)
    nnx.update(module, jax.tree.map(jnp.copy, nnx.state(source)))
    assert_array_equal(module(IDS, OFFSETS), source(IDS, OFFSETS))


def test_the_state_dict_of_another_optimizer_is_refused_by_name_although_names_and_shapes_agree():
    adam, lamb = (make(((10, 4),), optimizer=optimizer) for optimizer in (Optim.ADAM, Optim.LAMB))
    saved = adam.state_dict()
    assert saved.keys() == lamb.state_dict().keys()
    with pytest.raises(
        ValueError, match=r'optimizer is "ADAM", expected "LAMB".*leave out .contents.'
    ):
        lamb.load_state_dict(saved)
    lamb.load_state_dict({name: value for name, value in saved.items() if name != "contents"})
    assert_array_equal(tables_of(lamb)[0][0], tables_of(adam)[0][0])


def test_a_checkpoint_of_an_nnx_state_without_its_rows_on_the_host_is_refused(tmp_path):
    whole, cached = make(SPECS), make(SPECS, location=CACHED)
    checkpoint.save(tmp_path / "whole", {"model": nnx.state(whole)})
    with pytest.raises(
        ValueError,
        match=r"not whole: rows of tables \['table_0', 'table_1'\] are on the host.*state_dict",
    ):
        checkpoint.save(tmp_path / "cached", {"model": nnx.state(cached)})
    checkpoint.save(tmp_path / "cached", cached.state_dict())
    module = make(SPECS, location=CACHED, uniform=(2.0, 3.0))
    module.load_state_dict(checkpoint.load(tmp_path / "cached").tree)
    assert_same(tables_of(module)[0], tables_of(cached)[0])


# What a refused call leaves behind, and a copy that trains


layouts = pytest.mark.parametrize("num_devices", [None, 2], ids=["one device", "mesh"])


def module_of(num_devices=None, **options):
    return make(SPECS, **options, **({} if num_devices is None else {"mesh": mesh_of(num_devices)}))


@layouts
def test_a_module_whose_arrays_a_copy_trains_says_so(num_devices):
    module = module_of(num_devices)
    output, backward = module.vjp(IDS, OFFSETS)
    gradient = jnp.ones(output.shape)
    gradients = module.vjp(IDS, OFFSETS)[1].row_gradients(gradient)
    copy = nnx.clone(module)
    train(copy, IDS, OFFSETS)
    saved = copy.state_dict()
    own = [functools.partial(run, module) for name, run in ENTRIES.items() if name != "compiled"]
    others = [
        lambda: backward(gradient),
        lambda: module.apply(gradients),
        lambda: module.load_state_dict(saved),
    ]
    for call in own + others:
        with pytest.raises(RuntimeError, match="perhaps because of a copy that shared them"):
            call()


WRONG_NUMBERS = [
    ("learning_rate", [0.1, 0.2], "share an array and so one learning rate"),
    ("learning_rate", [0.1, 0.2, 0.3], r"'learning_rate' has shape \(3,\)"),
    ("step", np.ones(2, np.int32), "'step' must be an integer"),
    ("step", 1.5, "'step' must be an integer"),
    ("step", -5, "'step'"),
    ("step", 2**31, "'step'"),
    ("max_counter", np.ones(3), "'max_counter' must be a number"),
    ("key", np.zeros(3, np.uint32), "'key' must be integers of shape"),
]


@layouts
def test_a_state_dict_with_one_wrong_number_changes_nothing(num_devices):
    module, other = module_of(num_devices), module_of(num_devices)
    train(module, IDS, OFFSETS)
    before, saved = module.state_dict(), other.state_dict()
    for name, value, error in WRONG_NUMBERS:
        with pytest.raises((TypeError, ValueError), match=error):
            module.load_state_dict({**saved, name: np.asarray(value)})
        assert_same(module.state_dict(), before)
