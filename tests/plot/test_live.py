import base64
import sys

import numpy as np
import pytest

from rsembed import plot
from rsembed.caching import miss_ratio_curve
from rsembed.sparsecore import embedding, embedding_spec

NUM_CORES = 4
# Distinct ids in every sample, so that merged entries and ids are one.
RNG = np.random.default_rng(0)
BATCHES = np.argsort(RNG.exponential(size=(3, 32, 60)) * np.arange(1, 61), axis=2)[:, :, :5]
PROFILE = plot.profile_stream(BATCHES, num_shards=NUM_CORES)


def preprocess(ids, limit):
    table = embedding_spec.TableSpec(
        name="t", vocabulary_size=64, embedding_dim=8, max_ids_per_partition=limit, max_unique_ids_per_partition=512
    )
    spec = embedding_spec.FeatureSpec(name="f", table_spec=table, input_shape=(32, 5), output_shape=(32, 8))
    embedding.prepare_feature_specs_for_training(spec, 1, NUM_CORES)
    return embedding.preprocess_sparse_dense_matmul_input(
        ids, None, spec, 1, 1, num_sc_per_device=NUM_CORES, allow_id_dropping=True
    )


def test_partitions_and_drops_are_those_of_preprocessing():
    for limit in (4, 9, 200):
        dropped = 0
        for ids, entries in zip(BATCHES, PROFILE.entries, strict=True):
            inputs, seen = preprocess(ids, limit)
            assert seen.max_ids_per_partition["t"].tolist() == entries.max(axis=0).tolist()
            dropped += int(np.sum(seen.id_drop_counters["t"]))
        costs = PROFILE.costs(limit, 1, embedding_dim=8)
        assert costs.dropped_fraction == pytest.approx(dropped / PROFILE.entries.sum())
        places = inputs.lhs_embedding_ids["t"].size + inputs.lhs_sample_ids["t"].size + inputs.lhs_gains["t"].size
        assert costs.buffer_bytes == 4 * places


def test_hits_are_what_the_miss_ratio_curve_leaves():
    sizes = np.array([0, 1, 7, 30, 64])
    hits = [PROFILE.costs(1, int(rows), embedding_dim=2).hit_rate for rows in sizes]
    np.testing.assert_allclose(hits, 1 - miss_ratio_curve(BATCHES.reshape(-1), sizes))
    assert PROFILE.costs(1, 7, embedding_dim=2).cache_bytes == 56
    assert PROFILE.num_rows == len(np.unique(BATCHES))


@pytest.mark.parametrize("batches", [np.zeros((1, 5, 2), int), np.full((1, 4, 2), -1)])
def test_streams_without_a_profile_are_refused(batches):
    with pytest.raises(ValueError, match="profile_stream"):
        plot.profile_stream(batches, num_shards=4)


def test_the_dots_stand_on_their_curves():
    left = plot.plot_limit_choice(PROFILE, 9)
    costs = PROFILE.costs(9, 0, embedding_dim=1)
    assert left.lines[1].get_xydata().tolist() == [[costs.buffer_bytes / 1e3, 100 * costs.dropped_fraction]]
    right = plot.plot_cache_choice(PROFILE, 7, embedding_dim=2)
    (rows, misses), curve = right.lines[1].get_xydata()[0], right.lines[0]
    assert misses == pytest.approx(np.interp(rows, curve.get_xdata(), curve.get_ydata()))
    assert "56" not in right.get_title() and "cache of 7 rows: 0 kB" in right.get_title()


def explorer():
    return plot.explore(BATCHES, num_shards=NUM_CORES, embedding_dim=8, max_ids_per_partition=9, cache_rows=7)


@pytest.fixture
def page(monkeypatch):
    """What is displayed, in order; pictures have a handle, whose updates replace them."""
    shown = []

    class Handle:
        def __init__(self):
            self.place = len(shown)

        def update(self, bundle, *, raw):
            shown[self.place] = bundle

    def display(what, *, raw=False, display_id=False):
        handle = Handle()
        shown.append(what)
        return handle if display_id else None

    monkeypatch.setattr(pytest.importorskip("IPython.display"), "display", display)
    return shown


def test_dragging_a_slider_draws_the_picture_again(page):
    pytest.importorskip("ipywidgets")
    shown = explorer()
    shown._ipython_display_()
    sliders, before = page
    limit, cache = sliders.children
    limit.value = max(value for _, value in limit.options)
    cache.value = 1
    assert page[1]["image/png"] != before["image/png"]
    assert (shown.max_ids_per_partition, shown.cache_rows) == (PROFILE.entries.max(), 1)
    assert shown.costs_now() == PROFILE.costs(int(PROFILE.entries.max()), 1, embedding_dim=8)
    assert page[1]["text/plain"] == repr(shown.costs_now())


@pytest.mark.parametrize("has_widgets", [True, False])
def test_the_picture_is_an_output_of_its_own_which_needs_no_widget(page, monkeypatch, has_widgets):
    if not has_widgets:
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer()._ipython_display_()
    picture = page[-1]
    assert len(page) == 1 + has_widgets and set(picture) == {"image/png", "text/plain"}
    assert base64.b64decode(picture["image/png"])[:4] == b"\x89PNG"
    assert "dropped_fraction" in picture["text/plain"]


def test_sliders_start_where_nothing_is_dropped_and_refuse_nothing():
    shown = plot.explore(BATCHES, num_shards=NUM_CORES, embedding_dim=8)
    assert (shown.max_ids_per_partition, shown.cache_rows) == (PROFILE.entries.max(), PROFILE.num_rows // 10)
    with pytest.raises(ValueError, match="cache_rows=0"):
        plot.explore(BATCHES, num_shards=NUM_CORES, embedding_dim=8, cache_rows=0)
