"""The simulator finds mistakes that are planted in the source of the kernels."""

import contextlib
import functools
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import rsembed.optimizers as ro
from rsembed.kernels import sparsecore
from rsembed.kernels.devices import tracing_for
from rsembed.kernels.traced_rules import evaluate, trace_rule
from tests.kernels.simulator import KernelError, simulate

pytestmark = pytest.mark.filterwarnings("ignore:Destination semaphore is ignored")

SOURCE = Path(sparsecore.__file__).read_text().replace("MAX_CHUNK_ROWS = 64", "MAX_CHUNK_ROWS = 8")
# There are more chunks than the chip's 32 tiles, and tiles have different numbers of chunks. With
# one chunk for each tile, the test would not find a wrong stride.
NUM_ROWS, DIM, CHUNKS = 320, 16, 37
DRAWS = np.random.default_rng(0)
TABLE = DRAWS.standard_normal((NUM_ROWS, DIM)).astype(np.float32)
IDS = DRAWS.integers(0, NUM_ROWS, 8 * CHUNKS).astype(np.int32)
GAINS = DRAWS.choice([0.0, 0.5, 1.5], IDS.size).astype(np.float32)
BAGS = np.sort(DRAWS.integers(0, 8 * CHUNKS, IDS.size)).astype(np.int32)
VALUES = DRAWS.standard_normal((IDS.size, DIM)).astype(np.float32)
DISTINCT = DRAWS.permutation(NUM_ROWS)[: IDS.size].astype(np.int32)
DISTINCT[DRAWS.random(IDS.size) < 0.1] = -1


def gather_is_right(tiles):
    return np.array_equal(simulate(tiles.gather, TABLE, IDS), TABLE[IDS])


