"""States and row gradients are refused by other modules, and refused calls change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_array_equal

from rsembed import checkpoint, tbe as rt
from tests.tbe.oracle import CACHED, CALLS, IDS, OFFSETS, make, tables_of, train
from tests.world import assert_same, mesh_of

SPECS = ((10, 4), (20, 4))


def test_row_gradients_reach_the_rows_of_their_group_also_from_a_module_with_another_rule():
    specs = ((10, 2), (10, 3), (10, 2), (10, 3))
    options = {"location": CACHED, "table_names": ("b", "a", "c", "d"), "uniform": None}
    source = make(specs, optimizer="NONE", **options)
    module = make(specs, learning_rate=1.0, **options)
    output, backward = source.vjp(np.arange(4), np.arange(5))
    module.apply(backward.row_gradients(np.ones_like(output)))
    for table, weights in enumerate(module.split_embedding_weights()):
        expected = np.zeros(specs[table])
        expected[table] = -1.0
        assert_array_equal(weights, expected)


OTHERS = {
    "rows": {"specs": ((20, 4), (10, 4))},
    "dim": {"specs": ((10, 8), (20, 8))},
    "tables": {"table_names": ["x", "table_1"]},
    "group": {"learning_rate": [0.1, 0.2]},
    "optimizer": {"optimizer": "LAMB"},
    "dtype": {"weights_precision": rt.SparseType.FP16},
    "num_devices": {"mesh": mesh_of(2)},
}
CALLS_OF_TABLES = CALLS | {
    "new weights": lambda module, *_: module.set_embedding_weights(0, np.zeros(SPECS[0])),
    "rate": lambda module, *_: module.get_learning_rate(),
    "new rate": lambda module, *_: module.set_learning_rate(0.5),
}


@pytest.mark.slow_rows("dim", "rows")
@pytest.mark.parametrize("fact", OTHERS)
def test_states_and_row_gradients_of_another_module_are_refused_by_name(fact):
    arguments = {"specs": SPECS, "optimizer": "ADAM"}
    other = make(**arguments | OTHERS[fact])
    module = make(**arguments)
    output, backward = other.vjp(IDS, OFFSETS)
    # Modules with another optimizer or dtype have the same rows and columns.
    if fact not in ("optimizer", "dtype"):
        words = f"row gradients belong to another collection or module: .*{fact}.*Apply"
        with pytest.raises(ValueError, match=words):
            module.apply(backward.row_gradients(jnp.ones_like(output)))
    nnx.update(module, jax.tree.map(jnp.copy, nnx.state(other)))
    words = f"the state does not belong to this module: .*{fact}.*state_dict"
    for call in (*CALLS_OF_TABLES.values(), nnx.jit(CALLS["lookup"])):
        with pytest.raises(ValueError, match=words):
            call(module, IDS, OFFSETS)
    equal = make(**arguments)
    train(equal, IDS, OFFSETS)
    nnx.update(module, jax.tree.map(jnp.copy, nnx.state(equal)))
    assert_array_equal(module(IDS, OFFSETS), equal(IDS, OFFSETS))


def test_the_state_dict_of_another_optimizer_is_refused_by_name_although_names_and_shapes_agree():
    adam = make(SPECS, optimizer="ADAM", uniform=(0, 1))
    lamb = make(SPECS, optimizer="LAMB")
    saved = adam.state_dict()
    assert saved.keys() == lamb.state_dict().keys()
    words = r'optimizer is "ADAM", expected "LAMB".*leave out .contents.'
    with pytest.raises(ValueError, match=words):
        lamb.load_state_dict(saved)
    del saved["contents"]
    lamb.load_state_dict(saved)
    assert_same(tables_of(lamb), tables_of(adam))


def test_a_checkpoint_of_an_nnx_state_without_its_rows_on_the_host_is_refused(tmp_path):
    cached = make(SPECS, location=CACHED)
    checkpoint.save(tmp_path / "whole", {"model": nnx.state(make(SPECS))})
    words = r"not whole: rows of tables \['table_0', 'table_1'\] are on the host.*state_dict"
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path / "cached", {"model": nnx.state(cached)})
    checkpoint.save(tmp_path / "cached", cached.state_dict())
    module = make(SPECS, location=CACHED, uniform=(2.0, 3.0))
    module.load_state_dict(checkpoint.load(tmp_path / "cached").tree)
    assert_same(tables_of(module), tables_of(cached))


# State after refused calls, and copies that train


layouts = pytest.mark.parametrize("mesh", [None, mesh_of(2)], ids=["one device", "mesh"])


@layouts
def test_a_module_whose_arrays_a_copy_trains_says_so(mesh):
    module = make(SPECS, mesh=mesh)
    output, backward = module.vjp(IDS, OFFSETS)
    gradient = jnp.ones(output.shape)
    gradients = module.vjp(IDS, OFFSETS)[1].row_gradients(gradient)
    copy = nnx.clone(module)
    train(copy, IDS, OFFSETS)
    saved = copy.state_dict()
    others = [
        lambda *_: backward(gradient),
        lambda *_: module.apply(gradients),
        lambda *_: module.load_state_dict(saved),
    ]
    for call in (*CALLS_OF_TABLES.values(), *others):
        with pytest.raises(RuntimeError, match="perhaps because of a copy that shared them"):
            call(module, IDS, OFFSETS)


WRONG_NUMBERS = [
    ("learning_rate", [0.1, 0.2], "share an array and so one learning rate"),
    ("learning_rate", [0.1, 0.2, 0.3], "learning_rate has 3 entries for 2 tables"),
    ("step", np.ones(2, np.int32), "'step' must be an integer"),
    ("step", 1.5, "'step' must be an integer"),
    ("step", -5, "'step'"),
    ("step", 2**31, "'step'"),
    ("max_counter", np.ones(3), "'max_counter' must be a number"),
    ("key", np.zeros(3, np.uint32), "'key' must be integers of shape"),
]


@layouts
def test_a_state_dict_with_one_wrong_number_changes_nothing(mesh):
    module = make(SPECS, mesh=mesh)
    saved = module.state_dict()
    train(module, IDS, OFFSETS)
    before = module.state_dict()
    for name, value, error in WRONG_NUMBERS:
        with pytest.raises((TypeError, ValueError), match=error):
            module.load_state_dict(saved | {name: np.asarray(value)})
        assert_same(module.state_dict(), before)
