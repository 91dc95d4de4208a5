"""The partitioner against a walk over single ids, on many layouts."""

from collections import defaultdict

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsembed.sparsecore import embedding, embedding_spec, table_stacking
from rsembed.sparsecore.partitioner import PADDING_VALUE

BATCHES = {"a": 24, "b": 12, "c": 12}
VOCABULARIES = {"first": 20, "second": 50}
GAIN_TOLERANCE = 2e-6
"""Gains are float32 and are added entry by entry."""


def specs_for(devices, cores, combiner, rotation, max_ids=64, max_unique=64, suggested=None):
    tables = {
        name: embedding_spec.TableSpec(
            name=name,
            vocabulary_size=vocabulary,
            embedding_dim=4,
            combiner=combiner,
            max_ids_per_partition=max_ids,
            max_unique_ids_per_partition=max_unique,
            suggested_coo_buffer_size_per_device=suggested,
        )
        for name, vocabulary in VOCABULARIES.items()
    }
    readers = {"a": "first", "b": "second", "c": "first"}
    specs = {
        name: embedding_spec.FeatureSpec(
            name=name, table_spec=tables[readers[name]], input_shape=(batch, 1), output_shape=(batch, 4)
        )
        for name, batch in BATCHES.items()
    }
    if rotation is not None:
        limits = {"stack_to_max_ids_per_partition": lambda name, samples: max_ids,
                  "stack_to_max_unique_ids_per_partition": lambda name, samples: max_unique}  # fmt: skip
        table_stacking.stack_tables(specs, list(tables), devices, cores, rotation, **limits)
    embedding.prepare_feature_specs_for_training(specs, devices, cores)
    return specs


def gains_of(combiner, weights):
    weights = np.asarray(weights, np.float64)
    divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
    return weights / divisor if divisor else weights * 0


