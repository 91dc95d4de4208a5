"""Reports on the ids of batches, and on the limits, shards and caches that they need."""

from __future__ import annotations

import dataclasses
import html
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from rsembed.bags import PAD_ID, Bags, as_bags, check_bags, check_ids_dtype
from rsembed.checks import PositiveInt, validated
from rsembed.collection import EmbeddingCollection
from rsembed.collection.inputs import check_names, is_unknown
from rsembed.fdo.ids import IdCounter, partition_counts, zipf_exponent
from rsembed.fdo.statistics import EXACT
from rsembed.keys import Keys, is_beyond, join_keys, split_keys
from rsembed.progress import progress
from rsembed.specs import FeatureSpec, TableSpec

CACHE_PERCENTS = (1, 10, 30)
SHARDS_OF_ONE_DEVICE = 8
MOST_CURVES = 7
"""Curves in one panel. There are seven colours."""
_log = logging.getLogger("rsembed")

Cells = list[tuple[str, ...]]
"""Cells of a printed table: the column names, then one tuple for each row."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IdFigures:
    """Figures of the ids of one feature, or of all features that read one table.

    A *lookup* is an id that reads a row: it is neither missing nor out of range. Duplicates count.
    For a table that several features read, the samples of all of them count.

    Attributes:
      table: name of the table.
      num_rows: rows of the table, its `vocabulary_size`.
      num_samples: samples of all batches, including samples without ids.
      num_lookups: lookups of all batches.
      mean_ids_per_sample: lookups divided by samples.
      ids_per_sample_99th_percentile: the smallest number of lookups that 99 % of the samples do not
        exceed.
      max_ids_per_sample: lookups of the longest sample.
      num_missing: places that hold -1, which is no id. The padding of arrays counts, too.
      num_out_of_range: ids outside the table, or keys that the table's `key_dtype` cannot hold.
      num_distinct_ids: different ids among all lookups.
      hottest_share: share (0 to 1) of the lookups that read the hottest 1 % of the table's rows
        (rounded up to whole rows). This is what a cache serves that knows the hottest rows before
        the first batch.
      zipf_exponent: exponent of the Zipf law that fits the lookups of all rows, see
        `zipf_exponent`. For tables of keys, the rows are the keys that were seen. NaN without
        lookups, or where there is only one row.
      ids_per_distinct_id: lookups divided by the sum of the distinct ids of each batch. A lookup
        that merges the duplicates of a batch reads this many times fewer rows.
      shard_loads: lookups of each shard, where id `i` belongs to shard `i % num_shards`.
      max_ids_per_partition: the smallest limit that would have dropped nothing. Each batch is cut
        by sample into `num_shards` nearly equal parts, one for each core. A partition holds what
        one core sends to one shard; equal ids of one sample are sent once.
      max_unique_ids_per_partition: the smallest limit for distinct ids that would have dropped
        nothing.
      hit_rates: by size in percent of the table's rows, the hit rate (0 to 1) of an LRU cache.
        The cache starts empty. Before a batch is looked up, each of its distinct ids hits if
        the cache has its row, else the row is fetched. So this is the share of the rows of all
        batches that need not be fetched. Rows of one batch are equally recent: where only part of
        them fits into the cache, that part counts.
      counts: lookups of each distinct id, the most frequent first.
    """

    table: str
    num_rows: int
    num_samples: int
    num_lookups: int
    mean_ids_per_sample: float
    ids_per_sample_99th_percentile: int
    max_ids_per_sample: int
    num_missing: int
    num_out_of_range: int
    num_distinct_ids: int
    hottest_share: float
    zipf_exponent: float
    ids_per_distinct_id: float
    shard_loads: Int[np.ndarray, " shards"]
    max_ids_per_partition: int
    max_unique_ids_per_partition: int
    hit_rates: dict[int, float]
    counts: Int[np.ndarray, " ids"] = dataclasses.field(repr=False)

    @property
    def busiest_shard_load(self) -> float:
        """Lookups of the busiest shard divided by the mean over shards; 1 is even."""
        return _ratio(float(self.shard_loads.max()), float(self.shard_loads.mean()))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IdReport:
    """Report of `describe`: prints as two tables, draws itself, and holds every figure.

    Attributes:
      features: figures of each feature, by its name.
      tables: figures of each table, by its name.
      num_batches: batches that were read.
      num_shards: number of shards that the figures of shards and partitions are for.
      is_complete: False if `describe` stopped early, at `max_distinct_ids`.
    """

    features: dict[str, IdFigures]
    tables: dict[str, IdFigures]
    num_batches: int
    num_shards: int
    is_complete: bool = True

    def __repr__(self) -> str:
        blocks = [self._title()]
        for cells in self._blocks():
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            lines = []
            for row in cells:
                padded = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
                lines.append("  ".join(padded).rstrip())
            blocks.append("\n".join(lines))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(self._title())}</p>"]
        for columns, *rows in self._blocks():
            parts.append("<table>")
            parts.append(_html_row("th", columns))
            for row in rows:
                parts.append(_html_row("td", row))
            parts.append("</table>")
        return "".join(parts)

    def plot(self, *, tables: Sequence[str] | None = None) -> np.ndarray:
        """Draws a new figure of four panels, with functions of `rs.plot`.

        The panels show how often ids occur, which share of the lookups the hottest rows serve, the
        load of each shard (over all tables), and the miss ratio of LRU caches.

        Args:
          tables: names of the tables to draw. None takes the seven with the most lookups, since
            there are seven colours.

        Returns: the four `Axes`, as an array `[2, 2]`.

        Raises: ValueError: a name is no table of the report, or no table has a lookup.
        """
        import matplotlib.pyplot as plt

        from rsembed import plot

        drawn = self._tables_to_draw(tables)
        _, axes = plt.subplots(2, 2, figsize=(11.0, 7.6), layout="constrained")
        misses = {}
        for name, figures in drawn.items():
            counts = figures.counts
            num_rows = max(figures.num_rows, len(counts))  # more keys than rows may come
            plot.plot_id_frequency(counts, ax=axes[0, 0], label=name)
            plot.plot_coverage(counts, num_rows=num_rows, ax=axes[0, 1], label=name)
            misses[name] = {percent: 1 - rate for percent, rate in figures.hit_rates.items()}
        load = np.sum([figures.shard_loads for figures in self.tables.values()], axis=0)
        plot.plot_shard_load({"all tables": load}, ax=axes[1, 0])
        plot.plot_miss_ratio(misses, xlabel="LRU cache (% of the table's rows)", ax=axes[1, 1])
        axes[1, 1].set_ylabel("rows of batches to fetch (%)")
        titles = ("How often ids occur", "What the hottest rows serve", "Load of shards", "Caches")
        for ax, title in zip(axes.flat, titles, strict=True):
            ax.set_title(title)
        return np.asarray(axes)

    def _tables_to_draw(self, names: Sequence[str] | None) -> dict[str, IdFigures]:
        if names is None:
            by_lookups = sorted(self.tables, key=lambda name: -self.tables[name].num_lookups)
            names = by_lookups[:MOST_CURVES]
        unknown = sorted(set(names) - set(self.tables))
        if unknown:
            raise ValueError(f"plot: no table {unknown}; the report has {sorted(self.tables)}.")
        drawn = {}
        for name in names:
            if self.tables[name].num_lookups:
                drawn[name] = self.tables[name]
        if not drawn:
            raise ValueError(f"plot: none of the tables {sorted(names)} was looked up.")
        return drawn

    def _title(self) -> str:
        features = _count(len(self.features), "feature")
        tables = _count(len(self.tables), "table")
        batches = _count(self.num_batches, "batch", "batches")
        shards = _count(self.num_shards, "shard")
        title = f"{features} of {tables}, {batches}; {shards}"
        if not self.is_complete:
            title += "; stopped early, at max_distinct_ids"
        return title

    def _rows(self) -> list[tuple[str, IdFigures]]:
        """Features, then tables that several features read, which a feature's figures do not cover."""
        rows = list(self.features.items())
        for name, figures in self.tables.items():
            if figures not in self.features.values():
                rows.append((f"(table) {name}", figures))
        return rows

    def _blocks(self) -> tuple[Cells, Cells]:
        """Cells of the two printed tables: what the data are like, and what they need."""
        names = ("samples", "ids/sample", "99 %", "longest", "lookups", "distinct", "missing")
        data: Cells = [("feature", "table", *names, "out of range")]
        head = (f"busiest of {self.num_shards}", "max ids", "max unique")
        caches = tuple(f"LRU {percent} %" for percent in CACHE_PERCENTS)
        needs: Cells = [("feature", "hottest 1 %", "Zipf", "ids/distinct", *head, *caches)]
        for name, figures in self._rows():
            data.append(
                (
                    name,
                    figures.table,
                    f"{figures.num_samples:,}",
                    f"{figures.mean_ids_per_sample:.2f}",
                    f"{figures.ids_per_sample_99th_percentile:,}",
                    f"{figures.max_ids_per_sample:,}",
                    f"{figures.num_lookups:,}",
                    f"{figures.num_distinct_ids:,}",
                    f"{figures.num_missing:,}",
                    f"{figures.num_out_of_range:,}",
                )
            )
            needs.append(
                (
                    name,
                    f"{figures.hottest_share:.1%}",
                    f"{figures.zipf_exponent:.2f}",
                    f"{figures.ids_per_distinct_id:.2f}",
                    f"{figures.busiest_shard_load:.2f}",
                    f"{figures.max_ids_per_partition:,}",
                    f"{figures.max_unique_ids_per_partition:,}",
                    *(f"{rate:.1%}" for rate in figures.hit_rates.values()),
                )
            )
        return data, needs


