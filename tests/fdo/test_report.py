"""Tests of reports on batches, against loops over all ids."""

import math
import sys
from collections import Counter
from fractions import Fraction

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest

import rsembed as rs
from rsembed.fdo import describe, ids
from rsembed.fdo.ids import zipf_exponent
from tests.test_progress import Terminal
from tests.world import made_mesh

NUM_FILMS = 50
NUM_BATCHES = 12
SAMPLES = 16
RNG = np.random.default_rng(0)


def film_bags():
    """Bags of films. Some are empty, have duplicates, or have ids outside a table of 50 rows."""
    lengths = RNG.integers(0, 7, SAMPLES)
    bags = [(RNG.zipf(1.3, length) % NUM_FILMS).tolist() for length in lengths]
    bags[3] = [*bags[3], -1, 99]
    bags[5] = [-7, 1, 1]
    return bags


SEEN = [film_bags() for _ in range(NUM_BATCHES)]
LIKED = [film_bags() for _ in range(NUM_BATCHES)]
KNOWN_KEYS = RNG.integers(-(2**63), 2**63, 30)
KEYS = [RNG.choice(KNOWN_KEYS, (SAMPLES, 2)) for _ in range(NUM_BATCHES)]


def collection(**options):
    film = rs.TableSpec("film", NUM_FILMS, 4)
    user = rs.TableSpec("user", 40, 4, storage=rs.Hashed())
    features = [
        rs.FeatureSpec("seen", film),
        rs.FeatureSpec("liked", film),
        rs.FeatureSpec("who", user),
    ]
    return rs.EmbeddingCollection(features, **options)


def batches():
    return [{"seen": s, "liked": li, "who": k} for s, li, k in zip(SEEN, LIKED, KEYS, strict=True)]


def expected_figures(streams, num_rows, num_shards, *, is_key=False):
    """Figures of a table, by loops. Each stream is a feature: a list of batches of bags."""

    def is_row(number):
        return number != -1 and (is_key or 0 <= number < num_rows)

    def shard_of(number):
        # Keys are unsigned.
        return int(number) % 2**64 % num_shards

    bags = [bag for stream in streams for batch in stream for bag in batch]
    lengths = [sum(map(is_row, bag)) for bag in bags]
    everything = [int(number) for bag in bags for number in bag]
    counts = Counter(filter(is_row, everything))
    hottest_first = sorted(counts.values(), reverse=True)
    loads = [0] * num_shards
    for number, count in counts.items():
        loads[shard_of(number)] += count

    most_entries = most_unique = num_distinct_by_batch = 0
    cache_sizes = {percent: math.ceil(num_rows * percent / 100) for percent in (1, 10, 30)}
    hits = dict.fromkeys(cache_sizes, 0)
    last_use = {}
    for number_of_batch, parts in enumerate(zip(*streams, strict=True)):
        entries, unique = Counter(), {}
        for part in parts:
            for sample, bag in enumerate(part):
                core = sample * num_shards // len(part)
                for number in {int(number) for number in bag if is_row(number)}:
                    entries[core, shard_of(number)] += 1
                    unique.setdefault((core, shard_of(number)), set()).add(number)
        most_entries = max([most_entries, *entries.values()])
        most_unique = max([most_unique, *map(len, unique.values())])
        distinct = set().union(*unique.values())
        num_distinct_by_batch += len(distinct)
        uses = list(last_use.values())
        for number in distinct & set(last_use):
            later = sum(use > last_use[number] for use in uses)
            for percent, size in cache_sizes.items():
                room = Fraction(size - later, uses.count(last_use[number]))
                hits[percent] += min(max(room, 0), 1)
        last_use |= dict.fromkeys(distinct, number_of_batch)

    all_rows = hottest_first if is_key else hottest_first + [0] * (num_rows - len(hottest_first))
    return {
        "num_rows": num_rows,
        "num_samples": len(lengths),
        "num_lookups": sum(lengths),
        "mean_ids_per_sample": sum(lengths) / len(lengths),
        "ids_per_sample_99th_percentile": np.percentile(lengths, 99, method="inverted_cdf"),
        "max_ids_per_sample": max(lengths),
        "num_out_of_range": sum(number != -1 and not is_row(number) for number in everything),
        "num_distinct_ids": len(counts),
        "hottest_share": sum(hottest_first[: math.ceil(num_rows / 100)]) / sum(lengths),
        "zipf_exponent": zipf_exponent(np.array(all_rows)),
        "ids_per_distinct_id": sum(lengths) / num_distinct_by_batch,
        "shard_loads": loads,
        "busiest_shard_load": max(loads) / np.mean(loads),
        "max_ids_per_partition": most_entries,
        "max_unique_ids_per_partition": most_unique,
        "hit_rates": {percent: float(hit / num_distinct_by_batch) for percent, hit in hits.items()},
        "counts": hottest_first,
    }


