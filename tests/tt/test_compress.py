import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsembed.tt import TTEmbeddingBag, TTSpec, compress, fine_tune, from_dense, full_weight, round_cores

METHODS = {"tt", "reordered tt", "hot rows + tt", "low rank", "int8", "int4", "product codes"}


def trained_like(rows=1500, dim=16, seed=0):
    """Clusters, a few common directions, noise; scale falls with the row number, and rows come in no order."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(16, dim))[generator.integers(0, 16, rows)]
    shared = generator.normal(size=(rows, 3)) @ generator.normal(size=(3, dim))
    table = centres + 0.5 * shared + 0.3 * generator.normal(size=(rows, dim))
    table *= (1 + np.arange(rows)[:, None]) ** -0.2
    return table[generator.permutation(rows)].astype(np.float32)


TABLE = trained_like()


@functools.cache
def report_within(num_bytes):
    return compress(TABLE, bytes=num_bytes)


def by_method(report):
    return {entry.method: entry for entry in report.entries}


def test_every_reported_error_is_the_measured_one():
    report = report_within(30_000)
    assert {entry.method for entry in report.entries} == METHODS
    for entry in report.entries:
        wanted = np.linalg.norm(TABLE.astype(np.float64) - entry.reconstruction) / np.linalg.norm(TABLE)
        assert entry.relative_error == pytest.approx(wanted, rel=1e-4)
        assert entry.ratio == pytest.approx(TABLE.nbytes / entry.num_bytes)
        assert entry.fits == (entry.num_bytes <= 30_000)
        assert f"{entry.relative_error:.4f}" in str(report)


def test_bytes_are_those_of_the_arrays():
    found = by_method(report_within(30_000))
    spec, cores = found["tt"].payload
    assert found["tt"].num_bytes == sum(core.nbytes for core in cores)
    np.testing.assert_array_equal(full_weight(spec, cores), found["tt"].reconstruction)
    order, (_, cores) = found["reordered tt"].payload
    assert found["reordered tt"].num_bytes == sum(core.nbytes for core in cores) + 4 * order.size
    hot, rows, (_, cores) = found["hot rows + tt"].payload
    assert found["hot rows + tt"].num_bytes == sum(core.nbytes for core in cores) + rows.nbytes + 4 * hot.size
    np.testing.assert_array_equal(found["hot rows + tt"].reconstruction[hot], TABLE[hot])
    left, right = found["low rank"].payload
    assert found["low rank"].num_bytes == left.nbytes + right.nbytes
    codes = sum(codes.nbytes + words.nbytes for codes, words in found["product codes"].payload)
    assert found["product codes"].num_bytes == codes
    assert found["int8"].num_bytes == 1500 * 24
    assert found["int4"].num_bytes == 1500 * 16


def test_the_best_within_bytes_has_the_least_error():
    report = report_within(30_000)
    fitting = [entry for entry in report.entries if entry.fits]
    assert report.best.relative_error == min(entry.relative_error for entry in fitting)
    assert report.best.fits
    assert report.best.method == "int4"  # honest: a trained table is no tensor train
    assert report.best.relative_error < 0.2 * by_method(report)["tt"].relative_error


def test_the_best_within_an_error_has_the_fewest_bytes():
    report = compress(TABLE, max_relative_error=0.3)
    fitting = [entry for entry in report.entries if entry.fits]
    assert {"tt", "reordered tt", "hot rows + tt", "low rank", "int8", "int4"} <= {entry.method for entry in fitting}
    assert report.best.num_bytes == min(entry.num_bytes for entry in fitting)
    assert all(entry.relative_error <= 0.3 for entry in fitting)


def test_low_rank_is_the_best_of_its_rank():
    entry = by_method(compress(TABLE, bytes=4 * (1500 + 16) * 5))["low rank"]
    values = np.linalg.svd(TABLE.astype(np.float64), compute_uv=False)
    assert entry.relative_error == pytest.approx(np.linalg.norm(values[5:]) / np.linalg.norm(values), rel=1e-4)


@pytest.mark.parametrize(("method", "bits"), [("int8", 8), ("int4", 4)])
def test_integers_are_off_by_half_a_step_at_most(method, bits):
    entry = by_method(report_within(30_000))[method]
    step = (TABLE.max(1) - TABLE.min(1)) / (2**bits - 1)
    assert (np.abs(entry.reconstruction - TABLE).max(1) <= 0.501 * step).all()


def test_a_product_code_is_the_nearest_codeword():
    entry = by_method(report_within(30_000))["product codes"]
    width = 16 // len(entry.payload)
    for k, (codes, words) in enumerate(entry.payload):
        part = TABLE[:, k * width : (k + 1) * width].astype(np.float64)
        distances = ((part[:, None] - words[None]) ** 2).sum(2)
        chosen = distances[np.arange(len(part)), codes]
        np.testing.assert_allclose(chosen, distances.min(1), rtol=1e-4, atol=1e-6)


def test_similar_rows_become_neighbours():
    found = by_method(report_within(30_000))
    order, _ = found["reordered tt"].payload
    assert sorted(order) == list(range(1500))

    def roughness(table):
        return np.linalg.norm(np.diff(table, axis=0))

    assert roughness(TABLE[order]) < 0.8 * roughness(TABLE)


def test_methods_that_cannot_be_small_enough_are_left_out_or_marked():
    found = by_method(compress(TABLE, bytes=2_000))
    assert set(found) == {"tt", "int8", "int4"}
    assert not found["int8"].fits
    assert found["tt"].fits


def test_given_row_weights_choose_the_hot_rows():
    weights = np.zeros(1500)
    weights[[7, 99, 1400]] = [1, 3, 2]
    hot, _, _ = by_method(compress(TABLE, bytes=3_000, row_weights=weights))["hot rows + tt"].payload
    # 22 rows of 64 bytes and an id take half of the bytes; rows of equal weight are taken in order.
    assert hot.tolist() == [*range(20), 99, 1400]


def test_fine_tuning_lowers_the_error_of_the_rows_that_are_read():
    weights = (1.0 + np.random.default_rng(0).permutation(1500)) ** -1.2
    spec, cores = from_dense(TABLE, bytes=10_000)
    tuned, losses = fine_tune(spec, cores, TABLE, key=jax.random.key(0), row_weights=weights, batch_rows=512)

    def error(cores):
        squares = ((np.asarray(full_weight(spec, cores), np.float64) - TABLE) ** 2).sum(1)
        return np.average(squares, weights=weights) / np.average((TABLE**2).sum(1), weights=weights)

    assert error(tuned) < 0.8 * error(cores)
    assert losses.shape == (300,)
    assert losses[-50:].mean() == pytest.approx(error(tuned), rel=0.15)
    assert losses[0] == pytest.approx(error(cores), rel=0.3)


def test_fine_tuned_cores_go_into_a_module():
    spec, cores = from_dense(TABLE, bytes=10_000, dtype=jnp.bfloat16)
    tuned, _ = fine_tune(spec, cores, TABLE, key=jax.random.key(0), num_steps=1, batch_rows=512)
    emb = TTEmbeddingBag(1500, 16, spec.tt_ranks, spec.tt_p_shapes, spec.tt_q_shapes, dtype=jnp.bfloat16)
    emb.set_cores(tuned)
    assert [core.dtype for core in tuned] == [jnp.bfloat16] * 2
    np.testing.assert_allclose(emb.full_weight(), full_weight(spec, tuned), rtol=1e-6)


def test_wrong_fine_tuning_is_refused():
    spec, cores = from_dense(TABLE, bytes=10_000)
    with pytest.raises(ValueError, match="the table has shape"):
        fine_tune(spec, cores, TABLE[1:], key=jax.random.key(0))
    for weights in (np.zeros(1500), np.full(1500, np.nan), -np.ones(1500)):
        with pytest.raises(ValueError, match="row_weights must be 1500 numbers"):
            fine_tune(spec, cores, TABLE, key=jax.random.key(0), row_weights=weights)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="exactly one of bytes= and max_relative_error="):
        compress(TABLE)
    with pytest.raises(ValueError, match="all of them finite"):
        compress(np.full((3, 2), np.inf, np.float32), bytes=100)


@pytest.mark.parametrize("bound", [-0.1, float("nan"), float("inf")])
def test_error_bounds_without_a_meaning_are_refused(bound):
    spec, cores = from_dense(TABLE, bytes=2_000)
    for call in (
        lambda: compress(TABLE, max_relative_error=bound),
        lambda: from_dense(TABLE, max_relative_error=bound),
        lambda: round_cores(spec, cores, max_relative_error=bound),
    ):
        with pytest.raises(ValueError, match=rf"max_relative_error must be in \[0, inf\), got {bound}"):
            call()
    with pytest.raises(ValueError, match=rf"ratio must be in [\[(]0, inf\), got {bound}"):
        TTSpec.for_budget(100, 4, ratio=bound)


def test_row_weights_of_compress_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="row_weights must be 1500 finite numbers"):
        compress(TABLE, bytes=3_000, row_weights=np.full(1500, np.nan))
