"""Lookups, steps and dropped ids of random models equal loops, for all kinds of layouts.

The models are fixed, so that each is compiled only once. Hypothesis draws ids, weights and values.
"""

import dataclasses
import functools
from collections import Counter, defaultdict

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from rsembed.sparsecore.partitioner import bucket_of
from tests.oracles import adagrad_step, divisor_of, sgd_step, stepped_table
from tests.sparsecore import small_world
from tests.sparsecore.case_specs import lookup_and_update, on_devices, variables_of
from tests.sparsecore.small_world import ragged

BATCH = 48
"""Batch size, a multiple of the number of shards of each model."""
VALUE_TOLERANCE = 3e-5
"""Tolerance of sums of up to a few hundred float32 products.

Adagrad divides such sums by the square root of an accumulator, which can be as small as 0.1."""
RATE = 0.25
RULES = {
    "sgd": (embedding_spec.SGDOptimizerSpec(RATE), sgd_step),
    "adagrad": (embedding_spec.AdagradOptimizerSpec(RATE), adagrad_step),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    devices: int
    cores: int
    stacking: str = "none"  # or "auto" or "manual"
    rotation: int | None = None
    combiner: str = "sum"
    optimizer: str = "sgd"
    max_ids: int = 512
    max_unique: int = 512
    suggested: int | None = None
    minibatching: bool = False
    seed: int = 0

    @property
    def shards(self):
        return self.devices * self.cores

    @property
    def tables(self):
        """Pairs of number of rows and number of columns by table.

        Tables "u" and "v" can share an automatic stack.
        """
        rng = np.random.default_rng(self.seed)
        return {
            name: (int(rng.integers(3, 60)), dim) for name, dim in (("w", 11), ("u", 3), ("v", 8))
        }

    @property
    def features(self):
        """Pairs of table and number of columns by feature.

        The features are not sorted by name. Two features read one table, and "fm" reads only some
        columns of its table.
        """
        return {"fz": ("u", 3), "fa": ("w", 11), "fm": ("v", 5), "fb": ("u", 3)}

    @property
    def stacks(self):
        """Names of the tables of each stack, in the order of the stack."""
        return {
            "none": [["w"], ["u"], ["v"]],
            "auto": [["w"], ["u", "v"]],
            "manual": [["v", "w", "u"]],
        }[self.stacking]


MODELS = [
    Model(devices=1, cores=4, max_ids=5, max_unique=3, seed=1),
    Model(devices=1, cores=2, stacking="auto", suggested=48, combiner="sqrtn", seed=2),
    Model(devices=1, cores=1, stacking="manual", minibatching=True, combiner="mean", seed=3),
    Model(
        devices=1,
        cores=4,
        stacking="auto",
        rotation=3,
        minibatching=True,
        optimizer="adagrad",
        seed=4,
    ),
    Model(
        devices=2,
        cores=2,
        stacking="manual",
        rotation=1,
        max_ids=4,
        max_unique=2,
        optimizer="adagrad",
        seed=5,
    ),
    Model(
        devices=3,
        cores=1,
        stacking="auto",
        rotation=2,
        combiner="mean",
        optimizer="adagrad",
        seed=7,
    ),
    Model(devices=4, cores=4, stacking="auto", max_ids=2, combiner="sqrtn", seed=9),
    Model(devices=8, cores=2, stacking="manual", minibatching=True, combiner="mean", seed=11),
]


def up(value, multiple):
    return -(-value // multiple) * multiple


def places(model):
    """Position of each table: its stack, its first row in each shard, and its rotation."""
    rotation = model.cores if model.rotation is None else model.rotation
    arrays = {}
    for tables in model.stacks:
        first_row = 0
        for k, table in enumerate(tables):
            arrays[table] = ("_".join(tables), first_row, k * rotation % model.shards)
            first_row += up(model.tables[table][0], 8 * model.shards) // model.shards
    return arrays


def limits_of(model):
    """Maximum number of ids and of distinct ids of a partition.

    With minibatching, the limits are so high that no ids make a single bucket exceed them.
    """
    if not model.minibatching:
        return model.max_ids, model.max_unique
    rows = defaultdict(int)
    for table, (stack, first_row, rotation) in places(model).items():
        for row in range(model.tables[table][0]):
            shard = (row + rotation) % model.shards
            column = (first_row + row // model.shards) * model.shards + shard
            rows[stack, shard, int(bucket_of(np.asarray([column]))[0])] += 1
    most = max(rows.values())
    return most * len(model.features) * BATCH // model.shards, most


@functools.cache
def compiled(model):
    optimizer, _ = RULES[model.optimizer]
    max_ids, max_unique = limits_of(model)
    fields = {
        "combiner": model.combiner,
        "optimizer": optimizer,
        "max_ids_per_partition": max_ids,
        "max_unique_ids_per_partition": max_unique,
        "suggested_coo_buffer_size_per_device": model.suggested,
    }
    tables = {
        name: {"vocabulary_size": rows, "embedding_dim": dim}
        for name, (rows, dim) in model.tables.items()
    }
    features = {name: (table, BATCH, dim) for name, (table, dim) in model.features.items()}
    specs = list(small_world.feature_specs(tables, features, **fields).values())
    sizes = (model.devices, model.cores)
    limits = {
        "rotation": model.rotation,
        "stack_to_max_ids_per_partition": lambda name, samples: max_ids,
        "stack_to_max_unique_ids_per_partition": lambda name, samples: max_unique,
    }
    if model.stacking == "auto":
        table_stacking.auto_stack_tables(specs, *sizes, **limits)
    if model.stacking == "manual":
        table_stacking.stack_tables(specs, model.stacks[0], *sizes, **limits)
    embedding.prepare_feature_specs_for_training(specs, *sizes)
    run = lookup_and_update(specs, model.devices, enable_minibatching=model.minibatching)
    return specs, on_devices(run, model.devices)


def draw(model, seed, skew, weighted):
    """Random tables, ragged ids, weights of some features, and gradients.

    With a high skew, a few ids are frequent.
    """
    rng = np.random.default_rng(seed)
    tables = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in model.tables.items()
    }
    ids, weights, gradients = {}, {}, {}
    for name, (table, dim) in model.features.items():
        rows = model.tables[table][0]
        lengths = rng.integers(0, 6, BATCH)
        ids[name] = [(rows * rng.random(n) ** skew).astype(int).tolist() for n in lengths]
        weights[name] = None
        if name in weighted:
            weights[name] = [rng.uniform(0.2, 2, n).astype(np.float32).tolist() for n in lengths]
        gradients[name] = rng.normal(size=(BATCH, dim)).astype(np.float32)
    return tables, ids, weights, gradients


def preprocess(model, ids, weights):
    specs, _ = compiled(model)
    return small_world.preprocess(
        specs,
        ids,
        weights,
        devices=model.devices,
        allow_id_dropping=True,
        enable_minibatching=model.minibatching,
    )


def partitions_of(model, ids, weights):
    """Entries by stack and core, and there by shard, row and sample of the stack.

    Each list has tuples of feature, sample of the feature, id and gain, before they are merged.
    """
    names = sorted(model.features) if model.stacking == "none" else list(model.features)
    samples_before, entries = defaultdict(int), defaultdict(lambda: defaultdict(list))
    per_core = BATCH // model.shards
    for name in names:
        stack, first_row, rotation = places(model)[model.features[name][0]]
        for sample, numbers in enumerate(ids[name]):
            sample_weights = [1.0] * len(numbers)
            if weights[name] is not None:
                sample_weights = weights[name][sample]
            divisor = divisor_of(model.combiner, sample_weights)
            for number, weight in zip(numbers, sample_weights, strict=True):
                key = (
                    (number + rotation) % model.shards,
                    number // model.shards + first_row,
                    sample % per_core + samples_before[stack],
                )
                entry = (name, sample, number, weight / divisor)
                entries[stack, sample // per_core][key].append(entry)
        samples_before[stack] += per_core
    return entries


def outcome_of(model, partitions):
    """Entries that are kept, numbers of dropped ids by table, and counts of ids by stack.

    The counts have the shape `[core, shard, 2]`, with numbers of ids and distinct ids. They include
    dropped ids.
    """
    max_ids, max_unique = model.max_ids, model.max_unique
    if model.minibatching:
        max_ids = max_unique = np.inf
    kept, dropped, counts = [], Counter(), {}
    for tables in model.stacks:
        stack = "_".join(tables)
        size = np.inf
        if model.suggested is not None:
            size = len(tables) * model.suggested // model.cores
        counts[stack] = np.zeros((model.shards, model.shards, 2), int)
        for core in range(model.shards):
            entries = partitions[stack, core]
            place = 0
            for shard in range(model.shards):
                keys = sorted(key for key in entries if key[0] == shard)
                rows = set()
                for number, key in enumerate(keys, start=1):
                    rows.add(key[1])
                    table = model.features[entries[key][0][0]][0]
                    if number > max_ids or len(rows) > max_unique:
                        dropped[table] += len(entries[key])
                    elif place >= size:
                        # Merged entries count as one id here.
                        dropped[table] += 1
                    else:
                        kept += entries[key]
                        place += 1
                place = up(place, 8)
                counts[stack][core, shard] = len(keys), len(rows)
    return kept, dropped, counts


FORMS = {
    "lists": lambda rows, weights: (rows, weights),
    "objects": lambda rows, weights: (
        ragged(rows, np.int64),
        weights and ragged(weights, np.float32),
    ),
    "bags": lambda rows, weights: (Bags.from_lists(rows, weights), None),
}
"""Functions that convert ids and weights of a feature to forms that users have."""


@pytest.mark.slow_rows("4x4-auto", "1x4-auto", "2x2-manual")
@pytest.mark.parametrize(
    "model", MODELS, ids=lambda model: f"{model.devices}x{model.cores}-{model.stacking}"
)
@settings(deadline=None, max_examples=5)
@given(
    seed=st.integers(0, 2**31),
    skew=st.sampled_from([1.0, 4.0]),
    weighted=st.sets(st.sampled_from(["fz", "fa", "fm", "fb"])),
    form=st.sampled_from(sorted(FORMS)),
)
def test_everything_equals_loops(model, seed, skew, weighted, form):
    specs, run = compiled(model)
    tables, ids, weights, gradients = draw(model, seed, skew, weighted)
    batch = [FORMS[form](ids[name], weights[name]) for name in model.features]
    processed, statistics = preprocess(model, *map(list, zip(*batch, strict=True)))
    kept, dropped, counts = outcome_of(model, partitions_of(model, ids, weights))
    for stack, count in counts.items():
        by_device = count.reshape(model.devices, model.cores, model.shards, 2)
        num_ids, num_unique = by_device.max(axis=1).reshape(-1, 2).T
        assert_array_equal(statistics.max_ids_per_partition[stack], num_ids)
        assert_array_equal(statistics.max_unique_ids_per_partition[stack], num_unique)
        # With minibatches, each minibatch begins at a multiple of 8.
        if not model.minibatching:
            size = up(count[..., 0], 8).sum(axis=1)
            assert_array_equal(statistics.required_buffer_size_per_sc[stack], size)
    for stack in model.stacks:
        num_dropped = sum(dropped[table] for table in stack)
        assert statistics.id_drop_counters["_".join(stack)] == num_dropped
    for table in model.tables:
        assert sum(statistics.id_drops_by_table[table]) == dropped[table]
    activations, updated = run(processed, variables_of(specs, tables), list(gradients.values()))
    expected = {name: np.zeros((BATCH, dim)) for name, (_, dim) in model.features.items()}
    row_gradients = {name: {} for name in model.tables}
    for name, sample, number, gain in kept:
        table, dim = model.features[name]
        expected[name][sample] += gain * tables[table][number, :dim]
        row_gradient = row_gradients[table].setdefault(number, np.zeros(model.tables[table][1]))
        row_gradient[:dim] += gain * gradients[name][sample]
    for (name, wanted), got in zip(expected.items(), activations, strict=True):
        assert_allclose(got, wanted, atol=VALUE_TOLERANCE, err_msg=name)
    after = jax.tree.map(np.asarray, small_world.logical_tables(updated, specs))
    _, step_row = RULES[model.optimizer]
    for name, table in tables.items():
        slots = [np.full(table.shape, 0.1)]
        wanted, _ = stepped_table(table, slots, row_gradients[name], step_row, learning_rate=RATE)
        assert_allclose(after[name], wanted, atol=VALUE_TOLERANCE, err_msg=name)
        untouched = np.setdiff1d(np.arange(len(table)), list(row_gradients[name]))
        assert_array_equal(after[name][untouched], table[untouched])


def test_the_models_do_drop_ids_and_need_minibatches():
    """Otherwise the test above would not cover dropping and minibatches."""
    for model in MODELS:
        _, ids, _, _ = draw(model, 0, 1.0, ())
        processed, statistics = preprocess(model, list(ids.values()), None)
        drops = any(statistics.id_drop_counters.values())
        assert drops == (model.max_ids < 512 or model.suggested is not None)
        assert (processed.num_minibatches[0] > 1) == model.minibatching