def pool_is_right(tiles):
    bounds = np.zeros((CHUNKS, 8), np.int32)
    for chunk in range(CHUNKS):
        entries = np.flatnonzero((chunk == BAGS // 8) & (GAINS != 0))
        if entries.size:
            bounds[chunk, :2] = entries[0] // 8, entries[-1] // 8 + 1
    pool = functools.partial(tiles.pool_on_tiles, num_bags=8 * CHUNKS)
    pooled = simulate(pool, TABLE, IDS, GAINS, BAGS, bounds.reshape(-1))
    want = np.zeros((8 * CHUNKS, DIM))
    np.add.at(want, BAGS, GAINS[:, None] * TABLE[IDS])
    return np.allclose(pooled, want, atol=1e-5)


def step_is_right(tiles):
    """Whether the kernel steps a rule with a slot of full rows and a slot with a number per row."""

    class Rule(ro.SGD):
        def step_rows(self, rows, slots, gradients, hyper):
            wide, narrow = slots
            wide = wide + gradients
            narrow = narrow + jnp.mean(gradients, axis=-1, keepdims=True)
            return rows - hyper[0] * wide / jnp.sqrt(1.0 + narrow * narrow), (wide, narrow)

    wide = TABLE + 1.0
    narrow = TABLE[:, :1]
    traced = trace_rule(Rule(0.25), jnp.asarray(TABLE), (jnp.asarray(wide), jnp.asarray(narrow)), 1)

    def step(table, wide, numbers, ids, gradients, hyper):
        state = [table, wide], [numbers]
        return tiles.step_rows(traced, DIM, *state, ids, gradients, hyper, [0, 1, 2])

    numbers = np.repeat(narrow[DISTINCT], 8, axis=1)
    rate = np.full(8, 0.25, np.float32)
    (new_table, new_wide), (new_numbers,) = simulate(
        step, TABLE, wide, numbers, DISTINCT, VALUES, rate
    )
    is_row = DISTINCT >= 0
    rows = DISTINCT[is_row]
    want_numbers = narrow[rows] + VALUES[is_row].mean(axis=1, keepdims=True)
    want_wide = wide.copy()
    want_wide[rows] += VALUES[is_row]
    want_table = TABLE.copy()
    want_table[rows] -= 0.25 * want_wide[rows] / np.sqrt(1 + want_numbers**2)
    return (
        np.allclose(new_table, want_table, atol=1e-5)
        and np.allclose(new_wide, want_wide, atol=1e-5)
        and np.allclose(np.asarray(new_numbers)[is_row, :1], want_numbers, atol=1e-5)
    )


CHECKS = {"gather": gather_is_right, "pool": pool_is_right, "step": step_is_right}
PLANTED = {
    "last chunk skipped": (
        "gather",
        "_deal(num_ids // chunk, work)",
        "_deal(num_ids // chunk - 1, work)",
    ),
    "written before read": (
        "gather",
        "pltpu.sync_copy(table_hbm.at[ids_v], rows_v)\n            pltpu.sync_copy(rows_v, out_hbm.at[_span(number, "
        "chunk)])",
        "pltpu.sync_copy(rows_v, out_hbm.at[_span(number, chunk)])\n            pltpu.sync_copy(table_hbm.at[ids_v], "
        "rows_v)",
    ),
    "ids not loaded": (
        "gather",
        "pltpu.sync_copy(ids_hbm.at[_span(number, chunk)], ids_v)\n",
        "\n",
    ),
    "output not cleared": ("pool", "out_v[bag, span] = jnp.zeros(lanes, jnp.float32)", "pass"),
    "entry off by one": ("pool", "gain * rows_v[entry, span]", "gain * rows_v[entry + 1, span]"),
    "stored instead of added": ("pool", "plsc.addupdate_scatter", "plsc.store_scatter"),
    "columns shifted": ("pool", "lax.iota(jnp.int32, lanes) + start", "lax.iota(jnp.int32, lanes)"),
    "no write-back": ("step", "pltpu.sync_copy(v, hbm.at[rows_of_chunk])", "pass"),
    "padding not ignored": ("step", ", ignored_value=NO_ID", ""),
    "gradient of another row": ("step", "gradients_v[row, span] for", "gradients_v[0, span] for"),
    "a copy that nobody waits for": (
        "step",
        "pltpu.sync_copy(gradients_hbm.at[span], gradients_v)",
        "pl.run_scoped(lambda s: pltpu.make_async_copy(gradients_hbm.at[span], gradients_v, s).start(), "
        "pltpu.SemaphoreType.DMA)",
    ),
}


def tiles_from(source):
    module = types.ModuleType("planted")
    exec(compile(source, "planted", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("chip", ["v6e", "tpu7x", "v5p"])
def test_kernels_are_right_as_they_stand(chip):
    checks = CHECKS.values() if chip == "v6e" else [gather_is_right]
    with tracing_for(chip):
        assert all(check(tiles_from(SOURCE)) for check in checks)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistakes_are_caught(mistake):
    kernel, right, wrong = PLANTED[mistake]
    assert right in SOURCE, "the kernel has changed, so the planted mistake must be adapted"
    with tracing_for("v6e"), contextlib.suppress(KernelError):
        assert not CHECKS[kernel](tiles_from(SOURCE.replace(right, wrong)))


def test_repeated_rows_of_an_update_are_a_race():
    gradients = jnp.zeros((512, DIM))
    repeated = jnp.zeros(512, jnp.int32)

    def step(table):
        traced = trace_rule(ro.SGD(), table, (), 1)
        return sparsecore.step_rows(
            traced, DIM, [table], [], repeated, gradients, jnp.zeros(8), [0]
        )

    is_race = pytest.raises(KernelError, match="race: tile 1 reads what tile 0 wrote")
    with tracing_for("v6e"), is_race:
        simulate(step, TABLE)


def test_a_row_outside_the_table_is_an_error():
    with tracing_for("v6e"), pytest.raises(KernelError, match="outside an axis of 320"):
        simulate(sparsecore.gather, TABLE, jnp.full(64, NUM_ROWS))


class MeanOfOneNumber(ro.SGD):
    """A rule with a sum and a mean over columns that all have the same number."""

    def step_rows(self, rows, slots, gradients, hyperparameters):
        (rate,) = hyperparameters
        rates = jnp.full_like(rows, 0.5) * rate
        total = jnp.sum(rates, axis=1, keepdims=True)
        return rows - jnp.mean(rates, axis=1, keepdims=True) * gradients - total, slots


def test_a_sum_over_columns_of_one_number_counts_every_column():
    rule = MeanOfOneNumber(0.25)
    traced = trace_rule(rule, jnp.asarray(TABLE), (), 1)
    row, gradient = jnp.asarray(TABLE[0]), jnp.asarray(VALUES[0])
    pieces = [tuple(value.reshape(2, 8)) for value in (row, gradient)]
    (stepped,) = evaluate(traced, [*pieces, jnp.full(8, 0.25)], dim=DIM)
    wanted = TABLE[0] - 0.125 * VALUES[0] - 0.125 * DIM
    np.testing.assert_allclose(np.concatenate(stepped), wanted, rtol=1e-5)
