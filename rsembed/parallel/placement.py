"""Where each table should live on a mesh: by rows, whole, by columns, or everywhere.

```
features, hardware ─▶ four Choices per table (bytes, seconds) ─▶ plan_placement ─▶ PlacementPlan, which explains itself
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Num

from rsembed.checks import PositiveInt, check_within, did_you_mean, validated
from rsembed.parallel.communication import (
    DeviceLoad,
    Hardware,
    IdDistribution,
    bytes_sent,
    observed_ids,
    step_time,
    zipf_ids,
)
from rsembed.specs import FeatureSpec, TableSpec, features_of, tables_of

PLACEMENTS = ("row_wise", "table_wise", "column_wise", "replicated")
"""Rows spread by `id % devices` and read by distinct ids; the table on one device; columns spread; a copy on each."""


class PlacementError(ValueError):
    """The tables do not fit on the devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What one placement of one table would cost.

    Attributes:
      placement: which one.
      memory_bytes: table and optimizer state, on a device that holds a part.
      sent_bytes: per device and step, on average over the devices.
      seconds: likewise, without latencies.
    """

    placement: str
    memory_bytes: float
    sent_bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedTable:
    """A table, where it goes, and why.

    Attributes:
      name: of the table.
      placement: the choice taken.
      device: the owner of a `table_wise` table, else None.
      choices: all that were possible, the fastest first.
      reason: why this one.
    """

    name: str
    placement: str
    device: int | None
    choices: tuple[Choice, ...]
    reason: str

    @property
    def choice(self) -> Choice:
        """The choice taken."""
        return next(choice for choice in self.choices if choice.placement == self.placement)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Every table's place; prints as a table per table.

    Attributes:
      num_devices: devices that the plan is for.
      hardware: the constants behind the seconds.
      tables: in the order of the features.
      memory_bytes: of every device.
      seconds: of every device and step, latencies excluded. The owner of a table works for all.
      step_seconds: of a step's embeddings: the busiest device, and the latencies.
    """

    num_devices: int
    hardware: Hardware
    tables: tuple[PlacedTable, ...]
    memory_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    step_seconds: float

    def table(self, name: str) -> PlacedTable:
        """The place of one table. Raises: KeyError: there is none of this name."""
        found = {table.name: table for table in self.tables}
        if name not in found:
            raise KeyError(f"no table {name!r}{did_you_mean(name, found)}; the plan has {list(found)}.")
        return found[name]

    def __str__(self) -> str:
        lines = [
            f"{len(self.tables)} tables on {self.num_devices} devices: fullest {max(self.memory_bytes) / 1e9:.2f} of "
            f"{self.hardware.memory_bytes / 1e9:.2f} GB, {1e3 * self.step_seconds:.3f} ms per step"
        ]
        for table in self.tables:
            where = "" if table.device is None else f" on device {table.device}"
            lines += [f"{table.name}: {table.placement}{where}, {table.reason}"]
            lines += [f"  {'':12} {'GB on a device':>14} {'MB sent':>9} {'ms per step':>12}"]
            lines += [
                f"{'*' if choice.placement == table.placement else ' ':>1} {choice.placement:12} "
                f"{choice.memory_bytes / 1e9:14.3f} {choice.sent_bytes / 1e6:9.3f} {1e3 * choice.seconds:12.4f}"
                for choice in table.choices
            ]
        return "\n".join(lines)


@validated
def plan_placement(
    features: Any,
    *,
    num_devices: PositiveInt,
    hardware: Hardware | None = None,
    id_counts: Mapping[str, Num[np.ndarray, " vocab"]] | None = None,
    zipf_exponent: float = 1.05,
    placements: Mapping[str, str] | None = None,
    key_bytes: int = 4,
    value_bytes: int = 4,
    padding: float = 1.25,
) -> PlacementPlan:
    """Chooses a placement for every table, by estimated time, within the devices' memory.

    From three starts (the smallest shares of memory; the fastest for each table by itself; the fastest of those that
    burden all devices alike), tables move one by one as long as that shortens the step of the busiest device, with
    the latencies of every kind of exchange in use. The best of the three results is the plan.

    Args:
      features: FeatureSpecs, nested in lists or dicts, with `input_shape=(global batch, ids per sample)`.
      num_devices: devices of the mesh; whole nodes, if more than one.
      hardware: constants of the model; None takes its defaults.
      id_counts: observed lookups of each id, by table; see `plot.id_counts`.
      zipf_exponent: what ids of the other tables are assumed to follow.
      placements: tables whose placement is settled.
      key_bytes: of an id on the wire.
      value_bytes: of a number on the wire.
      padding: see `link_bytes`.

    Raises:
      PlacementError: a table does not fit; names it, its size and the budget.
      ValueError: a feature without shape or with a batch that does not split, an unknown table or placement.
      NotImplementedError: a table with `storage=`, or columns asked for where they cannot be split.
    """
    check_within("[1, inf)", padding, "plan_placement: padding")
    hardware = hardware or Hardware()
    tables, settled = tables_of(features), dict(placements or {})
    for name, placement in settled.items():
        if name not in tables or placement not in PLACEMENTS:
            raise ValueError(
                f"placements: {name!r} -> {placement!r}: tables are {sorted(tables)}, placements are {PLACEMENTS}."
            )
    if unknown := sorted(set(id_counts or {}) - set(tables)):
        raise ValueError(f"id_counts: there are no tables {unknown}, only {sorted(tables)}.")
    choices: dict[str, list[Choice]] = {}
    wire = {"key_bytes": key_bytes, "value_bytes": value_bytes}
    for name, table in tables.items():
        counts = (id_counts or {}).get(name)
        ids = zipf_ids(table.vocabulary_size, zipf_exponent) if counts is None else _observed(table, counts)
        load = _load_of(table, features_of(features), ids, num_devices, **wire)
        possible = _possible(table, num_devices, settled.get(name))
        found = [_choice(table, load, placement, num_devices, hardware, padding) for placement in possible]
        choices[name] = sorted(found, key=lambda choice: choice.seconds)
    starts: list[Callable[[Choice], tuple[float, ...]]] = [
        lambda choice: (choice.memory_bytes, choice.seconds),
        lambda choice: (choice.seconds,),
        lambda choice: (choice.placement == "table_wise", choice.seconds),
    ]
    searches = [_Search(choices, num_devices, hardware, start) for start in starts]
    return min(searches, key=_Search.cost).plan(settled)


