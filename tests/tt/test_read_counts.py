import contextlib

import numpy as np
import pytest

from rsembed.tt import TTEmbeddingBag
from rsembed.tt.read_counts import MOST_READS, ReadCounts


def zipf_ids(num_rows, exponent, num_ids, seed):
    """Ids of a Zipf law; which id is frequent has nothing to do with its number."""
    generator = np.random.default_rng(seed)
    cumulative = np.cumsum(np.arange(1, num_rows + 1) ** -exponent)
    ranks = np.searchsorted(cumulative, generator.random(num_ids) * cumulative[-1], side="right")
    return np.random.default_rng(99).permutation(num_rows)[ranks]


def hit_rate(stored, ids):
    return np.isin(ids, stored).mean()


def exact_hit_rate(seen, num_rows, num_kept, ids):
    return hit_rate(np.argsort(-np.bincount(seen, minlength=num_rows), kind="stable")[:num_kept], ids)


@pytest.mark.parametrize(
    ("exponent", "batch", "hashtbl_size"), [(0.8, 3000, 0), (1.2, 60_000, 0), (0.8, 60_000, 1000), (1.2, 3000, 1000)]
)
def test_the_cache_hits_as_often_as_with_exact_counts(exponent, batch, hashtbl_size):
    with contextlib.nullcontext() if not hashtbl_size else pytest.warns(UserWarning, match="16384 are counted"):
        emb = TTEmbeddingBag(100_000, 4, [2], [320, 320], [2, 2], cache_size=1000, hashtbl_size=hashtbl_size)
    seen, future = (zipf_ids(100_000, exponent, 60_000, seed) for seed in (0, 1))
    for start in range(0, seen.size, batch):
        emb.update_cache(seen[start : start + batch], np.asarray([0]))
    emb.cache_populate()
    stored, _ = emb.caches[0].learned()
    assert stored.size <= 1000
    assert hit_rate(stored, future) > exact_hit_rate(seen, 100_000, 1000, future) - 0.01


def test_a_batch_with_more_distinct_ids_than_places_keeps_the_most_read_not_the_lowest():
    emb = TTEmbeddingBag(5000, 4, [2], [71, 71], [2, 2], cache_size=8, hashtbl_size=128)
    hot = np.arange(4990, 4998)
    emb.update_cache(np.concatenate([np.arange(5000), np.repeat(hot, 3)])[:, None])
    emb.cache_populate()
    assert emb.caches[0].learned()[0].tolist() == hot.tolist()


def test_counts_are_exact_while_there_is_room_and_no_id_counts_twice():
    generator, counts, wanted = np.random.default_rng(1), ReadCounts.empty(4096), {}
    for _ in range(5):
        ids = generator.zipf(1.3, 400) % 1000
        counts, num_uncounted = counts.counted(ids)
        assert num_uncounted == 0
        for i in ids.tolist():
            wanted[i] = wanted.get(i, 0) + 1
    assert {int(k): int(c) for k, c in zip(*counts, strict=True) if k >= 0} == wanted
    assert counts.of(np.asarray(sorted(wanted))).tolist() == [wanted[i] for i in sorted(wanted)]


def test_a_full_bucket_never_counts_too_little_and_holds_whatever_beats_its_least_count():
    generator, counts, exact = np.random.default_rng(2), ReadCounts.empty(32), np.zeros(200, int)
    for _ in range(50):
        ids = generator.zipf(1.2, 40) % 200
        counts, _ = counts.counted(ids)
        exact += np.bincount(ids, minlength=200)
        has_place = np.isin(np.arange(200), counts.keys)
        assert (counts.of(np.flatnonzero(has_place)) >= exact[has_place]).all()
        assert exact[~has_place].max() <= counts.reads.min()


def test_a_full_count_table_says_what_it_did_not_count_and_reuses_faded_places():
    counts, num_uncounted = ReadCounts.empty(8).counted(np.repeat(np.arange(8), [2, 2, 2, 2, 2, 2, 9, 9]))
    assert num_uncounted == 0
    full, num_uncounted = counts.counted(np.arange(100, 120))
    assert num_uncounted == 14  # six of the twenty took the places that were read twice, and inherited
    assert sorted(full.reads.tolist()) == [3] * 6 + [9, 9]
    faded, num_uncounted = counts.halved().halved().counted(np.asarray([100]))
    assert num_uncounted == 0
    assert faded.of(np.asarray([100, 6])).tolist() == [1, 2]
    assert (faded.keys == 100).sum() == 1


def test_counts_stop_at_the_largest_number_and_do_not_wrap():
    counts = ReadCounts(np.asarray([5], np.int32), np.asarray([MOST_READS], np.int32))
    assert counts.counted(np.asarray([5, 5]))[0].reads.tolist() == [MOST_READS]
