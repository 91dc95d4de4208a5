"""Reports on the ids of batches, and on the effect of limits, shards and caches."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
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
"""Maximum number of curves in one panel of a plot, which is the number of colours in `rs.plot`."""
_log = logging.getLogger("rsembed")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IdFigures:
    """Statistics of the ids of one feature, or of all features that read one table.

    A *lookup* is an id that reads a row, so missing ids and ids out of range are not lookups.
    Duplicates are counted as separate lookups. In the statistics of a table, the samples of all
    features that read the table are counted.

    Attributes:
      table: name of the table.
      num_rows: number of rows of the table, `vocabulary_size`.
      num_samples: number of samples in all batches, including samples without ids.
      num_lookups: number of lookups in all batches.
      mean_ids_per_sample: mean number of lookups per sample.
      ids_per_sample_99th_percentile: the smallest number of lookups that 99 % of the samples do not
        exceed.
      max_ids_per_sample: largest number of lookups in one sample.
      num_missing: number of entries without an id (-1), including the padding of arrays.
      num_out_of_range: number of ids outside the table, or of keys that the table's `key_dtype`
        cannot hold.
      num_distinct_ids: number of different ids among all lookups.
      hottest_share: share (0 to 1) of the lookups that read the hottest 1 % of the table's rows
        (rounded up to whole rows). A cache that always holds exactly the hottest 1 % of the rows
        would serve the share `hottest_share` of the lookups.
      zipf_exponent: exponent of the Zipf law that best fits the number of lookups of each row, see
        `zipf_exponent`. For a table with keys, only keys that occur in the batches count as rows.
        The exponent is NaN if there are no lookups, or only one row.
      ids_per_distinct_id: number of lookups divided by the number of distinct ids. Distinct ids are
        counted in each batch, and the counts of all batches are added. If duplicates within a batch
        are merged, all batches together read `num_lookups / ids_per_distinct_id` rows.
      shard_loads: number of lookups of each shard. Id `i` belongs to shard `i % num_shards`.
      max_ids_per_partition: the smallest limit of ids per partition that would have dropped no id.
        The samples of each batch are divided into `num_shards` nearly equal parts, one for each
        core. A partition consists of the ids that one core sends to one shard. A core sends an id
        once for each sample, even if the sample contains the id several times.
      max_unique_ids_per_partition: the smallest limit of distinct ids per partition that would have
        dropped no id.
      hit_rates: hit rate (0 to 1) of an LRU cache, by cache size in percent of the table's rows.
        Each simulated cache is empty before the first batch. When a batch is looked up, each
        distinct id is a hit if its row is cached, and the rows of all other ids are fetched. The
        hit rate is the number of hits divided by the number of distinct ids, where both numbers are
        sums over all batches. Rows that were last looked up in the same batch count as equally
        recent. If a cache has space for only half of a group of equally recent rows, half of the
        lookups of the group count as hits.
      counts: number of lookups of each distinct id, the most frequent id first.
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
        """Largest load of a shard, divided by the mean load. 1 if all shards have equal loads."""
        return _ratio(float(self.shard_loads.max()), float(self.shard_loads.mean()))


