"""What one training step sends between devices, and how long that takes: a model in bytes and seconds.

```
IdDistribution ─▶ DeviceLoad (ids, distinct ids, outputs of one device) ─▶ bytes_sent, step_time for every path
```

Bytes follow from the algorithm alone. Seconds come from a two-level latency and bandwidth model, see `Hardware`;
nothing overlaps in it, and its constants are inputs: measure them before you believe a number.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Num

from rsembed.checks import PositiveInt, check_within, validated, within

PATHS = (
    "dedup",
    "hierarchical_dedup",
    "all_to_all",
    "table_wise",
    "column_wise",
    "row_wise_reduce_scatter",
    "all_gather",
    "all_gather_mean",
    "replicated",
)
"""How ids reach rows and vectors come back, forward and backward:

* `dedup`: distinct ids to the owners of their rows, vectors back, gradients there. What this library does.
* `hierarchical_dedup`: the same, after a second look for equal ids among the devices of a node.
* `all_to_all`: as `dedup`, every occurrence by itself (SOK `All2AllDenseEmbedding`).
* `table_wise`: ids to the one owner of their table, pooled vectors back.
* `column_wise`: ids to all devices, each of which pools its columns.
* `row_wise_reduce_scatter`: ids to owners of rows, partial sums of all outputs added on the way (TorchRec row-wise).
* `all_gather`, `all_gather_mean`: all ids everywhere, partial sums added (SOK 1.x `DistributedEmbedding`).
* `replicated`: the table on every device, its whole gradient reduced.
"""

_HEAD_RANKS = 100_000
_TAIL_RATIO = 1.001


class IdDistribution(NamedTuple):
    """How often ids are drawn: groups of ids of equal probability."""

    probabilities: Float[np.ndarray, " groups"]
    num_ids: Float[np.ndarray, " groups"]

    def expected_distinct(self, num_draws: float) -> float:
        """Different ids among independent draws: the sum of `1 - (1 - p) ** num_draws`."""
        never = num_draws * np.log1p(-np.minimum(self.probabilities, 1 - 1e-16))
        return float(np.sum(self.num_ids * -np.expm1(never)))


@validated
def zipf_ids(vocabulary_size: int, exponent: float) -> IdDistribution:
    """The id of rank `r` has a probability proportional to `r ** -exponent`; 0 draws all ids alike.

    Ranks beyond 100,000 are taken together where their probabilities differ by less than 0.1 %.

    Raises: ValueError: there is no id.
    """
    if vocabulary_size < 1:
        raise ValueError(f"zipf_ids: vocabulary_size must be at least 1, got {vocabulary_size}.")
    check_within("[0, inf)", exponent, "zipf_ids: exponent")
    head = min(vocabulary_size, _HEAD_RANKS)
    edges = [float(head)]
    while edges[-1] < vocabulary_size:
        edges.append(min(float(vocabulary_size), math.ceil(edges[-1] * _TAIL_RATIO)))
    low, high = np.array(edges[:-1]), np.array(edges[1:])
    ranks = np.concatenate([np.arange(1.0, head + 1), np.sqrt((low + 1) * high)])
    num_ids = np.concatenate([np.ones(head), high - low])
    weights = ranks**-exponent
    return IdDistribution(weights / np.sum(weights * num_ids), num_ids)


@validated
def observed_ids(counts: Num[np.ndarray, " vocab"]) -> IdDistribution:
    """The distribution of a histogram, such as `plot.id_counts` returns.

    Raises: ValueError: a count is negative, or all are 0.
    """
    counts = np.asarray(counts, np.float64)
    if not counts.size or counts.min() < 0 or counts.max() == 0:
        raise ValueError("observed_ids: counts must not be negative, and at least one must be above 0.")
    values, num_ids = np.unique(counts[counts > 0], return_counts=True)
    return IdDistribution(values / counts.sum(), num_ids.astype(np.float64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLoad:
    """What one device looks up in one step.

    Args:
      num_ids: ids, repetitions included.
      num_outputs: pooled vectors; without pooling, as many as ids.
      num_distinct_ids: different ids.
      num_rows: rows of the table, or of all tables together.
      embedding_dim: columns.
      num_distinct_ids_of_node: different ids among all devices of a node, divided by these devices; None means that
        devices of a node share no ids.
      key_bytes: of an id on the wire.
      value_bytes: of a number on the wire; 2 for bfloat16.
    """

    num_ids: float
    num_outputs: float
    num_distinct_ids: float
    num_rows: float
    embedding_dim: int
    num_distinct_ids_of_node: float | None = None
    key_bytes: int = 8
    value_bytes: int = 4


@validated
def device_load(
    ids: IdDistribution,
    *,
    local_batch: PositiveInt,
    num_features: PositiveInt,
    ids_per_sample: PositiveInt,
    embedding_dim: PositiveInt,
    devices_per_node: PositiveInt = 8,
    key_bytes: int = 8,
    value_bytes: int = 4,
) -> DeviceLoad:
    """What a device looks up for features that read one table each, all tables being alike.

    Args:
      ids: what one feature draws from.
      local_batch: samples per device.
      num_features: features, and tables.
      ids_per_sample: of one feature.
      embedding_dim: columns of every table.
      devices_per_node: devices that look for equal ids together in `hierarchical_dedup`.
      key_bytes: see `DeviceLoad`.
      value_bytes: see `DeviceLoad`.
    """
    draws = local_batch * ids_per_sample
    return DeviceLoad(
        num_ids=num_features * draws,
        num_outputs=num_features * local_batch,
        num_distinct_ids=num_features * ids.expected_distinct(draws),
        num_distinct_ids_of_node=num_features * ids.expected_distinct(draws * devices_per_node) / devices_per_node,
        num_rows=num_features * float(ids.num_ids.sum()),
        embedding_dim=embedding_dim,
        key_bytes=key_bytes,
        value_bytes=value_bytes,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
@validated
class Hardware:
    """Devices in nodes: fast links inside a node, slower ones between nodes. Defaults are round numbers, not a product.

    Args:
      devices_per_node: devices that share the fast links.
      intra_node_bytes_per_second: per device, inside its node.
      inter_node_bytes_per_second: per device, between nodes.
      intra_node_latency_seconds: of one collective inside a node.
      inter_node_latency_seconds: likewise between nodes, times the logarithm of their number.
      memory_bytes_per_second: of a device's own memory.
      memory_bytes: of a device, for tables and optimizer state.
    """

    devices_per_node: int = within("[1, inf)", default=8)
    intra_node_bytes_per_second: float = within("(0, inf]", default=300e9)
    inter_node_bytes_per_second: float = within("(0, inf]", default=25e9)
    intra_node_latency_seconds: float = within("[0, inf)", default=15e-6)
    inter_node_latency_seconds: float = within("[0, inf)", default=30e-6)
    memory_bytes_per_second: float = within("(0, inf]", default=2e12)
    memory_bytes: float = within("[0, inf]", default=60e9)

    def split(self, num_devices: int) -> tuple[int, int]:
        """Devices of a node, and nodes. Raises: ValueError: nodes would not be full."""
        own = min(self.devices_per_node, num_devices)
        if num_devices < 1 or num_devices % own:
            raise ValueError(f"{num_devices} devices do not fill nodes of {self.devices_per_node}.")
        return own, num_devices // own

    def latency_seconds(self, num_devices: int) -> float:
        """Of one collective."""
        own, nodes = self.split(num_devices)
        inside = self.intra_node_latency_seconds * (own > 1)
        return inside + self.inter_node_latency_seconds * (nodes > 1) * math.log2(nodes + 1)

    def link_seconds(self, intra_node_bytes: float, inter_node_bytes: float) -> float:
        """To send so much from one device."""
        inside = intra_node_bytes / self.intra_node_bytes_per_second
        return inside + inter_node_bytes / self.inter_node_bytes_per_second


def _collectives(path: str, load: DeviceLoad, num_devices: int, padding: float) -> list[tuple[str, float]]:
    """Collectives of a step with their bytes per device; in a `ring`, each device's block goes to all (or is summed).

    Source: the upstream implementations of the paths, see docs/distributed.md.
    """
    vector = load.embedding_dim * load.value_bytes
    ids, wanted, pooled = load.num_ids * load.key_bytes, padding * load.num_distinct_ids, load.num_outputs * vector
    ids_and_rows = ids + 8 * load.num_ids  # an int64 row index beside every id
    lengths = 8 * (num_devices * load.num_outputs + 1) / num_devices  # int64, reduced and spread again
    known = {
        "dedup": [("all_to_all", wanted * load.key_bytes), *2 * [("all_to_all", wanted * vector)]],
        "all_to_all": [("all_to_all", ids), *2 * [("all_to_all", load.num_ids * vector)]],
        "table_wise": [("all_to_all", ids), *2 * [("all_to_all", pooled)]],
        "column_wise": [("ring", ids), *2 * [("all_to_all", pooled)]],
        "row_wise_reduce_scatter": [("all_to_all", ids), *2 * [("ring", pooled)]],
        "all_gather": [("ring", ids_and_rows), *2 * [("ring", pooled)]],
        "all_gather_mean": [("ring", ids_and_rows), *2 * [("ring", pooled)], *2 * [("ring", lengths)]],
        "replicated": 2 * [("ring", load.num_rows * vector / num_devices)],
    }
    if path not in known:
        raise ValueError(f"unknown path {path!r}; choose one of {', '.join(PATHS)}.")
    return known[path]


def link_bytes(
    path: str, load: DeviceLoad, num_devices: int, *, devices_per_node: int = 8, padding: float = 1.0
) -> tuple[float, float]:
    """Bytes that a device sends per step inside its node, and to other nodes.

    Args:
      path: one of `PATHS`.
      load: of one device.
      num_devices: all of them.
      devices_per_node: see `Hardware`.
      padding: buffers over the ids that are in them, for the `dedup` paths; 1.1 to 1.5 in practice.

    Raises: ValueError: unknown path, or nodes that are not full.
    """
    own, nodes = Hardware(devices_per_node=devices_per_node).split(num_devices)
    if path == "hierarchical_dedup":
        per_id = padding * (load.key_bytes + 2 * load.embedding_dim * load.value_bytes)
        of_node = load.num_distinct_ids if load.num_distinct_ids_of_node is None else load.num_distinct_ids_of_node
        inside = per_id * load.num_distinct_ids * (own - 1) / own
        return inside, per_id * of_node * (num_devices - own) / num_devices
    inside = outside = 0.0
    for kind, num_bytes in _collectives(path, load, num_devices, padding):
        if kind == "all_to_all":
            inside += num_bytes * (own - 1) / num_devices
            outside += num_bytes * (num_devices - own) / num_devices
        else:  # blocks travel inside nodes first, then what a device has gathered of them between nodes
            total = num_devices * num_bytes
            inside += total * (own - 1) / own
            outside += total / own * (nodes - 1) / nodes
    return inside, outside


def bytes_sent(
    path: str, load: DeviceLoad, num_devices: int, *, devices_per_node: int = 8, padding: float = 1.0
) -> float:
    """Bytes that a device sends per step; what it keeps for itself is not counted. See `link_bytes`.

    Example:
      >>> load = DeviceLoad(num_ids=100, num_outputs=10, num_distinct_ids=40, num_rows=1000, embedding_dim=16)
      >>> bytes_sent("dedup", load, 4), bytes_sent("table_wise", load, 4)
      (4080.0, 1560.0)
    """
    return sum(link_bytes(path, load, num_devices, devices_per_node=devices_per_node, padding=padding))


def step_time(
    path: str,
    load: DeviceLoad,
    num_devices: int,
    hardware: Hardware,
    *,
    dense_seconds: float = 0.0,
    padding: float = 1.25,
    latency: bool = True,
) -> float:
    """Seconds of a step: dense layers, collectives one after another, and the device's own memory.

    Args:
      path: one of `PATHS`.
      load: of one device.
      num_devices: all of them.
      hardware: the constants.
      dense_seconds: of everything that is not embedding.
      padding: see `link_bytes`.
      latency: count the latencies; without them, the times of several tables add up.

    Raises: ValueError: as `link_bytes`.
    """
    inside, outside = link_bytes(path, load, num_devices, devices_per_node=hardware.devices_per_node, padding=padding)
    # A row is read forward; gradient and row are read and written backward, with about as much state again.
    rows = 6 * (load.num_distinct_ids if "dedup" in path else load.num_ids)
    if path == "replicated":
        rows += 3 * load.num_rows  # the reduced gradient is dense: read it, read and write every row
    memory = rows * load.embedding_dim * load.value_bytes / hardware.memory_bytes_per_second
    num_collectives = 3 if "dedup" in path else len(_collectives(path, load, num_devices, padding))
    waiting = num_collectives * hardware.latency_seconds(num_devices) if latency else 0.0
    return dense_seconds + waiting + hardware.link_seconds(inside, outside) + memory
