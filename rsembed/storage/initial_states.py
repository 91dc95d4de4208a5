"""Initial rows and slots of the dense stacks of a collection, filled by a few compiled loops."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import Form, form, initial_rows, table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, KeyOrKeys
from rsembed.places import Place
from rsembed.specs import TableSpec
from rsembed.storage.protocol import State
from rsembed.storage.row_layout import RowLayout

# Tables are filled block by block, so `init` needs memory for the arrays and for one block of
# values.
INIT_BLOCK_VALUES = 1 << 18

Arrays: TypeAlias = list[tuple[Array, ...]]
"""For each stack, the array of its rows on this device, and one array for each slot."""


class NewStack(NamedTuple):
    """A stack of dense tables that gets its initial values.

    Args:
      layout: layout of the rows.
      tables: specs of the tables, in the order of the layout.
      num_parts: number of devices that share the columns of each row. 1: every device has all
        columns.
      table: spec of the stack's first table. The `embedding_dim` of `table` is the number of
        columns of the whole stack.
      shard: index of this device in the mesh.
    """

    layout: RowLayout
    tables: tuple[TableSpec, ...]
    num_parts: int
    table: TableSpec
    shard: Int[Array, ""]


class _NewTable(NamedTuple):
    """A table that gets its initial values.

    Attributes:
      stack: index of the stack that contains the table.
      spec: spec of the table.
      place: position of the table in the shards of its stack.
      num_rows: number of rows, including the padding after the vocabulary.
      form: description of the computation of the initial values.
    """

    stack: int
    spec: TableSpec
    place: Place
    num_rows: int
    form: Form


class _TableNumbers(NamedTuple):
    """Numbers of a table, which the loop of its group reads.

    Attributes:
      stack: index of the table's stack among the stacks of the group.
      place: position of the table in the shards of its stack.
      num_ids: number of ids.
      num_rows: number of rows, including the padding after the vocabulary.
      rows_per_shard: number of rows of the stack in each shard.
      num_blocks: number of blocks that the table has in each shard.
      first_block: index of the table's first block. The blocks of all tables are numbered
        consecutively. A table has `num_blocks` blocks for each shard of this device.
    """

    stack: Any
    place: Place
    num_ids: Any
    num_rows: Any
    rows_per_shard: Any
    num_blocks: Any
    first_block: Any


def initial_states(stacks: Sequence[NewStack], key: PRNGKeyArray) -> list[State]:
    """Initial rows and slots of dense stacks on one device.

    If the columns of a stack are split over devices, each device has a part of the columns of all
    rows. The initial values of a table depend only on `key`, on the table's name and on the table's
    initializer. Padding rows are zero.

    One compiled loop fills many tables, because XLA takes about 0.1 s to compile such a loop. All
    tables of a loop have the same dtype and the same computation of initial values, but may have
    different dims. See `_groups_of_tables` for all conditions under which tables share a loop. The
    loop computes as many columns as the largest dim, and writes as many leading columns as each
    table has.

    Args:
      stacks: stacks of the collection.
      key: PRNG key of the model.
    """
    arrays = [_new_arrays(stack) for stack in stacks]
    groups = _groups_of_tables(stacks, key)
    names = [table.spec.name for _, tables in groups for table in tables]
    # All keys are computed together, because threefry is a large part of a small program.
    keys = table_keys(key, names)
    first_key = 0
    for block, tables in groups:
        keys_of_group = keys[first_key : first_key + len(tables)]
        first_key += len(tables)
        indices = sorted({table.stack for table in tables})
        stacks_of_group = [stacks[index] for index in indices]
        arrays_of_group = [arrays[index] for index in indices]
        numbers, num_blocks = _numbers_of_tables(stacks, indices, tables, block)
        fill_block = _block_filler(stacks_of_group, tables, numbers, block, keys_of_group)
        filled = jax.lax.fori_loop(0, num_blocks, fill_block, arrays_of_group)
        for index, new in zip(indices, filled, strict=True):
            arrays[index] = new
    return [(vectors, tuple(slots)) for vectors, *slots in arrays]


def _new_arrays(stack: NewStack) -> tuple[Array, ...]:
    """Arrays for the rows and for each slot of a stack on one device, with zeros as padding."""
    layout = stack.layout
    width = stack.table.embedding_dim // stack.num_parts
    rows = jax.ShapeDtypeStruct((layout.rows_per_device, width), jnp.float32)
    # If the stack has no padding rows, `initial_states` writes every row, so the new arrays need no fill
    # value.
    fill = None
    if layout.num_rows != layout.stack.spec.stack_vocab_size:
        fill = 0.0
    arrays = [api.allocate(rows.shape, jnp.dtype(stack.table.dtype), fill)]
    for slot in jax.eval_shape(stack.table.optimizer.init_slots, rows):
        arrays.append(api.allocate(slot.shape, slot.dtype, fill))
    return tuple(arrays)


def _groups_of_tables(
    stacks: Sequence[NewStack],
    key: PRNGKeyArray,
) -> list[tuple[int, list[_NewTable]]]:
    """Groups of tables that one loop fills: pairs `(rows per block, tables)`."""
    widths = _widths_of_init(stacks, key)
    groups: dict[Hashable, tuple[int, list[_NewTable]]] = {}
    forms: dict[Hashable, Form] = {}
    for index, stack in enumerate(stacks):
        layout, specs, num_parts, stack_table, _ = stack
        slots = _form_of_slots(stack_table)
        separate_stack = None
        if num_parts > 1 or slots is None:
            separate_stack = index
        for spec, planned, place in zip(specs, layout.stack.tables, layout.places, strict=True):
            dim = spec.embedding_dim
            width = widths[index] if dim == stack_table.embedding_dim else dim
            alike = spec.initializer, spec.vocabulary_size, dim, width
            if alike not in forms:
                forms[alike] = form(spec, width)
            num_rows = planned.setting.padded_vocab_size
            table = _NewTable(index, spec, place, num_rows, forms[alike])
            # The loop writes `block` rows at a time: the smallest power of four that is at least
            # the number of the table's rows on one shard, but at most `full_block`.
            rows_of_shard = -(-num_rows // layout.spread)
            num_bits = max(rows_of_shard - 1, 0).bit_length()
            num_bits += num_bits % 2
            full_block = max(1, INIT_BLOCK_VALUES // table.form.width)
            block = min(full_block, 1 << num_bits)
            group = (
                table.form.program,
                table.form.width,
                block,
                stack_table.dtype,
                slots,
                layout.spread,
                layout.shards_per_device,
                separate_stack,
            )
            _, tables = groups.setdefault(group, (block, []))
            tables.append(table)
    return list(groups.values())


def _widths_of_init(stacks: Sequence[NewStack], key: PRNGKeyArray) -> list[int]:
    """Number of columns that are computed for the rows of each stack.

    Dims are rounded up to 2**k or 3 * 2**k, so that stacks share a loop and more than half of the
    computed columns are used. Dims are rounded only if two or more different dims round to the same
    number.
    """
    config: Any = jax.config  # Some type stubs of JAX lack `jax_threefry_partitionable`.
    is_threefry = jax.random.key_impl(key) == "threefry2x32"
    dims = [stack.table.embedding_dim for stack in stacks]
    if not is_threefry or not config.jax_threefry_partitionable:
        # Without partitionable threefry, the random bits of a row depend on the number of columns,
        # so dims are not rounded up.
        return dims
    dims_by_width: dict[int, set[int]] = {}
    for dim in dims:
        dims_by_width.setdefault(_rounded_up(dim), set()).add(dim)
    widths = []
    for dim in dims:
        width = _rounded_up(dim)
        widths.append(dim if len(dims_by_width[width]) == 1 else width)
    return widths


def _rounded_up(dim: int) -> int:
    """The smallest number of the form 2**k or 3 * 2**k that is at least `dim`."""
    power = 1 << (dim - 1).bit_length()
    return 3 * power // 4 if dim <= 3 * power // 4 else power


def _form_of_slots(table: TableSpec) -> Hashable | None:
    """Cache key for the initial slots of a table.

    Tables with equal keys have the same initial slots, except that their dims may differ. The
    result is None if the initial slots may depend on the values or the dim of the rows.
    """
    row = jax.ShapeDtypeStruct((1, table.embedding_dim), jnp.float32)
    trace = jax.make_jaxpr(table.optimizer.init_slots)(row)
    constants = {}
    for equation in trace.eqns:
        (source, *_) = equation.invars
        if equation.primitive.name != "broadcast_in_dim" or not isinstance(source, Literal):
            return None
        constants[equation.outvars[0]] = source.val
    slots: list[Hashable] = [table.embedding_dim == 1]
    for variable in trace.jaxpr.outvars:
        if variable not in constants:
            return None
        aval: Any = variable.aval  # Some type stubs of JAX lack `shape`.
        shape = aval.shape[1:]
        shape_of_row = "row" if shape == row.shape[1:] else shape
        slots.append((float(constants[variable]), aval.dtype, shape_of_row))
    return tuple(slots)


def _numbers_of_tables(
    stacks: Sequence[NewStack],
    indices: Sequence[int],
    tables: Sequence[_NewTable],
    block: int,
) -> tuple[list[_TableNumbers], int]:
    """Numbers of each table of a group, and the number of blocks of all tables together.

    Args:
      stacks: stacks of the collection.
      indices: indices of the stacks with tables of the group.
      tables: tables of the group, as `_groups_of_tables` groups them.
      block: number of rows of a block.
    """
    numbers_of_tables = []
    first_block = 0
    for table in tables:
        layout = stacks[table.stack].layout
        num_blocks = -(-table.num_rows // (layout.spread * block))
        numbers = _TableNumbers(
            stack=indices.index(table.stack),
            place=table.place,
            num_ids=table.spec.vocabulary_size,
            num_rows=table.num_rows,
            rows_per_shard=layout.rows_per_shard,
            num_blocks=num_blocks,
            first_block=first_block,
        )
        numbers_of_tables.append(numbers)
        first_block += num_blocks * layout.shards_per_device

    return numbers_of_tables, first_block


def _block_filler(
    stacks: Sequence[NewStack],
    tables: Sequence[_NewTable],
    numbers: Sequence[_TableNumbers],
    block: int,
    keys: KeyOrKeys,
) -> Callable[[Array, Arrays], Arrays]:
    """Function that writes the initial rows and slots of one block of a group of tables.

    The function gets the index of the block and, for each stack, the array of the rows on this
    device and one array for each slot. It returns the new arrays.

    Args:
      stacks: stacks with tables of the group.
      tables: tables of the group, as `_groups_of_tables` groups them.
      numbers: numbers of each table.
      block: number of rows of a block.
      keys: PRNG key of each table.
    """
    layout, _, num_parts, stack_table, part = stacks[0]
    spread = layout.spread
    computation = tables[0].form
    first_shards = jnp.stack([stack.shard for stack in stacks]) * layout.shards_per_device
    if num_parts > 1:
        # Every device has some columns of all shards.
        first_shards = jnp.zeros_like(first_shards)
    # If all tables have the same `form.factors`, the factors are constants in the compiled loop.
    factors_of_table = None
    if len({table.form.factors for table in tables}) > 1:
        factors_of_table = jnp.asarray([table.form.factors for table in tables], jnp.float32)
    dims = [stack.table.embedding_dim for stack in stacks]
    num_columns = max(computation.width, *dims)

    _, form_of_numbers = jax.tree.flatten(numbers[0])
    # One matrix, because each indexed array is several operations of the program.
    matrix = jnp.asarray([jax.tree.leaves(of_table) for of_table in numbers], jnp.int32)
    first_blocks = jnp.asarray([of_table.first_block for of_table in numbers], jnp.int32)

    def fill_block(number: Array, arrays: Arrays) -> Arrays:
        index = jnp.sum(first_blocks <= number, dtype=jnp.int32) - 1
        numbers_of_table = jax.lax.dynamic_index_in_dim(matrix, index, keepdims=False)
        table = jax.tree.unflatten(form_of_numbers, list(numbers_of_table))
        block_of_table = number - table.first_block
        shard_here = jax.lax.div(block_of_table, table.num_blocks)
        first_of_block = jax.lax.rem(block_of_table, table.num_blocks) * block
        shard = first_shards[table.stack] + shard_here
        first_row = table.place.first_row(shard, spread=spread)
        rows = first_row + first_of_block + jnp.arange(block, dtype=jnp.int32)
        ids = table.place.ids(shard, rows, spread=spread)
        factors = None
        if factors_of_table is not None:
            factors = factors_of_table[index]
        values = initial_rows(
            keys[index],
            tables[0].spec,
            jnp.clip(ids, 0, table.num_ids - 1),
            width=computation.width,
            factors=factors,
        )
        is_id = ids < table.num_ids
        values = jnp.where(is_id[:, None], values, 0.0)
        num_added_columns = num_columns - computation.width
        if num_added_columns > 0:
            values = jnp.pad(values, ((0, 0), (0, num_added_columns)))
        if num_parts > 1:
            part_width = num_columns // num_parts
            first_column = part * part_width
            values = jax.lax.dynamic_slice_in_dim(values, first_column, part_width, axis=1)
        is_of_table = (ids >= 0) & (ids < table.num_rows)
        first_row_of_shard = shard_here * table.rows_per_shard
        rows = jnp.where(is_of_table, first_row_of_shard + rows, NO_ROW)
        slots = stack_table.optimizer.init_slots(values)
        return api.scatter_into(arrays, table.stack, rows, (values, *slots))

    return fill_block
