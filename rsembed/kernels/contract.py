"""Arguments of kernels: lists of ids, lookup calls, output gradients, and the optimizer step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, no_type_check

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from rsembed.optimizers.base import Hyperparameters, OptimizerSpec

Table = Float[Array, "num_rows dim"]
Outputs = tuple[Float[Array, "..."], ...]
RowsAndGradients = tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]
WeightGradients = tuple[Float[Array, " nnz"] | None, ...]

KeyOrKeys = Shaped[Array, "*tables"]
"""A PRNG key, or an array with one PRNG key for each of several tables."""

Rounding = Callable[..., Array]
"""Function `(values, dtype, rows) -> values` that rounds updated rows to the table's dtype.

If several keyed tables share one storage, a fourth argument, `table`, has the index of each row's
table."""

Ref: TypeAlias = Any
"""Reference to memory of a device, which Pallas passes to a kernel.

Reading from a `Ref` returns an array.
"""

Index: TypeAlias = Any
"""Index into a `Ref`: a traced loop index, or a slice from `pl.ds` of Pallas."""

# Row number that marks padding. No table has a row `NO_ROW`. Sorting moves padding to the end,
# because every real row number is smaller.
NO_ROW = 2**31 - 1


TABLE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that a table can have."""


def check_dtype(table: Table, kernels: str, dtypes: Sequence[str] = TABLE_DTYPES) -> None:
    """Raises `NotImplementedError` if the dtype of a table is not in `dtypes`.

    Args:
      table: table that a kernel reads or updates.
      kernels: name of the implementation, for the error message.
      dtypes: dtypes that the kernels support, `TABLE_DTYPES` by default.
    """
    if table.dtype.name not in dtypes:
        known = ", ".join(dtypes)
        raise NotImplementedError(
            f"tables of the {kernels} kernels are {known}, not {table.dtype}",
        )


def as_rows(rows: ArrayLike) -> Int[Array, " nnz"]:
    """Row numbers as int32. A number that does not fit into int32 becomes `NO_ROW`."""
    rows = jnp.asarray(rows)
    if rows.dtype == jnp.int32:
        return rows
    if rows.dtype.itemsize < 4:
        return rows.astype(jnp.int32)
    fits = is_between(rows, 0, NO_ROW)
    return jnp.where(fits, rows, NO_ROW).astype(jnp.int32)


def as_offsets(offsets: ArrayLike, num_entries: int) -> Int[Array, " bags_plus_1"]:
    """Offsets as int32, clipped to `[0, num_entries]`."""
    offsets = jnp.asarray(offsets)
    if offsets.dtype.itemsize < 4:
        offsets = offsets.astype(jnp.int32)
    clipped = jnp.clip(offsets, 0, num_entries)
    return clipped.astype(jnp.int32)


def int32_range(size: Any) -> Int[Array, " size"]:
    """The int32 numbers from 0 to `size - 1`."""
    return jnp.arange(size, dtype=jnp.int32)


def is_between(numbers: Array, first: Any, stop: Any) -> Bool[Array, "..."]:
    """Whether each number is in `[first, stop)`.

    Args:
      numbers: an array.
      first: lower bound, an array or an integer.
      stop: exclusive upper bound, an array or an integer. In an export for any batch size, `stop`
        can be a symbolic dimension.
    """
    return (numbers >= first) & (numbers < stop)


Combiner = Literal["sum", "mean", "sqrtn", "none", "mean_by_count"]
"""How the rows of a bag are combined into one output.

`sum` adds `weight * row`. `mean` divides the result of `sum` by the sum of the weights, `sqrtn` by
the root of the sum of the squared weights, and `mean_by_count` by the number of entries. Entries
without a valid row are ignored. If the divisor of a bag is zero, the bag's output is zero. `none`
does not pool: every entry has an output, `weight * row`.
"""

Layout = Literal["each", "columns", "blocks"]
"""Layout of the outputs of a call.

`each`: one array per segment, `[bags, dim]`, or `[entries, dim]` with combiner `none`. `columns`:
one array `[bags, sum of dims]` with the outputs of all segments side by side, for segments with
equal numbers of bags. `blocks`: one flat array, with the flattened `[bags, dim]` outputs of all
segments one after the other. With combiner `none`, `columns` and `blocks` both mean one array
`[entries, longest dim]`, where shorter rows are padded with zeros.
"""


