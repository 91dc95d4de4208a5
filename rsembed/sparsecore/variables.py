"""Variables of stacks, as pytrees keyed by stack name: making, checking, and access by table.

Stacking, sharding, rotation and padding are matters of the physical layout; a logical table is `[vocabulary, dim]`. The
rule that steps the rows of a stack sees no padding.

Variables are bare arrays, of which shapes and slots alone are compared with specs. Another number of cores, another
rotation or order of tables may leave the shapes and move the rows: what goes to other specs, at once or through files,
goes by table, by `logical_variables` and `with_logical_tables`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jaxtyping import Array, Num, PRNGKeyArray, PyTree

from rsembed.bags import is_traced
from rsembed.checks import check_type, check_within
from rsembed.collection.dense_rows import DenseRows, RowLayout
from rsembed.collection.devices import Devices
from rsembed.collection.rows import AskedRows, Rows
from rsembed.optimizers import SGD, Hyperparameters, OptimizerSpec, Slots
from rsembed.sparsecore.layout import (
    ArrayLike,
    Nested,
    Scalar,
    StackLayout,
    cores_of,
    placed_stack,
    stacks_of,
)
from rsembed.specs import FeatureSpec, TableSpec, tables_of
from rsembed.stacking import TablePlacement
from rsembed.storage.protocol import on_host

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

    def get_hyperparameters(self, step: Scalar | None = None) -> Hyperparameters:
        return self.inner.get_hyperparameters(step)

    def slot_initial_values(self) -> tuple[PyTree, ...]:
        return self.inner.slot_initial_values()

    def init_slots(self, rows: Array) -> Slots:
        end, width = self.num_columns or rows.shape[1], rows.shape[1]
        return tuple(
            jnp.pad(slot, ((0, 0), (0, width - end))) if slot.shape[1:] == (end,) else slot
            for slot in self.inner.init_slots(rows[:, :end])
        )

    def pack_slots(self, slots: Slots) -> PyTree:
        return self.inner.pack_slots(slots)

    def step_rows(self, rows: Array, slots: Slots, gradients: Array, hyper: Hyperparameters) -> tuple[Array, Slots]:
        end, width = self.num_columns or rows.shape[1], rows.shape[1]
        seen = tuple(slot[:, :end] if slot.shape[1:] == (width,) else slot for slot in slots)
        new, new_slots = self.inner.step_rows(rows[:, :end], seen, gradients[:, :end], hyper)
        if self.minimum is not None or self.maximum is not None:
            new = jnp.clip(new, self.minimum, self.maximum)

        def whole(stepped: Array, old: Array) -> Array:
            return stepped if stepped.shape == old.shape else jnp.concatenate([stepped, old[:, end:]], axis=1)

        return whole(new, rows), tuple(map(whole, new_slots, slots))

    def short_name(self) -> str:
        return self.inner.short_name()


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
      tables: placed tables.
      devices: devices that rows are dealt to.
      num_cores: cores per device; None takes the number that the tables were placed for.

    Raises: ValueError: a table was not placed, or for another number of shards; tables of a stack are missing.
    """
    stacks = stacks_of(tables)
    cores_of(tables, devices.num_devices, num_cores)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)

    def build(key: PRNGKeyArray) -> dict[str, EmbeddingVariables]:
        made = {name: stack_rows(own, devices, rule_of(own)).init(key) for name, own in stacks.items()}
        packed = {name: own.spec.optimizer.pack_slots for name, own in stacks.items()}
        return {name: EmbeddingVariables(table, packed[name](slots)) for name, (table, slots) in made.items()}

    return devices.on_each(build, P(), devices.split)(key)


def variables_of(
    embedding_variables: Mapping[str, PyTree], layout: StackLayout, *, rule: OptimizerSpec | None = None
) -> EmbeddingVariables:
    """Checked variables of one stack, from `EmbeddingVariables` or a plain tuple of a table and its slots."""
    check_type(embedding_variables, Mapping[str, tuple[Any, ...]], "embedding_variables")
    if layout.name not in embedding_variables:
        raise ValueError(
            f"embedding_variables have no stack {layout.name!r}, only {sorted(embedding_variables)}; were they made "
            "for these feature_specs?"
        )
    variables = embedding_variables[layout.name]
    if not isinstance(variables, EmbeddingVariables):
        variables = EmbeddingVariables(variables[0], tuple(jax.tree.leaves(tuple(variables[1:]))))
    check_variables(variables, layout, rule=rule)
    return variables