def _observed(table: TableSpec, counts: Any) -> IdDistribution:
    if np.shape(counts) != (table.vocabulary_size,):
        raise ValueError(
            f"id_counts: table {table.name!r} has {table.vocabulary_size} rows, its counts shape {np.shape(counts)}."
        )
    return observed_ids(counts)


def _load_of(
    table: TableSpec, features: list[FeatureSpec], ids: IdDistribution, num_devices: int, **wire: int
) -> DeviceLoad:
    num_ids = num_outputs = 0
    for feature in features:
        if feature.table_spec.name != table.name:
            continue
        if feature.input_shape is None or feature.input_shape[0] % num_devices:
            raise ValueError(
                f"feature {feature.name!r}: input_shape is {feature.input_shape}; a plan needs (global batch, ids per "
                f"sample) with a batch that {num_devices} devices can share equally."
            )
        samples = feature.input_shape[0] // num_devices
        drawn = samples * math.prod(size or 1 for size in feature.input_shape[1:])
        num_ids += drawn
        num_outputs += drawn if table.combiner == "none" else samples
    return DeviceLoad(
        num_ids=num_ids,
        num_outputs=num_outputs,
        num_distinct_ids=ids.expected_distinct(num_ids),
        num_rows=table.vocabulary_size,
        embedding_dim=table.embedding_dim,
        **wire,
    )


def _possible(table: TableSpec, num_devices: int, settled: str | None) -> list[str]:
    if table.storage is not None:
        raise NotImplementedError(f"table {table.name!r} is kept as {table.storage}, which has no rows to place.")
    # A rule that looks at a whole row cannot step a part of its columns.
    has_columns = table.embedding_dim % num_devices == 0 and not table.optimizer.is_row_wise
    if settled == "column_wise" and not has_columns:
        raise NotImplementedError(
            f"table {table.name!r}: {table.embedding_dim} columns with {table.optimizer.short_name()} cannot be split "
            f"over {num_devices} devices: they must divide, and the optimizer must treat every number by itself."
        )
    if settled is not None:
        return [settled]
    return [placement for placement in PLACEMENTS if placement != "column_wise" or has_columns]


