"""All cases of `tests/data/sparsecore_cases.json`, which were observed in the published system."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from rsembed import datasets
from rsembed.fdo import NPZFileFDOClient, SparseDenseMatmulInputStats
from rsembed.sparsecore import (
    embedding,
    embedding_pipelining_utils as pipelining,
    embedding_spec,
    table_stacking,
    utils,
)
from rsembed.sparsecore.partitioner import PADDING_VALUE, split_nodes
from rsembed.stacking import split_by_memory, stack_name_of
from tests.sparsecore import small_world
from tests.sparsecore.case_specs import (
    CASES,
    assert_matches,
    declared_specs,
    on_devices,
    optimizer_of,
    placed_specs,
    preprocess,
    stack_as_told,
    table_values,
    tree_like,
    variables_of,
)
from tests.sparsecore.tutorial_program import final_loss, make_batch
from tests.world import assert_same

LAYOUT_CASES = [
    "stack_auto_two_tables",
    "stack_auto_dict_features_sorted_by_key",
    "stack_tables_manual",
]


def cases_of(prefix, *others):
    return sorted(name for name in CASES if name.startswith(prefix) and name not in others)


PREPROCESSING_CASES = cases_of("pre_", "pre_errors", "pre_sparse_tensor")
FORWARD_CASES = cases_of("fwd_")
UPDATE_CASES = cases_of("grad_sgd_")
RULE_CASES = cases_of("opt_", "opt_custom", "opt_hyperparameters", "opt_learning_rate_callables")


def case(name):
    case = CASES[name]
    return case["inputs"], case["expected"], case["tolerance"]


def test_every_case_is_run():
    alone = re.findall(r'case\("(\w+)"\)', Path(__file__).read_text())
    run = [*LAYOUT_CASES, *PREPROCESSING_CASES, *FORWARD_CASES, *UPDATE_CASES, *RULE_CASES, *alone]
    assert sorted(run) == sorted(CASES)


@pytest.mark.parametrize("name", LAYOUT_CASES)
def test_stacking_lays_tables_and_features_out_as_published(name):
    inputs, expected, _ = case(name)
    specs = placed_specs(inputs["spec"])
    features = {feature.name: feature for feature in jax.tree.leaves(specs)}
    for feature, fields in expected["features"].items():
        assert vars(features[feature].id_transformation) == fields
    for table, fields in expected["tables"].items():
        assert vars(embedding.get_table_specs(specs)[table].setting_in_stack) == fields
    for stack, fields in expected["stacks"].items():
        placed = embedding.get_stacked_table_specs(specs)[stack]
        assert {field: getattr(placed, field) for field in fields} == fields


def test_groups_are_split_first_fit():
    inputs, expected, _ = case("stack_split_groups_first_fit")
    assert [
        split_by_memory(call["groups"], call["bytes"], call["limit"]) for call in inputs["calls"]
    ] == expected


def test_long_stack_names_are_cut_and_hashed():
    inputs, expected, _ = case("stack_short_name")
    assert stack_name_of(inputs["table_names"]) == expected["short"]
    assert stack_name_of(inputs["table_names"], use_short_stack_names=False) == expected["long"]
    assert stack_name_of(["a", "b"]) == expected["under_50"]


@pytest.mark.parametrize(
    "label", [label for label, _ in CASES["stack_errors"]["inputs"]["stackings"]]
)
def test_impossible_stacks_are_refused(label):
    inputs, expected, _ = case("stack_errors")
    assert dict(expected)[label] == "ValueError"
    spec = inputs["spec"]
    with pytest.raises(ValueError, match="stack"):
        stack_as_told(
            declared_specs(spec), dict(inputs["stackings"])[label], spec["devices"], spec["cores"]
        )


def published_buffers(partitions, shape):
    """Ids, samples and gains of a case's partitions, in buffers of this shape with padded gaps."""
    ids = np.full(shape, PADDING_VALUE)
    samples = np.full(shape, PADDING_VALUE)
    gains = np.full(shape, np.nan)
    for partition in partitions:
        end = partition["start"] + len(partition["ids"])
        filled = partition["device"], partition["sc"], slice(partition["start"], end)
        ids[filled] = partition["ids"]
        samples[filled] = partition["samples"]
        gains[filled] = partition["gains"]
    return ids, samples, gains


