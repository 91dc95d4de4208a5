"""The device side: what one device does with its part of a preprocessed batch, inside `shard_map`.

```
lookup   entries ──rows by owner──▶ vectors ──pool by sample──▶ activations of the stack
update   d(activations) ──spread──▶ one vector per entry ──to the owner──▶ one optimizer step per row
```

With one device the exchange falls away. All arithmetic on tables is done by `rsembed.kernels`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment, Step
from rsembed.optimizers import Slots
from rsembed.parallel.exchange import AxisName, Routes, plan_routes, send, send_back
from rsembed.places import tables_and_ids
from rsembed.sparsecore.layout import StackLayout
from rsembed.stacking import SUBLANES, round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackEntries:
    """What one device looks up in a stack: its buffer place by place, empty ones with `NO_ROW` and gain 0.

    Attributes:
      layout: the stack's.
      owners: device that holds the row.
      rows: row of the owner's part of the physical table.
      samples: sample of this device.
      gains: factor of the row in the sample's activation.
      axes: mesh axes along which devices share the stack; None for one device.
      capacity: most entries that go to one of them.
    """

    layout: StackLayout
    owners: Int[Array, " nnz"]
    rows: Int[Array, " nnz"]
    samples: Int[Array, " nnz"]
    gains: Float[Array, " nnz"]
    axes: AxisName | None
    capacity: int

    def _routes(self) -> Routes:
        return plan_routes(self.owners, num_devices=self.layout.num_devices, capacity=self.capacity)

    def lookup(self, table: Float[Array, "rows dim"]) -> Float[Array, "samples dim"]:
        """Activations of all samples of this device, float32, in the stacked order (cores, then features)."""
        vectors, places = table, self.rows
        if self.axes is not None:
            routes = self._routes()
            wanted = send(self.rows, routes.entries, self.axes)
            (found,) = api.lookup(table, [Segment(wanted.reshape(-1), None, None, "none")])
            vectors, places = send_back(found.reshape(*wanted.shape, -1), self.axes), routes.places
        return api.lookup(vectors, [self._bags(places)], quantization=self.layout.spec.quantization_config)[0]

    def update(
        self, table: Float[Array, "rows dim"], slots: Slots, d_activations: Float[Array, "samples dim"], step: Step
    ) -> tuple[Float[Array, "rows dim"], Slots]:
        """One optimizer step of every row that any device looked up, with the gradients of all of them added."""
        segment, d_outputs = self._bags(self.rows), d_activations
        if self.axes is not None:
            routes = self._routes()
            (vectors,) = api.lookup(d_activations, [Segment(self.samples, None, self.gains, "none")])
            rows, d_outputs = send((self.rows, vectors), routes.entries, self.axes)
            segment, d_outputs = Segment(rows.reshape(-1), None, None, "none"), d_outputs.reshape(rows.size, -1)
        return api.update(table, slots, [segment], [d_outputs], step.hyper, step.rule, rounding=step.rounding)

    def _bags(self, places: Int[Array, " nnz"]) -> Segment:
        """The entries of every sample, which read from `places`."""
        offsets, order = api.rows_by_bag(self.samples, self.layout.samples_per_core * self.layout.num_cores)
        return Segment(places[order], offsets, self.gains[order], "sum")

    def stacked_rows(self, rows: Int[Array, " capacity"]) -> Int[Array, " capacity"]:
        """Number of this device's rows in the stack's tables laid under each other, which no sharding changes."""
        layout = self.layout
        first_shard = 0 if self.axes is None else jax.lax.axis_index(self.axes) * layout.num_cores
        core, row_in_shard = jnp.divmod(rows, layout.rows_per_shard)
        sizes = [table.vocabulary_size for table in layout.tables]
        shard = first_shard + core
        tables, ids = tables_and_ids(layout.places, sizes, shard, row_in_shard, spread=layout.num_shards)
        firsts = np.cumsum([0, *sizes[:-1]], dtype=np.int32)
        return jnp.where((rows == NO_ROW) | (tables < 0), NO_ROW, jnp.asarray(firsts)[tables] + ids)


def read_entries(
    layout: StackLayout,
    buffers: Sequence[Array],
    num_minibatches: Int[Array, ""] | None,
    *,
    axes: AxisName | None,
    capacity: int,
) -> StackEntries:
    """The entries that the row pointers delimit; what lies in gaps and behind the last partition is never used.

    Without minibatches (None), row pointers count from the first place of their core. With them, blocks of row
    pointers belong to (core, minibatch) and count from the first place of all. All minibatches are read together: a
    minibatch exists so that a SparseCore can hold it, and other machines need not. Entries are put into the order of
    a batch without minibatches, so that sums come out bit by bit the same.

    Args:
      layout: the stack's.
      buffers: row pointers, embedding ids, sample ids and gains of this device.
      num_minibatches: how many there are.
      axes: as `StackEntries` has them.
      capacity: likewise.
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

    owners, rows = used(shards // num_cores), used(shards % num_cores * layout.rows_per_shard + embedding_ids)
    samples, gains = used(cores * layout.samples_per_core + sample_ids), jnp.where(is_entry, gains, 0.0)
    if num_minibatches is not None:
        order = jnp.lexsort((samples, rows, owners, jnp.where(is_entry, cores, num_cores)))
        owners, rows, samples, gains = (field[order] for field in (owners, rows, samples, gains))
    return StackEntries(
        layout=layout, owners=owners, rows=rows, samples=samples, gains=gains, axes=axes, capacity=capacity
    )


def manual_axes(num_devices: int, axis_name: AxisName | None = None) -> AxisName | None:
    """The mesh axes of the surrounding `shard_map` that have `num_devices` devices together; None for one device.

    Args:
      num_devices: devices that share the tables.
      axis_name: the axes, outermost first, where the caller knows them; None searches: all axes in the order of the
        mesh, or the one that fits.

    Raises:
      ValueError: there is no `shard_map` around, none of its axes fits, or several do.
    """
    if num_devices == 1:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape[name] for name in mesh.manual_axes}
    if axis_name is not None:
        wanted = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    elif math.prod(sizes.values()) == num_devices:
        wanted = tuple(sizes)
    else:
        wanted = tuple(name for name, size in sizes.items() if size == num_devices)
    if wanted and math.prod(sizes.get(name, 0) for name in wanted) == num_devices:
        return wanted
    raise ValueError(
        f"global_device_count={num_devices}, but the surrounding shard_map has the axes {sizes}; call this inside "
        "jax.shard_map over the axis that shards the tables, and name it with axis_name= if several fit."
    )