def _choice(
    table: TableSpec, load: DeviceLoad, placement: str, num_devices: int, hardware: Hardware, padding: float
) -> Choice:
    one_row = jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
    slots = jax.tree.leaves(jax.eval_shape(table.optimizer.init_slots, one_row))
    row_bytes = table.embedding_dim * jnp.dtype(table.dtype).itemsize + sum(x.size * x.dtype.itemsize for x in slots)
    path = "dedup" if placement == "row_wise" else placement
    sent = bytes_sent(path, load, num_devices, devices_per_node=hardware.devices_per_node, padding=padding)
    own_rows = -(-table.vocabulary_size // num_devices) if placement == "row_wise" else table.vocabulary_size
    return Choice(
        placement=placement,
        memory_bytes=own_rows * row_bytes / (num_devices if placement == "column_wise" else 1),
        sent_bytes=sent,
        seconds=step_time(path, load, num_devices, hardware, padding=padding, latency=False),
    )


class _Search:
    """What every table has at present, and what that adds up to on every device."""

    def __init__(
        self,
        choices: Mapping[str, list[Choice]],
        num_devices: int,
        hardware: Hardware,
        preference: Callable[[Choice], tuple[float, ...]],
    ):
        self.choices, self.num_devices, self.hardware = choices, num_devices, hardware
        self.memory, self.seconds = np.zeros(num_devices), np.zeros(num_devices)
        self.taken: dict[str, tuple[Choice, int | None]] = {}
        smallest = {name: min(own, key=lambda choice: choice.memory_bytes) for name, own in choices.items()}
        largest_first = sorted(choices, key=lambda name: -smallest[name].memory_bytes)
        for name in largest_first:
            if not self._take(name, smallest[name]):
                self._raise_does_not_fit(name, smallest[name])
        for name in largest_first:
            next(filter(lambda choice: self._take(name, choice), sorted(choices[name], key=preference)))
        while any([self._improve(name) for name in choices]):
            pass

    def cost(self) -> tuple[float, int, float]:
        """Seconds of a step; among equals, the number of busiest devices and the work of all count."""
        longest = float(self.seconds.max())
        return (
            round(longest + self._latency_seconds(), 12),
            int(np.sum(self.seconds > longest * (1 - 1e-6))),
            round(float(self.seconds.sum()), 12),
        )

    def _latency_seconds(self) -> float:
        # Exchanges of one kind travel together: three collectives, two where gradients are reduced.
        kinds = {choice.placement for choice, _ in self.taken.values()}
        num_collectives = sum(2 if kind == "replicated" else 3 for kind in kinds)
        return num_collectives * self.hardware.latency_seconds(self.num_devices)

    def _add(self, name: str, sign: int) -> None:
        choice, device = self.taken[name]
        places: Any = slice(None) if device is None else device
        self.memory[places] += sign * choice.memory_bytes
        # Seconds are those of an average device; an owner works for all.
        self.seconds[places] += sign * choice.seconds * (1 if device is None else self.num_devices)

    def _take(self, name: str, choice: Choice) -> bool:
        """Gives the table this place instead of the one it has, if there is room."""
        before = self.taken.get(name)
        if before is not None:
            self._add(name, -1)
        # A hair of tolerance: leaving and coming back must fit, however the sums were rounded.
        has_room = (1 + 1e-9) * self.hardware.memory_bytes - self.memory >= choice.memory_bytes
        is_owned = choice.placement == "table_wise"
        fits = bool(has_room.any() if is_owned else has_room.all())
        if fits:
            device = int(np.argmin(np.where(has_room, self.seconds, np.inf))) if is_owned else None
            self.taken[name] = (choice, device)
        if fits or before is not None:
            self._add(name, 1)
        return fits

    def _improve(self, name: str) -> bool:
        """Moves the table if that lowers the cost."""
        is_better = False
        for choice in self.choices[name]:
            before, cost, loads = self.taken[name], self.cost(), (self.memory.copy(), self.seconds.copy())
            if self._take(name, choice) and self.cost() < cost:
                is_better = True
            else:
                self.taken[name], (self.memory, self.seconds) = before, loads
        return is_better

    def plan(self, settled: Mapping[str, str]) -> PlacementPlan:
        """The present places, with their reasons."""
        return PlacementPlan(
            num_devices=self.num_devices,
            hardware=self.hardware,
            tables=tuple(
                PlacedTable(
                    name=name,
                    placement=self.taken[name][0].placement,
                    device=self.taken[name][1],
                    choices=tuple(own),
                    reason="as asked for" if name in settled else self._reason(name, own[0]),
                )
                for name, own in self.choices.items()
            ),
            memory_bytes=tuple(self.memory.tolist()),
            seconds=tuple(self.seconds.tolist()),
            step_seconds=float(self.seconds.max()) + self._latency_seconds(),
        )

    def _reason(self, name: str, fastest: Choice) -> str:
        if self.taken[name][0] == fastest:
            return "the fastest"
        self._add(name, -1)
        free = self.hardware.memory_bytes - self.memory
        self._add(name, 1)
        most = float(free.max() if fastest.placement == "table_wise" else free.min())
        if most < fastest.memory_bytes:
            needed = f"{fastest.memory_bytes / 1e9:.2f} GB, where {most / 1e9:.2f} GB are free"
            return f"because {fastest.placement} needs {needed}"
        if fastest.placement == "table_wise":
            return "because as table_wise its owner would hold up the others"
        return f"because for {fastest.placement} there would be one more kind of exchange to wait for"

    def _raise_does_not_fit(self, name: str, choice: Choice) -> None:
        is_owned = choice.placement == "table_wise"
        left = self.hardware.memory_bytes - float(self.memory.min() if is_owned else self.memory.max())
        where = "one device" if is_owned else f"each of {self.num_devices} devices"
        raise PlacementError(
            f"table {name!r} does not fit: {choice.placement} it needs {choice.memory_bytes / 1e9:.3f} GB on {where}, "
            f"where {left / 1e9:.3f} GB of the budget of {self.hardware.memory_bytes / 1e9:.3f} GB are left. Take more "
            "devices, an optimizer with less state, a 16-bit dtype or a smaller embedding_dim."
        )