def assert_buffers(processed, statistics, spec, expected, tolerance):
    shape = (spec["devices"], spec["cores"], -1)
    for stack, wanted in expected["stacks"].items():
        pointers, *buffers = (field[stack] for field in processed.sparse_dense_matmul_input)
        assert pointers.tolist() == wanted["row_pointers"]
        assert buffers[0].size == wanted["buffer_len"]
        ids, samples, gains = (buffer.reshape(shape) for buffer in buffers)
        published = published_buffers(wanted["partitions"], ids.shape)
        assert_same((ids, samples), published[:2])
        assert_matches(gains, published[2], tolerance)
    for field, by_stack in expected["stats"].items():
        assert_same(getattr(statistics, field), by_stack)
    assert processed.num_minibatches.tolist() == expected["num_minibatches"]


@pytest.mark.parametrize("name", PREPROCESSING_CASES)
def test_preprocessing_fills_the_published_buffers(name):
    inputs, expected, tolerance = case(name)
    specs = placed_specs(inputs["spec"])
    processed, statistics = preprocess(inputs, specs, allow_id_dropping=inputs["allow_id_dropping"])
    assert_buffers(processed, statistics, inputs["spec"], expected, tolerance)


def test_sparse_tensors_fill_the_same_buffers_as_ragged_rows():
    inputs, expected, tolerance = case("pre_sparse_tensor")
    spec = inputs["spec"]
    specs = placed_specs(spec)
    trees = (
        tree_like(specs, inputs[key], np.asarray) for key in ("indices", "values", "dense_shape")
    )
    processed, statistics = embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
        *trees, specs, 1, 1, num_sc_per_device=spec["cores"]
    )
    assert_buffers(processed, statistics, spec, expected, tolerance)
    assert processed.num_minibatches.dtype == np.int32


def test_calls_that_crash_the_published_system_are_tried_elsewhere():
    """`test_mesh_lookup` trains on six shards. `bad_calls/sparsecore.py` has the other calls."""
    assert case("pre_errors")[0]["calls"] == [
        "shards_not_a_power_of_two",
        "limit_exceeded",
        "three_dimensions",
        "tree_mismatch",
    ]


def test_minibatches_are_cut_as_published():
    inputs, expected, _ = case("minibatch_split_bits")
    for call, wanted in zip(inputs["calls"], expected, strict=True):
        nodes = split_nodes(np.asarray(call["counts"]), call["limit"])
        # The case shows the bits as a binary number, with the root first.
        assert "".join(str(int(node)) for node in reversed(nodes)) == wanted


def test_buffer_sizes():
    inputs, expected, _ = case("buffer_sizes")
    for call, size in zip(inputs["calls"], expected, strict=True):
        devices, cores, minibatching = call["global_devices"], call["sc"], call["minibatching"]
        if call["fn"] == "row_pointers_size_per_device":
            got = embedding.compute_row_pointers_size_per_device(
                global_device_count=devices,
                num_sc_per_device=cores,
                enable_minibatching=minibatching,
            )
        else:
            got = embedding.compute_theoretical_max_coo_buffer_size(
                call["max_ids"], devices, cores, minibatching
            )
        assert got == size


@pytest.mark.parametrize("name", FORWARD_CASES)
def test_lookup_combines_rows_as_published(name):
    inputs, expected, tolerance = case(name)
    spec = inputs["spec"]
    specs = placed_specs(spec)
    processed, _ = preprocess(inputs, specs)
    variables = variables_of(specs, table_values(spec, inputs.get("table")))

    def look_up(processed, variables):
        activations = functools.partial(
            embedding.tpu_sparse_dense_matmul,
            processed,
            variables,
            specs,
            global_device_count=spec["devices"],
        )
        return activations(), activations(perform_unstacking=False)

    activations, stacked = on_devices(look_up, spec["devices"])(processed, variables)
    for feature, got in zip(specs, activations, strict=True):
        assert_matches(got, expected["activations"][feature.name], tolerance)
    for stack, rows in expected.get("raw_stacked", {}).items():
        assert_matches(stacked[stack], rows, tolerance)


