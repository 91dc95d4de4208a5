"""A picture to play with: drag a limit or a cache size, and see drops, bytes and hits change.

The stream is counted once; every setting is then answered from the counts. Where no kernel runs, as on a page, the same
picture stands still.
"""

from __future__ import annotations

import base64
import contextlib
import io
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int64
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from rsembed.caching import reuse_distances
from rsembed.checks import PositiveInt, validated
from rsembed.plot.caching import plot_miss_ratio
from rsembed.plot.drawing import COLOURS, axes_or_new, finish, with_defaults
from rsembed.stacking import SUBLANES, round_up

BYTES_PER_PLACE = 12
"""Of an input buffer: id, sample and gain of one entry, 4 bytes each."""


class Costs(NamedTuple):
    """What a choice of limit and cache size costs.

    Attributes:
      dropped_fraction: entries above the limit, over all entries.
      buffer_bytes: input buffers of all cores, as large as the limit makes them; a suggested size may be smaller.
      hit_rate: share of all lookups that the cache holds.
      cache_bytes: rows of the cache, in float32.
    """

    dropped_fraction: float
    buffer_bytes: int
    hit_rate: float
    cache_bytes: int


class StreamProfile(NamedTuple):
    """What a stream of ids asks of buffers and caches, see `profile_stream`.

    Attributes:
      entries: of every partition; equal ids of one sample travel once.
      sorted_reuse: reuse distances of all ids that were used before, in rising order.
      num_ids: ids of the stream, first uses included.
      num_rows: distinct ids.
    """

    entries: Int[np.ndarray, "batches cores shards"]
    sorted_reuse: Int64[np.ndarray, " reuses"]
    num_ids: int
    num_rows: int

    def costs(self, max_ids_per_partition: int, cache_rows: int, *, embedding_dim: int) -> Costs:
        """What these settings would have cost; the cache is fully associative and forgets the least recently used."""
        num_partitions = self.entries.shape[1] * self.entries.shape[2]
        dropped = np.maximum(self.entries - max_ids_per_partition, 0).sum() / max(int(self.entries.sum()), 1)
        hits = np.searchsorted(self.sorted_reuse, cache_rows, side="left") / max(self.num_ids, 1)
        places = num_partitions * round_up(max_ids_per_partition, SUBLANES)
        return Costs(float(dropped), places * BYTES_PER_PLACE, float(hits), cache_rows * embedding_dim * 4)


@validated
def profile_stream(batches: Int[np.ndarray, "batches samples ids"], *, num_shards: PositiveInt) -> StreamProfile:
    """Counts a stream of batches once, for one device of `num_shards` cores that own the rows `id % num_shards`.

    Args:
      batches: ids in order of time; `-1` is no id. Samples are cut into equal parts, one per core.
      num_shards: cores.

    Raises: ValueError: the samples cannot be cut evenly, `num_shards` is below 1, or there is no id.

    Example:
      >>> profile = profile_stream(np.array([[[0, 2], [3, 3]], [[2, 1], [0, -1]]]), num_shards=2)
      >>> profile.entries.tolist(), profile.num_ids
      ([[[2, 0], [0, 1]], [[1, 1], [1, 0]]], 7)
    """
    num_batches, num_samples = batches.shape[:2]
    flat = batches.reshape(-1)
    flat = flat[flat != -1]
    if num_samples % num_shards or not flat.size:
        raise ValueError(
            f"profile_stream: {num_samples} samples are dealt to {num_shards} cores, which needs a multiple of them, "
            f"and at least one id among the {batches.size} places."
        )
    ids = np.sort(batches, axis=2)
    counts = ids != -1
    counts[:, :, 1:] &= ids[:, :, 1:] != ids[:, :, :-1]  # the first of equal ids in a sample
    core = np.arange(num_samples) // (num_samples // num_shards)
    partition = (np.arange(num_batches)[:, None, None] * num_shards + core[:, None]) * num_shards + ids % num_shards
    entries = np.bincount(partition[counts], minlength=num_batches * num_shards**2)
    distances = reuse_distances(flat)
    reused = np.sort(distances[distances >= 0])
    return StreamProfile(
        entries.reshape(num_batches, num_shards, num_shards), reused, flat.size, flat.size - reused.size
    )


def plot_limit_choice(
    profile: StreamProfile, max_ids_per_partition: int, *, ax: Axes | None = None, **line_kwargs: Any
) -> Axes:
    """The share of entries that each limit would drop, over the bytes of its buffers; a dot marks the one chosen.

    Args:
      profile: see `profile_stream`.
      max_ids_per_partition: the limit to mark.
      ax: None makes a figure.
      **line_kwargs: for the curve.
    """
    ax = axes_or_new(ax)
    largest = max(int(profile.entries.max()), max_ids_per_partition) / SUBLANES
    limits = SUBLANES * np.unique(np.ceil(np.linspace(1, max(largest, 1), 120)).astype(int))  # buffers have no others
    curve = [profile.costs(int(limit), 0, embedding_dim=1) for limit in limits]
    buffers, dropped = np.array([(own.buffer_bytes, 100 * own.dropped_fraction) for own in curve]).T
    ax.plot(buffers / 1e3, dropped, **with_defaults(line_kwargs, color=COLOURS[0], linewidth=2.0))
    here = profile.costs(max_ids_per_partition, 0, embedding_dim=1)
    ax.plot(here.buffer_bytes / 1e3, 100 * here.dropped_fraction, "o", color=COLOURS[1], markersize=9, zorder=3)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    title = f"limit {max_ids_per_partition:,}: {here.buffer_bytes / 1e3:,.0f} kB, {here.dropped_fraction:.2%} dropped"
    return finish(ax, "input buffers (kB)", "entries dropped (%)", ylim=(-3.0, None), title=title)