def assert_figures(figures, expected):
    for name, value in expected.items():
        got = getattr(figures, name)
        assert got == pytest.approx(value), f"{name}: {got}, expected {value}"


@pytest.mark.parametrize("fewest_pending", [1, ids.FEWEST_PENDING_IDS])
@pytest.mark.parametrize("num_shards", [None, 3])
def test_every_figure_is_what_loops_over_the_ids_count(monkeypatch, num_shards, fewest_pending):
    monkeypatch.setattr(ids, "FEWEST_PENDING_IDS", fewest_pending)
    report = describe(collection(), batches(), num_shards=num_shards)
    shards = num_shards or 8
    assert (report.num_batches, report.num_shards) == (NUM_BATCHES, shards)
    assert report.is_complete
    assert_figures(report.features["seen"], expected_figures([SEEN], NUM_FILMS, shards))
    assert_figures(report.features["liked"], expected_figures([LIKED], NUM_FILMS, shards))
    assert_figures(report.tables["film"], expected_figures([SEEN, LIKED], NUM_FILMS, shards))
    assert_figures(report.features["who"], expected_figures([KEYS], 40, shards, is_key=True))
    assert report.tables["user"] is report.features["who"]
    assert report.features["seen"].num_missing == NUM_BATCHES
    assert report.features["who"].num_missing == 0
    assert {figures.table for figures in report.features.values()} == {"film", "user"}


def in_range(bags):
    return [[i for i in bag if 0 <= i < NUM_FILMS] for bag in bags]


def padded(bags):
    """Bags as an array of 8 columns, with -1 after the ids of each bag."""
    return [bag + [-1] * (8 - len(bag)) for bag in bags]


def as_arrays(batch, _):
    weights = [[0.5] * len(bag) for bag in batch["seen"]]
    liked = jax.numpy.asarray(padded(batch["liked"]))
    return batch | {"seen": (batch["seen"], weights), "liked": liked}


def as_padded_bags(batch, _):
    return batch | {name: rs.Bags.from_lists(batch[name]).pad_to(200) for name in ("seen", "liked")}


def as_jagged(batch, _):
    bags = [*batch["seen"], *batch["liked"], *batch["who"].tolist()]
    ids = np.array([number for bag in bags for number in bag])
    return rs.Jagged(ids, list(map(len, bags)), features=["seen", "liked", "who"])


def as_prepared(batch, a_collection):
    return a_collection.prepare(batch)


@pytest.mark.slow_rows("None-as_arrays", "None-as_padded_bags", "None-as_prepared")
@pytest.mark.parametrize("form", [as_arrays, as_padded_bags, as_jagged, as_prepared])
@pytest.mark.parametrize("num_devices", [None, 4])
def test_a_report_does_not_depend_on_the_form_of_the_batches(form, num_devices):
    on_mesh = collection(mesh=made_mesh(num_devices))
    plain = [
        one | {"seen": in_range(one["seen"]), "liked": in_range(one["liked"])} for one in batches()
    ]
    report = describe(on_mesh, (form(one, on_mesh) for one in plain))
    expected = describe(collection(), plain, num_shards=num_devices)
    assert_figures(expected.tables["film"], {"num_missing": 0, "num_out_of_range": 0})
    for name, figures in report.features.items():
        values = dict(vars(expected.features[name]))
        values.pop("num_missing")
        assert_figures(figures, values)
    if form is as_arrays:
        num_places = 8 * SAMPLES * NUM_BATCHES
        assert (
            report.features["liked"].num_missing
            == num_places - report.features["liked"].num_lookups
        )