DATA_COLUMNS = {
    "table": "{0.table}",
    "samples": "{0.num_samples:,}",
    "ids/sample": "{0.mean_ids_per_sample:.2f}",
    "99 %": "{0.ids_per_sample_99th_percentile:,}",
    "longest": "{0.max_ids_per_sample:,}",
    "lookups": "{0.num_lookups:,}",
    "distinct": "{0.num_distinct_ids:,}",
    "missing": "{0.num_missing:,}",
    "out of range": "{0.num_out_of_range:,}",
}
"""Columns of the first printed table, which describes the ids.

The dictionary maps the heading of each column to the format string for the cells of the column. In
a cell, `{0}` is the `IdFigures` of the row.
"""
NEEDS_COLUMNS = {
    "hottest 1 %": "{0.hottest_share:.1%}",
    "Zipf": "{0.zipf_exponent:.2f}",
    "ids/distinct": "{0.ids_per_distinct_id:.2f}",
    "busiest of {0.shard_loads.size}": "{0.busiest_shard_load:.2f}",
    "max ids": "{0.max_ids_per_partition:,}",
    "max unique": "{0.max_unique_ids_per_partition:,}",
    "LRU 1 %": "{0.hit_rates[1]:.1%}",
    "LRU 10 %": "{0.hit_rates[10]:.1%}",
    "LRU 30 %": "{0.hit_rates[30]:.1%}",
}
"""Columns of the second printed table: how skewed the ids are, and figures on shards and caches.

The dictionary maps the format string for the heading of each column to the format string for the
cells of the column. In a cell, `{0}` is the `IdFigures` of the row. In a heading, `{0}` is the
`IdFigures` of the first row.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class IdReport:
    """Report of `describe`: statistics of each feature and each table, to print or to plot.

    Attributes:
      features: the `IdFigures` of each feature, by feature name.
      tables: the `IdFigures` of each table, by table name.
      num_batches: number of batches that were counted.
      num_shards: number of shards for which loads and partitions are counted.
      is_complete: whether all batches were counted. False if `describe` stopped early, because a
        table had more than `max_distinct_ids` distinct ids.
    """

    features: dict[str, IdFigures]
    tables: dict[str, IdFigures]
    num_batches: int
    num_shards: int
    is_complete: bool = True

    def __repr__(self) -> str:
        title = (
            f"features: {len(self.features)}, tables: {len(self.tables)}, "
            f"batches: {self.num_batches:,}, shards: {self.num_shards:,}"
        )
        if not self.is_complete:
            title += "; stopped early, at max_distinct_ids"
        rows = dict(self.features)
        for name, figures in self.tables.items():
            # A table that only one feature reads has the same `IdFigures` as the feature.
            if figures not in self.features.values():
                rows[f"(table) {name}"] = figures
        return "\n\n".join(
            [title, _text_table(rows, DATA_COLUMNS), _text_table(rows, NEEDS_COLUMNS)]
        )

    def plot(self) -> np.ndarray:
        """Draws a new figure with four panels.

        The panels show how often ids occur, which share of the lookups the hottest rows serve, the
        load of each shard (over all tables), and the miss ratio of LRU caches. Curves are drawn for
        the seven tables with the most lookups, because there are seven colours. To draw other
        tables, pass attributes of an `IdFigures`, such as `tables[name].counts`, to functions of
        `rs.plot`.

        Returns: the four `Axes`, as an array `[2, 2]`.

        Raises: ValueError: no batch has a lookup.
        """
        import matplotlib.pyplot as plt

        from rsembed import plot

        by_lookups = sorted(self.tables, key=lambda name: -self.tables[name].num_lookups)
        drawn = [name for name in by_lookups[:MOST_CURVES] if self.tables[name].num_lookups]
        if not drawn:
            raise ValueError(f"plot: none of the tables {sorted(self.tables)} was looked up.")
        _, axes = plt.subplots(2, 2, figsize=(11.0, 7.6), layout="constrained")
        frequency_ax, coverage_ax, load_ax, cache_ax = axes.flat
        misses = {}
        for name in drawn:
            figures = self.tables[name]
            counts = figures.counts
            # A keyed table can be looked up with more distinct ids than it has rows.
            num_rows = max(figures.num_rows, len(counts))
            plot.plot_id_frequency(counts, ax=frequency_ax, label=name)
            plot.plot_coverage(counts, num_rows=num_rows, ax=coverage_ax, label=name)
            misses[name] = {percent: 1 - rate for percent, rate in figures.hit_rates.items()}
        load = np.sum([figures.shard_loads for figures in self.tables.values()], axis=0)
        plot.plot_shard_load({"all tables": load}, ax=load_ax)
        plot.plot_miss_ratio(misses, xlabel="LRU cache (% of the table's rows)", ax=cache_ax)
        cache_ax.set_ylabel("rows of batches to fetch (%)")
        frequency_ax.set_title("How often ids occur")
        coverage_ax.set_title("What the hottest rows serve")
        load_ax.set_title("Load of shards")
        cache_ax.set_title("Caches")
        return np.asarray(axes)


def _text_table(rows: Mapping[str, IdFigures], columns: Mapping[str, str]) -> str:
    """A table as text: a line with the headings of the columns, and a line for each row.

    Args:
      rows: the `IdFigures` to print in each row, by the name at the beginning of the row.
      columns: mapping from the format string for the heading of a column to the format string for
        its cells, as in `NEEDS_COLUMNS`.
    """
    names = ["feature", *rows]
    width = max(map(len, names))
    lines = [name.ljust(width) for name in names]
    for heading, cell in columns.items():
        # In a heading, `{0}` is the `IdFigures` of the first row. `str.format` ignores arguments
        # that the heading does not refer to.
        texts = [heading.format(*rows.values())]
        for figures in rows.values():
            texts.append(cell.format(figures))
        width = max(map(len, texts))
        for number, text in enumerate(texts):
            lines[number] += "  " + text.rjust(width)
    return "\n".join(lines)


@validated
def describe(
    collection: EmbeddingCollection,
    batches: Iterable[Mapping[str, Any]],
    *,
    num_shards: PositiveInt | None = None,
    max_distinct_ids: PositiveInt = 50_000_000,
) -> IdReport:
    """Report on the ids of batches, which can be printed, or drawn by its method `plot`.

    The report shows how skewed the ids are, how many ids are missing or out of range, and the
    effect of limits, shards and caches. `IdFigures` documents each number of the report. `describe`
    reads no table and compiles nothing. Ids out of range are counted, even if `prepare` would
    reject them.

    Memory grows with the number of distinct ids (at most about 100 bytes for each), not with the
    number of batches. A progress bar is shown in a terminal and in a notebook.

    Args:
      collection: the collection with the features, and the tables that they read.
      batches: any iterable of batches, each in a form that `collection.prepare` accepts. With
        several processes, pass unprepared batches, which have only the ids of this process.
      num_shards: number of shards for which loads and partitions are counted. If None, `num_shards`
        is the number of devices on the collection's mesh, or 8 without a mesh.
      max_distinct_ids: maximum number of distinct ids of a table, 50 million by default. If a table
        has more than `max_distinct_ids` distinct ids, counting stops with a warning, and the report
        covers only the batches that were counted before the warning. Without `max_distinct_ids`,
        counting of 64-bit keys could fill the memory.

    Raises:
      TypeError: `batches` is a single batch, or a batch has a form that `prepare` does not accept.
      ValueError: `batches` is empty, or a batch lacks valid ids for a feature.

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
    readers: dict[str, list[str]] = {}
    streams: dict[tuple[str, ...], _Stream] = {}
    for name, feature in collection.features.items():
        readers.setdefault(feature.table_spec.name, []).append(name)
        streams[(name,)] = _Stream(feature.table_spec, num_shards)
    for table, names in readers.items():
        # A table that only one feature reads shares the `_Stream` of this feature.
        streams.setdefault(tuple(names), _Stream(collection.table_specs[table], num_shards))
    num_batches = 0
    is_complete = True
    for batch in progress(batches, description="counting ids"):
        if any(stream.counter.ids.size > max_distinct_ids for stream in streams.values()):
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
            lookups[name] = _lookups(feature, batch[name], num_shards)
        for group, stream in streams.items():
            stream.add([lookups[name] for name in group])
        num_batches += 1
    if not num_batches:
        raise ValueError(
            "describe: there is no batch to describe; a generator can be read only once."
        )
    figures = {group: stream.figures() for group, stream in streams.items()}
    return IdReport(
        features={name: figures[(name,)] for name in collection.features},
        tables={table: figures[tuple(names)] for table, names in readers.items()},
        num_batches=num_batches,
        num_shards=num_shards,
        is_complete=is_complete,
    )