@pytest.mark.parametrize("name", UPDATE_CASES)
def test_update_steps_every_touched_row_once(name):
    inputs, expected, tolerance = case(name)
    spec = inputs["spec"]
    specs = placed_specs(spec)
    processed, _ = preprocess(inputs, specs)
    before = table_values(spec)
    limits = inputs["embedding_var_limits"]

    limits = None if limits is None else {"t": tuple(limits)}

    update = functools.partial(
        embedding.tpu_sparse_dense_matmul_grad,
        feature_specs=specs,
        step=inputs["step"],
        embedding_var_limits=limits,
    )
    gradients = tree_like(
        specs, inputs["activation_grads"], lambda rows: jnp.asarray(rows, jnp.float32)
    )
    arguments = (processed, variables_of(specs, before))
    updated = jax.jit(update)(gradients, *arguments)
    stacked = embedding.stack_embedding_gradients(gradients, specs, spec["cores"])
    update_stacked = jax.jit(functools.partial(update, perform_stacking=False))
    assert_same(update_stacked(stacked, *arguments), updated)
    after = jax.tree.map(np.asarray, small_world.logical_tables(updated, specs))
    for table, rows in expected["updated_rows"].items():
        touched = sorted(map(int, rows))
        assert_matches(
            after[table][touched], [rows[str(row)]["table"] for row in touched], tolerance
        )
        untouched = np.setdiff1d(np.arange(len(after[table])), touched)
        assert_array_equal(after[table][untouched], before[table][untouched])


def test_gradients_are_stacked_as_published():
    inputs, expected, tolerance = case("grad_stack_layout")
    specs = placed_specs(inputs["spec"])
    gradients = tree_like(specs, inputs["grads"], lambda rows: jnp.asarray(rows, jnp.float32))
    stacked = embedding.stack_embedding_gradients(gradients, specs, inputs["spec"]["cores"])
    assert_matches(stacked["t"], expected["t"], tolerance)
    back = embedding.unstack_embedding_activations(stacked, specs, 1, inputs["spec"]["cores"])
    assert_same(back, gradients)


@pytest.mark.parametrize("name", RULE_CASES)
def test_row_rules_step_as_published(name):
    inputs, expected, tolerance = case(name)
    optimizer = optimizer_of(inputs["optimizer"])
    hyper = optimizer.get_hyperparameters(inputs["step"])
    row, *slots = (
        jnp.asarray([values], jnp.float32) for values in (inputs["table"], *inputs["slots"])
    )
    row, slots = optimizer.step_rows(
        row, tuple(slots), jnp.asarray([inputs["grad"]], jnp.float32), hyper
    )
    assert_matches(hyper, expected["hyperparameters"], tolerance)
    assert_matches(row[0], expected["table"], tolerance)
    for got, wanted in zip(slots, expected["slots"], strict=True):
        assert_matches(got[0], wanted, tolerance)


def test_hyperparameters_follow_the_step():
    inputs, expected, tolerance = case("opt_hyperparameters")
    for call, wanted in zip(inputs["calls"], expected, strict=True):
        call = dict(call)
        step = call.pop("step")
        assert_matches(optimizer_of(call).get_hyperparameters(step), wanted, tolerance)


def test_learning_rates_may_be_callables():
    inputs, expected, tolerance = case("opt_learning_rate_callables")
    calls = {
        "number": (0.3, None),
        "callable_of_nothing": (lambda: 0.3, None),
        "callable_of_step_5": (lambda step: 0.3 * step, 5),
        "callable_of_step_without_step": (lambda step: 0.3 * step, None),
        "callable_of_two": (lambda step, other: 0.3, 5),
    }
    for name, wanted in zip(inputs["calls"], expected, strict=True):
        learning_rate, step = calls[name]
        if wanted == "ValueError":
            with pytest.raises(ValueError, match="learning"):
                embedding_spec.SGDOptimizerSpec(learning_rate).get_learning_rate(step)
        else:
            assert_matches(
                embedding_spec.SGDOptimizerSpec(learning_rate).get_learning_rate(step),
                wanted,
                tolerance,
            )