@pytest.mark.parametrize("num_rows", [3_000, 60_000, 3_000_000])
def test_the_mean_log_rank_of_the_fitted_law_is_that_of_the_counts(num_rows):
    counts = np.floor(1e6 / np.arange(1.0, 3001.0) ** 1.1)
    exponent = zipf_exponent(counts, num_rows=num_rows)
    if num_rows <= 60_000:
        assert exponent == zipf_exponent(np.append(np.zeros(num_rows - 3_000), counts))
    logs = np.log(np.arange(1, num_rows + 1))
    law = np.exp(-exponent * logs)
    mean_log = counts @ logs[: counts.size] / counts.sum()
    assert law @ logs / law.sum() == pytest.approx(mean_log, rel=1e-6)


def test_a_law_is_fitted_to_more_rows_than_64_bits_count():
    counts = np.array([5, 3, 1])
    exponents = [zipf_exponent(counts, num_rows=num_rows) for num_rows in (2**62, 2**64, 2**66)]
    assert exponents[0] > 1 and exponents == pytest.approx([exponents[0]] * 3, rel=0.01)


def test_a_stream_with_too_many_ids_stops_early_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(ids, "FEWEST_PENDING_IDS", 1)
    report = describe(collection(), batches(), max_distinct_ids=20)
    assert 0 < report.num_batches < NUM_BATCHES and not report.is_complete
    assert "stopped early, at max_distinct_ids" in repr(report)
    assert "max_distinct_ids=20" in caplog.text
    read = batches()[: report.num_batches]
    assert repr(describe(collection(), read)).split("\n\n")[1:] == repr(report).split("\n\n")[1:]


def test_tables_without_a_lookup_have_figures_too():
    nothing = {"seen": [[], [-1]], "liked": [[], [80]], "who": np.full((2, 1), -1)}
    report = describe(collection(), [nothing])
    film = report.tables["film"]
    assert (film.num_lookups, film.num_missing, film.num_out_of_range) == (0, 1, 1)
    assert film.busiest_shard_load == 0
    assert math.isnan(film.zipf_exponent) and "nan" in repr(report)


def test_a_report_prints_as_tables():
    report = describe(collection(), batches())
    title, data, needs = repr(report).split("\n\n")
    assert title == "features: 3, tables: 2, batches: 12, shards: 8"
    names = ["seen", "liked", "who", "(table) film"]
    for block in (data, needs):
        lines = block.splitlines()
        assert [line.split("  ")[0] for line in lines[1:]] == names
        assert max(map(len, lines)) <= 110
    film = report.tables["film"]
    assert f"{film.num_lookups:,}" in data and f"{film.hit_rates[30]:.1%}" in needs


def test_a_report_draws_its_figures():
    report = describe(collection(), batches())
    axes = report.plot()
    assert axes.shape == (2, 2) and len(plt.get_fignums()) == 1
    frequency, coverage, load, misses = axes.flat
    assert [line.get_label() for line in frequency.lines] == ["film", "user"]
    assert frequency.lines[0].get_ydata().tolist() == report.tables["film"].counts.tolist()
    assert coverage.lines[0].get_xdata()[-1] == 100 and coverage.lines[0].get_ydata()[-1] == 100
    total = report.tables["film"].shard_loads + report.tables["user"].shard_loads
    assert [bar.get_height() for bar in load.patches] == total.tolist()
    hit_rates = np.asarray(list(report.tables["user"].hit_rates.values()))
    assert misses.lines[1].get_ydata() == pytest.approx(100 - 100 * hit_rates)


def test_a_bar_tells_how_many_batches_were_read(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    describe(collection(), batches())
    assert "counting ids: 100%" in sys.stderr.getvalue() and "12/12" in sys.stderr.getvalue()
