"""Figures about a module in training, every so many steps."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import jax

from rsembed.bags import is_traced
from rsembed.caching import CacheCounts
from rsembed.tbe.records import TBEStatsReporterConfig

if TYPE_CHECKING:
    from rsembed.tbe.module import TableBatchedEmbeddingBags

MAX_MEMORY_REPORTS = 10
"""Sizes of tables do not change: the original reports them ten times as well."""


PUBLISHED_COUNTS = (
    *("num_calls", "num_requested_indices", "num_unique_indices"),
    *("num_unique_misses", "num_conflict_unique_misses", "num_conflict_misses"),
)
"""The original's names of the first fields of `CacheCounts`."""


class StatisticsReporter:
    """Reports sizes, bytes, durations and cache counts of training steps by the original's names.

    Args:
      config: how often, and where to: `config.report(step, figures)`, or the log `rsembed` at level INFO.
    """

    def __init__(self, config: TBEStatsReporterConfig):
        self.config = config
        self.prefetch_seconds = 0.0
        self.prefetched_ids = self.prefetched_bytes = 0
        self._num_steps = self._num_reports = 0
        self._reported = CacheCounts()

    def note_prefetch(self, ids: Any, seconds: float) -> None:
        """A prefetch, for the next report."""
        self.prefetch_seconds += seconds
        self.prefetched_ids += ids.size
        self.prefetched_bytes += ids.nbytes

    def step(self, module: TableBatchedEmbeddingBags, batch: Any, output: Any) -> None:
        """Counts a training step, and reports if it is time; warns of steps inside `jit`, which it never sees."""
        if is_traced(batch):
            warnings.warn(
                "stats_reporter_config: no effect inside jit, where steps are not reported; train outside of it, or "
                "read state_bytes() and get_uvm_cache_stats() between compiled steps.",
                stacklevel=3,
            )
            return
        self._num_steps += 1
        if self._num_steps % self.config.interval:
            return
        outputs, given = jax.tree.leaves(output), jax.tree.leaves(batch.ids)
        figures: dict[str, float] = {
            "total_prefetch_duration": self.prefetch_seconds,
            "bwd_wait_for_prefetch": 0.0,  # prefetches end before they return
            "tbe.prefetch_input_count": self.prefetched_ids,
            "tbe.prefetch_input_size": self.prefetched_bytes,
            "tbe.fwd_input_count": sum(leaf.size for leaf in given),
            "tbe.fwd_input_size": sum(leaf.nbytes for leaf in given),
            "tbe.fwd_output_count": sum(leaf.size for leaf in outputs),
            "tbe.fwd_output_size": sum(leaf.nbytes for leaf in outputs),
        }
        self.prefetch_seconds, self.prefetched_ids, self.prefetched_bytes = 0.0, 0, 0
        if self._num_reports < MAX_MEMORY_REPORTS:
            figures |= _memory(module)
        if module.host_rows is not None:
            counts = module.host_rows.statistics.totals
            figures |= {f"tbe.prefetch.cache_stats.{name}": value for name, value in counts._asdict().items()}
            figures |= self._row_bytes(module, counts)
        self._num_reports += 1
        if self.config.report is not None:
            self.config.report(int(module.step), figures)
        else:
            text = ", ".join(f"{name} {value:g}" for name, value in figures.items())
            logging.getLogger("rsembed").info("step %d: %s", int(module.step), text)

    def _row_bytes(self, module: TableBatchedEmbeddingBags, counts: CacheCounts) -> dict[str, float]:
        """Counts of a step, on average since the last report, times the bytes of the longest cached row."""
        row = max(
            group.table.dim * module.caching.dtype_of(group.table).itemsize
            for group in module.plan.groups
            if group.table.is_cached
        )
        since = [max(new - old, 0) for new, old in zip(counts, self._reported, strict=True)]  # less after a reset
        self._reported = counts
        named = zip(PUBLISHED_COUNTS, since, strict=False)
        interval = self.config.interval
        return {f"tbe.prefetch.cache_stats_by_data_size.{name}": count * row / interval for name, count in named}


def _memory(module: TableBatchedEmbeddingBags) -> dict[str, float]:
    by_table = module.state_bytes()
    cache = by_table["total"].get("cache", 0)
    figures: dict[str, float] = {"tbe.hbm.cache": cache}
    for kind, is_cached in (("hbm", False), ("uvm", True)):
        own = [by_table[table.name] for table in module.plan.tables if table.is_cached == is_cached]
        weights, states = (sum(size[what] for size in own) for what in ("weights", "optimizer_states"))
        figures[f"tbe.{kind}.embeddings"], figures[f"tbe.{kind}.optimizer_states"] = weights, states
        figures[f"tbe.{kind}.total_static_sparse"] = weights + states + (0 if is_cached else cache)
        figures[f"tbe.total_{kind}_usage"] = weights + states + (0 if is_cached else cache)
    return figures
