"""All storages, ways, rules and combiners give the numbers of loops.

Each entry of `STORAGES` is run on each entry of `WAYS`, or refuses it with an error. The table in
docs/engine.md is made of the same entries.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rsembed as rs
from rsembed.initial_values import table_key
from rsembed.keys import split_keys
from rsembed.specs import Combiner
from rsembed.tt import TensorTrain
from tests.optimizers import test_contract as rules
from tests.storage.oracle import DenseTable, KeyedTable, Read, SideBySide, Steps, TrainTable
from tests.world import mesh_of

ROWS, SAMPLES, WIDTH, NUM_DEVICES, NUM_STEPS = 10, 8, 3, 4, 4
# Keys of the keyed storages, in groups of four, with one key for each device. The keys of a group
# differ only in their lower halves, and the keys of a device only in their upper halves.
KEYS = np.arange(16) % 4 + np.repeat(
    np.array([2**40, 5 * 2**38, 2**33 - 2**62, 7 * 2**33], np.int64), 4
)
# Groups that each step reads. A table with twelve rows must evict keys for the last group, and then
# for groups that come back. In other storages, the last group is the same as the first group.
GROUPS = ((0, 1), (0, 2), (3,), (0, 1))


class Storage(NamedTuple):
    """A storage, the ways on which it works, and the arguments of its oracle."""

    storage: Any
    ways: tuple[str, ...]
    takes_keys: bool = False
    # Arguments of the oracle.
    keyed: Mapping[str, int] = MappingProxyType({})
    # Arguments of the storage and of the oracle, by way.
    policies: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    refuses_rules_that_move_all_rows: bool = False


class Way(NamedTuple):
    """A placement on a mesh, or None for one device, and the capacity of exchanges."""

    placement: str | None
    capacity: int | None = None


WAYS = {
    "one device": Way(None),
    "row": Way("row"),
    "row, many rounds": Way("row", capacity=1),
    "table": Way("table"),
    "column": Way("column"),
    "replicated": Way("replicated"),
}
OWNED = ("one device", "row", "row, many rounds")
# A policy is applied to the rows of each device, so one policy for each way is enough.
EVICTIONS = dict(zip(OWNED, ({"eviction": name} for name in ("lru", "lfu", "lru")), strict=True))
COUNTED, DRAWN = {"admission_count": 4}, {"admission_probability": 0.2}
ADMISSIONS = {"one device": COUNTED, "row": DRAWN, "row, many rounds": COUNTED}
STORAGES = {
    "dense": Storage(None, tuple(WAYS)),
    "hashed": Storage(rs.Hashed(), OWNED, True),
    "hashed, evicting": Storage(
        rs.Hashed(when_full="evict"), OWNED, True, {"capacity": 12}, EVICTIONS
    ),
    "hashed, admitting": Storage(rs.Hashed(), OWNED, True, policies=ADMISSIONS),
    "host-cached": Storage(
        rs.HostCached(cache_rows=8), OWNED, refuses_rules_that_move_all_rows=True
    ),
    "train": Storage(TensorTrain((11,)), ("one device", "replicated")),
}
RUNS = [(storage, way) for storage in STORAGES for way in STORAGES[storage].ways]


def adamw_of_optax(rule, row, slots, gradient, number):
    slots[0] += 1
    slots[1][:] = 0.9 * slots[1] + 0.1 * gradient
    slots[2][:] = 0.999 * slots[2] + 0.001 * gradient**2
    t = slots[0][0]
    direction = slots[1] / (1 - 0.9**t) / (np.sqrt(slots[2] / (1 - 0.999**t)) + 1e-8)
    row -= rules.LR * (direction + 0.3 * row)


CONTRACT = rules.CONTRACT | {
    "optax adamw": (rs.from_optax(optax.adamw(rules.LR, weight_decay=0.3)), adamw_of_optax)
}
MOVING_ALL = [name for name, (rule, _) in CONTRACT.items() if rule.moves_all_rows]
ROW_WISE = [name for name, (rule, _) in CONTRACT.items() if rule.is_row_wise]
LAZY = [name for name in CONTRACT if name not in MOVING_ALL]


class Cell(NamedTuple):
    """A table: its storage, its way, the rules that step it, and its combiner.

    One of its two features has weights.
    """

    storage: str
    way: str
    rules: tuple[str, ...]
    combiner: str

    @property
    def table(self):
        return " ".join((self.storage, self.way, self.rules[0][:5], self.combiner))

    @property
    def features(self):
        return f"{self.table} plain", f"{self.table} weighted"


def rules_of(storage, way):
    """Groups of rules for one table. A rule that moves all rows is alone in its group."""
    lazy = [name for name in LAZY if way != "column" or name not in ROW_WISE]
    # On ways that several storages support, each storage tests a part of the rules.
    parts = 1 if way in ("table", "column") else 3
    groups = [tuple(lazy[k::parts]) for k in range(parts)] + [("adam",)]
    if not STORAGES[storage].refuses_rules_that_move_all_rows:
        groups += [(name,) for name in MOVING_ALL]
    return groups


def pairs_of(cell):
    named = [(axis, value) for axis, value in cell._asdict().items() if axis != "rules"]
    named += [("rule", name) for name in cell.rules]
    return {
        frozenset(pair) for pair in itertools.combinations(named, 2) if pair[0][0] != pair[1][0]
    }


def cost_of(cell):
    """Estimated time to compile a table, in rules. Lookups of keys take most of the time."""
    return len(cell.rules) + (4 if cell.storage in ("dense", "train") else 15)


@functools.cache
def cells():
    """Tables that together cover all possible pairs of values of two axes.

    A greedy choice keeps their compile time low.
    """
    possible = [
        Cell(storage, way, names, combiner)
        for storage, way in RUNS
        for names in rules_of(storage, way)
        for combiner in get_args(Combiner)
    ]
    missing, chosen = set().union(*map(pairs_of, possible)), []
    while missing:
        best = max(possible, key=lambda cell: len(pairs_of(cell) & missing) / cost_of(cell))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def steps_of(cell):
    return Steps(*zip(*(CONTRACT[name] for name in cell.rules), strict=True))


def spec_of(cell):
    steps, contract = steps_of(cell), STORAGES[cell.storage]
    dim = NUM_DEVICES * max(len(steps.rules), 2)
    storage = contract.storage
    if cell.way in contract.policies:
        storage = dataclasses.replace(storage, **contract.policies[cell.way])
    if isinstance(storage, TensorTrain):
        storage = dataclasses.replace(storage, tt_p_shapes=(3, 4), tt_q_shapes=(dim // 4, 4))
    return rs.TableSpec(
        cell.table,
        contract.keyed.get("capacity", 16) if contract.takes_keys else ROWS,
        dim,
        initializer=from_key,
        optimizer=steps.rules[0] if len(steps.rules) == 1 else SideBySide(rules=steps.rules),
        combiner=cell.combiner,
        storage=storage,
    )


def from_key(key, shape):
    """Numbers in [-0.5, 0.5) that depend on the key and compile fast."""
    numbers = jnp.arange(shape[0] * shape[1], dtype=jnp.uint32).reshape(shape)
    scattered = (jax.random.key_data(key)[1] + numbers) * jnp.uint32(0x9E3779B1)
    return (scattered >> 8).astype(jnp.float32) / 2**24 - 0.5


def collection_of(way, cells_of_way):
    placed = WAYS[way]
    on_mesh = {}
    if placed.placement is not None:
        on_mesh = {
            "mesh": mesh_of(NUM_DEVICES),
            "placement": {cell.table: placed.placement for cell in cells_of_way},
        }
    features = []
    for cell in cells_of_way:
        table = spec_of(cell)
        features += [rs.FeatureSpec(name, table) for name in cell.features]
    return rs.EmbeddingCollection(
        features, exchange_capacity=placed.capacity, bounds_check="ignore", **on_mesh
    )


def reads_of(contract, number):
    """Ids of both features in a step.

    Ids are repeated in samples and in the batch, and some are padding. In step 1, one device has no
    ids.
    """
    generator = np.random.default_rng(number)
    num_groups = 4 if "capacity" in contract.keyed else 3
    letters = np.concatenate([np.arange(4) + 4 * (group % num_groups) for group in GROUPS[number]])
    empty = SAMPLES // NUM_DEVICES
    ids = generator.choice(letters, (2, SAMPLES, WIDTH))
    for feature_ids in ids:
        positions = generator.permutation((SAMPLES - empty) * WIDTH)
        feature_ids.reshape(-1)[positions[: letters.size]] = letters
        feature_ids.reshape(-1)[positions[letters.size :][: 2 * WIDTH]] = -1
    if number == 1:
        ids[:, SAMPLES - empty :] = -1
    weights = generator.uniform(0.2, 2.0, (SAMPLES, WIDTH)).astype(np.float32)
    weights[generator.random(weights.shape) < 0.2] = 0.0
    weights[number] = 0.0
    ids = np.where(ids < 0, -1, KEYS[ids]) if contract.takes_keys else ids.astype(np.int32)
    return Read(ids[0], None), Read(ids[1], weights)


def batch_of(cells_of_way, number):
    batch = {}
    for cell in cells_of_way:
        for name, read in zip(cell.features, reads_of(STORAGES[cell.storage], number), strict=True):
            batch[name] = read.ids if read.weights is None else (read.ids, read.weights)
    return batch


def keys_by_number(key):
    """A PRNG key for each of `KEYS`: `key` with both halves of the number folded in."""
    lanes = split_keys(KEYS)

    def fold(high, low):
        return jax.random.fold_in(jax.random.fold_in(key, high), low)

    return jax.vmap(fold)(lanes.high, lanes.low)


def initial_vectors(cell):
    """Initial row of each key, by the documented formula."""
    keys = keys_by_number(table_key(jax.random.key(0), cell.table))
    dim = spec_of(cell).embedding_dim
    return dict(
        zip(
            KEYS.tolist(),
            np.float64(jax.vmap(lambda key: from_key(key, (1, dim))[0])(keys)),
            strict=True,
        )
    )


def draws(cell):
    """A function of step and key that returns a random number, by the documented formula."""
    of_draws = jax.random.fold_in(table_key(jax.random.key(0), cell.table), 0x61646D74)

    def draw(number):
        keys = keys_by_number(jax.random.fold_in(of_draws, number))
        return jax.vmap(lambda key: jax.random.bits(key, (1,), jnp.uint32)[0])(keys)

    numbers_drawn = np.float64(jax.vmap(draw)(jnp.arange(NUM_STEPS))) / 2**32
    return lambda number, key: numbers_drawn[number, KEYS.tolist().index(key)]


def oracle_of(cell, collection, state):
    contract, steps = STORAGES[cell.storage], steps_of(cell)
    if contract.takes_keys:
        num_shards = NUM_DEVICES if WAYS[cell.way].placement == "row" else 1
        made_of = dict(contract.keyed, num_shards=num_shards, **contract.policies.get(cell.way, {}))
        if "admission_probability" in made_of:
            made_of["draw"] = draws(cell)
        if "capacity" in made_of:
            made_of["capacity"] //= num_shards
        return KeyedTable(initial_vectors(cell), cell.combiner, steps, **made_of)
    if isinstance(contract.storage, TensorTrain):
        q_shapes = spec_of(cell).storage.tt_q_shapes
        return TrainTable(
            [np.asarray(core) for core in state.tables[cell.table]],
            ROWS,
            q_shapes,
            cell.combiner,
            steps,
        )
    return DenseTable(np.asarray(collection.tables(state)[cell.table]), cell.combiner, steps)


def assert_close(actual, expected, what):
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64).reshape(expected.shape),
        expected,
        rtol=2e-4,
        atol=2e-5,
        err_msg=what,
    )


def slots_of(pairs):
    """Slots of many rows, as one array for each slot."""
    flat = [[slot for slots_of_rule in slots for slot in slots_of_rule] for slots in pairs]
    return [np.stack(column) for column in zip(*flat, strict=True)]


def assert_holds(collection, state, oracles, what):
    """Asserts rows, slots and bookkeeping of all tables, which have the same storage."""
    tables = collection.tables(state)
    takes_keys = any(isinstance(oracle, KeyedTable) for oracle in oracles.values())
    slots_by_table = {} if takes_keys else collection.slots(state)
    for cell, oracle in oracles.items():
        about = f"{cell.table}, {what}"
        values = tables[cell.table]
        slots = slots_by_table.get(cell.table)
        if isinstance(oracle, KeyedTable):
            assert_bookkeeping_holds(values, collection.counts(state)[cell.table], oracle, about)
            slots = [array for name, array in values.items() if name.startswith("slot_")]
            values = values["values"]
        if isinstance(oracle, TrainTable):
            assert_cores_hold(state.tables[cell.table], slots, oracle, about)
            slots = []
        rows = [oracle.rows[key] for key in sorted(oracle.rows)]
        assert_close(values, np.stack([row for row, _ in rows]), about)
        expected = slots_of([row_slots for _, row_slots in rows])
        for slot, column in zip(jax.tree.leaves(slots), expected, strict=True):
            assert_close(slot, column, f"{about}: slots")


def assert_bookkeeping_holds(table, counts, oracle, what):
    """Asserts steps and counts of keys with rows and of waiting keys, and the counters."""

    def noted(prefix=""):
        lanes = (table[prefix + lane].tolist() for lane in ("keys", "last_step", "count"))
        return list(zip(*lanes, strict=True))

    expected = [
        (key, oracle.last_step[key], oracle.occurrences[key]) for key in sorted(oracle.rows)
    ]
    assert noted() == expected, what
    if oracle.admission_count:
        waiting = [(key, *oracle.waiting[key]) for key in sorted(oracle.waiting)]
        assert noted("waiting_") == waiting, what
    sums = [counts[name].sum() for name in ("inserted", "evicted", "failed")]
    assert sums == [oracle.num_inserted, oracle.num_evicted, 0], what


def assert_cores_hold(cores, slots, oracle, what):
    for core, core_slots, wanted, wanted_slots in zip(
        cores, slots, oracle.cores, oracle.slots, strict=True
    ):
        assert_close(core, wanted, what)
        for copy in core.addressable_shards[1:]:
            np.testing.assert_array_equal(copy.data, core.addressable_shards[0].data, err_msg=what)
        for slot, column in zip(core_slots, slots_of(wanted_slots), strict=True):
            assert_close(slot, column, what)


# Without these rows, the test still covers all storages, all ways and all policies of keys.
@pytest.mark.slow_rows(
    "dense-row",
    "hashed-row",
    "hashed-row, many rounds",
    "hashed, evicting-one device",
    "hashed, evicting-row, many rounds",
    "hashed, admitting-one device",
    "host-cached-row",
    "train-one device",
    "host-cached-one device",
)
@pytest.mark.parametrize(("storage", "way"), RUNS)
def test_a_storage_on_a_way_gives_the_numbers_of_loops(storage, way):
    cells_of_way = [cell for cell in cells() if (cell.storage, cell.way) == (storage, way)]
    collection = collection_of(way, cells_of_way)

    @jax.jit
    def step(state, batch, d_activations):
        ahead, pullback = collection.lookup_vjp(state, batch)
        applied = collection.apply(state, pullback(d_activations))
        updated = collection.update(state, batch, d_activations)
        return collection.lookup(state, batch), ahead, applied, updated

    state = collection.init(jax.random.key(0))
    outputs = jax.eval_shape(
        collection.lookup, state, collection.prepare(batch_of(cells_of_way, 0))
    )
    oracles = {cell: oracle_of(cell, collection, state) for cell in cells_of_way}
    for number in range(NUM_STEPS):
        generator = np.random.default_rng(100 + number)
        d_activations = {
            name: generator.normal(size=output.shape).astype(np.float32)
            for name, output in outputs.items()
        }
        batch = collection.prepare(batch_of(cells_of_way, number))
        state = collection.prefetch(state, batch)
        looked, ahead, applied, state = step(state, batch, d_activations)
        for cell, oracle in oracles.items():
            reads = dict(zip(cell.features, reads_of(STORAGES[storage], number), strict=True))
            for call, actual, expected in (
                ("lookup", looked, oracle.lookup(reads)),
                ("lookup_vjp", ahead, oracle.lookup_ahead(reads)),
            ):
                for name in cell.features:
                    what = f"{name}, step {number}, {call}"
                    assert actual[name].shape == expected[name].shape, what
                    assert_close(actual[name], expected[name], what)
            oracle.update(reads, d_activations)
        for call, after in (("update", state), ("apply", applied)):
            assert_holds(collection, after, oracles, f"step {number}, {call}")


def test_cells_cover_every_pair_of_storage_way_rule_and_combiner_that_is_not_refused():
    covered = set().union(*map(pairs_of, cells()))
    refused = [pair for pair, _, _ in refusals()]
    values = {"storage": STORAGES, "way": WAYS, "rule": CONTRACT, "combiner": get_args(Combiner)}
    for one, other in itertools.combinations(values, 2):
        for pair in itertools.product(values[one], values[other]):
            named = frozenset(zip((one, other), pair, strict=True))
            assert (named in covered) != (named in refused), sorted(named)


def refusals():
    """Each refused pair of values, a cell with this pair, and the reason."""
    for storage, way in itertools.product(STORAGES, WAYS):
        if way not in STORAGES[storage].ways:
            reason = f"is kept as .* cannot be placed '{WAYS[way].placement}'"
            pair = {("storage", storage), ("way", way)}
            yield pair, Cell(storage, way, ("sgd",), "sum"), reason
    for name in ROW_WISE:
        rule = type(CONTRACT[name][0]).__name__
        reason = rf"\] cannot be placed 'column': {rule} steps whole rows"
        yield {("way", "column"), ("rule", name)}, Cell("dense", "column", (name,), "sum"), reason
    for storage, name in itertools.product(STORAGES, MOVING_ALL):
        if STORAGES[storage].refuses_rules_that_move_all_rows:
            reason = f": {type(CONTRACT[name][0]).__name__} moves all rows"
            pair = {("storage", storage), ("rule", name)}
            yield pair, Cell(storage, "one device", (name,), "sum"), reason


@pytest.mark.parametrize(("cell", "reason"), [refusal[1:] for refusal in refusals()], ids=str)
def test_what_a_storage_cannot_do_is_refused_by_name(cell, reason):
    with pytest.raises(ValueError, match=f"'{cell.table}'.*{reason}"):
        collection_of(cell.way, [cell])


def contract_table():
    """The cells as a table of Markdown."""
    # Exchanges in many rounds are no other placement.
    ways = [way for way in WAYS if way != "row, many rounds"]
    lines = [["", *ways, "rules"], ["---"] * (len(ways) + 2)]
    for name, storage in STORAGES.items():
        answers = {way: "yes" if way in storage.ways else "refused" for way in ways}
        if "column" in storage.ways:
            answers["column"] = "yes, with rules of single entries"
        taken = "all"
        if storage.refuses_rules_that_move_all_rows:
            taken = "those that move rows of the batch"
        lines.append([name, *answers.values(), taken])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_table_in_the_docs_is_what_is_run_here():
    page = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
    _, begun, rest = page.partition("<!-- contract table: begin -->\n")
    table, ended, _ = rest.partition("\n<!-- contract table: end -->")
    assert begun and ended and table.strip() == contract_table()
