"""Table-batched kernels: every implementation against loops over bags in numpy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.kernels import gpu, native, reference, sparsecore
from rsembed.kernels.contract import Block, JaggedBatch, JaggedGradients, Step
from tests.kernels.cases import RULES, STEP, assert_close, needs_native, step_by_loops

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
IMPLEMENTATIONS = [reference, pytest.param(native, marks=needs_native), gpu]
TABLE_ROWS, TABLE_DIMS, TABLE_DTYPES = (9, 14), (5, 8), ("float32", "bfloat16")
# Two tables share the first array; the third feature reads the second one.
FEATURES = [(0, 0, 4), (0, 4, 5), (1, 3, 11), (0, 0, 4)]
NUM_BAGS, NUM_IDS = 3, 40


def draw_tables(seed: int) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = zip(TABLE_ROWS, TABLE_DIMS, TABLE_DTYPES, strict=True)
    return [jax.device_put(rng.standard_normal((rows, dim)).astype(jnp.dtype(dtype))) for rows, dim, dtype in shapes]


def draw_batch(seed: int, combiner: str, layout: str = "columns", *, weighted: bool, wild: bool = True) -> JaggedBatch:
    """Ids may be padding or outside; some stand in front of the first bag and behind the last."""
    rng = np.random.default_rng(seed)
    bags = [NUM_BAGS] * 4 if layout == "columns" else [3, 0, 4, 1]
    ends = np.sort(rng.integers(2, NUM_IDS - 2, sum(bags)))
    offsets = np.concatenate([[2], ends]).astype(np.int32)
    first = np.concatenate([[0], np.cumsum(bags)])
    features = FEATURES if combiner != "none" else [f for f in FEATURES if f[0] == 0]
    if combiner == "none":
        offsets = offsets[: NUM_BAGS * len(features) + 1]
    blocks = [Block(int(first[i]), bags[i], *feature) for i, feature in enumerate(features)]
    if layout == "blocks":  # the output has another order than the ids
        blocks = [blocks[i] for i in (2, 0, 3, 1)]
    ids = rng.integers(-2 if wild else 0, 13 if wild else 4, NUM_IDS)
    weights = rng.standard_normal(NUM_IDS).astype(np.float32) if weighted else None
    arrays = jax.device_put((ids.astype(np.int32), offsets, weights))
    return JaggedBatch(*arrays, combiner, tuple(blocks), layout)


@dataclasses.dataclass
class Oracle:
    """Forward and backward of a batch, entry by entry in float64."""

    output: np.ndarray
    weight_gradients: np.ndarray
    gradients: list[dict[int, np.ndarray]]


def oracle(tables: list[Any], batch: JaggedBatch, d_output: np.ndarray) -> Oracle:
    tables = [np.asarray(table, np.float64) for table in tables]
    size, places = batch.output_places([table.shape[1] for table in tables])
    ids, offsets = np.asarray(batch.ids), np.asarray(batch.offsets)
    weights = np.ones(ids.size) if batch.weights is None else np.asarray(batch.weights, np.float64)
    result = Oracle(np.zeros(size), np.zeros(ids.size), [{} for _ in tables])
    for block, (start, stride) in zip(batch.blocks, places, strict=True):
        table = tables[block.table]
        for bag in range(block.num_bags):
            entries = range(offsets[block.first_bag + bag], offsets[block.first_bag + bag + 1])
            valid = [e for e in entries if 0 <= ids[e] < block.num_rows]
            for e in valid:
                at = start + stride * (e if batch.combiner == "none" else bag)
                share = 1 / len(valid) if batch.combiner == "mean" else 1.0
                row = block.first_row + int(ids[e])
                d_vector = d_output[at : at + table.shape[1]]
                result.output[at : at + table.shape[1]] += share * weights[e] * table[row]
                result.weight_gradients[e] = share * d_vector @ table[row]
                gradients = result.gradients[block.table]
                gradients[row] = gradients.get(row, 0) + share * weights[e] * d_vector
    return result


CASES = [
    ("sum", "columns", False),
    ("sum", "blocks", True),
    ("mean", "columns", True),
    ("mean", "blocks", False),
    ("none", "columns", True),
]


@functools.partial(jax.jit, static_argnums=0)
def every_call(implementation, tables, batch, d_output):
    """Output, gradients of weights, and gradients of the rows of every table."""
    dims = [table.shape[1] for table in tables]
    row_gradients = [
        implementation.row_gradients(table.shape[0], JaggedGradients(batch, d_output, number, dims))
        for number, table in enumerate(tables)
    ]
    return (
        implementation.lookup_jagged(tables, batch),
        (native if implementation is native else reference).weight_gradients(tables, batch, d_output),
        row_gradients,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda module: module.NAME)
@pytest.mark.parametrize(("combiner", "layout", "weighted"), CASES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_lookup_and_gradients_are_those_of_a_loop_over_entries(implementation, combiner, layout, weighted, seed):
    tables, batch = draw_tables(seed), draw_batch(seed, combiner, layout, weighted=weighted)
    if combiner == "none":
        tables = tables[:1]
    dims = [table.shape[1] for table in tables]
    size = batch.output_places(dims)[0]
    d_output = np.random.default_rng(seed + 1).standard_normal(size).astype(np.float32)
    expected = oracle(tables, batch, d_output)
    output, weight_gradients, row_gradients = every_call(implementation, tables, batch, d_output)
    np.testing.assert_allclose(output, expected.output, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(weight_gradients, expected.weight_gradients, rtol=2e-5, atol=2e-5)
    for wanted, arrays in zip(expected.gradients, row_gradients, strict=False):
        found_rows, found = map(np.asarray, arrays)
        rows = sorted(wanted)
        assert found_rows[: len(rows)].tolist() == rows
        assert (found_rows[len(rows) :] == 2**31 - 1).all()
        for position, row in enumerate(rows):
            np.testing.assert_allclose(found[position], wanted[row], rtol=2e-5, atol=2e-5)
        assert not found[len(rows) :].any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda module: module.NAME)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"])
def test_update_steps_each_touched_row_once_with_its_summed_gradient(implementation, name):
    rule, tables, batch = RULES[name], draw_tables(3), draw_batch(3, "mean", weighted=True)
    dims, step = [table.shape[1] for table in tables], Step(rule.get_hyperparameters(STEP), rule)
    d_output = np.random.default_rng(4).standard_normal(batch.output_places(dims)[0]).astype(np.float32)
    slots = [rule.init_slots(jnp.asarray(table, jnp.float32)) for table in tables]

    @jax.jit
    def updates(d_output):
        gradients = [JaggedGradients(batch, d_output, number, dims) for number in range(len(tables))]
        return [implementation.update(*each, step) for each in zip(tables, slots, gradients, strict=True)]

    summed = oracle(tables, batch, d_output).gradients
    for table, own, (new_table, new_slots), by_row in zip(tables, slots, updates(d_output), summed, strict=True):
        wanted, wanted_slots = step_by_loops(name, table, own, by_row)
        assert_close(new_table, wanted, table.dtype)
        for found, slot in zip(new_slots, wanted_slots, strict=True):
            assert_close(found, slot)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda module: module.NAME)
def test_no_ids_and_empty_tables_give_zeros(implementation):
    ids, offsets, table = jax.device_put((np.zeros(0, np.int32), np.zeros(3, np.int32), np.ones((0, 3), np.float32)))
    batch = JaggedBatch(ids, offsets, None, "mean", (Block(0, 2, 0, 0, 0),))
    output, _, [(rows, gradients)] = every_call(implementation, [table], batch, np.ones(6, np.float32))
    np.testing.assert_array_equal(output, np.zeros(6))
    assert rows.shape == (0,)
    assert gradients.shape == (0, 3)


def test_tiles_look_up_jagged_batches_by_the_lookup_that_is_simulated():
    assert sparsecore.lookup_jagged.keywords == sparsecore.row_gradients.keywords == {"lookup": sparsecore.lookup}
