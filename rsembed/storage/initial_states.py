"""Initial rows and slots of the dense stacks of a collection, filled by a few compiled loops."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jaxtyping import Array, Int, PRNGKeyArray

from rsembed.initial_values import Form, form, initial_rows, table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.places import Place
from rsembed.specs import TableSpec
from rsembed.storage.protocol import State
from rsembed.storage.row_layout import RowLayout

# Tables are filled block by block, so `init` needs memory for the arrays and for one block of
# values.
INIT_BLOCK_VALUES = 1 << 18


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
      number: index of the table in the stack.
      form: description of the computation of the initial values.
    """

    stack: int
    number: int
    form: Form


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
    for block, tables in _groups_of_tables(stacks, key):
        indices = sorted({table.stack for table in tables})
        arrays_of_group = [arrays[index] for index in indices]
        filled = _filled(stacks, arrays_of_group, tables, block, key)
        for index, new in zip(indices, filled, strict=True):
            arrays[index] = new
    return [(vectors, tuple(slots)) for vectors, *slots in arrays]


def _new_arrays(stack: NewStack) -> tuple[Array, ...]:
    """Arrays for the rows and for each slot of a stack on one device, with zeros as padding."""
    layout = stack.layout
    width = stack.table.embedding_dim // stack.num_parts
    rows = jax.ShapeDtypeStruct((layout.rows_per_device, width), jnp.float32)
    # If the stack has no padding rows, `_filled` writes every row, so the new arrays need no fill
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
        layout, specs, num_parts, stack_table, shard = stack
        slots = _form_of_slots(stack_table)
        separate_stack = None
        if num_parts > 1 or slots is None:
            separate_stack = index
        for number, spec in enumerate(specs):
            dim = spec.embedding_dim
            width = widths[index] if dim == stack_table.embedding_dim else dim
            alike = spec.initializer, spec.vocabulary_size, dim, width
            if alike not in forms:
                forms[alike] = form(spec, width)
            table = _NewTable(index, number, forms[alike])
            # The loop writes `block` rows at a time: the smallest power of four that is at least
            # the number of the table's rows on one shard, but at most `full_block`.
            rows_of_shard = -(-_padded_rows(stack, number) // layout.spread)
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
                jax.typeof(shard).mat.varying,
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


def _padded_rows(stack: NewStack, number: int) -> int:
    """Number of rows of a table, including the padding after the vocabulary."""
    return stack.layout.stack.tables[number].setting.padded_vocab_size


def _filled(
    stacks: Sequence[NewStack],
    arrays: Sequence[tuple[Array, ...]],
    tables: Sequence[_NewTable],
    block: int,
    key: PRNGKeyArray,
) -> list[tuple[Array, ...]]:
    """Writes the initial rows and slots of a group of tables, and returns the arrays.

    Args:
      stacks: stacks of the collection.
      arrays: for each stack with tables of the group, the array of the rows on this device, and one
        array for each slot.
      tables: tables to fill, as `_groups_of_tables` groups them.
      block: number of rows of a block.
      key: PRNG key of the model.
    """
    first_stack = stacks[tables[0].stack]
    computation = tables[0].form
    num_parts = first_stack.num_parts
    spread = first_stack.layout.spread
    shards_here = first_stack.layout.shards_per_device
    spec = first_stack.tables[tables[0].number]
    optimizer = first_stack.table.optimizer
    indices = sorted({table.stack for table in tables})
    names = []
    vocabulary_sizes = []
    padded_sizes = []
    places_of_tables = []
    positions = []
    first_shards = []
    sizes_of_shards = []
    for table in tables:
        stack = stacks[table.stack]
        spec_of_table = stack.tables[table.number]
        names.append(spec_of_table.name)
        vocabulary_sizes.append(spec_of_table.vocabulary_size)
        padded_sizes.append(_padded_rows(stack, table.number))
        places_of_tables.append(stack.layout.places[table.number])
        positions.append(indices.index(table.stack))
        first_shard = jnp.zeros_like(stack.shard)
        if num_parts == 1:
            first_shard = stack.shard * shards_here
        first_shards.append(first_shard)
        sizes_of_shards.append(stack.layout.rows_per_shard)
    keys = table_keys(key, names)
    places = Place(*jnp.asarray(places_of_tables, jnp.int32).T)
    padded = np.asarray(padded_sizes, np.int32)
    num_rows = jnp.asarray(padded)
    num_ids = jnp.asarray(vocabulary_sizes, jnp.int32)
    position_of_table = jnp.asarray(positions, jnp.int32)
    first_shard_of_table = jnp.stack(first_shards)
    rows_per_shard = jnp.asarray(sizes_of_shards, jnp.int32)
    # If all tables have the same `form.factors`, the factors are constants in the compiled loop.
    factors_of_table = None
    if len({table.form.factors for table in tables}) > 1:
        factors_of_table = jnp.asarray([table.form.factors for table in tables], jnp.float32)
    # The loop numbers the blocks of all tables consecutively. Each table has `blocks_of_shard`
    # blocks for each shard of this device. The last block of table `t` has number `ends[t] - 1`.
    blocks_of_shard = -(-padded // (spread * block))
    blocks_of_table = blocks_of_shard * shards_here
    ends = np.cumsum(blocks_of_table, dtype=np.int32)
    num_columns = max(computation.width, *(vectors.shape[1] * num_parts for vectors, *_ in arrays))

    def fill_block(number: Array, arrays: list[tuple[Array, ...]]) -> list[tuple[Array, ...]]:
        table = jnp.searchsorted(
            jnp.asarray(ends),
            number,
            side="right",
            method="compare_all",
        )
        first_block = (jnp.asarray(ends) - blocks_of_table)[table]
        block_of_table = number - first_block
        num_blocks = jnp.asarray(blocks_of_shard)[table]
        shard_here = block_of_table // num_blocks
        first_of_block = block_of_table % num_blocks * block
        place = jax.tree.map(lambda field: field[table], places)
        shard = first_shard_of_table[table] + shard_here
        first_row = place.first_row(shard, spread=spread)
        rows = first_row + first_of_block + jnp.arange(block, dtype=jnp.int32)
        ids = place.ids(shard, rows, spread=spread)
        valid_ids = jnp.clip(ids, 0, num_ids[table] - 1)
        factors = None
        if factors_of_table is not None:
            factors = factors_of_table[table]
        values = initial_rows(
            keys[table],
            spec,
            valid_ids,
            width=computation.width,
            factors=factors,
        )
        is_id = ids < num_ids[table]
        values = jnp.where(is_id[:, None], values, 0.0)
        num_added_columns = num_columns - computation.width
        values = jnp.pad(values, ((0, 0), (0, num_added_columns)))
        if num_parts > 1:
            part_width = num_columns // num_parts
            first_column = first_stack.shard * part_width
            values = jax.lax.dynamic_slice_in_dim(values, first_column, part_width, axis=1)
        is_of_table = (ids >= 0) & (ids < num_rows[table])
        first_row_of_shard = shard_here * rows_per_shard[table]
        rows = jnp.where(is_of_table, first_row_of_shard + rows, NO_ROW)
        slots = optimizer.init_slots(values)
        return api.scatter_into(arrays, position_of_table[table], rows, (values, *slots))

    num_iterations = int(ends[-1])
    return jax.lax.fori_loop(0, num_iterations, fill_block, list(arrays))