@no_type_check  # Types are unchecked, because JAX puts placeholders into fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IdList:
    """Ids of one or more features, concatenated bag by bag.

    Args:
      ids: id of every entry, an index into the table of the entry's feature.
      offsets: entries `offsets[b] : offsets[b + 1]` belong to bag `b`. Entries before the first
        offset or after the last belong to no bag. None, the default: all bags have the same length,
        see `shape`.
      weights: weight of every entry. None, the default: all weights are 1.
      shape: number of bags, and number of entries in every bag, for a list without offsets.
    """

    ids: Int[Array, " nnz"]
    offsets: Int[Array, " bags_plus_1"] | None = None
    weights: Float[Array, " nnz"] | None = None
    shape: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})

    @staticmethod
    def single(ids: Int[Array, " nnz"]) -> IdList:
        """A list without weights, with one entry in each bag."""
        return IdList(ids, shape=(ids.shape[0], 1))

    @property
    def num_entries(self) -> int:
        """Number of entries, including entries that belong to no bag."""
        return self.ids.shape[0]

    @property
    def num_bags(self) -> int:
        """Number of bags."""
        if self.offsets is not None:
            return self.offsets.shape[0] - 1
        return self.array_shape[0]

    @property
    def array_shape(self) -> tuple[int, int]:
        """Number of bags, and number of entries in every bag, for a list without offsets.

        Raises: ValueError: `shape` is None.
        """
        if self.shape is None:
            raise ValueError(
                "a list of ids needs offsets, or the shape of bags that are equally long.",
            )
        return self.shape

    def all_offsets(self) -> Int[Array, " bags_plus_1"]:
        """Offsets of the bags, computed from `shape` if the list has no offsets."""
        if self.offsets is not None:
            return self.offsets
        num_bags, width = self.array_shape
        return int32_range(num_bags + 1) * width


class Segment(NamedTuple):
    """The part of a list that one feature reads, and the rows of the feature's table.

    All fields are static under `jit`.

    Args:
      list: index of the list in the call.
      first_bag: index in the list of the segment's first bag.
      num_bags: number of consecutive bags that the segment reads. No two segments share a bag.
      combiner: how rows are pooled, `sum` by default.
      table: index of the table in the call, 0 by default.
      first_row: row of the table that id 0 selects, 0 by default.
      num_rows: ids outside `[0, num_rows)` contribute nothing and are not counted. If `num_rows` is
        `NO_ROW`, the default, ids can select all rows from `first_row` to the end of the table.
    """

    list: int
    first_bag: int
    num_bags: int
    combiner: Combiner = "sum"
    table: int = 0
    first_row: int = 0
    num_rows: int = NO_ROW

    @property
    def bags(self) -> slice:
        """Slice that selects the bags of this segment from all bags of the list."""
        return slice(self.first_bag, self.first_bag + self.num_bags)

    def rows_in(self, table_rows: int) -> int:
        """Number of rows that ids of this segment can select in a table with `table_rows` rows."""
        return min(self.num_rows, table_rows - self.first_row)


class Place(NamedTuple):
    """Position of a segment's vectors in the outputs.

    Args:
      output: index of the output in the call.
      start: index of the segment's first number in the flattened output.
      stride: number of positions between the starts of consecutive vectors in the flattened output.
    """

    output: int
    start: int
    stride: int


