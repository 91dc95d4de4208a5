"""Every optimizer step of `tests/data/tbe_cases.json`, most of them observed on the published module."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.tbe import full_table, records
from rsembed.tbe.records import CounterWeightDecayMode, LearningRateMode, TailIdThreshold, WeightDecayMode
from rsembed.tbe.records import EmbOptimType as Optim
from rsembed.tbe.rules import make_rule, state_names, torch_state_names
from tests.tbe.row_formulas import stepped

CASES = json.loads((Path(__file__).parents[1] / "data" / "tbe_cases.json").read_text())["cases"]
RECORDS = {
    "counter_based_regularization": records.CounterBasedRegularizationDefinition,
    "cowclip_regularization": records.CowClipDefinition,
    "emainplace_mode": records.EmainplaceModeDefinition,
    "tail_id_threshold": TailIdThreshold,
    "weight_decay_mode": WeightDecayMode,
    "counter_weight_decay_mode": CounterWeightDecayMode,
    "learning_rate_mode": LearningRateMode,
}


def declared(values):
    """The arguments of a case, with its nested objects as records and its names as enum members."""
    made = {}
    for name, value in values.items():
        kind = RECORDS.get(name)
        if isinstance(value, dict):
            value = kind(**declared(value))
        elif kind is not None:
            value = kind[value]
        made[name] = value
    return made


def case_rule(case):
    inputs = case["inputs"]
    arguments = declared(inputs.get("kwargs", {}))
    clamp = arguments.pop("max_gradient", np.inf) if arguments.pop("gradient_clipping", False) else np.inf
    rule = make_rule(Optim[inputs["optimizer"]], learning_rate=inputs["learning_rate"], **arguments)
    return rule, arguments, clamp


STEP_CASES = [case for case in CASES if case["api"].startswith("forward+backward x")]


@pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: case["name"])
def test_observed_steps_are_reproduced(case):
    inputs, expected = case["inputs"], case["expected"]
    if expected.get("raises"):
        with pytest.raises(ValueError, match="counter_halflife"):
            case_rule(case)
        return
    rule, arguments, clamp = case_rule(case)
    tables = [jnp.asarray(weights, jnp.float32) for weights in inputs["weights"]]
    slots = [rule.init_slots(table) for table in tables]
    close = functools.partial(np.testing.assert_allclose, **case["tolerance"])
    features = inputs.get("feature_table_map") or list(range(len(tables)))
    largest = 1.0
    for k, step in enumerate(inputs["steps"]):
        if "emainplace_mode" in arguments:
            tables = [full_table.emainplace_pass(table, k + 1, arguments["emainplace_mode"]) for table in tables]
        if "counter_based_regularization" in arguments:
            config = arguments["counter_based_regularization"]
            largest = full_table.refreshed_max_counter([s[2] for s in slots], k + 1, largest, config)
        output, gradients = bag_step(tables, features, step, inputs["pooling_mode"] == "MEAN", clamp)
        close(output, expected["outputs"][k])
        for t, found in enumerate(gradients):
            rows, values = sorted(found), np.array([found[row] for row in sorted(found)])
            tables[t], slots[t] = stepped(rule, tables[t], slots[t], rows, values, k, largest)
    for table, wanted in zip(tables, expected["weights"], strict=True):
        close(table, wanted)
    if "split_optimizer_states" in expected:
        mode = arguments.get("weight_decay_mode", WeightDecayMode.NONE)
        assert list(state_names(Optim[inputs["optimizer"]], mode)) == expected["state_names"]
        for states, wanted_states in zip(slots, expected["split_optimizer_states"], strict=True):
            for state, wanted in zip(states, wanted_states, strict=True):
                close(np.reshape(state, np.shape(wanted)), wanted)


def bag_step(tables, features, step, is_mean, clamp):
    """Pooled output, and `{row: gradient}` per table, id by id."""
    num_bags = (len(step["offsets"]) - 1) // len(features)
    d_output = np.clip(np.array(step["grad_output"], np.float64), -clamp, clamp)
    blocks, gradients, column = [], [{} for _ in tables], 0
    for f, t in enumerate(features):
        table = np.asarray(tables[t], np.float64)
        block = np.zeros((num_bags, table.shape[1]))
        for b in range(num_bags):
            first, last = step["offsets"][f * num_bags + b : f * num_bags + b + 2]
            gain = 1 / max(last - first, 1) if is_mean else 1
            for row in step["indices"][first:last]:
                block[b] += gain * table[row]
                part = gain * d_output[b, column : column + table.shape[1]]
                gradients[t][row] = gradients[t].get(row, 0) + part
        blocks.append(block)
        column += table.shape[1]
    return np.hstack(blocks), gradients


def test_states_have_the_published_names_and_shapes():
    (case,) = (case for case in CASES if case["name"] == "default_state_layout")
    table = jnp.zeros((case["inputs"]["E"], case["inputs"]["D"]))
    for name, states in case["expected"]["states"].items():
        names = torch_state_names(Optim[name])
        assert names == tuple(torch_name for torch_name, _ in states)
        slots = make_rule(Optim[name]).init_slots(table)
        shapes = [[len(slot)] if slot.shape[1] == 1 else list(slot.shape) for slot in slots]
        # The ensemble's slow copy is no slot: the row rule does not read it.
        assert shapes == [shape for torch_name, shape in states if torch_name != "sparse_ema"]