def test_custom_rules_are_ordinary_functions():
    inputs, expected, tolerance = case("opt_custom")

    def adagrad(gradient, row, accumulator, learning_rate):
        accumulator = accumulator + gradient * gradient
        return row - learning_rate * gradient / jnp.sqrt(accumulator), accumulator

    optimizer = embedding_spec.CustomOptimizerSpec(
        inputs["learning_rate"], adagrad, tuple(inputs["slot_init"])
    )
    row, accumulator, gradient = (
        jnp.asarray([inputs[key]], jnp.float32) for key in ("table", "accum", "grad")
    )
    row, slots = optimizer.step_rows(row, (accumulator,), gradient, optimizer.get_hyperparameters())
    assert_matches(row[0], expected["table"], tolerance)
    assert_matches(slots[0][0], expected["slots"][0], tolerance)


def test_one_table_is_dealt_to_devices():
    inputs, expected, _ = case("shard_emb_table")
    table = np.arange(inputs["vocab"], dtype=np.float32)[:, None]
    sharded = utils.shard_emb_table(table, inputs["devices"], inputs["sc_per_device"])
    assert sharded[..., 0].tolist() == expected["sharded_row_ids"]
    assert_array_equal(utils.unshard_emb_table(sharded, inputs["sc_per_device"]), table)


def test_tables_are_stacked_and_sharded_and_back():
    inputs, expected, tolerance = case("stack_and_shard_tables")
    spec = inputs["spec"]
    specs = placed_specs(spec)
    tables, table_specs = table_values(spec), embedding.get_table_specs(specs)
    (stacked,) = table_stacking.stack_and_shard_tables(table_specs, tables, 4).values()
    assert list(stacked.shape) == expected["shape"]
    assert_matches(stacked[:, :, 0], expected["first_column_per_shard"], tolerance)
    assert_matches(stacked[0, 0], expected["row0_of_shard0"], tolerance)
    back = table_stacking.unshard_and_unstack_tables(table_specs, {"ta_tb": stacked}, 4)
    assert_same(back, tables)


def test_initial_variables_have_the_published_shapes():
    inputs, expected, tolerance = case("init_embedding_variables")
    tables = {}
    for name, rows, dim, optimizer in inputs["tables"]:
        tables[name] = {
            "vocabulary_size": rows,
            "embedding_dim": dim,
            "optimizer": optimizer_of({"type": optimizer}),
        }
    specs = small_world.feature_specs(tables, {f"of_{name}": (name, 8) for name in tables})
    stack_as_told(specs, inputs["stack"], inputs["devices"], inputs["sc_per_device"])
    variables = small_world.init(specs, cores=inputs["sc_per_device"])
    assert list(variables) == expected["keys"]
    (stack,) = variables.values()
    assert list(stack.table.shape) == expected["table_shape"]
    assert [list(slot.shape) for slot in stack.slot] == expected["slot_shapes"]
    for slot, fill in zip(stack.slot, expected["slot_fill"], strict=True):
        assert_matches(slot, np.full(slot.shape, fill), tolerance)


def test_statistics_survive_a_file(tmp_path):
    inputs, expected, _ = case("fdo_npz")
    client = NPZFileFDOClient(str(tmp_path))
    for record in inputs["records"]:
        fields = (record["max_ids"], record["max_unique"], record["required"], record["dropped"])
        client.record(
            SparseDenseMatmulInputStats(*({inputs["table"]: values} for values in fields))
        )
    client.publish()
    (path,) = tmp_path.iterdir()
    assert path.match("fdo_stats_0_*.npz")
    with np.load(path) as arrays:
        assert {key: arrays[key].tolist() for key in arrays.files} == expected["arrays"]
    loaded = client.load()
    assert loaded.max_ids_per_partition[inputs["table"]].tolist() == expected["loaded_max_ids"]
    assert (
        loaded.required_buffer_size_per_sc[inputs["table"]].tolist() == expected["loaded_required"]
    )