class _Lookups(NamedTuple):
    """Lookups of one feature in one batch, and counts of missing ids and ids out of range.

    Attributes:
      ids: looked-up ids of all samples, one sample after the other.
      lengths: number of lookups of each sample.
      cores: index of the core that processes each sample.
      num_missing: number of entries without an id (-1).
      num_out_of_range: number of ids outside the table.
    """

    ids: np.ndarray
    lengths: np.ndarray
    cores: np.ndarray
    num_missing: int
    num_out_of_range: int


def _lookups(feature: FeatureSpec, value: Any, num_shards: int) -> _Lookups:
    """Lookups of one feature in one batch.

    Args:
      feature: spec of the feature.
      value: ids of the feature, in any form that `prepare` accepts.
      num_shards: number of cores that the samples are divided among.
    """
    bags = as_bags(value, feature=feature.name)
    if is_unknown(bags):
        raise TypeError(
            f"describe: feature {feature.name!r}: the ids cannot be read, since they are traced or another process "
            "has some of them; call it outside of jit, with batches of this process that are not prepared."
        )
    bags = jax.tree.map(np.asarray, bags)
    check_bags(bags, feature=feature.name)
    ids, is_missing, is_outside = _numbers(bags, feature)
    is_lookup = ~(is_missing | is_outside)
    offsets = bags.offsets.astype(np.int64)
    samples = np.repeat(np.arange(bags.num_bags), np.diff(offsets))
    num_bags = bags.num_bags
    used = slice(0, int(offsets[-1]))  # Entries after the last offset are padding.
    is_used_lookup = is_lookup[used]
    is_out_of_range = is_outside & ~is_missing
    return _Lookups(
        ids=ids[used][is_used_lookup],
        lengths=np.bincount(samples[is_used_lookup], minlength=num_bags),
        cores=np.arange(num_bags) * num_shards // max(num_bags, 1),
        num_missing=int(is_missing[used].sum()),
        num_out_of_range=int(is_out_of_range[used].sum()),
    )


