"""Defects of the published system, and tests that show that this package does not have them.

* int64 ids are misread as pairs of int32, or wrapped: `bad_calls/sparsecore` (accepted: all forms
  of the same ids)
* ids outside the table and other batch sizes are accepted: `bad_calls/sparsecore` (an id outside, a
  batch of another size)
* an unknown combiner has the effect of sum: `test_specs` (unknown combiner 'max')
* weights with sum 0 give NaN: `test_preprocessing::test_cancelling_weights_give_zero_gains`
* a layer does not pass the step to Adam: `test_cases` (published loss), `test_flax_layers`,
  `test_surface`
* tables of the same shape start equal; padding is random: `test_variables`
* new limits do not reach a compiled step: `test_new_limits_are_traced_once_each` here
* the hash of static specs ignores their limits: `test_specs_as_static_arguments_follow_new_limits`
  here
* ids that do not fit the buffer are dropped silently: `test_random_models` (counts),
  `test_drops_are_told_once...` here
* limits of stacked tables are ignored silently:
  `test_surface::test_a_stack_of_several_tables_has...`
* suggested buffer sizes are lost in stacking: `test_suggested_buffer_sizes_survive_stacking` here
* a saved LaProp is restored as SGD, and a saved quantization is lost: `test_layout_record`
* different optimizers may compare equal: `optimizers/test_rules` (specs compare by class and value)
* AdagradMomentum is wrong with minibatches:
  `test_minibatching::test_the_step_is_bit_by_bit_that_of_the_whole_batch`
* predicted shapes ignore the leading dimension:
  `test_minibatching::test_shapes_are_known_in_advance`
* the process aborts for limits, 3-D input, lists, uneven batches, large buffers:
  `bad_calls/sparsecore`, `test_cases`
* lookup and update need a TPU; constructors of layers fail: all tests of this folder run on a CPU
* shard counts must be powers of two; a single core is refused: `test_cases`, `test_random_models`
* sparse tensors have no weights: `test_random_models` (bags), `test_sparse_input_may_have_weights`
  here
* all tables are float32: `test_embedding`,
  `test_surface::test_activations_have_the_dtype_of_the_table`
* the statistics example of the documentation is wrong: `test_cases` (`pre_stats_docstring_example`)
* initializers without arguments fail without a reason: `bad_calls/sparsecore` (an initializer
  without arguments)
* limits change up and down with every batch: `fdo/test_statistics::test_few_limits_occur...`
* statistics files grow and are never removed: `fdo/test_clients` (running maximum, earlier run)
* unit tests of convergence assert nothing: `test_tutorial`, `test_cases` (published loss)
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed import Bags
from rsembed.sparsecore import embedding, partitioner, table_stacking
from tests.sparsecore import minibatch_program as program
from tests.sparsecore.small_world import feature_specs, place, preprocess


def spec_for(name="words", batch=8, **fields):
    return feature_specs({name: 32}, {f"of_{name}": (name, batch)}, **fields)[f"of_{name}"]


def prepared(*features):
    place(features)
    return features[0] if len(features) == 1 else features


def test_new_limits_are_traced_once_each():
    spec = prepared(spec_for())
    table, traced = {"words": embedding.EmbeddingVariables(jnp.ones((32, 8)), ())}, []

    @jax.jit
    def look_up(processed, variables):
        traced.extend(max_ids for _, max_ids, _ in processed.limits)
        return embedding.sparse_dense_matmul(processed, variables, spec, global_device_count=1)

    ids = np.arange(16).reshape(8, 2)
    for max_ids in (20, 20, 24, 20, 24):
        # Buffers for 20 and for 24 ids have the same size, so only the limit differs.
        statistics = embedding.SparseDenseMatmulInputStats(
            max_ids_per_partition={"words": [max_ids]}
        )
        embedding.update_preprocessing_parameters(spec, statistics, 1)
        processed, _ = preprocess(spec, ids)
        assert processed.lhs_gains["words"].size == 24
        np.testing.assert_array_equal(look_up(processed, table), np.full((8, 8), 2.0))
    assert traced == [20, 24]


def test_specs_as_static_arguments_follow_new_limits():
    """JAX can reuse a traced program for a static argument that was changed in place.

    So the preprocessed input must make JAX trace again.
    """
    spec, traced = prepared(spec_for()), []

    @jax.jit(static_argnums=0)
    def limit(spec, processed):
        traced.append(spec.table_spec.stacked_table_spec.max_ids_per_partition)
        return jnp.float32(traced[-1])

    def run(spec):
        return limit(spec, preprocess(spec, [[3]] * 8)[0])

    assert spec == prepared(spec_for()) and hash(spec) == hash(prepared(spec_for()))
    assert run(spec) == run(prepared(spec_for())) == 256
    statistics = embedding.SparseDenseMatmulInputStats(max_ids_per_partition={"words": [9]})
    embedding.update_preprocessing_parameters(spec, statistics, 1)
    assert spec != prepared(spec_for())
    assert run(spec) == 9
    assert traced == [256, 9]


def test_drops_are_told_once_with_table_limit_and_number(caplog, monkeypatch):
    monkeypatch.setattr(partitioner, "_warned", set())
    fields = {
        "max_ids_per_partition": 1,
        "max_unique_ids_per_partition": 1,
        "suggested_coo_buffer_size_per_device": 4,
    }
    specs = [spec_for("left", **fields), spec_for("right", **fields)]
    limits = {
        "stack_to_max_ids_per_partition": lambda *_: 12,
        "stack_to_max_unique_ids_per_partition": lambda *_: 10,
    }
    place(specs, rotation=0, **limits)
    # The entries are sorted by table: 8 distinct rows of "left", and then of "right" row 0 four
    # times and rows 1 to 4.
    left, right = np.arange(8)[:, None], np.asarray([0, 0, 0, 0, 1, 2, 3, 4])[:, None]
    for _ in range(2):
        _, statistics = preprocess(specs, [left, right], allow_id_dropping=True)
    assert statistics.id_drop_counters == {"left_right": 4 + 4}
    assert statistics.id_drops_by_table == {"left": (0, 0, 0), "right": (4, 0, 4)}
    assert [message.split(";")[0] for message in caplog.messages] == [
        f"rsembed.sparsecore: table 'right' in stack 'left_right': 4 ids were dropped in one batch by {limit}"
        for limit in ("max_ids_per_partition=12", "suggested_coo_buffer_size_per_device=8")
    ]
    monkeypatch.setattr(partitioner, "_warned", set())
    spec = prepared(spec_for(max_unique_ids_per_partition=5))
    _, statistics = preprocess(
        spec, np.repeat(np.arange(8), 2).reshape(8, 2), allow_id_dropping=True
    )
    assert statistics.id_drops_by_table == {"words": (0, 6, 0)}
    assert (
        "6 ids were dropped in one batch by max_unique_ids_per_partition=5" in caplog.messages[-1]
    )


@pytest.mark.parametrize("is_auto", [False, True])
def test_suggested_buffer_sizes_survive_stacking(is_auto):
    def stacked_size(*sizes):
        specs = [
            spec_for(f"t{k}", suggested_coo_buffer_size_per_device=size)
            for k, size in enumerate(sizes)
        ]
        if is_auto:
            table_stacking.auto_stack_tables(specs, 1, 1)
        else:
            table_stacking.stack_tables(specs, [spec.table_spec.name for spec in specs], 1, 1)
        (size,) = embedding.compute_coo_buffer_size_per_device(specs, 1, 1).values()
        return size

    assert stacked_size(40) == 40
    assert stacked_size(40, 60) == 104
    assert stacked_size(40, None) == 256
    # The sizes of two tables are added, but the stack has one limit. The sum is cut to the size
    # that the limit allows, without a warning.
    assert stacked_size(200, 200) == 256


def test_sparse_input_may_have_weights():
    indices = [[5, 1], [0, 0], [0, 3]]
    bags = Bags.from_sparse_tensor(indices, [4, 2, 4], (8, 4), [2.0, 1.0, 3.0])
    assert bags.ids.tolist() == [2, 4, 4] and bags.weights.tolist() == [1.0, 3.0, 2.0]


def test_no_drop_goes_uncounted_with_minibatches_in_a_small_buffer():
    specs = program.specs_for(1, max_ids_per_partition=2, suggested_coo_buffer_size_per_device=64)
    # No sample has an id twice.
    ids = np.arange(32 * 6).reshape(32, 6) * 5 % 64
    processed, statistics = preprocess(
        specs, {"history": ids}, enable_minibatching=True, allow_id_dropping=True
    )
    lost = statistics.id_drops_by_table["words"]
    assert lost.ids > 0 and lost.buffer > 0 and lost.unique_ids == 0
    assert np.isfinite(processed.lhs_gains["words"]).sum() + sum(lost) == ids.size
    assert statistics.id_drop_counters == {"words": sum(lost)}