@validated
def describe(
    collection: EmbeddingCollection,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_shards: PositiveInt | None = None,
    max_distinct_ids: PositiveInt = 50_000_000,
) -> IdReport:
    """A report on the ids of batches, which prints as a table and draws itself.

    It says how skewed the ids are, how many are missing or out of range, and what limits, shards and
    caches would do. `IdFigures` defines each figure. No table is read, and nothing is compiled. Ids
    out of range are counted, also where `prepare` would refuse them.

    Memory grows with the number of distinct ids (about 100 bytes each, at its peak), not with the
    number of batches. A progress bar is shown in a terminal and in a notebook.

    Args:
      collection: the features, and the tables that they read.
      batches: any iterable of batches, each in a form that `collection.prepare` takes. With several
        processes, pass the batches of this process before they are prepared.
      num_shards: number of shards for the figures of shards and partitions. None takes the number
        of devices on the collection's mesh, or 8 without a mesh.
      max_distinct_ids: bound on the memory, which tables of 64-bit keys need. Counting stops with a
        warning once a table has more distinct ids, and the report covers the batches before.

    Raises:
      TypeError: `batches` is a single batch, or a batch is of no form that `prepare` takes.
      ValueError: there is no batch, or a batch does not match the features.

    Example:
      >>> import rsembed as rs
      >>> film = rs.TableSpec(name="film", vocabulary_size=100, embedding_dim=4)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="seen", table_spec=film)])
      >>> report = describe(collection, [{"seen": [[1, 2], [1]]}, {"seen": [[1], [250, 7]]}])
      >>> report.tables["film"].num_lookups, report.features["seen"].num_out_of_range
      (5, 1)
    """
    if num_shards is None:
        mesh = collection.devices.mesh
        num_shards = SHARDS_OF_ONE_DEVICE if mesh is None else collection.devices.num_devices
    features, tables = _streams_of(collection, num_shards)
    streams = {*features.values(), *tables.values()}
    num_batches = 0
    is_complete = True
    for batch in progress(batches, description="counting ids"):
        if any(stream.num_distinct_ids > max_distinct_ids for stream in streams):
            _log.warning(
                "describe: stopped after %d batches: a table has more than max_distinct_ids=%d distinct ids; raise it "
                "if there is memory.",
                num_batches,
                max_distinct_ids,
            )
            is_complete = False
            break
        check_names(collection.features, batch, "batch")
        lookups = {}
        for name, feature in collection.features.items():
            lookups[name] = _lookups_of(feature, batch[name])
        for stream in streams:
            stream.add(lookups)
        num_batches += 1
    if not num_batches:
        raise ValueError(
            "describe: there is no batch to describe; a generator can be read only once."
        )
    figures = {stream: stream.figures() for stream in streams}
    return IdReport(
        features={name: figures[stream] for name, stream in features.items()},
        tables={name: figures[stream] for name, stream in tables.items()},
        num_batches=num_batches,
        num_shards=num_shards,
        is_complete=is_complete,
    )


