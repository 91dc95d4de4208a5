"""The device side: what one device reads of a preprocessed batch, and the engine's way to the rows of a stack.

```
buffers ──read_entries──▶ occurrences: rows, samples, gains ──Rows, AskedRows──▶ activations; tables and slots
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rsembed.collection.asked_rows import AskedRows
from rsembed.collection.dense_rows import DenseRows
from rsembed.collection.devices import Devices
from rsembed.collection.rows import Occurrences, Rows
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.optimizers import OptimizerSpec
from rsembed.parallel.exchange import AxisName
from rsembed.sparsecore.layout import StackLayout
from rsembed.stacking import SUBLANES, round_up


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


def read_entries(layout: StackLayout, buffers: Sequence[Array], num_minibatches: Int[Array, ""] | None) -> Occurrences:
    """The entries that the row pointers delimit, by sample; what lies in gaps and behind the last partition is none.

    Without minibatches (None), row pointers count from the first place of their core. With them, blocks of row
    pointers belong to (core, minibatch) and count from the first place of all. All minibatches are read together: a
    minibatch exists so that a SparseCore can hold it, and other machines need not. Entries are put into the order of
    a batch without minibatches, so that sums come out bit by bit the same.

    Args:
      layout: the stack's.
      buffers: row pointers, embedding ids, sample ids and gains of this device.
      num_minibatches: how many there are.

    Returns: one feature, whose ids are rows of the physical table, and whose samples are those of this device in the
      stacked order (cores, then features).
    """
    row_pointers, embedding_ids, sample_ids, gains = buffers
    num_cores, num_shards = layout.num_cores, layout.num_shards
    num_parts = num_cores if num_minibatches is None else 1
    places_per_part = embedding_ids.size // num_parts
    blocks = row_pointers.reshape(num_parts, -1, max(num_shards, SUBLANES))
    ends = blocks[:, :, :num_shards].reshape(num_parts, -1)
    starts = jnp.pad(round_up(ends[:, :-1], SUBLANES), ((0, 0), (1, 0)))
    if num_minibatches is not None:
        is_used = jnp.arange(ends.size, dtype=jnp.int32)[None, :] < num_cores * num_minibatches * num_shards
        starts = jnp.where(is_used, starts, places_per_part)
    # Counting the partitions that start up to a place tells its partition: the last of those, if some are empty.
    part = jnp.arange(num_parts, dtype=jnp.int32)[:, None]
    started = jnp.zeros((num_parts, places_per_part), jnp.int32).at[part, starts].add(1, mode="drop")
    partition = jnp.cumsum(started, axis=1) - 1
    place = jnp.arange(places_per_part, dtype=jnp.int32)[None, :]
    is_entry = (place < jnp.take_along_axis(ends, partition, axis=1)).reshape(-1)
    if num_minibatches is None:
        cores, shards = jnp.repeat(part.reshape(-1), places_per_part), partition.reshape(-1)
    else:
        cores, shards = partition[0] // (num_minibatches * num_shards), partition[0] % num_shards

    def used(values: Array) -> Array:
        return jnp.where(is_entry, values, NO_ROW)

    rows = used(shards * layout.rows_per_shard + embedding_ids)
    samples, gains = used(cores * layout.samples_per_core + sample_ids), jnp.where(is_entry, gains, 0.0)
    if num_minibatches is not None:
        order = jnp.lexsort((samples, rows, jnp.where(is_entry, cores, num_cores)))
        rows, samples, gains = (field[order] for field in (rows, samples, gains))
    offsets, order = api.rows_by_bag(samples, layout.samples_per_core * num_cores)
    return Occurrences([Segment(rows[order], offsets, gains[order], "sum")])


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