@no_type_check  # Types are unchecked, because JAX puts placeholders into fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """One kernel call: lists of ids, and the segments that read them from tables.

    Args:
      lists: lists of ids, with their bags and weights.
      segments: one segment per feature, in the order of the outputs.
      layout: layout of the outputs, `each` by default.
    """

    lists: tuple[IdList, ...]
    segments: tuple[Segment, ...] = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(default="each", metadata={"static": True})

    @staticmethod
    def of(lists: Sequence[IdList], combiners: Sequence[Combiner]) -> Call:
        """A call with one feature per list, where all features read table 0."""
        segments: list[Segment] = []
        for ids, combiner in zip(lists, combiners, strict=True):
            number = len(segments)
            segments.append(Segment(number, 0, ids.num_bags, combiner))
        return Call(tuple(lists), tuple(segments))

    def with_ids(self, entries: Int[Array, " nnz"]) -> Call:
        """A copy of the call with new ids, which are row numbers of one table.

        `entries` has the new ids of all lists, one list after the other.
        """
        lists = []
        first = 0
        for ids in self.lists:
            last = first + ids.num_entries
            new_list = dataclasses.replace(ids, ids=entries[first:last])
            lists.append(new_list)
            first = last
        segments = []
        for segment in self.segments:
            new_segment = segment._replace(table=0, first_row=0, num_rows=NO_ROW)
            segments.append(new_segment)
        return Call(tuple(lists), tuple(segments), self.layout)

    def outputs(
        self,
        dims: Sequence[int],
    ) -> tuple[list[tuple[int, ...]], list[Place]]:
        """Shapes of the outputs, and the `Place` of each segment's vectors.

        Args:
          dims: row length of every table.
        """
        columns = [dims[segment.table] for segment in self.segments]
        output_places = []
        if self.layout == "each":
            shapes: list[tuple[int, ...]] = []
            for segment, dim in zip(self.segments, columns, strict=True):
                size = segment.num_bags
                if segment.combiner == "none":
                    size = self.lists[segment.list].num_entries
                number = len(shapes)
                shapes.append((size, dim))
                output_places.append(Place(number, 0, dim))
            return shapes, output_places
        if self.segments[0].combiner == "none":
            longest = max(columns)
            shape: tuple[int, ...] = (self.lists[0].num_entries, longest)
            return [shape], [Place(0, 0, longest)] * len(columns)
        total = sum(columns)
        sizes = columns
        strides = [total] * len(columns)
        shape = (self.segments[0].num_bags, total)
        if self.layout == "blocks":
            sizes = []
            for segment, dim in zip(self.segments, columns, strict=True):
                sizes.append(segment.num_bags * dim)
            strides = columns
            shape = (sum(sizes),)
        starts = itertools.accumulate(sizes, initial=0)
        for start, stride in zip(starts, strides, strict=False):
            output_places.append(Place(0, start, stride))
        return [shape], output_places


@no_type_check  # Types are unchecked, because JAX puts placeholders into fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CallGradients:
    """Gradients of the outputs of a call, from which the row gradients of one table are computed.

    Args:
      call: call that produced the outputs.
      d_outputs: gradient of each output, in the shape of the output or flattened.
      dims: row length of every table of the call.
      table: index of the table that gets row gradients, 0 by default.
    """

    call: Call
    d_outputs: tuple[Float[Array, "..."], ...]
    dims: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    table: int = dataclasses.field(default=0, metadata={"static": True})

    @staticmethod
    def of_rows(
        rows: Int[Array, " n"],
        gradients: Float[Array, "n dim"],
    ) -> CallGradients:
        """`CallGradients` in which row `rows[k]` has gradient `gradients[k]`. Rows may repeat."""
        call = Call.of([IdList.single(rows)], ["sum"])
        dims = (gradients.shape[1],)
        return CallGradients(call, (gradients,), dims)

    @property
    def dim(self) -> int:
        """Length of the rows that get gradients."""
        return self.dims[self.table]

    @property
    def num_entries(self) -> int:
        """Number of entries of the lists that the table's segments read.

        At most `num_entries` rows can get a gradient.
        """
        num_entries = 0
        for number in self.lists_read():
            num_entries += self.call.lists[number].num_entries
        return num_entries

    def lists_read(self) -> list[int]:
        """Ascending indices of the lists of ids in `call` from which rows of this table are read."""
        numbers = set()
        for segment in self.call.segments:
            if segment.table == self.table:
                numbers.add(segment.list)
        return sorted(numbers)


@no_type_check  # Types are unchecked, because JAX puts placeholders into fields of pytrees.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """Optimizer step on distinct rows: rule, hyperparameters and rounding.

    Args:
      hyper: result of `rule.get_hyperparameters`.
      rule: optimizer that updates the rows.
      rounding: function that rounds updated rows to the table's dtype. None, the default: updated
        rows are rounded to nearest.
      number: index of the step, counted from 0. A storage needs `number` if it records the step in
        which each row was last used. None, the default: the index is unknown.
      resident_rows: if the table is a cache, the row that each cache slot holds, `NO_ROW` for empty
        slots. With `resident_rows`, the row numbers of the rows to update are indices of cache
        slots. By default, the table is not a cache.
    """

    hyper: Hyperparameters
    rule: OptimizerSpec = dataclasses.field(metadata={"static": True})
    rounding: Rounding | None = None
    number: Int[Array, ""] | None = None
    resident_rows: Int[Array, " places"] | None = None

    def rounds(self, table: Table) -> bool:
        """Whether updated rows of this table must be rounded with `rounding`."""
        return self.rounding is not None and table.dtype != jnp.float32

    def hyper_vector(self, least: int = 0) -> Float[Array, " hyper"]:
        """The hyperparameters in one array, padded with zeros to at least `least` numbers."""
        num_absent = least - len(self.hyper)
        padding = [0.0] * num_absent
        numbers = []
        for value in (*self.hyper, *padding):
            numbers.append(jnp.asarray(value, jnp.float32))
        return jnp.stack(numbers)