def _streams_of(
    collection: EmbeddingCollection, num_shards: int
) -> tuple[dict[str, _Stream], dict[str, _Stream]]:
    """Streams of the features and of the tables, by name. A table with one feature has its stream."""
    features = {}
    readers: dict[str, list[str]] = {}
    for name, feature in collection.features.items():
        features[name] = _Stream(feature.table_spec, [name], num_shards)
        readers.setdefault(feature.table_spec.name, []).append(name)
    tables = {}
    for name, feature_names in readers.items():
        if len(feature_names) == 1:
            tables[name] = features[feature_names[0]]
        else:
            tables[name] = _Stream(collection.table_specs[name], feature_names, num_shards)
    return features, tables


class _Lookups(NamedTuple):
    """Ids of one feature in one batch that read a row, with the sample of each."""

    ids: np.ndarray
    samples: np.ndarray
    num_samples: int
    num_missing: int
    num_out_of_range: int


def _lookups_of(feature: FeatureSpec, value: Any) -> _Lookups:
    """Lookups of a feature's part of a batch, and counts of its other ids."""
    bags = as_bags(value, feature=feature.name)
    if is_unknown(bags):
        raise TypeError(
            f"describe: feature {feature.name!r}: the ids cannot be read, since they are traced or another process "
            "has some of them; call it outside of jit, with batches of this process that are not prepared."
        )
    bags = jax.tree.map(np.asarray, bags)
    check_bags(bags, feature=feature.name)
    ids, is_missing, is_outside = _numbers_of(bags, feature)
    offsets = bags.offsets.astype(np.int64)
    samples = np.repeat(np.arange(bags.num_bags), np.diff(offsets))
    used = slice(0, int(offsets[-1]))  # what follows the last offset is room for more ids
    is_missing = is_missing[used]
    is_outside = is_outside[used] & ~is_missing
    is_lookup = ~is_missing & ~is_outside
    return _Lookups(
        ids=ids[used][is_lookup],
        samples=samples[is_lookup],
        num_samples=bags.num_bags,
        num_missing=int(is_missing.sum()),
        num_out_of_range=int(is_outside.sum()),
    )