def walk(specs, batch, weights, devices, cores, max_ids, max_unique):
    """What every core sends to every shard: `{(stack, core, shard): [(row, sample, gain)]}`, counts, drops."""
    shards = devices * cores
    merged, times = defaultdict(float), defaultdict(int)
    for spec in jax.tree.leaves(specs):
        table, place = spec.table_spec, spec.id_transformation
        per_core = BATCHES[spec.name] // shards
        for sample, ids in enumerate(batch[spec.name]):
            row_weights = [1.0] * len(ids) if weights is None else weights[spec.name][sample]
            for number, gain in zip(ids, gains_of(table.combiner, row_weights), strict=True):
                column = (number + place.col_shift) % shards + number // shards * shards + place.col_offset
                core, inside = divmod(sample, per_core)
                key = (table.setting_in_stack.stack_name, core, column % shards, column // shards,
                       inside + place.row_offset // shards)  # fmt: skip
                merged[key] += gain
                times[key] += 1
    kept, counts, dropped = defaultdict(list), defaultdict(lambda: [0, 0]), defaultdict(int)
    last_row = {}
    for key in sorted(merged):
        (stack, _, _, row, sample), partition = key, key[:3]
        count = counts[partition]
        count[0] += 1
        count[1] += last_row.get(partition) != row
        last_row[partition] = row
        if count[0] > max_ids or count[1] > max_unique:
            dropped[stack] += times[key]
        else:
            kept[partition].append((row, sample, merged[key]))
    return kept, counts, dropped


def assert_same(processed, statistics, walked, devices, cores):
    kept, counts, dropped = walked
    shards = devices * cores
    for stack, pointers in processed.lhs_row_pointers.items():
        pointers = pointers.reshape(shards, -1)
        fields = [field[stack].reshape(shards, -1) for field in processed.sparse_dense_matmul_input[1:]]
        for core in range(shards):
            start, used = 0, np.zeros(fields[0].shape[1], bool)
            for shard in range(shards):
                end = pointers[core, shard]
                rows, samples, gains = (field[core, start:end].tolist() for field in fields)
                wanted = kept[stack, core, shard]
                assert [(row, sample) for row, sample, _ in wanted] == list(zip(rows, samples, strict=True))
                np.testing.assert_allclose(gains, [gain for *_, gain in wanted], atol=GAIN_TOLERANCE)
                used[start:end] = True
                start = -(-end // 8) * 8
            assert (pointers[core, shards:] == start).all()
            assert (fields[0][core, ~used] == PADDING_VALUE).all()
            assert (fields[1][core, ~used] == PADDING_VALUE).all()
            assert np.isnan(fields[2][core, ~used]).all()
        for index, field in enumerate(("max_ids_per_partition", "max_unique_ids_per_partition")):
            most = [max(counts[stack, d * cores + c, p][index] for c in range(cores))
                    for d in range(devices) for p in range(shards)]  # fmt: skip
            assert getattr(statistics, field)[stack].tolist() == most
        places = [sum(-(-counts[stack, core, p][0] // 8) * 8 for p in range(shards)) for core in range(shards)]
        assert statistics.required_buffer_size_per_sc[stack].tolist() == places
        assert statistics.id_drop_counters[stack] == dropped[stack]


def ragged(rows, dtype):
    result = np.empty(len(rows), object)
    result[:] = [np.asarray(row, dtype) for row in rows]
    return result


def draw_batch(seed, is_skewed):
    rng = np.random.default_rng(seed)
    batch, weights = {}, {}
    for name, vocabulary in (("a", 20), ("b", 50), ("c", 20)):
        lengths = rng.integers(0, 6, BATCHES[name])
        high = 3 if is_skewed else vocabulary
        batch[name] = [rng.integers(0, high, length).tolist() for length in lengths]
        weights[name] = [rng.uniform(0.1, 2, length).astype(np.float32).tolist() for length in lengths]
    return batch, weights


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 2), (4, 1)]),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    rotation=st.sampled_from([None, 0, 1, 3]),
    is_weighted=st.booleans(),
    is_skewed=st.booleans(),
    limits=st.sampled_from([(512, 512), (8, 8), (5, 2), (1, 1)]),
)
def test_buffers_and_statistics_equal_a_walk_over_ids(seed, layout, combiner, rotation, is_weighted, is_skewed, limits):
    devices, cores = layout
    specs = specs_for(devices, cores, combiner, rotation, *limits)
    batch, weights = draw_batch(seed, is_skewed)
    processed, statistics = embedding.preprocess_sparse_dense_matmul_input(
        {name: ragged(rows, np.int64) for name, rows in batch.items()},
        {name: ragged(rows, np.float32) for name, rows in weights.items()} if is_weighted else None,
        specs,
        devices,
        devices,
        num_sc_per_device=cores,
        allow_id_dropping=True,
    )
    stack = embedding.get_stacked_table_specs(specs)
    for spec in stack.values():
        # Tables that declare a lower limit than the stack's never tighten it.
        assert (spec.max_ids_per_partition, spec.max_unique_ids_per_partition) == limits
    walked = walk(specs, batch, weights if is_weighted else None, devices, cores, *limits)
    assert_same(processed, statistics, walked, devices, cores)


@pytest.mark.parametrize("convert", [
    lambda rows: rows,
    lambda rows: [tuple(row) for row in rows],
    lambda rows: ragged(rows, np.int32),
    lambda rows: ragged(rows, np.int64),
    lambda rows: ragged(rows, np.uint64),
    lambda rows: np.asarray(rows, np.uint8),
    lambda rows: np.asarray(rows, np.int64),
    lambda rows: jax.numpy.asarray(rows, np.int32),
], ids=["lists", "tuples", "ragged32", "ragged64", "ragged_unsigned", "dense_bytes", "dense64", "jax"])  # fmt: skip
def test_every_form_of_the_same_ids_gives_the_same_buffers(convert):
    rows = {name: (np.arange(3 * batch).reshape(batch, 3) % 20).tolist() for name, batch in BATCHES.items()}
    specs = specs_for(1, 2, "mean", 1)

    def run(convert):
        features = {name: convert(rows[name]) for name in rows}
        return embedding.preprocess_sparse_dense_matmul_input(features, None, specs, 1, 1, num_sc_per_device=2)[0]

    for got, wanted in zip(jax.tree.leaves(run(convert)), jax.tree.leaves(run(np.asarray)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_processes_together_fill_what_one_process_fills():
    specs = specs_for(4, 1, "sum", 1)
    batch, _ = draw_batch(3, is_skewed=False)
    parts = []
    for process in range(2):
        local = {
            name: ragged(rows, np.int32)[process * len(rows) // 2 :][: len(rows) // 2] for name, rows in batch.items()
        }
        parts.append(embedding.preprocess_sparse_dense_matmul_input(local, None, specs, 2, 4, num_sc_per_device=1)[0])
    whole, _ = embedding.preprocess_sparse_dense_matmul_input(
        {name: ragged(rows, np.int32) for name, rows in batch.items()}, None, specs, 4, 4, num_sc_per_device=1
    )
    together = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    jax.tree.map(np.testing.assert_array_equal, together, whole)


@pytest.mark.parametrize("is_global", [True, False])
def test_sparse_tensors_of_a_global_or_a_local_batch_are_cut_like_dense_ones(is_global, monkeypatch):
    specs = specs_for(4, 1, "sum", 1)
    rows = {name: np.arange(3 * batch).reshape(batch, 3) % 20 for name, batch in BATCHES.items()}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        own = {name: ids[process * len(ids) // 2 :][: len(ids) // 2] for name, ids in rows.items()}
        wanted = embedding.preprocess_sparse_dense_matmul_input(own, None, specs, 2, 4, num_sc_per_device=1)[0]
        given = rows if is_global else own
        indices, values, shapes = (
            {name: part(ids) for name, ids in given.items()}
            for part in (lambda ids: np.argwhere(ids >= 0), np.ravel, np.shape)
        )
        found = embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor(
            indices, values, shapes, specs, 2, 4, num_sc_per_device=1
        )[0]
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(got, want)


def test_leading_dimension_counts_local_devices():
    specs = specs_for(2, 2, "sum", 1)
    batch = {name: np.zeros((size, 1), np.int32) for name, size in BATCHES.items()}
    run = embedding.preprocess_sparse_dense_matmul_input
    flat, _ = run(batch, None, specs, 2, 2, num_sc_per_device=2)
    deep, _ = run(batch, None, specs, 2, 2, num_sc_per_device=2, has_leading_dimension=True)
    assert deep.num_minibatches.shape == (2, 1)
    for a, b in zip(jax.tree.leaves(flat), jax.tree.leaves(deep), strict=True):
        assert b.shape[0] == 2
        np.testing.assert_array_equal(a, b.reshape(-1))


def test_a_small_buffer_drops_whole_tails_and_counts_them():
    specs = specs_for(1, 1, "sum", None, suggested=16)
    batch = {name: (np.arange(size) % 20)[:, None] for name, size in BATCHES.items()}
    run = embedding.preprocess_sparse_dense_matmul_input
    processed, statistics = run(batch, None, specs, 1, 1, num_sc_per_device=1, allow_id_dropping=True)
    assert processed.lhs_row_pointers["first"].tolist() == [16] * 8
    assert statistics.id_drop_counters == {"first": 24 + 12 - 16, "second": 0}
    assert statistics.required_buffer_size_per_sc["first"].tolist() == [40]
    with pytest.raises(ValueError, match=r"stack 'first': 20 entries do not fit the buffer of 16 places .*to 40"):
        run(batch, None, specs, 1, 1, num_sc_per_device=1)


def test_cancelling_weights_give_zero_gains():
    table = embedding_spec.TableSpec(name="t", vocabulary_size=8, embedding_dim=4, combiner="mean")
    feature = embedding_spec.FeatureSpec(name="f", table_spec=table, input_shape=(2, 2))
    embedding.prepare_feature_specs_for_training(feature, 1, 1)
    weights = np.asarray([[1, -1], [0, 0]], np.float32)
    processed, _ = embedding.preprocess_sparse_dense_matmul_input(
        np.asarray([[1, 2], [3, 4]]), weights, feature, 1, 1, num_sc_per_device=1
    )
    assert processed.lhs_gains["t"][:4].tolist() == [0, 0, 0, 0]


def test_new_limits_change_the_tree_so_that_jit_traces_again():
    specs = specs_for(1, 1, "sum", None)
    batch = {name: np.zeros((size, 1), np.int32) for name, size in BATCHES.items()}

    def run():
        return embedding.preprocess_sparse_dense_matmul_input(batch, None, specs, 1, 1, num_sc_per_device=1)

    before, statistics = run()
    assert jax.tree.structure(before) == jax.tree.structure(run()[0])
    embedding.update_preprocessing_parameters(specs, statistics, 1)
    after, _ = run()
    assert jax.tree.structure(before) != jax.tree.structure(after)
    assert after.max_ids_per_partition("first") == 36
    assert embedding.PreprocessedInput(after.sparse_dense_matmul_input).max_ids_per_partition("first") is None