def plot_cache_choice(profile: StreamProfile, cache_rows: int, *, embedding_dim: int, ax: Axes | None = None) -> Axes:
    """The share of lookups that each cache size would miss; a dot marks the one chosen.

    Args:
      profile: see `profile_stream`.
      cache_rows: the size to mark.
      embedding_dim: numbers in a row, for the bytes in the title.
      ax: None makes a figure.
    """
    sizes = np.unique(np.geomspace(1, max(profile.num_rows, cache_rows), 120).astype(int))
    misses = [1 - profile.costs(1, int(size), embedding_dim=1).hit_rate for size in sizes]
    here = profile.costs(1, cache_rows, embedding_dim=embedding_dim)
    ax = plot_miss_ratio(sizes, misses, ax=ax)
    ax.plot(cache_rows, 100 * (1 - here.hit_rate), "o", color=COLOURS[1], markersize=9, zorder=3)
    ax.set_title(f"cache of {cache_rows:,} rows: {here.cache_bytes / 1e3:,.0f} kB, {here.hit_rate:.1%} hits")
    return ax


class Explorer:
    """The picture of one choice, with a slider for each setting where the notebook shows widgets.

    Attributes:
      max_ids_per_partition: the limit chosen.
      cache_rows: the cache size chosen.
    """

    def __init__(self, profile: StreamProfile, *, max_ids_per_partition: int, cache_rows: int, embedding_dim: int):
        self.profile, self.embedding_dim = profile, embedding_dim
        self.max_ids_per_partition, self.cache_rows = max_ids_per_partition, cache_rows
        self._pictures: list[Any] = []  # handles of those on display

    def costs_now(self) -> Costs:
        """What the present choice costs."""
        return self.profile.costs(self.max_ids_per_partition, self.cache_rows, embedding_dim=self.embedding_dim)

    def figure(self) -> Figure:
        """Both choices side by side, outside pyplot."""
        figure = Figure(figsize=(10.0, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        plot_limit_choice(self.profile, self.max_ids_per_partition, ax=left)
        plot_cache_choice(self.profile, self.cache_rows, embedding_dim=self.embedding_dim, ax=right)
        return figure

    def png(self) -> bytes:
        """The figure as a file."""
        file = io.BytesIO()
        self.figure().savefig(file, format="png", dpi=100)
        return file.getvalue()

    def widget(self) -> Any:
        """Two sliders, which every picture shown of this explorer follows.

        Raises: ImportError: ipywidgets is missing; the extra `notebooks` brings it.
        """
        import ipywidgets

        def slider(name: str, text: str, largest: int) -> Any:
            start = getattr(self, name)
            values = sorted({start, *np.geomspace(1, max(largest, start), 60).astype(int).tolist()})
            made = ipywidgets.SelectionSlider(
                options=[(f"{value:,}", value) for value in values], value=start, description=text,
                style={"description_width": "12em"}, layout={"width": "40em"},
            )  # fmt: skip

            def follow(change: Any) -> None:
                setattr(self, name, change["new"])
                for picture in self._pictures:
                    picture.update(self._picture(), raw=True)

            made.observe(follow, names="value")
            return made

        largest = int(self.profile.entries.max()), self.profile.num_rows
        limit = slider("max_ids_per_partition", "limit (ids per partition)", largest[0])
        return ipywidgets.VBox([limit, slider("cache_rows", "cache (rows)", largest[1])])

    def _picture(self) -> dict[str, str]:
        return {"text/plain": repr(self.costs_now()), "image/png": base64.b64encode(self.png()).decode()}

    def _ipython_display_(self) -> None:
        """Shows sliders, where there are widgets, and the picture as an output of its own, which every page keeps."""
        from IPython.display import display

        with contextlib.suppress(ImportError):
            display(self.widget())
        self._pictures.append(display(self._picture(), raw=True, display_id=True))


def explore(
    batches: Int[np.ndarray, "batches samples ids"],
    *,
    num_shards: int,
    embedding_dim: int,
    max_ids_per_partition: int | None = None,
    cache_rows: int | None = None,
) -> Explorer:
    """A picture with sliders for the limit of a partition and for the rows of a cache; show it as a cell's last line.

    Args:
      batches: ids in order of time, see `profile_stream`, whose numbers answer every setting.
      num_shards: cores that own the rows.
      embedding_dim: numbers in a row.
      max_ids_per_partition: where the slider starts; None is the smallest limit that drops nothing.
      cache_rows: where the slider starts; None is a tenth of the distinct ids.

    Raises: ValueError: a setting is below 1, or the batches have no profile.
    """
    profile = profile_stream(batches, num_shards=num_shards)
    limit = int(profile.entries.max()) if max_ids_per_partition is None else max_ids_per_partition
    rows = max(profile.num_rows // 10, 1) if cache_rows is None else cache_rows
    if min(limit, rows) < 1:
        raise ValueError(f"explore: max_ids_per_partition={limit} and cache_rows={rows} must be at least 1.")
    return Explorer(profile, max_ids_per_partition=limit, cache_rows=rows, embedding_dim=embedding_dim)
