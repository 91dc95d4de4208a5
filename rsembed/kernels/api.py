"""The kernels as everybody calls them; `choice.py` picks the implementation that serves a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from rsembed.kernels import reference
from rsembed.kernels.blocks import Queue, Rows
from rsembed.kernels.choice import check_implementation as check_implementation
from rsembed.kernels.choice import dispatch
from rsembed.kernels.choice import implementation_states as implementation_states
from rsembed.kernels.contract import (
    NO_ROW,
    JaggedBatch,
    JaggedGradients,
    KeyOrKeys,
    OutputGradients,
    Segment,
    SegmentGradients,
    Step,
)
from rsembed.kernels.keyed import Distinct, Unique
from rsembed.kernels.partitions import Partitions, SampleEntries
from rsembed.keys import Keys
from rsembed.optimizers import Hyperparameters, OptimizerSpec, Slots
from rsembed.places import Place
from rsembed.specs import QuantizationConfig


def lookup(
    table: Float[Array, "num_rows dim"],
    segments: Sequence[Segment],
    *,
    quantization: QuantizationConfig | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "_ dim"], ...]:
    """Pooled rows of every segment, float32; see `reference.lookup` for the meaning.

    Differentiable in the table and the weights (dense gradients); training uses `row_gradients` or `update` instead.
    """
    if quantization is None:
        return _lookup(implementation, table, tuple(segments))
    outputs: list[Array] = []
    for segment in segments:  # quantization acts on single rows, before they are combined
        entries = Segment(segment.rows, None, None, "none")
        (vectors,) = _lookup(implementation, table, (entries,))
        valid = (segment.rows >= 0) & (segment.rows < table.shape[0])
        places = jnp.where(valid, jnp.arange(segment.rows.shape[0], dtype=jnp.int32), NO_ROW)
        pooled = Segment(places, segment.offsets, segment.weights, segment.combiner)
        outputs.extend(_lookup(implementation, quantization.quantize(vectors), (pooled,)))
    return tuple(outputs)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup(implementation: str | None, table: Array, segments: tuple[Segment, ...]) -> tuple[Array, ...]:
    return dispatch("lookup", implementation, table, segments)


def _lookup_forward(implementation: str | None, table: Array, segments: tuple[Segment, ...]) -> Any:
    return _lookup(implementation, table, segments), (table, segments)


def _lookup_backward(implementation: str | None, saved: Any, d_outputs: tuple[Array, ...]) -> Any:
    table, segments = saved
    rows, values = row_gradients(table.shape[0], segments, d_outputs, implementation=implementation)
    d_table = jnp.zeros_like(table).at[rows].add(values.astype(table.dtype), mode="drop")
    return d_table, tuple(
        _segment_cotangent(table, segment, d_output) for segment, d_output in zip(segments, d_outputs, strict=True)
    )


def _segment_cotangent(table: Array, segment: Segment, d_output: Array) -> Segment:
    d_weights = None if segment.weights is None else reference.gradients_of_weights(table, segment, d_output)
    return Segment(_no_gradient(segment.rows), _no_gradient(segment.offsets), d_weights, segment.combiner)


def _no_gradient(integers: Any) -> Any:
    return None if integers is None else np.zeros(integers.shape, jax.dtypes.float0)


_lookup.defvjp(_lookup_forward, _lookup_backward)


def row_gradients(
    num_rows: int,
    segments: Sequence[Segment],
    d_outputs: Sequence[Float[Array, "_ dim"]],
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]:
    """Gradient of every looked-up row, equal rows combined; see `reference.row_gradients`."""
    return dispatch("row_gradients", implementation, num_rows, SegmentGradients(segments, d_outputs))


def apply_rows(
    table: Float[Array, "num_rows dim"],
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    hyper: Hyperparameters,
    rule: OptimizerSpec,
    *,
    rounding: reference.Rounding | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "num_rows dim"], Slots]:
    """One optimizer step of distinct rows, in place when the arrays are donated."""
    step = Step(hyper, rule, rounding)
    if rule.moves_all_rows:  # one pass over whole arrays, entry by entry: no kernel could be faster than XLA
        return reference.apply_rows(table, slots, rows, gradients, step)
    return dispatch("apply_rows", implementation, table, slots, rows, gradients, step)


def update(
    table: Float[Array, "num_rows dim"],
    slots: Slots,
    segments: Sequence[Segment],
    d_outputs: Sequence[Float[Array, "_ dim"]],
    hyper: Hyperparameters,
    rule: OptimizerSpec,
    *,
    rounding: reference.Rounding | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "num_rows dim"], Slots]:
    """Row gradients and one optimizer step per row in one call, in place when the arrays are donated."""
    return _update(implementation, table, slots, SegmentGradients(segments, d_outputs), Step(hyper, rule, rounding))


def _update(
    implementation: str | None, table: Array, slots: Slots, gradients: OutputGradients, step: Step
) -> tuple[Array, Slots]:
    if not step.rule.moves_all_rows:
        return dispatch("update", implementation, table, slots, gradients, step)
    rows, sums = dispatch("row_gradients", implementation, table.shape[0], gradients)
    return reference.apply_rows(table, slots, rows, sums, step)


def lookup_jagged(
    tables: Sequence[Float[Array, "_ _"]], batch: JaggedBatch, *, implementation: str | None = None
) -> Float[Array, " size"]:
    """Pooled rows of every feature of a table-batched call, float32 and flat; see `reference.lookup_jagged`.

    Differentiable in the weights alone: `row_gradients_jagged` and `update_jagged` train the tables.
    """
    return _lookup_jagged(implementation, tuple(tables), batch)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _lookup_jagged(implementation: str | None, tables: tuple[Array, ...], batch: JaggedBatch) -> Array:
    return dispatch("lookup_jagged", implementation, tables, batch)


def _lookup_jagged_forward(implementation: str | None, tables: tuple[Array, ...], batch: JaggedBatch) -> Any:
    return _lookup_jagged(implementation, tables, batch), (tables, batch)


def _lookup_jagged_backward(implementation: str | None, saved: Any, d_output: Array) -> Any:
    tables, batch = saved
    d_weights = None
    if batch.weights is not None:
        d_weights = weight_gradients(tables, batch, d_output, implementation=implementation)
    integers = {"ids": _no_gradient(batch.ids), "offsets": _no_gradient(batch.offsets)}
    return None, dataclasses.replace(batch, weights=d_weights, **integers)


_lookup_jagged.defvjp(_lookup_jagged_forward, _lookup_jagged_backward)


def row_gradients_jagged(
    num_rows: int,
    table: int,
    dims: Sequence[int],
    batch: JaggedBatch,
    d_output: Float[Array, " size"],
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, " capacity"], Float[Array, "capacity dim"]]:
    """Gradient of every looked-up row of one table of a table-batched call."""
    return dispatch("row_gradients", implementation, num_rows, JaggedGradients(batch, d_output, table, dims))


def update_jagged(
    table: Float[Array, "num_rows dim"],
    slots: Slots,
    number: int,
    dims: Sequence[int],
    batch: JaggedBatch,
    d_output: Float[Array, " size"],
    hyper: Hyperparameters,
    rule: OptimizerSpec,
    *,
    rounding: reference.Rounding | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "num_rows dim"], Slots]:
    """Row gradients and optimizer step of one table of a table-batched call, in place when the arrays are donated.

    Args:
      table: array `number` of the call.
      slots: optimizer state of its rows.
      number: which array of the call it is.
      dims: row length of every array of the call.
      batch: ids of all features.
      d_output: flat gradient of what `lookup_jagged` returned.
      hyper: from `rule.get_hyperparameters`.
      rule: how rows are stepped.
      rounding: how stepped rows are brought to the table's dtype.
      implementation: see `implementation_states`.
    """
    gradients = JaggedGradients(batch, d_output, number, dims)
    return _update(implementation, table, slots, gradients, Step(hyper, rule, rounding))


def weight_gradients(
    tables: Sequence[Float[Array, "_ _"]],
    batch: JaggedBatch,
    d_output: Float[Array, " size"],
    *,
    implementation: str | None = None,
) -> Float[Array, " nnz"]:
    """Gradients of the weights of a table-batched call; 0 for ids that contribute nothing."""
    return dispatch("weight_gradients", implementation, tuple(tables), batch, d_output)


def gather_rows(
    arrays: Sequence[Array], rows: Int[Array, " capacity"], *, missing: int = 0, implementation: str | None = None
) -> tuple[Array, ...]:
    """The same rows of every array, of any dtype; a row outside reads as `missing` in int32 arrays, zeros in others."""
    return dispatch("gather_rows", implementation, tuple(arrays), rows, missing)


def scatter_rows(
    arrays: Sequence[Array],
    rows: Int[Array, " capacity"],
    values: Sequence[Array],
    *,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """The arrays with distinct `rows` overwritten, in place when they are donated; rows outside are skipped."""
    return dispatch("scatter_rows", implementation, tuple(arrays), rows, tuple(values))


def pack_blocks(
    arrays: Sequence[Array], rows: Sequence[Rows], *, implementation: str | None = None
) -> Shaped[Array, "devices places *row"]:
    """Blocks of several arrays beside each other, to travel in one exchange.

    Args:
      arrays: `[n, ...]`, or blocks `[devices, capacity, ...]`; of one kind: rows of one shape and type, or lanes of 32
        bits, which become uint32.
      rows: for each array those rows that go into the places of its blocks, or for none. A row outside is an empty
        place, with `NO_ROW` in int32 arrays and zeros in others.
      implementation: see `implementation_states`.
    """
    return dispatch("pack_blocks", implementation, tuple(arrays), tuple(rows))


def unpack_blocks(
    packed: Shaped[Array, "devices places *row"], shapes: Sequence[Any], *, implementation: str | None = None
) -> tuple[Array, ...]:
    """The blocks of each array again, given their shapes and types."""
    return dispatch("unpack_blocks", implementation, packed, tuple(shapes))


def block_ends(
    queues: Sequence[Queue], *, implementation: str | None = None
) -> tuple[Int[Array, "queues devices"], UInt32[Array, "levels queues devices"]]:
    """Of each owner in each queue: 1 if all entries that are left have places in this round, 0 if not.

    Where they have not, what tells the first one without a place from others, as words of the same order: one per lane
    of the queue that has most, of others the last again. Zeros where all fit.
    """
    return dispatch("block_ends", implementation, tuple(queues))


def round_places(
    queues: Sequence[Queue],
    fit: Int[Array, "queues devices"],
    cuts: UInt32[Array, "levels queues devices"],
    *,
    implementation: str | None = None,
) -> tuple[Sequence[Int[Array, "devices _"]], Sequence[Int[Array, " devices"]], Bool[Array, ""]]:
    """What every queue sends to every owner in a round.

    Args:
      queues: of one device.
      fit: 1 where no device has more entries for an owner than places, 0 where some has.
      cuts: and then the least entry without a place, in the words of `block_ends`; only those before it travel.
      implementation: see `implementation_states`.

    Returns: of each queue the entries in the places, `NO_ROW` in empty ones, and the cursor behind them; and whether
      any queue has entries left.
    """
    return dispatch("round_places", implementation, tuple(queues), fit, cuts)


def stochastic_rounding(key: KeyOrKeys) -> reference.Rounding:
    """Rounding up or down with probabilities that keep the mean; see `reference.round_stochastically`."""
    return jax.tree_util.Partial(reference.round_stochastically, key=key)


def rows_by_bag(
    bags: Int[Array, " nnz"], num_bags: int, *, implementation: str | None = None
) -> tuple[Int[Array, " num_bags_plus_1"], Int[Array, " nnz"]]:
    """Offsets and order that turn unsorted entries into bags; see `reference.rows_by_bag`."""
    return dispatch("rows_by_bag", implementation, bags, num_bags)


def rows_of_ids(
    ids: Sequence[Int[Array, " _"]],
    places: Sequence[Place],
    sizes: Sequence[int],
    *,
    spread: int,
    rows_per_shard: int,
    implementation: str | None = None,
) -> tuple[Int[Array, " _"], ...]:
    """Row of each id of each feature in their stack, `NO_ROW` for ids outside `[0, size)` of the feature's table.

    Args:
      ids: one array per feature.
      places: where the tables of the features lie.
      sizes: ids of these tables.
      spread: shards over which a table is dealt.
      rows_per_shard: rows of every shard.
      implementation: see `implementation_states`.
    """
    return dispatch("rows_of_ids", implementation, tuple(ids), places, sizes, spread, rows_per_shard)


def entries_by_sample(stacks: Sequence[Partitions], *, implementation: str | None = None) -> list[SampleEntries]:
    """What one device looks up in each stack: rows of its shards, where the entries of each sample begin, and gains.

    Entries are those that the row pointers delimit; the ones of a sample come in the order of their rows.
    """
    return dispatch("entries_by_sample", implementation, tuple(stacks))


def count_ids(
    ids: Sequence[Int[Array, " _"]],
    offsets: Sequence[Int[Array, " _"]],
    sizes: Sequence[int],
    *,
    implementation: str | None = None,
) -> tuple[tuple[Int[Array, ""], Int[Array, ""]], ...]:
    """Of each feature, how many ids lie inside its table, and how many outside that are no padding.

    Entries behind the last offset are neither.
    """
    return dispatch("count_ids", implementation, tuple(ids), tuple(offsets), sizes)


def distinct(
    owners: Int[Array, " nnz"],
    lanes: Sequence[Shaped[Array, " nnz"]],
    *,
    num_owners: int,
    implementation: str | None = None,
) -> Distinct:
    """Equal entries made one, by owner and then by lanes; entries of an owner outside `[0, num_owners)` are left out.

    Args:
      owners: of every occurrence.
      lanes: integer arrays that together name an entry, most significant first.
      num_owners: how many there are.
      implementation: see `implementation_states`.

    Returns: lanes, entry of every occurrence, first occurrence of every entry, offsets, and how often every entry
      occurs; see `keyed.distinct`.
    """
    return dispatch("distinct", implementation, owners, tuple(lanes), num_owners)


def unique_keys(keys: Keys, occurrences: Int[Array, " nnz"], *, implementation: str | None = None) -> Unique:
    """Distinct keys in the order of their first occurrence.

    Args:
      keys: any, also several times.
      occurrences: for how many every one of them counts, at least 0.
      implementation: see `implementation_states`.

    Returns: which distinct key every key is, where each occurs first, and for how many it counts; see
      `keyed.unique_keys`.
    """
    return dispatch("unique_keys", implementation, keys, occurrences)


def find_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    keys: Keys,
    num_tables: int = 1,
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, " nnz"], Int[Array, " nnz"], Int[Array, ""]]:
    """Slot and row of every key in its table, `NO_ROW` for absent keys and padding; and how many of them are absent.

    Args:
      lanes: the keys in the slots of `num_tables` tables, equally many in each.
      rows: what belongs to them.
      keys: any, also several times.
      num_tables: how many tables there are.
      implementation: see `implementation_states`.
    """
    return dispatch("find_keys", implementation, lanes, rows, keys, num_tables)


def insert_keys(
    lanes: UInt32[Array, "slots 2"],
    rows: Int[Array, " slots"],
    num_keys: Int[Array, " tables"],
    num_deleted: Int[Array, " tables"],
    keys: Keys,
    new_rows: Int[Array, " nnz"],
    *,
    implementation: str | None = None,
) -> tuple[UInt32[Array, "slots 2"], Int[Array, " slots"], Int[Array, " tables"], Int[Array, " tables"]]:
    """The tables and their counts with distinct, absent keys added, in place when the arrays are donated.

    Keys that would leave less than a quarter of a table's slots empty are left out.
    """
    return dispatch("insert_keys", implementation, lanes, rows, num_keys, num_deleted, keys, new_rows)


def compact(
    mask: Bool[Array, " n"], size: int, *, implementation: str | None = None
) -> tuple[Int[Array, " size"], Int[Array, ""]]:
    """Positions of the first `size` True entries, `NO_ROW` behind them; and how many there are."""
    return dispatch("compact", implementation, mask, size)


def take_rows(
    free: Int[Array, " rows"],
    num_free: Int[Array, " tables"],
    wants: Bool[Array, " n"],
    table: Int[Array, " n"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, " n"], Int[Array, " tables"], Int[Array, " tables"]]:
    """Rows from the top of a table's stack for those that want one, in their order, `NO_ROW` for the others.

    Returns: the rows, how many are left in each stack, and for how many there was none; see `keyed.take_rows`.
    """
    return dispatch("take_rows", implementation, free, num_free, wants, table)


def count_uses(
    last_step: Int[Array, " rows"],
    counts: Int[Array, " rows"],
    rows: Int[Array, " nnz"],
    step: Int[Array, ""],
    occurrences: Int[Array, " nnz"],
    *,
    implementation: str | None = None,
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Both lanes after `rows` were used by `step`, in place when they are donated; a row may occur several times."""
    return dispatch("count_uses", implementation, last_step, counts, rows, step, occurrences)


def row_bits(
    key: KeyOrKeys,
    lanes: Sequence[UInt32[Array, " nnz"]],
    dim: int,
    table: Int[Array, " nnz"] | None = None,
    *,
    implementation: str | None = None,
) -> UInt32[Array, "nnz dim"]:
    """Random bits of rows, each from the key that is folded with the row's lanes, one after the other.

    With `table`, `key` has several, of which it says whose is taken.
    """
    return dispatch("row_bits", implementation, key, tuple(lanes), dim, table)


def allocate(
    shape: tuple[int, ...], dtype: Any, fill: float | None = None, *, implementation: str | None = None
) -> Shaped[Array, "*shape"]:
    """An array of `fill`, or of unspecified values to be overwritten; on huge pages where the system has them."""
    return dispatch("allocate", implementation, shape, dtype, fill)
