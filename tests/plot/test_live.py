import numpy as np
import pytest

from rsembed import plot
from rsembed.plot.buffers import limit_costs, partition_entries
from tests.plot.preprocessing import preprocessed

NUM_CORES = 4
# The ids of a sample are distinct, so that each of them is an entry.
RNG = np.random.default_rng(0)
BATCHES = np.argsort(RNG.exponential(size=(3, 32, 60)) * np.arange(1, 61), axis=2)[:, :, :5]
ENTRIES = partition_entries(BATCHES, num_shards=NUM_CORES)


def test_partitions_and_drops_are_those_of_preprocessing():
    for limit in (4, 9, 200):
        dropped = 0
        for ids, entries in zip(BATCHES, ENTRIES, strict=True):
            inputs, seen = preprocessed(ids, NUM_CORES, limit)
            assert seen.max_ids_per_partition["t"].tolist() == entries.max(axis=0).tolist()
            dropped += int(np.sum(seen.id_drop_counters["t"]))
        fraction, num_bytes = limit_costs(ENTRIES, limit)
        assert fraction == pytest.approx(dropped / ENTRIES.sum())
        arrays = (inputs.lhs_embedding_ids, inputs.lhs_sample_ids, inputs.lhs_gains)
        assert num_bytes == sum(array["t"].nbytes for array in arrays)


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
