"""Random models against loops: what is looked up, what is stepped and what is dropped, on every kind of layout.

A few dozen models are fixed, so that each is compiled once; hypothesis draws their values.
"""

import dataclasses
import functools
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from rsembed import Bags
from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from rsembed.sparsecore.partitioner import bucket_of
from tests.oracles import adagrad_step, divisor_of, sgd_step, stepped_table
from tests.sparsecore.case_specs import on_devices, variables_of
from tests.sparsecore.small_world import logical_tables, ragged

BATCH = 48
"""A multiple of every shard count below; also of the 6 shards of three devices."""
VALUE_TOLERANCE = 3e-5
"""Sums of up to a few hundred float32 products, divided by an Adagrad accumulator that may be as small as 0.1."""
RATE = 0.25


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
        """`{name: (rows, columns)}`; the second and third can share an automatic stack."""
        rng = np.random.default_rng(self.seed)
        return {
            name: (int(rng.integers(3, 60)), dim) for name, dim in (("w", 11), ("u", 3), ("v", 8))
        }

    @property
    def features(self):
        """`{name: (table, columns)}`; not in the order of names, one table read twice, one by some columns."""
        return {"fz": ("u", 3), "fa": ("w", 11), "fm": ("v", 5), "fb": ("u", 3)}

    @property
    def stacks(self):
        """Names of the tables of every stack, in its order."""
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
MORE_MODELS = [
    Model(devices=1, cores=1, stacking="manual", combiner="mean", optimizer="adagrad"),
    Model(devices=2, cores=1, minibatching=True, combiner="sqrtn", optimizer="adagrad", seed=6),
    Model(devices=3, cores=2, stacking="manual", rotation=5, minibatching=True, seed=8),
    Model(devices=8, cores=1, stacking="manual", rotation=0, optimizer="adagrad", seed=10),
]


def up(value, multiple):
    return -(-value // multiple) * multiple


def places(model):
    """Where rows lie, from the model alone: table to (stack, first row in a shard, rotation)."""
    rotation = model.cores if model.rotation is None else model.rotation
    found = {}
    for tables in model.stacks:
        first_row = 0
        for k, table in enumerate(tables):
            found[table] = ("_".join(tables), first_row, k * rotation % model.shards)
            first_row += up(model.tables[table][0], 8 * model.shards) // model.shards
    return found


def limits_of(model):
    """The model's limits; with minibatching the lowest under which no bucket alone overflows, whatever is drawn."""
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
    optimizer = {
        "sgd": embedding_spec.SGDOptimizerSpec(RATE),
        "adagrad": embedding_spec.AdagradOptimizerSpec(RATE),
    }
    max_ids, max_unique = limits_of(model)
    tables = {
        name: embedding_spec.TableSpec(
            name,
            rows,
            dim,
            combiner=model.combiner,
            optimizer=optimizer[model.optimizer],
            max_ids_per_partition=max_ids,
            max_unique_ids_per_partition=max_unique,
            suggested_coo_buffer_size_per_device=model.suggested,
        )
        for name, (rows, dim) in model.tables.items()
    }
    specs = [
        embedding_spec.FeatureSpec(name, tables[table], output_shape=(BATCH, dim))
        for name, (table, dim) in model.features.items()
    ]
    limits = {
        "rotation": model.rotation,
        "stack_to_max_ids_per_partition": lambda name, samples: max_ids,
        "stack_to_max_unique_ids_per_partition": lambda name, samples: max_unique,
    }
    if model.stacking == "auto":
        table_stacking.auto_stack_tables(specs, model.devices, model.cores, **limits)
    if model.stacking == "manual":
        table_stacking.stack_tables(specs, model.stacks[0], model.devices, model.cores, **limits)
    embedding.prepare_feature_specs_for_training(specs, model.devices, model.cores)
    options = {"global_device_count": model.devices, "enable_minibatching": model.minibatching}

    def run(processed, variables, gradients):
        activations = embedding.sparse_dense_matmul(processed, variables, specs, **options)
        return activations, embedding.sparse_dense_matmul_grad(
            gradients, processed, variables, specs, **options
        )

    return specs, on_devices(run, model.devices)


def draw(model, seed, skew):
    """Tables, ragged ids with duplicates, weights, and gradients; a high skew makes few ids frequent."""
    rng = np.random.default_rng(seed)
    tables = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in model.tables.items()
    }
    ids, weights, gradients = {}, {}, {}
    for name, (table, dim) in model.features.items():
        lengths = rng.integers(0, 6, BATCH)
        rows = [
            (model.tables[table][0] * rng.random(length) ** skew).astype(int) for length in lengths
        ]
        ids[name] = [row.tolist() for row in rows]
        weights[name] = [
            rng.uniform(0.2, 2, length).astype(np.float32).tolist() for length in lengths
        ]
        gradients[name] = rng.normal(size=(BATCH, dim)).astype(np.float32)
    return tables, ids, weights, gradients


