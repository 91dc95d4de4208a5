import numpy as np
import pytest

from rsembed import plot
from rsembed.plot.buffers import limit_costs, partition_entries
from rsembed.sparsecore import embedding, embedding_spec

NUM_CORES = 4
# Distinct ids in every sample, so that merged entries and ids are one.
RNG = np.random.default_rng(0)
BATCHES = np.argsort(RNG.exponential(size=(3, 32, 60)) * np.arange(1, 61), axis=2)[:, :, :5]
ENTRIES = partition_entries(BATCHES, num_shards=NUM_CORES)


def preprocess(ids, limit):
    table = embedding_spec.TableSpec(
        "t",
        64,
        8,
        max_ids_per_partition=limit,
        max_unique_ids_per_partition=512,
    )
    spec = embedding_spec.FeatureSpec("f", table, input_shape=(32, 5), output_shape=(32, 8))
    embedding.prepare_feature_specs_for_training(spec, 1, NUM_CORES)
    return embedding.preprocess_sparse_dense_matmul_input(
        ids, None, spec, 1, 1, num_sc_per_device=NUM_CORES, allow_id_dropping=True
    )


def test_partitions_and_drops_are_those_of_preprocessing():
    for limit in (4, 9, 200):
        dropped = 0
        for ids, entries in zip(BATCHES, ENTRIES, strict=True):
            inputs, seen = preprocess(ids, limit)
            assert seen.max_ids_per_partition["t"].tolist() == entries.max(axis=0).tolist()
            dropped += int(np.sum(seen.id_drop_counters["t"]))
        fraction, num_bytes = limit_costs(ENTRIES, limit)
        assert fraction == pytest.approx(dropped / ENTRIES.sum())
        places = (
            inputs.lhs_embedding_ids["t"].size
            + inputs.lhs_sample_ids["t"].size
            + inputs.lhs_gains["t"].size
        )
        assert num_bytes == 4 * places


def test_the_dot_stands_on_its_curve():
    ax = plot.plot_limit_choice(ENTRIES, 9)
    fraction, num_bytes = limit_costs(ENTRIES, 9)
    assert ax.lines[1].get_xydata().tolist() == [[num_bytes / 1e3, 100 * fraction]]


def test_dragging_the_slider_draws_the_picture_again(monkeypatch):
    pytest.importorskip("ipywidgets")
    shown = []
    monkeypatch.setattr(pytest.importorskip("IPython.display"), "display", shown.append)
    slider, _ = plot.explore(ENTRIES).children
    slider.value = 9
    titles = [figure.axes[0].get_title() for figure in shown]
    assert [title.split(":")[0] for title in titles] == [f"limit {ENTRIES.max()}", "limit 9"]
    assert titles[0].endswith("0.00% dropped")