def _numbers(bags: Bags, feature: FeatureSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids as 64-bit numbers, a mask of entries without an id, and a mask of ids out of range.

    The mask of ids out of range can include entries without an id.
    """
    key_dtype = _key_dtype(feature.table_spec)
    if key_dtype is not None:
        keys = bags.ids
        if not isinstance(keys, Keys):
            keys = split_keys(keys, feature=f"feature {feature.name!r}")
        numbers = join_keys(keys.high, keys.low)
        return numbers, ~keys.is_key, is_beyond(keys, key_dtype)
    check_ids_dtype(bags, feature=feature.name)
    ids = bags.ids
    is_missing = ids == PAD_ID
    is_outside = (ids < 0) | (ids >= feature.table_spec.vocabulary_size)
    numbers = np.where(is_outside, 0, ids)
    return numbers.astype(np.uint64), is_missing, is_outside


def _key_dtype(table: TableSpec) -> str | None:
    """Dtype of the table's keys, or None if the ids of the table are row numbers."""
    if table.storage is None:
        return None
    return table.storage.key_dtype


class _Stream:
    """Running counts of the lookups of one feature, or of all features of one table."""

    def __init__(self, table: TableSpec, num_shards: int):
        cache_rows = []
        for percent in CACHE_PERCENTS:
            cache_rows.append(math.ceil(table.vocabulary_size * percent / 100))
        self.counter = IdCounter(cache_rows)
        self._table = table
        self._num_shards = num_shards
        self._samples_by_length = Counter({0: 0})
        self._num_missing = 0
        self._num_out_of_range = 0
        self._max_ids = 0
        self._max_unique = 0

    def add(self, parts: Sequence[_Lookups]) -> None:
        """Counts the lookups of one batch: `parts` has one item for each feature of the table."""
        ids = np.concatenate([part.ids for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        cores = np.concatenate([part.cores for part in parts])
        self.counter.add(ids)
        self._samples_by_length.update(lengths.tolist())
        for part in parts:
            self._num_missing += part.num_missing
            self._num_out_of_range += part.num_out_of_range
        samples = np.repeat(np.arange(lengths.size), lengths)
        entries, distinct = partition_counts(ids, samples, cores[samples], self._num_shards)
        most_entries = int(entries.max())
        most_distinct = int(distinct.max())
        self._max_ids = max(self._max_ids, most_entries)
        self._max_unique = max(self._max_unique, most_distinct)

    def figures(self) -> IdFigures:
        """The `IdFigures` of all batches that were added."""
        self.counter.merge()
        ids = self.counter.ids
        counts = self.counter.counts
        hottest_first = np.sort(counts)[::-1]
        num_lookups = int(counts.sum())
        lengths, num_samples = np.array(sorted(self._samples_by_length.items())).T
        covered = np.cumsum(num_samples)
        # The comparison uses integers, because no float is exactly 0.99.
        percentile = np.searchsorted(100 * covered, 99 * covered[-1])
        num_rows = self._table.vocabulary_size
        if _key_dtype(self._table) is not None:
            num_rows = ids.size
        exponent = math.nan
        if num_lookups and num_rows > 1:
            exponent = zipf_exponent(hottest_first, num_rows=num_rows)
        shards = (ids % np.uint64(self._num_shards)).astype(np.int64)
        loads = np.bincount(shards, weights=counts, minlength=self._num_shards)
        num_hottest = math.ceil(self._table.vocabulary_size / 100)
        return IdFigures(
            table=self._table.name,
            num_rows=self._table.vocabulary_size,
            num_samples=int(covered[-1]),
            num_lookups=num_lookups,
            mean_ids_per_sample=_ratio(num_lookups, int(covered[-1])),
            ids_per_sample_99th_percentile=int(lengths[percentile]),
            max_ids_per_sample=int(lengths[-1]),
            num_missing=self._num_missing,
            num_out_of_range=self._num_out_of_range,
            num_distinct_ids=int(ids.size),
            hottest_share=_ratio(int(hottest_first[:num_hottest].sum()), num_lookups),
            zipf_exponent=exponent,
            ids_per_distinct_id=_ratio(num_lookups, self.counter.num_distinct_by_batch),
            shard_loads=loads.astype(np.int64),
            max_ids_per_partition=EXACT.limit(self._max_ids, None),
            max_unique_ids_per_partition=EXACT.limit(self._max_unique, None),
            hit_rates=dict(zip(CACHE_PERCENTS, self.counter.hit_rates(), strict=True)),
            counts=hottest_first,
        )


def _ratio(part: float, whole: float) -> float:
    """`part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0