def partitions_of(model, ids, weights):
    """`{(stack, core): {(shard, row, sample): [(feature, sample of it, id, gain), ...]}}`, entry by entry."""
    names = sorted(model.features) if model.stacking == "none" else list(model.features)
    samples_before, found = defaultdict(int), defaultdict(lambda: defaultdict(list))
    for name in names:
        table = model.features[name][0]
        stack, first_row, rotation = places(model)[table]
        per_core = BATCH // model.shards
        for sample in range(BATCH):
            sample_weights = (
                [1.0] * len(ids[name][sample]) if weights is None else weights[name][sample]
            )
            divisor = divisor_of(model.combiner, sample_weights)
            for number, weight in zip(ids[name][sample], sample_weights, strict=True):
                key = (
                    (number + rotation) % model.shards,
                    number // model.shards + first_row,
                    sample % per_core + samples_before[stack],
                )
                entry = (name, sample, number, weight / divisor)
                found[stack, sample // per_core][key].append(entry)
        samples_before[stack] += per_core
    return found


def statistics_of(model, partitions):
    """By stack: ids and distinct ids of the busiest core's partitions, dropped ones included, and places per core."""
    cores, found = range(model.shards), {}
    for stack in map("_".join, model.stacks):
        parts = [
            [[key for key in partitions[stack, core] if key[0] == shard] for shard in cores]
            for core in cores
        ]
        counts = np.asarray(
            [[(len(part), len({key[1] for key in part})) for part in row] for row in parts]
        )
        busiest = (
            counts.reshape(model.devices, model.cores, model.shards, 2).max(axis=1).reshape(-1, 2)
        )
        found[stack] = [*busiest.T.tolist(), up(counts[..., 0], 8).sum(axis=1).tolist()]
    return found


def surviving(model, partitions):
    """Raw entries that the limits and the buffer let through, and the number of ids dropped per stack and table."""
    max_ids, max_unique = limits_of(model)
    kept, by_stack, by_table = [], defaultdict(int), defaultdict(int)
    for (stack, _), entries in partitions.items():
        place, is_full = 0, False
        for shard in range(model.shards):
            rows = []
            for num_ids, key in enumerate(
                sorted(key for key in entries if key[0] == shard), start=1
            ):
                raw = entries[key]
                if key[1] not in rows:
                    rows.append(key[1])
                is_over = not model.minibatching and (num_ids > max_ids or len(rows) > max_unique)
                if not is_over and model.suggested is not None:
                    num_tables = len(
                        [name for name in model.tables if places(model)[name][0] == stack]
                    )
                    is_full = is_full or place >= num_tables * model.suggested // model.cores
                if is_over or is_full:
                    lost = len(raw) if is_over else 1  # the buffer counts merged entries
                    by_stack[stack] += lost
                    by_table[model.features[raw[0][0]][0]] += lost
                else:
                    kept += raw
                    place += 1
            place = up(place, 8)
    return kept, by_stack, by_table


FORMS = {
    "lists": lambda rows, weights: (rows, weights),
    "objects": lambda rows, weights: (
        ragged(rows, np.int64),
        weights and ragged(weights, np.float32),
    ),
    "bags": lambda rows, weights: (Bags.from_lists(rows, weights), None),
}
"""Ids and weights of a feature as users have them."""


@pytest.mark.slow_rows("4x4-auto", "1x4-auto", "2x2-manual")
@pytest.mark.parametrize(
    "model",
    [*MODELS, *(pytest.param(model, marks=pytest.mark.slow) for model in MORE_MODELS)],
    ids=lambda model: f"{model.devices}x{model.cores}-{model.stacking}",
)
@settings(deadline=None, max_examples=5)
@given(
    seed=st.integers(0, 2**31),
    skew=st.sampled_from([1.0, 4.0]),
    is_weighted=st.booleans(),
    form=st.sampled_from(sorted(FORMS)),
)
def test_everything_equals_loops(model, seed, skew, is_weighted, form):
    specs, run = compiled(model)
    tables, ids, weights, gradients = draw(model, seed, skew)
    batch = [
        FORMS[form](ids[name], weights[name] if is_weighted else None) for name in model.features
    ]
    processed, statistics = embedding.preprocess_sparse_dense_matmul_input(
        [own for own, _ in batch],
        [own for _, own in batch] if is_weighted else None,
        specs,
        model.devices,
        model.devices,
        num_sc_per_device=model.cores,
        allow_id_dropping=True,
        enable_minibatching=model.minibatching,
    )
    partitions = partitions_of(model, ids, weights if is_weighted else None)
    for stack, (num_ids, num_unique, places_per_core) in statistics_of(model, partitions).items():
        assert statistics.max_ids_per_partition[stack].tolist() == num_ids
        assert statistics.max_unique_ids_per_partition[stack].tolist() == num_unique
        if not model.minibatching:  # which begins every minibatch at a new tile
            assert statistics.required_buffer_size_per_sc[stack].tolist() == places_per_core
    kept, by_stack, by_table = surviving(model, partitions)
    assert statistics.id_drop_counters == {
        "_".join(stack): by_stack["_".join(stack)] for stack in model.stacks
    }
    assert {table: sum(drops) for table, drops in statistics.id_drops_by_table.items()} == {
        table: by_table[table] for table in model.tables
    }
    activations, updated = run(
        processed,
        variables_of(specs, tables),
        [jnp.asarray(gradients[name]) for name in model.features],
    )
    expected = {name: np.zeros((BATCH, dim)) for name, (_, dim) in model.features.items()}
    row_gradients = {name: {} for name in model.tables}
    for name, sample, number, gain in kept:
        table, dim = model.features[name]
        expected[name][sample] += gain * tables[table][number, :dim]
        row_gradient = row_gradients[table].setdefault(number, np.zeros(model.tables[table][1]))
        row_gradient[:dim] += gain * gradients[name][sample]
    for (name, wanted), got in zip(expected.items(), activations, strict=True):
        assert_allclose(got, wanted, atol=VALUE_TOLERANCE, err_msg=name)
    after = jax.tree.map(np.asarray, logical_tables(updated, specs))
    step_row = {"sgd": sgd_step, "adagrad": adagrad_step}[model.optimizer]
    for name, table in tables.items():
        slots = [np.full(table.shape, 0.1)] if model.optimizer == "adagrad" else []
        wanted, _ = stepped_table(table, slots, row_gradients[name], step_row, learning_rate=RATE)
        assert_allclose(after[name], wanted, atol=VALUE_TOLERANCE, err_msg=name)
        untouched = sorted(set(range(len(table))) - set(row_gradients[name]))
        assert_array_equal(after[name][untouched], table[untouched])


def test_the_models_do_drop_ids_and_need_minibatches():
    """Otherwise the test above would say little."""
    dropped, minibatches = {}, {}
    for model in MODELS:
        specs, _ = compiled(model)
        _, ids, _, _ = draw(model, 0, 1.0)
        processed, statistics = embedding.preprocess_sparse_dense_matmul_input(
            list(ids.values()), None, specs, model.devices, model.devices, num_sc_per_device=model.cores,
            allow_id_dropping=True, enable_minibatching=model.minibatching,
        )  # fmt: skip
        dropped[model] = sum(statistics.id_drop_counters.values())
        minibatches[model] = int(processed.num_minibatches[0])
    assert [model for model in MODELS if dropped[model]] == [
        model for model in MODELS if model.max_ids < 512 or model.suggested
    ]
    assert [model for model in MODELS if minibatches[model] > 1] == [
        model for model in MODELS if model.minibatching
    ]