def check_variables(variables: EmbeddingVariables, layout: StackLayout, *, rule: OptimizerSpec | None = None) -> None:
    """Raises: ValueError: the variables do not have the shapes of one device's part of the stack.

    Args:
      variables: variables of one device.
      layout: the stack's.
      rule: optimizer rule whose slots are expected; None does not check the slots.
    """
    shape = (layout.rows_per_shard * layout.num_cores, layout.spec.stack_embedding_dim)
    if variables.table.shape != shape:
        raise ValueError(
            f"stack {layout.name!r} has shape {variables.table.shape}, but the specs say {shape} on each of "
            f"{layout.num_devices} devices; were they placed for another number of devices or cores?"
        )
    if rule is not None:
        _check_slots(variables.slot, rule, shape, where=f"stack {layout.name!r}")


def _check_slots(slot: PyTree, rule: OptimizerSpec, shape: tuple[int, int], *, where: str) -> None:
    rows = jax.ShapeDtypeStruct(shape, jnp.float32)
    expected = jax.eval_shape(lambda rows: rule.pack_slots(rule.init_slots(rows)), rows)
    found, wanted = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (slot, expected))
    structure: jax.tree_util.PyTreeDef = jax.tree.structure(expected)
    is_named = type(slot) is not tuple  # a plain tuple tells nothing but its length
    if found != wanted or (is_named and structure != jax.tree.structure(slot)):
        raise ValueError(
            f"{where}: its optimizer {rule.short_name()!r} keeps slots {type(expected).__name__} of shapes {wanted}, "
            f"but got {type(slot).__name__} of shapes {found}; use variables of this optimizer, or its init_slots."
        )


# Tables by name


def logical_tables(tree: PyTree, feature_specs: Nested[FeatureSpec]) -> dict[str, Array]:
    """Every table as `[vocabulary, dim]`, by table name.

    Args:
      tree: anything that has an `EmbeddingVariables` under the name of each stack: what `init_embedding_variables`
        returns, the parameters of a Linen model, the state of an NNX model.
      feature_specs: the placed specs it was made for.

    Raises:
      ValueError: a stack is missing, is there twice, or has another shape than these specs give it.
    """
    return {name: variables.table for name, variables in logical_variables(tree, feature_specs).items()}


def logical_variables(tree: PyTree, feature_specs: Nested[FeatureSpec]) -> dict[str, EmbeddingVariables]:
    """`EmbeddingVariables` of every table alone, in the form of `logical_tables`, by table name."""
    stacks = stacks_of(tables_of(feature_specs).values())
    found = _stacks_in(tree, stacks)
    logical: dict[str, EmbeddingVariables] = {}
    for name, layout in stacks.items():
        logical |= unstacked(found[name], layout.row_layout)
    return logical


def unstacked(stacked: PyTree, layout: RowLayout) -> dict[str, PyTree]:
    """The tables of a stack by name, in the order of ids and without padding.

    Args:
      stacked: a tree of flat arrays; those of fewer columns than the stack hold something for every row, and keep them.
      layout: where its tables lie.
    """

    def logical_rows(table: TablePlacement, array: Any) -> ArrayLike:
        is_full_width = array.ndim == 2 and array.shape[1] == layout.stack.spec.stack_embedding_dim
        index, is_host = layout.all_rows(table.name, table.rows), isinstance(array, np.ndarray)
        rows = array[index] if is_host else array.at[index].get(out_sharding=explicit_sharding(array, P()))
        return rows[:, : table.dim] if is_full_width else rows

    tables = layout.stack.tables
    return {table.name: jax.tree.map(functools.partial(logical_rows, table), stacked) for table in tables}


