"""Worked cases of the table-batched module, in its public interface."""

import inspect
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import tbe as rt
from tests.tbe.oracle import make

CASES = json.loads((Path(__file__).parents[1] / "data" / "tbe_cases.json").read_text())["cases"]
# Fields of records must be enum members. Arguments of the module can also be names of members.
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


def cases(api):
    chosen = [case for case in CASES if case["api"].split()[0] == api]
    return pytest.mark.parametrize("case", chosen, ids=[case["name"] for case in chosen])


def arguments(by_name):
    """Constructor arguments, with enum members and records instead of names and dictionaries."""
    made = {}
    for name, value in by_name.items():
        if name in RECORDS:
            value = RECORDS[name](**arguments(value))
        if name in ENUMS:
            value = ENUMS[name][value]
        made[name] = value
    return made


def module_of(inputs):
    """The module of a case, made as in FBGEMM's programs for GPUs."""
    by_name = {name: inputs[name] for name in ARGUMENTS & set(inputs)}
    module = rt.SplitTableBatchedEmbeddingBagsCodegen(
        [(*spec, rt.EmbeddingLocation.MANAGED, rt.ComputeDevice.CUDA) for spec in inputs["specs"]],
        **arguments(by_name | inputs.get("kwargs", {})),
    )
    for table, weights in enumerate(inputs["weights"]):
        module.set_embedding_weights(table, np.float32(weights))
    return module


def batch_of(inputs):
    weights = inputs.get("per_sample_weights")
    if weights is not None:
        weights = np.float32(weights)
    return [np.asarray(inputs["indices"]), np.asarray(inputs["offsets"]), weights]


def assert_close(actual, expected, tolerance):
    assert_allclose(np.asarray(actual, np.float64), expected, **tolerance)


def assert_tables(module, expected, tolerance):
    for weights, wanted in zip(module.split_embedding_weights(), expected["weights"], strict=True):
        assert_close(weights, wanted, tolerance)
    if "split_optimizer_states" in expected:
        of_tables = expected["split_optimizer_states"]
        for states, wanted_states in zip(module.split_optimizer_states(), of_tables, strict=True):
            for state, wanted in zip(states, wanted_states, strict=True):
                assert_close(state, wanted, tolerance)


@cases("forward")
def test_forward(case):
    output = module_of(case["inputs"])(*batch_of(case["inputs"]))
    assert_close(output, case["expected"]["output"], case["tolerance"])


# Some cases have arguments that their optimizer ignores. Another test checks the warning.
@pytest.mark.filterwarnings("ignore:.*no effect")
@cases("forward+backward")
def test_training(case):
    inputs = case["inputs"]
    expected = case["expected"]
    tolerance = case["tolerance"]
    if expected.get("raises"):
        with pytest.raises(ValueError, match="counter_halflife"):
            module_of(inputs)
        return
    module = module_of(inputs)
    outputs = []
    for step in inputs.get("steps", [inputs]):
        output, backward = module.vjp(
            *batch_of(step), total_unique_indices=step.get("total_unique_indices")
        )
        outputs.append(output)
        returned = backward(np.float32(step["grad_output"]))
    if "output" in expected:
        assert_close(outputs[0], expected["output"], tolerance)
    if "outputs" in expected:
        assert_close(outputs, expected["outputs"], tolerance)
    if "unique_linear_rows" in expected:
        (rows,) = returned.rows.values()
        (values,) = returned.values.values()
        count = len(expected["unique_linear_rows"])
        assert rows[:count].tolist() == expected["unique_linear_rows"]
        assert_close(values[:count], expected["unique_grads"], tolerance)
        assert (np.asarray(rows[count:]) == 2**31 - 1).all()
        return
    if "per_sample_weights_grad" in expected:
        assert_close(returned, expected["per_sample_weights_grad"], tolerance)
    assert_tables(module, expected, tolerance)


@cases("set_learning_rate")
def test_the_learning_rate_is_the_one_that_the_lookup_saw(case):
    inputs = case["inputs"]
    module = module_of(inputs)
    for number in (1, 2):
        _, backward = module.vjp(*batch_of(inputs))
        module.set_learning_rate(1.0)
        backward(np.float32(inputs["grad_output"]))
        weights = case["expected"][f"weights_after_step{number}"]
        assert_tables(module, {"weights": weights}, case["tolerance"])


@cases("set_optimizer_step")
def test_the_step_can_be_set_at_any_time_and_only_updates_move_it(case):
    inputs = case["inputs"]
    expected = case["expected"]
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
                backward(np.float32(inputs["grad_output"]))
        assert int(module.step) == step, operation
    (states,) = module.split_optimizer_states()
    assert states[1].dtype == jnp.int32
    assert states[1].tolist() == expected["prev_iter_after_second_update"]


@cases("bounds")
def test_bounds_checks(case):
    inputs = case["inputs"]
    expected = case["expected"]
    tolerance = case["tolerance"]
    module = module_of(inputs)
    for name, call in inputs.get("calls", {}).items():
        if expected["raises"][name]:
            with pytest.raises(ValueError, match=r"id|offset"):
                module(*batch_of(call))
        else:
            assert_close(module(*batch_of(call)), expected["output"][name], tolerance)
    if "calls" not in inputs:
        batch = batch_of(inputs)
        with pytest.warns(UserWarning, match="corrected"):
            output = module(*batch)
        assert_close(output, expected["output"], tolerance)
        assert int(module.bounds_check_warning.get_value()) == expected["bounds_check_warning"]
        assert_array_equal(batch[0], inputs["indices"])
        assert_array_equal(batch[1], inputs["offsets"])


@cases("split_optimizer_states")
def test_states_have_the_names_and_shapes_of_torch(case):
    shape = (case["inputs"]["E"], case["inputs"]["D"])
    for optimizer, expected in case["expected"]["states"].items():
        # Default arguments must not warn.
        module = make((shape,), optimizer=optimizer)
        (states,) = module.get_optimizer_state()
        assert [[name, list(state.shape)] for name, state in states.items()] == expected
        assert all(state.dtype == np.float32 for state in states.values())
        assert len(module.split_optimizer_states()[0]) == len(expected)
