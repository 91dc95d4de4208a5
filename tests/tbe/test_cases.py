"""The worked cases of the table-batched module, through its public interface."""

import inspect
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import tbe as rt

CASES = json.loads((Path(__file__).parent.parent / "data" / "tbe_cases.json").read_text())["cases"]
# Fields of records take members alone; arguments of the module take their names, too.
ENUMS = {
    "counter_weight_decay_mode": rt.CounterWeightDecayMode,
    "learning_rate_mode": rt.LearningRateMode,
}
RECORDS = {
    "counter_based_regularization": rt.CounterBasedRegularizationDefinition,
    "cowclip_regularization": rt.CowClipDefinition,
    "emainplace_mode": rt.EmainplaceModeDefinition,
    "tail_id_threshold": rt.TailIdThreshold,
}
ARGUMENTS = set(inspect.signature(rt.TableBatchedEmbeddingBags.__init__).parameters)
# Some cases give arguments that their optimizer does not read: a warning, which is tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:.*no effect")


def cases(*apis: str) -> list[Any]:
    return [
        pytest.param(c, id=c["name"])
        for c in CASES
        if any(c["api"].startswith(api) for api in apis)
    ]


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Constructor arguments with enum members and records for names and objects."""
    found = {}
    for name, value in given.items():
        if name in RECORDS:
            value = RECORDS[name](**arguments(value))
        found[name] = ENUMS[name][value] if name in ENUMS else value
    return found


def module_of(inputs: dict[str, Any]) -> rt.TableBatchedEmbeddingBags:
    given = {name: inputs[name] for name in ARGUMENTS & set(inputs)} | inputs.get("kwargs", {})
    specs = [(*spec, rt.EmbeddingLocation.DEVICE, rt.ComputeDevice.CPU) for spec in inputs["specs"]]
    module = rt.TableBatchedEmbeddingBags(specs, **arguments(given))
    weights = {
        f"table_{t}.weight": np.asarray(w, np.float32) for t, w in enumerate(inputs["weights"])
    }
    module.load_state_dict(module.state_dict() | weights)
    return module


def batch_of(inputs: dict[str, Any]) -> list[Any]:
    weights = inputs.get("per_sample_weights")
    given = [np.asarray(inputs["indices"]), np.asarray(inputs["offsets"])]
    return [*given, None if weights is None else np.asarray(weights, np.float32)]


def assert_close(found: Any, expected: Any, tolerance: dict[str, float]) -> None:
    assert_allclose(np.asarray(found, np.float64), expected, **tolerance)


def assert_tables(module: Any, expected: dict[str, Any], tolerance: dict[str, float]) -> None:
    for found, wanted in zip(module.split_embedding_weights(), expected["weights"], strict=True):
        assert_close(found, wanted, tolerance)
    states = expected.get("split_optimizer_states", [])
    for own, wanted in zip(module.split_optimizer_states()[: len(states)], states, strict=True):
        for one, other in zip(own, wanted, strict=True):
            assert_close(one, other, tolerance)


@pytest.mark.parametrize(
    "case", [c for c in cases("forward") if "backward" not in c.values[0]["api"]]
)
def test_forward(case):
    found = module_of(case["inputs"])(*batch_of(case["inputs"]))
    assert_close(found, case["expected"]["output"], case["tolerance"])


@pytest.mark.parametrize("case", cases("forward+backward"))
def test_training(case):
    inputs, expected, tolerance = case["inputs"], case["expected"], case["tolerance"]
    if expected.get("raises"):
        with pytest.raises(ValueError, match="counter_halflife"):
            module_of(inputs)
        return
    module, outputs = (
        module_of(inputs),
        expected.get("outputs", [expected[k] for k in ("output",) if k in expected]),
    )
    for number, step in enumerate(inputs.get("steps", [inputs])):
        out, backward = module.vjp(
            *batch_of(step), total_unique_indices=step.get("total_unique_indices")
        )
        if outputs:
            assert_close(out, outputs[number], tolerance)
        returned = backward(np.asarray(step["grad_output"], np.float32))
    if "unique_linear_rows" in expected:
        (rows,), (values,) = returned.rows.values(), returned.values.values()
        count = len(expected["unique_linear_rows"])
        assert rows[:count].tolist() == expected["unique_linear_rows"]
        assert_close(values[:count], expected["unique_grads"], tolerance)
        assert (np.asarray(rows[count:]) == 2**31 - 1).all()
        return
    if "per_sample_weights_grad" in expected:
        assert_close(returned, expected["per_sample_weights_grad"], tolerance)
    assert_tables(module, expected, tolerance)


@pytest.mark.parametrize("case", cases("set_learning_rate"))
def test_the_learning_rate_is_the_one_that_the_lookup_saw(case):
    inputs, expected = case["inputs"], case["expected"]
    module = module_of(inputs)
    for number in (1, 2):
        _, backward = module.vjp(*batch_of(inputs))
        module.set_learning_rate(1.0)
        backward(np.asarray(inputs["grad_output"], np.float32))
        assert_tables(
            module, {"weights": expected[f"weights_after_step{number}"]}, case["tolerance"]
        )


@pytest.mark.parametrize("case", cases("set_optimizer_step"))
def test_the_step_can_be_set_at_any_time_and_only_updates_move_it(case):
    inputs, expected = case["inputs"], case["expected"]
    module = module_of(inputs)
    for operation, step in zip(inputs["script"], expected["step_after"], strict=True):
        if operation.startswith("set_optimizer_step"):
            module.set_optimizer_step(int(operation.split("(")[1][:-1]))
        elif operation == "eval forward":
            module.eval()
            module(*batch_of(inputs))
        else:
            _, backward = module.vjp(*batch_of(inputs))
            if operation == "forward+backward":
                backward(np.asarray(inputs["grad_output"], np.float32))
        assert int(module.step) == step, operation
    (states,) = module.split_optimizer_states()
    assert states[1].dtype == jnp.int32
    assert states[1].tolist() == expected["prev_iter_after_second_update"]


@pytest.mark.parametrize("case", cases("bounds check"))
def test_bounds_checks(case):
    inputs, expected, tolerance = case["inputs"], case["expected"], case["tolerance"]
    module = module_of(inputs)
    if "calls" in inputs:
        for name, call in inputs["calls"].items():
            if expected["raises"][name]:
                with pytest.raises(ValueError, match=r"id|offset"):
                    module(*batch_of(call))
            else:
                assert_close(module(*batch_of(call)), expected["output"][name], tolerance)
        return
    ids, offsets = np.asarray(inputs["indices"]), np.asarray(inputs["offsets"])
    before = ids.copy(), offsets.copy()
    with pytest.warns(UserWarning, match="corrected"):
        found = module(ids, offsets)
    assert_close(found, expected["output"], tolerance)
    assert int(module.bounds_check_warning.get_value()) == expected["bounds_check_warning"]
    assert_array_equal(ids, before[0])
    assert_array_equal(offsets, before[1])


@pytest.mark.parametrize("case", cases("split_optimizer_states"))
def test_states_have_the_names_and_shapes_of_torch(case):
    spec = (
        case["inputs"]["E"],
        case["inputs"]["D"],
        rt.EmbeddingLocation.DEVICE,
        rt.ComputeDevice.CPU,
    )
    for optimizer, expected in case["expected"]["states"].items():
        module = rt.TableBatchedEmbeddingBags([spec], optimizer=optimizer)
        (states,) = module.get_optimizer_state()
        states.pop("iter", None)  # the number of steps, which is no array of rows
        assert [[name, list(state.shape)] for name, state in states.items()] == expected
        dtypes = {"prev_iter": np.int32}
        assert all(state.dtype == dtypes.get(name, np.float32) for name, state in states.items())
        assert [list(state.shape) for state in module.split_optimizer_states()[0]] == [
            shape for _, shape in expected
        ]
