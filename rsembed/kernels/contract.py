"""Arguments of kernels: segments and jagged batches of ids, gradients of outputs, and the optimizer step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

from rsembed.optimizers.base import Hyperparameters, OptimizerSpec
from rsembed.specs import Combiner

Table = Float[Array, "num_rows dim"]
Outputs = tuple[Float[Array, "_ dim"], ...]
RowsAndGradients = tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]

KeyOrKeys = Shaped[Array, "*tables"]
"""A PRNG key, or one for each of several tables."""

Rounding = Callable[..., Array]
"""`(values, dtype, rows) -> values`: how stepped rows are brought to the table's dtype; None rounds to nearest.

Rows of keyed tables that share one storage are told apart by a fourth argument, `table`."""

# Row number that no table has. Sorts behind every real row, so padding gathers at the end.
NO_ROW = 2**31 - 1


def as_rows(rows: ArrayLike) -> Int[Array, " nnz"]:
    """Row numbers as int32; those that do not fit become `NO_ROW`, which no table has."""
    rows = jnp.asarray(rows)
    if rows.dtype == jnp.int32:
        return rows
    if rows.dtype.itemsize < 4:
        return rows.astype(jnp.int32)
    return jnp.where((rows >= 0) & (rows < NO_ROW), rows, NO_ROW).astype(jnp.int32)


def as_offsets(offsets: ArrayLike, num_entries: int) -> Int[Array, " bags_plus_1"]:
    """Offsets as int32; none lies outside `[0, num_entries]`."""
    offsets = jnp.asarray(offsets)
    wide = offsets.astype(jnp.int32) if offsets.dtype.itemsize < 4 else offsets
    return jnp.clip(wide, 0, num_entries).astype(jnp.int32)


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """Ids of one feature in a kernel call, with their bags, weights and combiner.

    Args:
      rows: table row of every entry. A row outside `[0, num_rows)` contributes nothing and is not counted.
      offsets: entries `offsets[b] : offsets[b + 1]` belong to bag `b`; entries behind the last offset are ignored.
        None with combiner "none", where every entry is a bag.
      weights: weight of every entry; None means ones.
      combiner: `sum` adds `weight * row`; `mean` divides by the sum of weights, `sqrtn` by the root of the sum of
        squared weights (of entries with a valid row; a zero divisor gives zeros); `none` returns every entry by itself.
    """

    rows: Int[Array, " nnz"]
    offsets: Int[Array, " bags_plus_1"] | None
    weights: Float[Array, " nnz"] | None
    combiner: Combiner = dataclasses.field(default="sum", metadata={"static": True})

    def __post_init__(self) -> None:
        if (self.offsets is None) != (self.combiner == "none"):
            raise ValueError(
                f"combiner {self.combiner!r} and offsets do not go together: `none`, and only it, has none."
            )

    @property
    def num_outputs(self) -> int:
        """Rows of this segment's output: bags, or entries for combiner "none"."""
        return self.rows.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


class Block(NamedTuple):
    """A feature's bags in a jagged batch, and the rows of its table.

    Args:
      first_bag: number of its first bag.
      num_bags: number of consecutive bags.
      table: number of the call's array that holds the feature's table.
      first_row: row of that array which id 0 means.
      num_rows: ids outside `[0, num_rows)` contribute nothing and are not counted.
    """

    first_bag: int
    num_bags: int
    table: int
    first_row: int
    num_rows: int


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JaggedBatch:
    """All features of a call in one list of ids, feature after feature: what table-batched kernels read.

    Args:
      ids: id in the feature's own table, of every entry.
      offsets: entries `offsets[b] : offsets[b + 1]` belong to bag `b`; they never fall.
      weights: weight of every entry; None means ones.
      combiner: `sum`; `mean`, which divides by the number of valid ids, weighted or not; `none`, which returns every
        entry by itself, shorter rows filled up with zeros.
      blocks: one per feature, in the order of the output; no two share a bag.
      layout: `columns` sets the features of a bag side by side, `[bags, sum of dims]`, and needs equally many bags of
        each; `blocks` sets `[num_bags, dim]` after `[num_bags, dim]`. Combiner `none` gives `[nnz, longest dim]` and
        has no use for it. Outputs and their gradients are passed flat.
    """

    ids: Int[Array, " nnz"]
    offsets: Int[Array, " bags_plus_1"]
    weights: Float[Array, " nnz"] | None
    combiner: Literal["sum", "mean", "none"] = dataclasses.field(metadata={"static": True})
    blocks: tuple[Block, ...] = dataclasses.field(metadata={"static": True})
    layout: Literal["columns", "blocks"] = dataclasses.field(default="columns", metadata={"static": True})

    def output_shape(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Shape of the output, which kernels pass flat, for arrays with these row lengths."""
        size, [(_, stride), *_] = self.output_places(dims)
        is_flat = self.combiner != "none" and self.layout == "blocks"
        return (size,) if is_flat else (size // stride, stride)

    def output_places(self, dims: Sequence[int]) -> tuple[int, list[tuple[int, int]]]:
        """Size of the flat output, and for each block the offset of its first vector and the stride between vectors."""
        own = [dims[block.table] for block in self.blocks]
        if self.combiner == "none":
            return self.ids.shape[0] * max(own), [(0, max(own))] * len(own)
        if self.layout == "blocks":
            sizes = [block.num_bags * dim for block, dim in zip(self.blocks, own, strict=True)]
            return sum(sizes), list(zip(itertools.accumulate(sizes, initial=0), own, strict=False))
        starts = itertools.accumulate(own, initial=0)
        return self.blocks[0].num_bags * sum(own), [(start, sum(own)) for start, _ in zip(starts, own, strict=False)]


class SegmentGradients(NamedTuple):
    """Gradients of the outputs of segments that read one table."""

    segments: Sequence[Segment]
    d_outputs: Sequence[Float[Array, "_ dim"]]

    @staticmethod
    def of_rows(rows: Int[Array, " n"], gradients: Float[Array, "n dim"]) -> SegmentGradients:
        """Gradients of single rows, which may repeat."""
        return SegmentGradients([Segment(rows, None, None, "none")], [gradients])


class JaggedGradients(NamedTuple):
    """The flat gradient of a table-batched call's output, on its way to one of the call's arrays.

    Args:
      batch: ids of all features.
      d_output: gradient of what `lookup_jagged` returned.
      table: number of the call's array whose rows get gradients.
      dims: row length of every array of the call.
    """

    batch: JaggedBatch
    d_output: Float[Array, " size"]
    table: int
    dims: Sequence[int]


OutputGradients = SegmentGradients | JaggedGradients


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """Optimizer step of distinct rows: rule, hyperparameters and rounding.

    Args:
      hyper: result of `rule.get_hyperparameters`.
      rule: the optimizer.
      rounding: function that rounds stepped rows to the table's dtype; None rounds to nearest.
      number: number of the step, from 0; for storages that record when a row was used.
    """

    hyper: Hyperparameters
    rule: OptimizerSpec = dataclasses.field(metadata={"static": True})
    rounding: Rounding | None = None
    number: Int[Array, ""] | None = None

    def rounds(self, table: Table) -> bool:
        """Whether rows of this table need the rounding."""
        return self.rounding is not None and table.dtype != jnp.float32

    def hyper_vector(self, least: int = 0) -> Float[Array, " hyper"]:
        """The hyperparameters in one array, filled up with zeros to `least` numbers."""
        absent = [0.0] * (least - len(self.hyper))
        return jnp.stack([jnp.asarray(value, jnp.float32) for value in (*self.hyper, *absent)])