def explicit_sharding(array: ArrayLike, spec: P | None = None) -> NamedSharding | None:
    """How an array, or one of another `spec`, lies on its mesh of explicit axes, as JAX asks for; None on others."""
    own = jax.typeof(array).sharding
    if AxisType.Explicit not in own.mesh.axis_types:
        return None
    return own if spec is None else NamedSharding(own.mesh, spec)


def with_logical_tables(tree: PyTree, feature_specs: Nested[FeatureSpec], tables: Mapping[str, PyTree]) -> PyTree:
    """A copy of `tree` in which some tables have new values; everything else, padding included, is as before.

    Args:
      tree: as for `logical_tables`.
      feature_specs: the placed specs it was made for.
      tables: `[vocabulary, dim]` (or `[vocabulary]`, for one column) by table name, which leaves the slots alone, or
        `EmbeddingVariables` as `logical_variables` returns them.

    Raises:
      ValueError: a table is unknown or has another shape than its spec, slots are not those of its optimizer, or the
        stacks in `tree` have other shapes than these specs give them.
    """
    specs = tables_of(feature_specs)
    stacks = stacks_of(specs.values())
    found = _stacks_in(tree, stacks)
    unknown = sorted(set(tables) - set(specs))
    if unknown:
        raise ValueError(f"the specs have no tables {unknown}; they have {sorted(specs)}.")
    for name, given in tables.items():
        stack = placed_stack(specs[name]).stack_name
        found[stack] = _with_table(stacks[stack], specs[name], found[stack], given)

    def replaced(path: KeyPath, value: PyTree) -> PyTree:
        return found.get(_last_name(path), value) if isinstance(value, EmbeddingVariables) else value

    return jax.tree_util.tree_map_with_path(replaced, tree, is_leaf=_is_variables)


def _with_table(
    layout: StackLayout, table: TableSpec, stacked: EmbeddingVariables, given: PyTree
) -> EmbeddingVariables:
    where, shape = f"table {table.name!r}", (table.vocabulary_size, table.embedding_dim)
    old, structure = jax.tree.flatten(stacked)
    new = jax.tree.leaves(given) if isinstance(given, EmbeddingVariables) else [given]
    if isinstance(given, EmbeddingVariables) and len(new) != len(old):
        raise ValueError(f"{where}: got {len(new) - 1} slots, but its optimizer has {len(old) - 1}.")
    check_type(new[0], Num[Array, "..."], where)
    if jnp.shape(new[0]) == shape[:1] and shape[1] == 1:
        new[0] = new[0][:, None]
    if jnp.shape(new[0]) != shape:
        raise ValueError(f"{where}: got shape {jnp.shape(new[0])}, its spec says {shape}.")
    if isinstance(given, EmbeddingVariables):
        _check_slots(given.slot, table.optimizer, shape, where=where)
    rows = layout.row_layout.all_rows(table.name, table.vocabulary_size)
    for number, values in enumerate(new):
        array, is_inside = jnp.asarray(old[number]), is_traced((old[number], values))
        # Outside of `jit`, by way of the host, as they may come from another mesh.
        values = jnp.asarray(values if is_inside else on_host(values), array.dtype)
        index = (rows, *(slice(size) for size in values.shape[1:]))
        changed = array.at[index].set(values, out_sharding=explicit_sharding(array))
        old[number] = changed if is_inside else jax.device_put(changed, array.sharding)
    return jax.tree.unflatten(structure, old)


def _is_variables(value: object) -> bool:
    return isinstance(value, EmbeddingVariables)


def _last_name(path: KeyPath) -> str:
    return getattr(path[-1], "key", "") if path else ""


def _stacks_in(tree: PyTree, wanted: Mapping[str, StackLayout]) -> dict[str, EmbeddingVariables]:
    """Variables of every wanted stack, found anywhere in `tree` by the stack's name."""
    found: dict[str, EmbeddingVariables] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variables):
        name = _last_name(path)
        if not _is_variables(value) or name not in wanted:
            continue
        if name in found:
            raise ValueError(f"stack {name!r} is there twice; pass the part of the tree that you mean.")
        check_variables(value, wanted[name])
        found[name] = value
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(f"no EmbeddingVariables under the names of the stacks {missing}.")
    return found
