"""Converts the ids of a batch to row numbers or keys, as arguments of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from rsembed.bags import Bags
from rsembed.collection.devices import Devices
from rsembed.collection.prepared import Listed, PreparedBatch, in_order_of_features
from rsembed.kernels.contract import NO_ROW, Call, CallGradients, IdList, Segment
from rsembed.kernels.reference import by_bag, rows_of_list
from rsembed.keys import Keys, as_keys
from rsembed.stacking import FeaturePlacement
from rsembed.storage.dense_rows import DenseRows
from rsembed.storage.protocol import Storage
from rsembed.storage.row_layout import RowLayout, in_some_bag, list_of
from rsembed.storage.row_map import unnamed


class Occurrences(NamedTuple):
    """All ids that a batch looks up in one stack, with the bags of each feature.

    An id that occurs twice in the batch has two entries.

    Attributes:
      call: kernel call that looks up the ids. For keyed tables, the ids in `call` are indices into
        `keys`. For tables without keys, the ids in `call` are row numbers. Padding is `NO_ROW`.
      keys: 64-bit keys that the batch looks up, for keyed tables. None: ids are row numbers.
      table: index of the stack's array among the arrays that `call` reads, 0 by default.
      dims: row length of each array that `call` reads. Empty if `call` reads a single array.
    """

    call: Call
    keys: Keys | None = None
    table: int = 0
    dims: tuple[int, ...] = ()

    def gradients(self, d_outputs: Sequence[Array]) -> CallGradients:
        """Argument of the backward kernels: the lookup call, and the gradients of its outputs.

        If the call reads a single array, `d_outputs` may have only some columns of the outputs.
        """
        dims = self.dims
        if not dims:
            num_columns = d_outputs[0].shape[-1]
            dims = (num_columns,)
        return CallGradients(self.call, tuple(d_outputs), dims, self.table)

    def all_keys(self) -> Keys:
        """All ids as `Keys`. Row numbers are converted to keys."""
        if self.keys is not None:
            return self.keys
        rows = []
        for number in range(len(self.call.lists)):
            rows.append(rows_of_list(self.call, number, 0, NO_ROW))
        return keys_of_rows(jnp.concatenate(rows))

    def of_all(self, devices: Devices) -> Occurrences:
        """Gathers the ids of all devices. Samples of device 0 come first, then samples of device 1.

        If there are several devices, the ids must be row numbers, because `of_all` does not gather
        keys.
        """
        num_devices = devices.num_devices
        if num_devices == 1:
            return self
        lists = []
        segments = list(self.call.segments)
        for number, ids in enumerate(self.call.lists):
            readers = [k for k, segment in enumerate(segments) if segment.list == number]
            gathered = jax.tree.map(devices.gather, ids)
            if ids.offsets is None:
                num_bags, width = ids.array_shape
                array_shape = num_bags * num_devices, width
                gathered = replace(gathered, shape=array_shape)
            else:
                parts = Bags(gathered.ids, gathered.offsets, gathered.weights)
                places = [segments[k] for k in readers]
                gathered = list_of(in_order_of_features(parts, places, num_devices, NO_ROW))
            lists.append(gathered)
            first_bag = 0
            for k in readers:
                num_bags = segments[k].num_bags * num_devices
                segments[k] = segments[k]._replace(
                    first_bag=first_bag,
                    num_bags=num_bags,
                )
                first_bag += num_bags
        return Occurrences(Call(tuple(lists), tuple(segments)))


def occurrences_of(batch: PreparedBatch, layout: RowLayout, storage: Storage) -> Occurrences:
    """Ids of a batch in the form in which the storage of a stack looks them up.

    The ids of tables in one array become row indices in the array that `layout` describes. The ids
    of keyed tables become 64-bit keys. All other storages get row numbers, which are consecutive
    over the tables of the stack. An id outside its table contributes nothing.
    """
    bags, segments = _bags_of(batch, layout.stack.features)
    if isinstance(storage, DenseRows):
        return Occurrences(layout.call(bags, segments))
    if storage.takes_keys:
        return _keys_in_bags(layout, bags, segments)
    call = RowLayout.whole(layout.stack).call(bags, segments)
    lists = []
    for ids, bags_of_list in zip(call.lists, bags, strict=True):
        # An id that belongs to no bag becomes `NO_ROW`, so that the storage does not look it up.
        rows = jnp.where(in_some_bag(bags_of_list), ids.ids, NO_ROW)
        lists.append(replace(ids, ids=rows))
    return Occurrences(replace(call, lists=tuple(lists)))


def joined_calls(calls: Sequence[Call]) -> Call:
    """One kernel call that does the lookups of several calls.

    Table `k` of the result is the table of `calls[k]`. The outputs are the outputs of `calls[0]`,
    then the outputs of `calls[1]`, and so on.
    """
    lists: list[IdList] = []
    segments = []
    for number, call in enumerate(calls):
        for segment in call.segments:
            segments.append(segment._replace(list=len(lists) + segment.list, table=number))
        lists += call.lists
    return Call(tuple(lists), tuple(segments))


def _bags_of(
    batch: PreparedBatch, features: Sequence[FeaturePlacement]
) -> tuple[list[Bags], list[Segment]]:
    """Arguments of a kernel call that looks up some features: lists of ids, and segments.

    There is one segment per feature. Each list is a `Bags` object, which can hold the bags of
    several features. The segment of a feature has the index of the list with the feature's bags,
    the range of the feature's bags in the list, and the combiner of the feature.
    """
    all_bags: list[Bags] = []
    segments: list[Segment] = []
    number_of: dict[str, int] = {}
    for feature in features:
        place = batch.place(feature.name)
        if place is None:
            bags = batch.bags(feature.name)
            place = Listed(feature.name, 0, bags.num_bags)
            number = len(all_bags)
            all_bags.append(bags)
        else:
            if place.list not in number_of:
                number_of[place.list] = len(all_bags)
                all_bags.append(batch.lists[place.list])
            number = number_of[place.list]
        segment = Segment(
            list=number,
            first_bag=place.first_bag,
            num_bags=place.num_bags,
            combiner=feature.combiner,
        )
        segments.append(segment)
    return all_bags, segments


def _keys_in_bags(
    layout: RowLayout,
    all_bags: Sequence[Bags],
    segments: Sequence[Segment],
) -> Occurrences:
    """Ids as 64-bit keys. Ids that belong to no bag are replaced by padding."""
    lists = []
    all_keys = []
    first = 0
    for number, bags in enumerate(all_bags):
        keys = as_keys(bags.ids).only(in_some_bag(bags))
        index = first + jnp.arange(keys.shape[0], dtype=jnp.int32)
        index_or_padding = jnp.where(keys.is_key, index, NO_ROW)
        ids = list_of(bags, index_or_padding)
        tables = _tables_of_keys(layout, number, ids, segments)
        lists.append(ids)
        all_keys.append(keys._replace(table=tables))
        first += keys.shape[0]
    call = Call(tuple(lists), tuple(segments))
    joined = jax.tree.map(lambda *lanes: jnp.concatenate(lanes), *all_keys)
    return Occurrences(call, joined)


def _tables_of_keys(
    layout: RowLayout,
    number: int,
    ids: IdList,
    segments: Sequence[Segment],
) -> Int[Array, " nnz"] | None:
    """Index of the table that each key belongs to. None if the stack has one table.

    Args:
      layout: tables and features of the stack.
      number: index of the list in the kernel call.
      ids: the list.
      segments: for each feature of the stack, the range of the feature's bags in a list.
    """
    names = [table.name for table in layout.stack.tables]
    if len(names) == 1:
        return None
    readers = []
    tables = []
    for feature, segment in zip(layout.stack.features, segments, strict=True):
        if segment.list == number:
            readers.append(segment)
            tables.append(names.index(feature.table_name))
    table_of_key = by_bag(ids, readers, tables, 0)
    return jnp.broadcast_to(table_of_key, ids.ids.shape)


def keys_of_rows(rows: Int[Array, " nnz"]) -> Keys:
    """Converts row numbers to `Keys`. Entries that are `NO_ROW` become padding keys."""
    high = jnp.zeros(rows.shape, jnp.uint32)
    low = rows.astype(jnp.uint32)
    return Keys(high, low, is_key=rows != NO_ROW)


def keys_of_gradients(rows: Array) -> tuple[Keys, Int[Array, " capacity"]]:
    """Keys of the rows in `RowGradients`, and the number of occurrences of each key.

    For a keyed table, `rows` has two 32-bit lanes for each key, and the number of occurrences of
    the key. For a table without keys, `rows` are row numbers, and the number of occurrences is 1
    for every row.
    """
    if rows.ndim == 1:
        keys = keys_of_rows(rows)
        return keys, keys.is_key.astype(jnp.int32)
    return unnamed(rows)
