"""What a call that is refused leaves behind, and a copy that trains: nothing is lost, and nothing ends the process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from rsembed import tbe as rt
from tests.tbe.oracle import make, train

Optim = rt.OptimType
SPECS = ((50, 4), (30, 4))
IDS, OFFSETS = np.asarray([0, 1, 2, 3]), np.arange(5)
MODES = {
    Optim.ENSEMBLE_ROWWISE_ADAGRAD: {
        "ensemble_mode": rt.EnsembleModeDefinition(step_ema=1, step_swap=1, step_start=0, step_ema_coef=0.6)
    },
    Optim.EMAINPLACE_ROWWISE_ADAGRAD: {
        "emainplace_mode": rt.EmainplaceModeDefinition(step_ema=1, step_start=0, step_ema_coef=0.6)
    },
}
layouts = pytest.mark.parametrize("num_devices", [None, 2], ids=["one device", "mesh"])


def module_of(num_devices=None, specs=SPECS, **options):
    if num_devices is not None:
        options["mesh"] = Mesh(np.asarray(jax.devices()[:num_devices]), ("x",))
    return make(specs, **options)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@layouts
def test_a_module_whose_arrays_a_copy_trains_says_so(num_devices):
    module = module_of(num_devices)
    output, backward = module.vjp(IDS, OFFSETS)
    gradient = jnp.ones(output.shape)
    gradients = module.vjp(IDS, OFFSETS)[1].row_gradients(gradient)
    copy = nnx.clone(module)
    train(copy, IDS, OFFSETS)
    saved = copy.state_dict()
    for call in (
        lambda: module(IDS, OFFSETS),
        lambda: module.vjp(IDS, OFFSETS),
        lambda: backward(gradient),
        lambda: module.apply(gradients),
        module.get_learning_rate,
        module.state_dict,
        module.split_embedding_weights,
        lambda: module.set_embedding_weights(0, np.zeros(SPECS[0])),
        lambda: module.set_learning_rate(0.5),
        lambda: module.load_state_dict(saved),
    ):
        with pytest.raises(RuntimeError, match="has lost its tables, perhaps by way of a copy"):
            call()


@layouts
@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("learning_rate", [0.1, 0.2], "share an array and so one learning rate"),
        ("learning_rate", [0.1, 0.2, 0.3], r"'learning_rate' has shape \(3,\)"),
        ("step", np.ones(2, np.int32), "'step' must be an integer"),
        ("step", 1.5, "'step' must be an integer"),
        ("step", -5, "'step'"),
        ("step", 2**31, "'step'"),
        ("max_counter", np.ones(3), "'max_counter' must be a number"),
        ("key", np.zeros(3, np.uint32), "'key' must be integers of shape"),
    ],
)
def test_a_state_dict_with_one_wrong_number_changes_nothing(num_devices, name, value, error):
    module, other = module_of(num_devices), module_of(num_devices)
    train(module, IDS, OFFSETS)
    before = module.state_dict()
    with pytest.raises((TypeError, ValueError), match=error):
        module.load_state_dict({**other.state_dict(), name: np.asarray(value)})
    assert_same(module.state_dict(), before)


@layouts
@pytest.mark.parametrize("optimizer", list(MODES), ids=lambda own: own.name)
@pytest.mark.parametrize("between", ["a refused batch", "a lookup"])
def test_a_pass_over_whole_tables_runs_once_a_step_whatever_comes_between(num_devices, optimizer, between):
    options = {"optimizer": optimizer, "bounds_check_mode": "FATAL", **MODES[optimizer]}

    def trained(*, disturbs, saves):
        module = module_of(num_devices, **options)
        for number in range(3):
            if disturbs and between == "a refused batch":
                before = module.state_dict()
                with pytest.raises(ValueError, match="99"):
                    module.vjp(np.asarray([0, 99, 2, 3]), OFFSETS)
                assert_same(module.state_dict(), before)
            elif disturbs:
                module.vjp(IDS, OFFSETS)
            if saves and number == 1:
                saved = module.state_dict()
                train(module, IDS, OFFSETS)
                module.load_state_dict(saved)  # which goes back
            train(module, IDS, OFFSETS)
        return module.state_dict()

    expected = trained(disturbs=False, saves=False)
    for saves in (False, True):
        assert_same(trained(disturbs=True, saves=saves), expected)