def _numbers_of(bags: Bags, feature: FeatureSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids as 64-bit numbers, and masks of the places without an id and of ids out of range."""
    storage = feature.table_spec.storage
    if storage is not None and storage.key_dtype is not None:
        keys = bags.ids
        if not isinstance(keys, Keys):
            keys = split_keys(keys, feature=f"feature {feature.name!r}")
        numbers = join_keys(keys.high, keys.low)
        return numbers, ~keys.is_key, is_beyond(keys, storage.key_dtype)
    check_ids_dtype(bags, feature=feature.name)
    is_outside = (bags.ids < 0) | (bags.ids >= feature.table_spec.vocabulary_size)
    numbers = np.where(is_outside, 0, bags.ids).astype(np.int64)
    return numbers, bags.ids == PAD_ID, is_outside


def _takes_keys(table: TableSpec) -> bool:
    return table.storage is not None and table.storage.key_dtype is not None


class _Stream:
    """Running counts of the lookups of one feature, or of all features of one table."""

    def __init__(self, table: TableSpec, features: Sequence[str], num_shards: int):
        self._table = table
        self._features = features
        self._num_shards = num_shards
        dtype = np.uint64 if _takes_keys(table) else np.int64
        cache_rows = [
            math.ceil(table.vocabulary_size * percent / 100) for percent in CACHE_PERCENTS
        ]
        self._counter = IdCounter(dtype, cache_rows)
        self._samples_by_length: np.ndarray = np.zeros(1, np.int64)
        self._num_missing = 0
        self._num_out_of_range = 0
        self._max_ids = 0
        self._max_unique = 0

    @property
    def num_distinct_ids(self) -> int:
        """Distinct ids up to the last merge."""
        return int(self._counter.ids.size)

    def add(self, lookups: Mapping[str, _Lookups]) -> None:
        """Counts one batch, given as the lookups of each feature."""
        parts = [lookups[name] for name in self._features]
        samples = []
        cores = []
        lengths = []
        first_sample = 0
        for part in parts:
            samples.append(part.samples + first_sample)
            cores.append(part.samples * self._num_shards // max(part.num_samples, 1))
            lengths.append(np.bincount(part.samples, minlength=part.num_samples))
            first_sample += part.num_samples
            self._num_missing += part.num_missing
            self._num_out_of_range += part.num_out_of_range
        ids = np.concatenate([part.ids for part in parts])
        samples_by_length = np.bincount(
            np.concatenate(lengths), minlength=self._samples_by_length.size
        )
        samples_by_length[: self._samples_by_length.size] += self._samples_by_length
        self._samples_by_length = samples_by_length
        self._counter.add(ids)
        entries, distinct = partition_counts(
            ids, np.concatenate(samples), np.concatenate(cores), self._num_shards
        )
        self._max_ids = max(self._max_ids, int(entries.max()))
        self._max_unique = max(self._max_unique, int(distinct.max()))

    def figures(self) -> IdFigures:
        """All figures of what was added."""
        self._counter.merge()
        ids = self._counter.ids
        counts = self._counter.counts
        hottest_first = np.sort(counts)[::-1]
        num_lookups = int(counts.sum())
        num_samples = int(self._samples_by_length.sum())
        covered = np.cumsum(self._samples_by_length)
        rows = ids.size if _takes_keys(self._table) else self._table.vocabulary_size
        exponent = math.nan
        if num_lookups and rows > 1:
            exponent = zipf_exponent(hottest_first, num_rows=rows)
        shards = (ids % np.asarray(self._num_shards, ids.dtype)).astype(np.int64)
        loads = np.zeros(self._num_shards, np.int64)
        np.add.at(loads, shards, counts)
        num_hottest = math.ceil(self._table.vocabulary_size / 100)
        return IdFigures(
            table=self._table.name,
            num_rows=self._table.vocabulary_size,
            num_samples=num_samples,
            num_lookups=num_lookups,
            mean_ids_per_sample=_ratio(num_lookups, num_samples),
            # In integers, since 0.99 is no binary fraction.
            ids_per_sample_99th_percentile=int(np.searchsorted(100 * covered, 99 * num_samples)),
            max_ids_per_sample=int(np.flatnonzero(self._samples_by_length).max(initial=0)),
            num_missing=self._num_missing,
            num_out_of_range=self._num_out_of_range,
            num_distinct_ids=int(ids.size),
            hottest_share=_ratio(int(hottest_first[:num_hottest].sum()), num_lookups),
            zipf_exponent=exponent,
            ids_per_distinct_id=_ratio(num_lookups, self._counter.num_distinct_by_batch),
            shard_loads=loads,
            max_ids_per_partition=EXACT.limit(self._max_ids, None),
            max_unique_ids_per_partition=EXACT.limit(self._max_unique, None),
            hit_rates=dict(zip(CACHE_PERCENTS, self._counter.hit_rates(), strict=True)),
            counts=hottest_first,
        )


def _html_row(tag: str, cells: Sequence[str]) -> str:
    """A row of an HTML table, with the cells as text."""
    row = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{row}</tr>"


def _count(number: int, one: str, many: str | None = None) -> str:
    """`number` with its noun, such as "1 table" or "2 tables"."""
    noun = one if number == 1 else many or f"{one}s"
    return f"{number:,} {noun}"


def _ratio(part: float, whole: float) -> float:
    """`part / whole`, or 0 where there is nothing."""
    return part / whole if whole else 0.0
