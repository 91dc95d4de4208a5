"""The device side: what one device reads of a preprocessed batch, and the engine's way to the rows of a stack.

```
buffers ──read_occurrences──▶ rows, samples, gains ──Rows, AskedRows──▶ activations; tables and slots
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array, Int

from rsembed.collection.asked_rows import AskedRows
from rsembed.collection.dense_rows import DenseRows
from rsembed.collection.devices import Devices
from rsembed.collection.rows import Occurrences, Rows
from rsembed.kernels import api
from rsembed.kernels.contract import Segment
from rsembed.kernels.ids import Partitions
from rsembed.optimizers import OptimizerSpec
from rsembed.parallel.exchange import AxisName
from rsembed.sparsecore.layout import StackLayout


def stack_rows(layout: StackLayout, devices: Devices, rule: OptimizerSpec, *, capacity: int | None = None) -> Rows:
    """The rows of a stack, as the engine knows them: here, or asked from their owners.

    Args:
      layout: the stack's.
      devices: those that share it.
      rule: what steps them.
      capacity: places per block where they are asked for.
    """
    layout = dataclasses.replace(layout, num_devices=devices.num_devices)
    table = dataclasses.replace(
        layout.tables[0],
        embedding_dim=layout.spec.stack_embedding_dim,
        optimizer=rule,
        quantization_config=layout.spec.quantization_config,
    )
    home = DenseRows(layout.row_layout, layout.tables)
    if devices.num_devices == 1:
        return Rows(devices, table, home)
    return AskedRows(devices, table, home, capacity=capacity)


def read_occurrences(
    layouts: Sequence[StackLayout], buffers: Sequence[Sequence[Array]], num_minibatches: Int[Array, ""] | None
) -> list[Occurrences]:
    """What this device looks up in each stack.

    All minibatches are read together: a minibatch exists so that a SparseCore can hold it, and other machines need not.

    Args:
      layouts: those of the stacks.
      buffers: row pointers, embedding ids, sample ids and gains of this device, for each stack.
      num_minibatches: how many there are; None if batches are not cut into any.

    Returns: one feature a stack, whose ids are rows of the physical table, and whose samples are those of this device
      in the stacked order (cores, then features).
    """
    partitions = [
        Partitions(
            *(pointers, ids, samples, gains, num_minibatches),
            *(own.num_cores, own.num_shards, own.rows_per_shard, own.samples_per_core),
        )
        for (pointers, ids, samples, gains), own in zip(buffers, layouts, strict=True)
    ]
    found = api.entries_by_sample(partitions)
    return [Occurrences([Segment(rows, offsets, gains, "sum")]) for rows, offsets, gains in found]


def own_devices(num_devices: int, axis_name: AxisName | None = None) -> Devices:
    """The devices that share the tables: along those axes of the surrounding `shard_map` that have so many together.

    Args:
      num_devices: devices that share the tables.
      axis_name: the axes, outermost first, where the caller knows them; None searches: all axes in the order of the
        mesh, or the one that fits.

    Raises:
      ValueError: there is no `shard_map` around, none of its axes fits, or several do.
    """
    if num_devices == 1:
        return Devices()
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape[name] for name in mesh.manual_axes}
    if axis_name is not None:
        wanted = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    elif math.prod(sizes.values()) == num_devices:
        wanted = tuple(sizes)
    else:
        wanted = tuple(name for name, size in sizes.items() if size == num_devices)
    if wanted and math.prod(sizes.get(name, 0) for name in wanted) == num_devices:
        return Devices(mesh, wanted)
    raise ValueError(
        f"global_device_count={num_devices}, but the surrounding shard_map has the axes {sizes}; call this inside "
        "jax.shard_map over the axis that shards the tables, and name it with axis_name= if several fit."
    )
