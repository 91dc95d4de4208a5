"""Creates and checks the variables of stacks, and defines their optimizers.

The variables of several stacks are a pytree with one entry per stack, by stack name. Variables are
plain arrays, so the functions of this module can compare only the shapes and slots of variables
with the specs. Specs that differ only in the number of cores, the rotation or the order of tables
can have variables of equal shape, but with rows at different indices. If the specs change, convert
the existing variables with the functions of `table_stacking`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.checks import check_finite, check_type
from rsembed.collection.asked_rows import AskedRows
from rsembed.collection.devices import Devices
from rsembed.collection.rows import ArrayRows, Rows
from rsembed.optimizers.base import Hyperparameters, OptimizerSpec, Slots
from rsembed.sparsecore.layout import (
    FeatureTree,
    StackLayout,
    resolve_cores,
    stacks_of,
    with_place,
)
from rsembed.specs import TableSpec, default_initializer
from rsembed.storage.dense_rows import DenseRows

Limit = Annotated[float, "[-inf, inf]"] | None
RowLimits = tuple[Limit, Limit]
"""Minimum and maximum of the numbers in updated rows. None means no limit."""


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class BoundedRowRule(OptimizerSpec):
    """Optimizer that applies `inner` to the first `num_columns` columns, and clips updated rows.

    Clipping is part of the row update, so it happens in place and changes no other row. If a slot
    of `inner` has `num_columns` columns, the slot is padded to the number of columns of the table.

    Args:
      inner: the optimizer to apply.
      num_columns: number of columns to update. The columns after the first `num_columns` columns
        stay unchanged.
      minimum: lower limit, to which smaller numbers in updated rows are raised. None, the default:
        no limit.
      maximum: upper limit, to which larger numbers in updated rows are lowered. None, the default:
        no limit.
    """

    inner: OptimizerSpec
    num_columns: int
    minimum: float | None = None
    maximum: float | None = None

    @property
    def moves_all_rows(self) -> bool:
        return self.inner.moves_all_rows

    def init_slots(self, rows: Array) -> Slots:
        end = self.num_columns
        slots = []
        for slot in self.inner.init_slots(rows[:, :end]):
            if slot.shape[1:] == (end,):
                slot = jnp.pad(slot, ((0, 0), (0, rows.shape[1] - end)))
            slots.append(slot)
        return tuple(slots)

    def step_rows(
        self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters
    ) -> tuple[Array, Slots]:
        end = self.num_columns
        inner_slots = []
        for slot in slots:
            if slot.shape == rows.shape:
                slot = slot[:, :end]
            inner_slots.append(slot)
        new, new_slots = self.inner.step_rows(
            rows[:, :end], tuple(inner_slots), gradients[:, :end], hyper
        )
        if self.minimum is not None or self.maximum is not None:
            new = jnp.clip(new, self.minimum, self.maximum)

        def with_padding(stepped: Array, old: Array) -> Array:
            if stepped.shape == old.shape:
                return stepped
            return jnp.concatenate([stepped, old[:, end:]], axis=1)

        return with_padding(new, rows), tuple(map(with_padding, new_slots, slots))


def checked_limits(
    limits: Mapping[str, RowLimits] | None, stacks: Sequence[str]
) -> Mapping[str, RowLimits]:
    """Checks the lower and upper limits of all stacks, and returns the limits by stack name.

    If `limits` is None, the stacks have no limits.

    Raises:
      TypeError: `limits` is not a mapping to pairs of numbers.
      ValueError: the names in `limits` are not the names of all stacks, a limit is NaN, or the
        minimum of a stack is larger than its maximum.
    """
    if limits is None:
        return dict.fromkeys(stacks, (None, None))
    check_type(limits, Mapping[str, RowLimits], "embedding_var_limits")
    if set(limits) != set(stacks):
        raise ValueError(
            f"embedding_var_limits must name every stack: got {sorted(limits)}, need "
            f"{sorted(stacks)}; (None, None) sets no limit."
        )
    for name, (minimum, maximum) in limits.items():
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError(
                f"embedding_var_limits of stack {name!r}: minimum {minimum} is above maximum {maximum}."
            )
    return limits


def rule_of(layout: StackLayout, limits: RowLimits = (None, None)) -> OptimizerSpec:
    """Optimizer that updates the rows of a stack, and skips padding columns where necessary.

    Padding columns are zero, and an elementwise optimizer keeps padding columns zero. An optimizer
    of whole rows (a row-wise accumulator, a norm, a custom function) must not read the padding
    columns, because they would change a mean over the columns of a row.

    Args:
      layout: layout of the stack.
      limits: minimum and maximum to which the numbers in updated rows are clipped. None means no
        limit.

    Raises:
      ValueError: the optimizer works on whole rows, and the tables of the stack have different
        dims.
    """
    optimizer = layout.spec.optimizer
    num_columns = layout.spec.stack_embedding_dim
    dims = {table.name: table.embedding_dim for table in layout.tables}
    has_one_dim = len(set(dims.values())) == 1
    clips = limits != (None, None)
    # Clipping to a range that does not contain zero would change the padding columns. If all tables
    # of a stack have the same dim, only the first `num_columns` columns of each row are updated and
    # clipped.
    if optimizer.is_row_wise or (clips and has_one_dim):
        if not has_one_dim:
            raise ValueError(
                f"stack {layout.name!r}: optimizer {optimizer.short_name()!r} works on whole "
                f"rows, so the tables of a stack must have one embedding_dim, but have {dims}; "
                "give them stacks of their own."
            )
        num_columns = next(iter(dims.values()))
    if num_columns == layout.spec.stack_embedding_dim and not clips:
        return optimizer
    minimum, maximum = limits
    return BoundedRowRule(
        optimizer.learning_rate,
        inner=optimizer,
        num_columns=num_columns,
        minimum=minimum,
        maximum=maximum,
    )


def stack_rows(
    layout: StackLayout, devices: Devices, rule: OptimizerSpec, *, capacity: int | None = None
) -> Rows:
    """`Rows` object through which the engine reads and updates a stack on one or more devices.

    Args:
      layout: layout of the stack.
      devices: devices that share the stack.
      rule: optimizer that updates the rows.
      capacity: maximum number of distinct rows that a device requests from one other device in one
        round of the exchange. The default is the result of `exchange.default_capacity`.
    """
    table = dataclasses.replace(
        layout.tables[0],
        embedding_dim=layout.spec.stack_embedding_dim,
        optimizer=rule,
        quantization_config=layout.spec.quantization_config,
    )
    storage = DenseRows(layout.row_layout, layout.tables)
    if devices.num_devices == 1:
        return ArrayRows(devices, table, storage)
    return AskedRows(devices, table, storage, capacity=capacity)


class EmbeddingVariables(NamedTuple):
    """One physical table and its optimizer state.

    The fields of an `EmbeddingVariables` may hold other leaves than arrays, such as the shardings
    of table and slots.

    Attributes:
      table: rows of all shards, `[rows, columns]`, shard after shard.
      slot: the optimizer's named tuple of slots, arrays with one row per row of `table`.
    """

    table: PyTree
    slot: PyTree


Activations: TypeAlias = FeatureTree
"""Activations, or their gradients, in a tree like the feature specs."""
Variables: TypeAlias = PyTree
"""Pytree with the `EmbeddingVariables` of every stack, by stack name."""


def initialize(
    key: PRNGKeyArray,
    tables: Sequence[TableSpec],
    devices: Devices,
    num_cores: int | None,
) -> dict[str, EmbeddingVariables]:
    """Initial variables of all stacks.

    Every device builds only its own part of the variables. You can call `initialize` inside and
    outside `jit`.

    Args:
      key: random key of the model, typed or raw.
      tables: the tables. A table that has no stack yet becomes the only table of a stack.
      devices: devices that share the tables.
      num_cores: cores per device, or None for the number for which the tables were stacked.

    Raises:
      ValueError: a table was stacked for a different number of shards, tables of a stack are
        missing, or outside `jit` an initializer returned a number that is not finite.
    """
    num_shards = devices.num_devices * resolve_cores(num_cores, devices.num_devices)
    tables = [with_place(table, num_shards) for table in tables]
    stacks = stacks_of(tables, devices.num_devices, num_cores)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)

    def build(key: PRNGKeyArray) -> dict[str, EmbeddingVariables]:
        by_stack = {}
        for name, layout in stacks.items():
            table, slots = stack_rows(layout, devices, rule_of(layout)).init(key)
            by_stack[name] = EmbeddingVariables(table, layout.spec.optimizer.pack_slots(slots))
        return by_stack

    variables: dict[str, EmbeddingVariables] = devices.on_each(build, P(), devices.split)(key)
    for name, layout in stacks.items():
        if any(table.initializer is not default_initializer for table in layout.tables):
            way_out = "give initializers that make finite numbers"
            check_finite(
                variables[name].table,
                f"stack {name!r}: what its initializers give",
                way_out=way_out,
            )
    return variables


def variables_of(
    embedding_variables: Mapping[str, PyTree],
    layout: StackLayout,
    *,
    rule: OptimizerSpec | None = None,
) -> EmbeddingVariables:
    """Variables of one stack on one device.

    A plain tuple of a table and its slots is converted to `EmbeddingVariables`.

    Args:
      embedding_variables: variables of all stacks, by name.
      layout: layout of the stack.
      rule: optimizer that defines the expected slots. By default, the slots are not checked.

    Raises: ValueError: `embedding_variables` lacks the stack, or the variables of the stack do not
      have the shapes of one device's part.
    """
    check_type(embedding_variables, Mapping[str, tuple[Any, ...]], "embedding_variables")
    if layout.name not in embedding_variables:
        raise ValueError(
            f"embedding_variables have no stack {layout.name!r}, only "
            f"{sorted(embedding_variables)}; were they made for these feature_specs?"
        )
    variables = embedding_variables[layout.name]
    if not isinstance(variables, EmbeddingVariables):
        variables = EmbeddingVariables(variables[0], tuple(jax.tree.leaves(tuple(variables[1:]))))
    shape = (layout.rows_per_shard * layout.num_cores, layout.spec.stack_embedding_dim)
    if variables.table.shape != shape:
        raise ValueError(
            f"stack {layout.name!r} has shape {variables.table.shape}, but the specs say {shape} "
            f"on each of {layout.num_devices} devices; were they placed for another number of "
            "devices or cores?"
        )
    if rule is None:
        return variables
    optimizer = layout.spec.optimizer
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    expected = jax.eval_shape(lambda rows: optimizer.pack_slots(rule.init_slots(rows)), rows)
    shapes = [leaf.shape for leaf in jax.tree.leaves(variables.slot)]
    expected_shapes = [leaf.shape for leaf in jax.tree.leaves(expected)]
    # Slots in a plain tuple have no names to compare.
    if shapes != expected_shapes or type(variables.slot) not in (tuple, type(expected)):
        raise ValueError(
            f"stack {layout.name!r}: its optimizer {optimizer.short_name()!r} keeps slots "
            f"{type(expected).__name__} of shapes {expected_shapes}, but got "
            f"{type(variables.slot).__name__} of shapes {shapes}; use variables of this "
            "optimizer, or its init_slots."
        )
    return variables
