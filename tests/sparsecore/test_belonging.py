"""Specs, batches and variables of different layouts are refused if they do not fit together."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import from_optax
from rsembed.fdo import limits_from_statistics
from rsembed.sparsecore import (
    embedding,
    embedding_pipelining_utils,
    embedding_spec,
    table_stacking,
)
from tests.sparsecore import small_world
from tests.sparsecore.small_world import init
from tests.world import mesh_of

ROWS, DIM, BATCH = 64, 8, 32
IDS = np.arange(BATCH * 2).reshape(BATCH, 2) % ROWS


def specs_of(*features, **fields):
    """Feature specs of new tables with 64 rows. `features` are tuples `(name, table, batch)`."""
    tables = {table: ROWS for _, table, _ in features}
    readers = {name: (table, batch) for name, table, batch in features}
    specs = small_world.feature_specs(tables, readers, max_ids_per_partition=64, **fields)
    return list(specs.values())


def placed(devices, cores, *features, rotation=None, **fields):
    return small_world.place(
        specs_of(*(features or (("f", "t", BATCH),)), **fields), devices, cores, rotation
    )


def preprocess(specs, ids=None, **options):
    ids = [IDS[: spec.num_samples] for spec in specs] if ids is None else ids
    return small_world.preprocess(specs, ids, **options)[0]


def look_up(specs, inputs, variables, cores=None):
    def on_device(*arguments):
        return embedding.sparse_dense_matmul(
            *arguments, specs, global_device_count=1, num_sc_per_device=cores
        )

    return jax.jit(on_device)(inputs, variables)


def step(specs, inputs, variables):
    def stepped(inputs, variables):
        gradients = [jnp.ones(spec.output_shape) for spec in specs]
        return embedding.sparse_dense_matmul_grad(
            gradients, inputs, variables, specs, global_device_count=1, step=0
        )

    return jax.jit(stepped)(inputs, variables)


def rows_by_number(key, shape):
    return jnp.broadcast_to(jnp.arange(shape[0], dtype=jnp.float32)[:, None], shape)


def test_whoever_names_no_number_of_cores_gets_the_placed_one():
    """The specs have 2 cores, and the default on a CPU is 4 cores. `test_surface` tests layers."""
    specs = placed(1, 2, initializer=rows_by_number)
    variables = init(specs)
    wanted = np.broadcast_to(IDS.sum(axis=1)[:, None], (BATCH, DIM))
    assert_array_equal(look_up(specs, preprocess(specs), variables)[0], wanted)
    assert_array_equal(small_world.logical_tables(variables, specs)["t"][:, 0], np.arange(ROWS))
    forward = embedding_pipelining_utils.get_default_sc_fwd_function(specs, mesh_of(1))
    assert_array_equal(jax.jit(forward)(preprocess(specs), variables)[0][0], wanted)


def test_tables_placed_later_take_the_cores_of_those_placed_before():
    specs = specs_of(("f", "t", BATCH), ("g", "u", BATCH), ("h", "alone", BATCH))
    table_stacking.stack_tables(specs, ["t", "u"], 1, 4)
    embedding.prepare_feature_specs_for_training(specs, 1)
    assert {stack.num_shards for stack in embedding.get_stacked_table_specs(specs).values()} == {4}


def test_limits_from_statistics_of_other_cores_are_told(caplog):
    """The published function accepts such statistics, so the library only logs a warning."""
    specs = placed(1, 4)
    statistics, others = (
        small_world.preprocess(some_specs, [IDS])[1] for some_specs in (specs, placed(1, 8))
    )
    stacks = list(embedding.get_stacked_table_specs(specs).values())
    limits_from_statistics(stacks, statistics, 4)
    assert not caplog.messages
    for seen, cores in ((statistics, 2), (statistics, 8), (others, 4)):
        caplog.clear()
        limits_from_statistics(stacks, seen, cores)
        assert (
            "stack 't' has 4 shards" in caplog.text and f"num_sc_per_device={cores}" in caplog.text
        )


TWO = (("f", "t", BATCH), ("g", "u", BATCH))


def in_another_order():
    """Specs of a stack with the tables in the opposite order, but with the usual stack name."""
    specs = specs_of(("f", "t", 8), ("g", "u", 16))
    table_stacking.stack_tables(specs, ["u", "t"], 1, 4, 0, stack_name="t_u")
    return specs


OTHER_LAYOUTS = {
    "rotation": lambda: placed(1, 4, ("f", "t", 8), ("g", "u", 16), rotation=1),
    "row_offset_in_shard": in_another_order,
    "samples": lambda: placed(1, 4, ("f", "t", 16), ("g", "u", 8), rotation=0),
}


# Another number of shards is not tested here, because it changes the row pointers.
@pytest.mark.parametrize("difference", OTHER_LAYOUTS)
def test_batches_of_another_layout_are_refused_though_shapes_agree(difference):
    specs = placed(1, 4, ("f", "t", 8), ("g", "u", 16), rotation=0)
    with pytest.raises(
        ValueError, match=f"the input was preprocessed for other specs: .*{difference}"
    ):
        look_up(specs, preprocess(OTHER_LAYOUTS[difference]()), init(specs))


OPTIMIZERS = {
    "named slots": (
        embedding_spec.AdamOptimizerSpec(),
        embedding_spec.AdagradMomentumOptimizerSpec(),
    ),
    "shapes": (embedding_spec.RowWiseAdagradOptimizerSpec(), embedding_spec.AdagradOptimizerSpec()),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_of_another_optimizer_are_looked_up_but_never_stepped(name):
    theirs, ours = (placed(1, 4, optimizer=optimizer) for optimizer in OPTIMIZERS[name])
    variables, inputs = init(theirs), preprocess(ours)
    assert look_up(ours, inputs, variables)[0].shape == (BATCH, DIM)
    with pytest.raises(
        ValueError, match=r"stack 't': its optimizer .* keeps slots .* but got .*Slot"
    ):
        step(ours, inputs, variables)


def test_the_same_rule_with_other_numbers_goes_on():
    theirs, ours = (placed(1, 4, optimizer=from_optax(optax.adam(rate))) for rate in (0.1, 0.2))
    assert step(ours, preprocess(ours), init(theirs)).keys() == {"t"}


def test_a_copied_feature_is_not_read_at_the_start_of_its_stack():
    specs = placed(1, 4, *TWO, rotation=1)
    first, second = specs
    # The copy would add both features, or alone read another table.
    for copied in ([first, dataclasses.replace(second)], [dataclasses.replace(second)]):
        for use in (
            preprocess,
            lambda specs: embedding.prepare_feature_specs_for_training(specs, 1, 4),
        ):
            with pytest.raises(
                ValueError, match=r"feature 'g' does not lie where stack 't_u' has room for it"
            ):
                use(copied)


def test_variables_serve_new_specs_with_another_batch_and_a_further_feature():
    training = placed(1, 4, *TWO, rotation=1, initializer=rows_by_number)
    serving = placed(
        1, 4, ("f", "t", 8), ("g", "u", 8), ("h", "u", 16), rotation=1, initializer=rows_by_number
    )
    variables = step(training, preprocess(training), init(training))
    ids = [IDS[:8], IDS[8:16] + 3, IDS[16:]]
    tables = small_world.logical_tables(variables, training)
    for got, name, rows in zip(
        look_up(serving, preprocess(serving, ids), variables), "tuu", ids, strict=True
    ):
        assert_allclose(got, np.asarray(tables[name])[rows].sum(axis=1), rtol=1e-6)


def test_limits_may_change_between_preprocessing_and_step():
    specs = placed(1, 4)
    variables, inputs, roomy = init(specs), preprocess(specs), preprocess(placed(1, 4))
    wanted = look_up(specs, roomy, variables)[0]
    for limit in (1, 512):
        statistics = embedding.SparseDenseMatmulInputStats(max_ids_per_partition={"t": [limit]})
        embedding.update_preprocessing_parameters(specs, statistics, 4)
        assert_array_equal(look_up(specs, inputs, variables)[0], wanted)


def test_variables_are_pairs_of_the_structure_that_they_were_given_in():
    specs = placed(1, 4)
    variables, inputs = init(specs), preprocess(specs)
    wanted = step(specs, inputs, variables)
    updated = step(specs, inputs, {"t": (variables["t"].table,)})
    assert isinstance(wanted["t"], embedding.EmbeddingVariables) and type(updated["t"]) is tuple
    assert_array_equal(updated["t"][0], wanted["t"].table)
    initializers = embedding_spec.AdagradOptimizerSpec().slot_variables_initializers()
    assert isinstance(initializers, embedding_spec.AdagradSlotVariables)
    ((path, _),) = jax.tree_util.tree_leaves_with_path(variables)
    assert jax.tree_util.keystr(path) == "['t'].table"
