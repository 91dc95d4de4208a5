"""The communication model reproduces hand-computed tables, simulation, and what compiled programs send."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from rsembed.parallel import Hardware, bytes_sent, device_load, make_mesh, observed_ids, step_time, zipf_ids
from rsembed.parallel.communication import PATHS, DeviceLoad, link_bytes
from tests.parallel.hlo import collective_bytes

COLUMNS = ("all_gather", "all_to_all", "row_wise_reduce_scatter", "table_wise", "dedup")
# MB per device and step: 128 float32 columns, int64 ids, 1024 samples, 26 tables of 1e7 rows, zipf 1.05.
MEGABYTES = {
    (1, 8): (193.8, 24.0, 191.0, 24.0, 15.7),
    (1, 64): (1744, 27.1, 1718, 27.1, 17.7),
    (1, 512): (14149, 27.4, 13932, 27.4, 17.9),
    (20, 8): (250.5, 480.8, 194.6, 27.6, 223.2),
    (20, 64): (2254, 540.9, 1722, 31.0, 251.1),
    (20, 512): (18285, 548.5, 13936, 31.5, 254.6),
}
# Ids over distinct ids for 8k, 64k, 512k, 4M draws from one table.
REPETITIONS = {
    (0.8, 10**6): (1.18, 1.42, 2.09, 5.25),
    (0.8, 10**8): (1.04, 1.09, 1.19, 1.39),
    (0.8, 10**9): (1.02, 1.05, 1.09, 1.18),
    (1.05, 10**6): (2.16, 3.03, 4.77, 9.62),
    (1.05, 10**8): (1.78, 2.23, 2.89, 3.93),
    (1.05, 10**9): (1.69, 2.05, 2.55, 3.28),
    (1.2, 10**6): (4.00, 6.27, 10.5, 20.0),
    (1.2, 10**8): (3.60, 5.27, 7.84, 12.0),
    (1.2, 10**9): (3.52, 5.08, 7.40, 11.0),
}
# ms per step on 8, 64, 512, 4096 devices, for 1 and for 20 ids per sample.
MILLISECONDS = {
    "dedup": ((4.35, 7.05, 7.61, 7.92), (8.10, 40.4, 44.7, 45.5)),
    "hierarchical_dedup": ((4.32, 6.40, 6.73, 6.85), (8.07, 31.9, 35.0, 35.4)),
    "all_to_all": ((4.53, 8.38, 9.08, 9.41), (13.7, 85.3, 94.5, 95.9)),
    "table_wise": ((4.53, 8.38, 9.08, 9.41), (7.68, 12.1, 12.8, 13.2)),
    "row_wise_reduce_scatter": ((6.76, 55.4, 442, 3537), (9.91, 59.1, 446, 3541)),
}


@pytest.fixture(scope="module")
def popular_ids():
    return zipf_ids(10**7, 1.05)


@pytest.mark.parametrize(("ids_per_sample", "num_devices"), MEGABYTES)
def test_bytes_per_step(popular_ids, ids_per_sample, num_devices):
    load = device_load(popular_ids, local_batch=1024, num_features=26, ids_per_sample=ids_per_sample, embedding_dim=128)
    found = [bytes_sent(path, load, num_devices) / 1e6 for path in COLUMNS]
    np.testing.assert_allclose(found, MEGABYTES[ids_per_sample, num_devices], rtol=5e-3)


@pytest.mark.parametrize(("exponent", "vocabulary_size"), REPETITIONS)
def test_repetitions_of_popular_ids(exponent, vocabulary_size):
    ids = zipf_ids(vocabulary_size, exponent)
    assert ids.num_ids.sum() == vocabulary_size
    draws = [2**13, 2**16, 2**19, 2**22]
    found = [number / ids.expected_distinct(number) for number in draws]
    np.testing.assert_allclose(found, REPETITIONS[exponent, vocabulary_size], rtol=1e-2)


@pytest.mark.parametrize("path", MILLISECONDS)
def test_step_times(path):
    ids, hardware, sizes = zipf_ids(10**8 // 26, 1.05), Hardware(), (8, 64, 512, 4096)
    for ids_per_sample, expected in zip((1, 20), MILLISECONDS[path], strict=True):
        load = device_load(ids, local_batch=4096, num_features=26, ids_per_sample=ids_per_sample, embedding_dim=128)
        found = np.array([step_time(path, load, n, hardware, dense_seconds=4e-3) for n in sizes])
        if path == "hierarchical_dedup":  # the table counts one latency for its three collectives
            found -= [2 * hardware.latency_seconds(n) for n in sizes]
        np.testing.assert_allclose(1e3 * found, expected, rtol=5e-3)


@pytest.mark.parametrize(
    ("vocabulary_size", "exponent", "draws"), [(1000, 1.05, 700), (300_000, 0.8, 20_000), (50, 0, 40)]
)
def test_distinct_ids_agree_with_drawing_them(vocabulary_size, exponent, draws):
    rng = np.random.default_rng(0)
    weights = np.array([rank**-exponent for rank in range(1, vocabulary_size + 1)])
    upper = np.cumsum(weights / weights.sum())
    trials = [len(set(np.searchsorted(upper, rng.random(draws)).tolist())) for _ in range(50)]
    error = 4 * np.std(trials) / np.sqrt(len(trials))
    assert abs(zipf_ids(vocabulary_size, exponent).expected_distinct(draws) - np.mean(trials)) < error
    counts = np.zeros(vocabulary_size + 3)
    counts[:vocabulary_size] = weights
    assert abs(observed_ids(counts).expected_distinct(draws) - np.mean(trials)) < error


def test_one_id_and_one_device():
    assert zipf_ids(1, 1.0).expected_distinct(5) == 1
    load = DeviceLoad(num_ids=10, num_outputs=10, num_distinct_ids=5, num_rows=9, embedding_dim=2)
    for path in PATHS:
        assert bytes_sent(path, load, 1) == 0


def test_a_second_look_for_equal_ids_saves_what_leaves_the_node(popular_ids):
    load = device_load(popular_ids, local_batch=1024, num_features=1, ids_per_sample=1, embedding_dim=64)
    plain, second = (link_bytes(path, load, 64) for path in ("dedup", "hierarchical_dedup"))
    of_node = popular_ids.expected_distinct(8 * 1024) / 8
    assert second[1] / plain[1] == pytest.approx(of_node / popular_ids.expected_distinct(1024))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda load: bytes_sent("dedupe", load, 8), "unknown path 'dedupe'; choose one of dedup, hier"),
        (lambda load: bytes_sent("dedup", load, 12), "12 devices do not fill nodes of 8"),
        (lambda load: zipf_ids(0, 1.0), "vocabulary_size must be at least 1"),
        (lambda load: observed_ids(np.zeros(3)), "at least one must be above 0"),
    ],
)
def test_wrong_questions(make, message):
    load = DeviceLoad(num_ids=10, num_outputs=10, num_distinct_ids=5, num_rows=9, embedding_dim=2)
    with pytest.raises(ValueError, match=message):
        make(load)


# The reader of compiled programs, with which the model is compared

BODIES = {
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "shard", 0, 0, tiled=True), 64 * 3 * 4 * 7 / 8),
    "all-gather": (lambda x: jax.lax.all_gather(x, "shard", tiled=True), 64 * 3 * 4 * 7),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "shard", tiled=True), 64 * 3 * 4 * 7 / 8),
    "all-reduce": (lambda x: jax.lax.psum(x, "shard"), 2 * 64 * 3 * 4 * 7 / 8),
}


@pytest.mark.parametrize("name", BODIES)
def test_bytes_of_compiled_collectives(name):
    body, expected = BODIES[name]
    program = jax.shard_map(body, mesh=make_mesh(), in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    text = jax.jit(program).lower(jnp.zeros((512, 3))).compile().as_text()
    assert collective_bytes(text, 8) == {name: expected}


def test_a_program_without_collectives_sends_nothing():
    text = jax.jit(lambda x: x + 1).lower(jnp.zeros(8)).compile().as_text()
    assert collective_bytes(text, 8) == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%a = (f32[1,64,8]{2,1,0}, f32[1,64,8]{2,1,0}) all-to-all(f32[1,64,8]{2,1,0} %x, f32[1,64,8]{2,1,0} %y), "
            "replica_groups={{0,1},{2,3}}",
            {"all-to-all": 2 * 64 * 8 * 4 / 2},
        ),
        (
            "%g = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            {"all-gather": 8 * 4 * 2 * 3 / 4},
        ),
        ("%r = s32[] all-reduce(s32[] %x), replica_groups={}, to_apply=%add", {"all-reduce": 2 * 4 * 7 / 8}),
        ("%d = bf16[8,4]{1,0} all-gather-done(%g)", {}),
    ],
)
def test_other_forms_of_collectives_are_read(line, expected):
    assert collective_bytes(line, 8) == expected
