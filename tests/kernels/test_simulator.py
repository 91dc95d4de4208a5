"""The simulator is a checker, so it is checked: mistakes planted in the kernels' source must not pass."""

import contextlib
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rsembed.optimizers as ro
from rsembed.kernels import sparsecore
from rsembed.kernels.devices import tracing_for
from rsembed.kernels.traced_rules import trace_rule
from tests.kernels.simulator import KernelError, simulate

pytestmark = pytest.mark.filterwarnings("ignore:Destination semaphore is ignored")

SOURCE = Path(sparsecore.__file__).read_text().replace("MAX_CHUNK_ROWS = 64", "MAX_CHUNK_ROWS = 8")
# More chunks than the 32 tiles of the chip, unevenly: with one chunk each, a wrong stride would pass unnoticed.
NUM_ROWS, DIM, CHUNKS = 320, 16, 37
DRAWS = np.random.default_rng(0)
TABLE = DRAWS.standard_normal((NUM_ROWS, DIM)).astype(np.float32)
IDS = DRAWS.integers(0, NUM_ROWS, 8 * CHUNKS).astype(np.int32)
GAINS = DRAWS.choice([0.0, 0.5, 1.5], IDS.size).astype(np.float32)
BAGS = np.sort(DRAWS.integers(0, 8 * CHUNKS, IDS.size)).astype(np.int32)
VALUES = DRAWS.standard_normal((IDS.size, DIM)).astype(np.float32)
DISTINCT = np.where(
    DRAWS.random(IDS.size) < 0.1, -1, DRAWS.permutation(NUM_ROWS)[: IDS.size]
).astype(np.int32)


def gather_is_right(tiles):
    return np.array_equal(simulate(tiles.gather, TABLE, IDS), TABLE[IDS])


def pool_is_right(tiles):
    bounds = np.zeros((CHUNKS, 8), np.int32)
    for chunk in range(CHUNKS):
        own = np.flatnonzero((chunk == BAGS // 8) & (GAINS != 0))
        bounds[chunk, :2] = (own[0] // 8, own[-1] // 8 + 1) if own.size else (0, 0)
    pooled = simulate(
        lambda *arrays: tiles.pool_on_tiles(*arrays, num_bags=8 * CHUNKS),
        TABLE,
        IDS,
        GAINS,
        BAGS,
        bounds.reshape(-1),
    )
    want = np.zeros((8 * CHUNKS, DIM))
    np.add.at(want, BAGS, GAINS[:, None] * TABLE[IDS])
    return np.allclose(pooled, want, atol=1e-5)


def step_is_right(tiles):
    """A rule with one wide slot and one number per row."""

    class Rule(ro.SGD):
        def step_rows(self, rows, slots, gradients, hyper):
            wide, narrow = slots
            wide, narrow = wide + gradients, narrow + jnp.mean(gradients, axis=-1, keepdims=True)
            return rows - hyper[0] * wide / jnp.sqrt(1.0 + narrow * narrow), (wide, narrow)

    wide, narrow, rate = TABLE + 1.0, TABLE[:, :1], 0.25
    slots = (jnp.asarray(wide), jnp.asarray(narrow))
    traced = trace_rule(Rule(0.25), jnp.asarray(TABLE), slots, 1)
    arguments = (
        TABLE,
        wide,
        np.repeat(narrow[DISTINCT], 8, axis=1),
        DISTINCT,
        VALUES,
        np.full(8, rate, np.float32),
    )

    def step(table, wide, numbers, ids, gradients, hyper):
        return tiles.step_rows(
            traced, DIM, [table, wide], [numbers], ids, gradients, hyper, [0, 1, 2]
        )

    (new_table, new_wide), (new_numbers,) = simulate(step, *arguments)
    real = DISTINCT >= 0
    rows, want_wide, want_table = DISTINCT[real], wide.copy(), TABLE.copy()
    numbers = narrow[rows] + VALUES[real].mean(axis=1, keepdims=True)
    want_wide[rows] += VALUES[real]
    want_table[rows] -= rate * want_wide[rows] / np.sqrt(1 + numbers**2)
    found = [
        (new_table, want_table),
        (new_wide, want_wide),
        (np.asarray(new_numbers)[real, :1], numbers),
    ]
    return all(np.allclose(one, other, atol=1e-5) for one, other in found)


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
    assert right in SOURCE, "the kernel has changed; plant the mistake anew"
    with tracing_for("v6e"), contextlib.suppress(KernelError):
        assert not CHECKS[kernel](tiles_from(SOURCE.replace(right, wrong)))


def test_repeated_rows_of_an_update_are_a_race():
    repeated = jnp.zeros(512, jnp.int32)
    with (
        tracing_for("v6e"),
        pytest.raises(KernelError, match="race: tile 1 reads what tile 0 wrote"),
    ):
        simulate(
            lambda table: sparsecore.step_rows(
                trace_rule(ro.SGD(), table, (), 1),
                DIM, [table], [], repeated, jnp.zeros((512, DIM)), jnp.zeros(8), [0],
            )[0],
            TABLE,
        )  # fmt: skip


def test_a_row_outside_the_table_is_an_error():
    with tracing_for("v6e"), pytest.raises(KernelError, match="outside an axis of 320"):
        simulate(tiles_from(SOURCE).gather, TABLE, jax.numpy.full(8, NUM_ROWS, jnp.int32))
