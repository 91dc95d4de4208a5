"""Variables of stacks, as pytrees keyed by stack name: how they are made and checked, and the rules that step them.

Variables are bare arrays, of which shapes and slots alone are compared with specs. Another number of cores, another
rotation or order of tables may leave the shapes and move the rows: what goes to other specs, at once or through files,
goes by table, by the functions of `table_stacking`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PRNGKeyArray, PyTree

from rsembed.checks import check_finite, check_type, check_within
from rsembed.collection.dense_rows import DenseRows
from rsembed.collection.devices import Devices
from rsembed.collection.rows import AskedRows, Rows
from rsembed.optimizers import SGD
from rsembed.optimizers.base import Hyperparameters, OptimizerSpec, Slots
from rsembed.sparsecore.layout import StackLayout, cores_of, resolve_cores, stacks_of, with_place
from rsembed.specs import TableSpec, default_initializer

RowLimits = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True, repr=False)
class BoundedRowRule(OptimizerSpec):
    """Rule that applies another optimizer to the first `num_columns` columns, and clips the stepped rows.

    The step is part of the rule, so it still happens in place and touches no other row. Slots as wide as what the rule
    sees are padded like the table, so that all arrays of a stack have equal columns.

    Args:
      inner: the optimizer.
      num_columns: columns that the rule sees; None means all. Columns behind them stay as they are.
      minimum: lower limit of stepped entries, or None.
      maximum: upper limit of stepped entries, or None.
    """

    inner: OptimizerSpec = dataclasses.field(default_factory=SGD)
    num_columns: int | None = None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def moves_all_rows(self) -> bool:
        return self.inner.moves_all_rows

    def init_slots(self, rows: Array) -> Slots:
        end, width = self.num_columns or rows.shape[1], rows.shape[1]
        return tuple(
            jnp.pad(slot, ((0, 0), (0, width - end))) if slot.shape[1:] == (end,) else slot
            for slot in self.inner.init_slots(rows[:, :end])
        )

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        end, width = self.num_columns or rows.shape[1], rows.shape[1]
        seen = tuple(slot[:, :end] if slot.shape[1:] == (width,) else slot for slot in slots)
        new, new_slots = self.inner.step_rows(rows[:, :end], seen, gradients[:, :end], hyper)
        if self.minimum is not None or self.maximum is not None:
            new = jnp.clip(new, self.minimum, self.maximum)

        def whole(stepped: Array, old: Array) -> Array:
            return stepped if stepped.shape == old.shape else jnp.concatenate([stepped, old[:, end:]], axis=1)

        return whole(new, rows), tuple(map(whole, new_slots, slots))


def checked_limits(limits: Mapping[str, RowLimits] | None, stacks: Sequence[str]) -> Mapping[str, RowLimits]:
    """The limits of all stacks. Raises: ValueError: some do not name every stack, or a minimum is above its maximum."""
    if limits is None:
        return dict.fromkeys(stacks, (None, None))
    if set(limits) != set(stacks):
        raise ValueError(
            f"embedding_var_limits must name every stack: got {sorted(limits)}, need {sorted(stacks)}; (None, None) "
            "sets no limit."
        )
    for name, pair in limits.items():
        check_type(pair, tuple[object, object], f"embedding_var_limits of stack {name!r}: (minimum, maximum)")
        minimum, maximum = pair
        for which, limit in (("minimum", minimum), ("maximum", maximum)):
            check_within("[-inf, inf]", limit, f"embedding_var_limits of stack {name!r}: {which}")
        if minimum is not None and maximum is not None and minimum > maximum:
            raise ValueError(f"embedding_var_limits of stack {name!r}: minimum {minimum} is above maximum {maximum}.")
    return limits


def rule_of(layout: StackLayout, limits: RowLimits = (None, None)) -> OptimizerSpec:
    """Optimizer rule that steps a stack's rows, padding excluded where the rule would see it.

    Padding columns hold zeros. Rules of single entries keep them zero by themselves; a rule that looks at whole rows (a
    row-wise accumulator, a norm, a custom function) must not see them, or its means would be wrong.

    Args:
      layout: the stack.
      limits: smallest and largest value of a stepped entry.

    Raises:
      ValueError: such a rule, and tables of different dims.
    """
    optimizer, num_columns = layout.spec.optimizer, None
    dims = {table.name: table.embedding_dim for table in layout.tables}
    # Limits that exclude zero would move the padding, so clipping too stops at the last real column where it can.
    if optimizer.is_row_wise or (limits != (None, None) and len(set(dims.values())) == 1):
        if len(set(dims.values())) > 1:
            raise ValueError(
                f"stack {layout.name!r}: optimizer {optimizer.short_name()!r} works on whole rows, so the tables of a "
                f"stack must have one embedding_dim, but have {dims}; give them stacks of their own."
            )
        num_columns = next(iter(dims.values()))
        num_columns = None if num_columns == layout.spec.stack_embedding_dim else num_columns
    if num_columns is None and limits == (None, None):
        return optimizer
    return BoundedRowRule(optimizer.learning_rate, optimizer, num_columns, *limits)


def stack_rows(layout: StackLayout, devices: Devices, rule: OptimizerSpec, *, capacity: int | None = None) -> Rows:
    """Rows of a stack as the engine's `Rows`: here, or asked from the devices that own them.

    Args:
      layout: the stack's.
      devices: devices that share the stack.
      rule: optimizer rule that steps the rows.
      capacity: places per block where they are asked for.
    """
    layout = dataclasses.replace(layout, num_devices=devices.num_devices)
    table = dataclasses.replace(
        layout.tables[0],
        embedding_dim=layout.spec.stack_embedding_dim,
        optimizer=rule,
        quantization_config=layout.spec.quantization_config,
    )
    storage = DenseRows(layout.row_layout, layout.tables)
    if devices.num_devices == 1:
        return Rows(devices, table, storage)
    return AskedRows(devices, table, storage, capacity=capacity)


class EmbeddingVariables(NamedTuple):
    """One physical table and its optimizer state: a pair of arrays (or of whatever a tree like them holds).

    Attributes:
      table: rows of all shards, `[rows, columns]`, shard after shard.
      slot: named tuple of arrays with the same rows, as the optimizer names them.
    """

    table: PyTree
    slot: PyTree


def initialize(
    key: PRNGKeyArray, tables: Sequence[TableSpec], devices: Devices, *, num_cores: int | None = None
) -> dict[str, EmbeddingVariables]:
    """Variables of all stacks, every device building its own rows. Compiled, or part of what is being compiled.

    Args:
      key: the model's key, typed or raw.
      tables: those that have no place yet stand alone.
      devices: devices that rows are dealt to.
      num_cores: cores per device; None takes the number that the tables were placed for.

    Raises: ValueError: a table was placed for another number of shards; tables of a stack are missing; outside `jit`,
      an initializer of yours gives a number that is not finite.
    """
    num_shards = devices.num_devices * resolve_cores(num_cores, devices.num_devices)
    tables = [with_place(table, num_shards) for table in tables]
    stacks = stacks_of(tables)
    cores_of(tables, devices.num_devices, num_cores)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)

    def build(key: PRNGKeyArray) -> dict[str, EmbeddingVariables]:
        made = {name: stack_rows(own, devices, rule_of(own)).init(key) for name, own in stacks.items()}
        packed = {name: own.spec.optimizer.pack_slots for name, own in stacks.items()}
        return {name: EmbeddingVariables(table, packed[name](slots)) for name, (table, slots) in made.items()}

    variables: dict[str, EmbeddingVariables] = devices.on_each(build, P(), devices.split)(key)
    for name, own in stacks.items():
        if any(table.initializer is not default_initializer for table in own.tables):
            way_out = "give initializers that make finite numbers"
            check_finite(variables[name].table, f"stack {name!r}: what its initializers give", way_out=way_out)
    return variables


def variables_of(
    embedding_variables: Mapping[str, PyTree], layout: StackLayout, *, rule: OptimizerSpec | None = None
) -> EmbeddingVariables:
    """Variables of one stack on one device, from `EmbeddingVariables` or a plain tuple of a table and its slots.

    Args:
      embedding_variables: variables of all stacks, by name.
      layout: the stack's.
      rule: optimizer rule whose slots are expected; None does not check the slots.

    Raises: ValueError: the stack is missing, or its variables do not have the shapes of a device's part of it.
    """
    check_type(embedding_variables, Mapping[str, tuple[Any, ...]], "embedding_variables")
    if layout.name not in embedding_variables:
        raise ValueError(
            f"embedding_variables have no stack {layout.name!r}, only {sorted(embedding_variables)}; were they made "
            "for these feature_specs?"
        )
    variables = embedding_variables[layout.name]
    if not isinstance(variables, EmbeddingVariables):
        variables = EmbeddingVariables(variables[0], tuple(jax.tree.leaves(tuple(variables[1:]))))
    shape = (layout.rows_per_shard * layout.num_cores, layout.spec.stack_embedding_dim)
    if variables.table.shape != shape:
        raise ValueError(
            f"stack {layout.name!r} has shape {variables.table.shape}, but the specs say {shape} on each of "
            f"{layout.num_devices} devices; were they placed for another number of devices or cores?"
        )
    if rule is None:
        return variables
    rows, optimizer = jax.ShapeDtypeStruct(shape, jnp.float32), layout.spec.optimizer
    expected = jax.eval_shape(lambda rows: optimizer.pack_slots(rule.init_slots(rows)), rows)
    found, wanted = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (variables.slot, expected))
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(expected)
    is_named = type(variables.slot) is not tuple  # a plain tuple tells nothing but its length
    if found != wanted or (is_named and structure != jax.tree.structure(variables.slot)):
        raise ValueError(
            f"stack {layout.name!r}: its optimizer {optimizer.short_name()!r} keeps slots {type(expected).__name__} of "
            f"shapes {wanted}, but got {type(variables.slot).__name__} of shapes {found}; use variables of this "
            "optimizer, or its init_slots."
        )
    return variables