def test_statistics_set_the_limits():
    inputs, expected, _ = case("fdo_update_parameters")
    specs = placed_specs(inputs["spec"])
    num_cores = 2
    for update, wanted in zip(inputs["updates"], expected["after_each"], strict=True):
        num_cores = update.get("num_sc", num_cores)
        fields = (
            {"t": update[key]} if update else {}
            for key in ("max_ids", "max_unique", "required_per_sc")
        )
        embedding.update_preprocessing_parameters(
            specs, SparseDenseMatmulInputStats(*fields), num_cores
        )
        stack = embedding.get_stacked_table_specs(specs)["t"]
        assert stack.max_ids_per_partition == wanted["max_ids"]
        assert stack.max_unique_ids_per_partition == wanted["max_unique"]
        assert stack.suggested_coo_buffer_size_per_device == wanted["suggested"]


def test_pipelined_training_follows_the_published_schedule():
    inputs, expected, tolerance = case("pipeline_schedule")
    stages = (
        lambda x, v: (v * x, None),
        lambda act, y, state, aux: (act - y, (act, act - y), state + 1, None),
        lambda x, g, v, aux: (v - 0.5 * g * x, None),
    )
    num_steps, drain = inputs["num_steps"], inputs["drain_inputs"]
    assert pipelining.get_pipeline_train_steps(num_steps) == expected["total_cycles"]
    drained = [drain, drain]
    batches = [
        pipelining.CurrentStepInput(jnp.float32(value), jnp.float32(target))
        for value, target in zip(
            inputs["inputs"] + drained, inputs["targets"] + drained, strict=True
        )
    ]
    count, variable = jnp.int32(0), jnp.float32(inputs["initial_variable"])
    state = pipelining.get_initial_state(batches[0], count, variable, *stages[:2])
    for wanted, batch in zip(expected["trace"], batches, strict=True):
        is_valid = pipelining.is_output_valid(wanted["cycle"], num_steps)
        output, _, count, variable, state = pipelining.step(
            batch, count, variable, state, *stages, fake_tc_step=not is_valid
        )
        assert (is_valid, int(count)) == (wanted["output_valid"], wanted["tc_steps"])
        assert_matches(variable, wanted["variable"], tolerance)
        if is_valid:
            assert_matches(output, wanted["output"], tolerance)


def test_optimizers_are_recorded_with_the_published_codes():
    inputs, expected, tolerance = case("proto_optimizer_roundtrip")
    for fields, wanted in zip(inputs["optimizers"], expected, strict=True):
        optimizer = optimizer_of(fields)
        record = embedding.optimizer_spec_to_proto(optimizer)
        assert embedding.proto_to_optimizer_spec(record) == optimizer
        # The published record has no code for LaProp, and gives SGD back.
        if fields["type"] == "laprop":
            continue
        assert (record.type, record.short_name) == (wanted["type_enum"], wanted["back"])
        assert record.bool_params == wanted["bool_params"]
        assert set(record.float_params) == set(wanted["float_params"])
        for name, value in wanted["float_params"].items():
            assert_matches(record.float_params[name], value, tolerance)


def test_first_guesses_of_limits():
    inputs, expected, _ = case("estimate_parameters")
    assert [utils.estimate_preprocessing_parameters(**call) for call in inputs["calls"]] == expected


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 0])
def test_the_published_text_reaches_the_published_loss(step):
    inputs, expected, _ = case("shakespeare_dataset")
    word_ids = np.asarray(inputs["word_ids"], np.int32)
    assert (len(word_ids), len(set(word_ids.tolist()))) == (
        expected["num_words"],
        expected["distinct_words"],
    )
    assert word_ids[:20].tolist() == expected["first_20_ids"]
    features, labels = datasets.word_id_batches(word_ids, 1, inputs["batch"], inputs["seq_len"], 1)
    assert list(features["words_0"][0].shape) == expected["features_shape"]
    assert labels[0][:8].tolist() == expected["labels_first_8"]
    batch = make_batch(word_ids)
    assert_array_equal(batch[0], features["words_0"][0][..., 0])
    loss = final_loss(batch, num_steps=inputs["steps"], step=step)
    low, high = expected["loss_with_true_step" if step is None else "loss_with_frozen_step"]
    # The range is from eight seeds. For twelve other seeds, the losses of the same model with a
    # plain table are between 0.77 of the lower end and 1.07 of the upper end.
    assert 0.7 * low <= loss <= 1.1 * high
