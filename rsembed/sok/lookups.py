"""Lookups in several embedding variables together, and the optimizer steps of these variables.

The variables of a lookup are divided into groups of at most `STACKS_TOGETHER`. Each group has a
`rsembed.collection.engine.Engine` with the compiled programs that look up and update the tables of
the group.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from rsembed.arrays import device_copy, is_traced
from rsembed.bags import Bags, as_bags
from rsembed.collection.engine import Engine
from rsembed.collection.stack import Batch, Stack
from rsembed.kernels.contract import Step
from rsembed.keys import Keys
from rsembed.row_gradients import check_gradient
from rsembed.sok.variables import (
    EmbeddingVariable,
    VariableTable,
    make_larger,
    stack_of,
    state_of,
)
from rsembed.specs import Combiner, FeatureSpec
from rsembed.storage.hashed import GrowingKeys, Hashed
from rsembed.storage.protocol import on_host
from rsembed.storage.row_map import RowMap

KeysOfBags = Keys | Bags | ArrayLike | Sequence[object]
"""Keys in any form that `key_bags` accepts."""
WeightsOfKeys = ArrayLike | Sequence[object] | None
KeysOfFeature: TypeAlias = PyTree
"""Keys of one feature in the canonical form of `rsembed.collection.inputs.prepare`."""
ByStack = dict[str, PyTree]
STACKS_TOGETHER = 25
"""Maximum number of variables that one compiled program looks up."""


def checked_combiner(combiner: str, what: str) -> Combiner:
    """Checks `combiner`, and returns it in lower case.

    Args:
      combiner: "sum", "mean" or "sqrtn", in upper or lower case.
      what: name of the argument in the error message.

    Raises: ValueError: the combiner is unknown.
    """
    if str(combiner).lower() not in ("sum", "mean", "sqrtn"):
        raise ValueError(f"{what} must be 'sum', 'mean' or 'sqrtn', got {combiner!r}.")
    return cast(Combiner, combiner.lower())


def key_bags(keys: KeysOfBags, weights: WeightsOfKeys, feature: str) -> Bags:
    """Converts keys and weights to `Bags`, with one bag for each index of the leading axes.

    Args:
      keys: integer array or `Keys` of shape `[..., keys per bag]` with padding -1, or any input of
        `as_bags`.
      weights: one float per key, in the structure of `keys`, 1 by default.
      feature: name of the feature in error messages.

    Raises: TypeError, ValueError: keys or weights are invalid. The error message contains the name
      of the feature.
    """
    if isinstance(keys, Bags) and weights is None:
        return as_bags(keys, feature=feature)
    return as_bags((_as_matrix(keys), _as_matrix(weights)), feature=feature)


def _as_matrix(array: Any) -> Any:
    """`array` with its leading axes (samples and features) joined into one axis of bags."""
    if getattr(array, "ndim", 0) > 2:
        return array.reshape(-1, array.shape[-1])
    return array


EngineTable = tuple[VariableTable, tuple[Combiner, ...], bool]
"""A table, the combiners of its features, and whether the table is enlarged before the step."""


@functools.lru_cache(maxsize=256)
def engine_of(tables: tuple[EngineTable, ...]) -> Engine:
    """The `Engine` with the compiled programs for `tables`. All tables must be on the same devices.

    The stack of a table is named after the position of the table in `tables`, such as "0". A
    feature is named after the positions of its table and its combiner, such as "0.1". Stacks and
    features are not named after their tables, so that tables with equal sizes and optimizers share
    compiled programs.

    Args:
      tables: tables of the engine, with the combiners of their features. If a table is enlarged
        before the step, a lookup returns initial rows for all new keys, even if no row is free yet.
    """
    stacks: dict[str, Stack] = {}
    features: dict[str, FeatureSpec] = {}
    for number, (table, combiners, grows) in enumerate(tables):
        stack = stack_of(table)
        plan = stack.layout.stack
        placements = []
        for position, combiner in enumerate(combiners):
            name = f"{number}.{position}"
            features[name] = FeatureSpec(name, table.spec)
            placement = dataclasses.replace(plan.features[0], name=name, combiner=combiner)
            placements.append(placement)
        plan = dataclasses.replace(plan, features=tuple(placements))
        layout = dataclasses.replace(stack.layout, stack=plan)
        rows = stack.rows
        if grows:
            settings = dataclasses.asdict(cast(Hashed, stack.storage))
            rows = dataclasses.replace(rows, storage=GrowingKeys(**settings))
        stacks[str(number)] = type(stack)(layout, rows)
    return Engine(features, stacks, tables[0][0].context.devices)


@dataclasses.dataclass(eq=False)
class TableUse:
    """An embedding variable, and the features of a lookup that read its table.

    Attributes:
      variable: the embedding variable.
      features: indices of the features in the lookup.
      num_new: number of new keys on each device, known after the lookup.
    """

    variable: EmbeddingVariable
    features: list[int] = dataclasses.field(default_factory=list)
    num_new: Int[Array, " devices"] | None = None


class _Program(NamedTuple):
    """The `Engine` with the compiled programs for some of the embedding variables of a lookup.

    Attributes:
      engine: the engine, which has one stack per variable.
      uses: the variable of each stack, by the name of the stack in the engine.
      features: index of each feature in the lookup, by the name of the feature in the engine.
    """

    engine: Engine
    uses: dict[str, TableUse]
    features: dict[str, int]


def _programs(
    uses: Sequence[TableUse],
    combiners: Sequence[Combiner],
    *,
    grow: bool,
) -> Iterator[_Program]:
    """Distributes variables over one or more engines, and yields a `_Program` for each engine.

    An engine has at most `STACKS_TOGETHER` variables, because the compile time of a program grows
    with the square of the number of tables in the program. Variables are grouped by the `kind` of
    their tables, so that more lookups share an engine and the compiled programs of the engine.

    Args:
      uses: the embedding variables of all features.
      combiners: combiner of each feature.
      grow: whether tables with `when_full="grow"` may be enlarged between this lookup and the step.
    """
    uses_by_kind: dict[int, list[TableUse]] = {}
    for use in uses:
        uses_by_kind.setdefault(id(use.variable.table.kind), []).append(use)
    ordered = list(itertools.chain.from_iterable(uses_by_kind.values()))
    num_programs = max(-(-len(uses) // STACKS_TOGETHER), 1)
    size = -(-len(uses) // num_programs)
    for first in range(0, len(uses), size or 1):
        uses_of_program = ordered[first : first + size]
        tables: list[EngineTable] = []
        features: list[int] = []
        for use in uses_of_program:
            table = use.variable.table
            combiners_of_table = tuple(combiners[feature] for feature in use.features)
            tables.append((table.kind, combiners_of_table, grow and table.when_full == "grow"))
            features += use.features
        engine = engine_of(tuple(tables))
        yield _Program(
            engine,
            dict(zip(engine.stacks, uses_of_program, strict=True)),
            dict(zip(engine.features, features, strict=True)),
        )


Arrays = tuple[ByStack, ByStack, ByStack]
"""Three dictionaries by stack name: parameters, optimizer slots and step counts of the tables."""


def _arrays_of(program: _Program) -> Arrays:
    params = ByStack()
    slots = ByStack()
    steps = ByStack()
    for stack, use in program.uses.items():
        state = state_of(use.variable)
        (params[stack],) = state.tables.values()
        (slots[stack],) = state.slots.values()
        steps[stack] = state.step
    return params, slots, steps


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(
    engine: Engine,
    arrays: Arrays,
    batch: Batch,
    d_outputs: Mapping[str, Float[Array, "_ _"]],
) -> Arrays:
    """Applies one optimizer step to the tables of an engine.

    `arrays` is donated. Returns the new parameters, slots and step counts.
    """
    params, slots, numbers = arrays
    steps = {}
    for name, stack in engine.stacks.items():
        hyper = stack.rule.get_hyperparameters(numbers[name])
        steps[name] = Step(hyper, stack.rule, None, numbers[name])
    new_params, new_slots = engine.update(params, slots, batch, d_outputs, steps)
    return new_params, new_slots, {name: number + 1 for name, number in numbers.items()}


@dataclasses.dataclass(eq=False)
class StepOnce:
    """Function that trains the tables of a lookup with the gradients of the lookup's outputs.

    A `StepOnce` can be called only once.

    Args:
      uses: the embedding variables of the lookup.
      combiners: combiner of each output.
      batch: keys of each output.
      shapes: shapes of the outputs, which the gradients must have.
      num_padded: number of padding rows that were removed from the end of the output. Padding rows
        get a gradient of zero.
      is_used: whether this `StepOnce` has been called.
    """

    uses: Sequence[TableUse]
    combiners: Sequence[Combiner]
    batch: Sequence[KeysOfFeature]
    shapes: list[tuple[int, ...]]
    num_padded: int = 0
    is_used: bool = False

    def __call__(self, *d_outputs: ArrayLike) -> None:
        """Adds rows for new keys, and applies one optimizer step to every row that the lookup read.

        If the lookup has more than `STACKS_TOGETHER` variables, several compiled programs run one
        after the other, and each program updates some of the tables. If a program raises an error,
        the tables of earlier programs have been updated, and the other tables are unchanged. Each
        table counts its updates in the field `step` of its state.

        Args:
          *d_outputs: gradient of the loss over the global batch, for each output.

        Raises:
          RuntimeError: this `StepOnce` has been called before, a table with `when_full="error"` has
            no row for a new key because other steps have filled the table since the lookup, or in a
            table with `when_full="error"` or "grow", the list of keys that wait for admission is
            full.
          ValueError: the gradients differ from the outputs in number or shape.
        """
        gradients = self._checked_gradients(d_outputs)
        if self.is_used:
            way_out = "Look up again for another step"
            raise RuntimeError(f"backward was called before: a lookup trains once. {way_out}.")
        self.is_used = True
        values = [use.variable.get_value() for use in self.uses]
        may_fail: list[tuple[EmbeddingVariable, int]] = []
        if not is_traced((self.batch, gradients, values)):
            for use in self.uses:
                if self._may_fail_after_growth(use):
                    may_fail.append((use.variable, _num_failed(use.variable)))
        # No table grows during the step. Outside `jit`, `_may_fail_after_growth` has already
        # enlarged the tables that had too few free rows. Inside `jit`, a table cannot grow.
        for program in _programs(self.uses, self.combiners, grow=False):
            # `_run` donates the old arrays of the program's tables, and stores the new arrays in
            # the variables at once, so all variables are valid even if a later program fails.
            self._run(program, gradients)
        for variable, num_failed_before in may_fail:
            num_failed = _num_failed(variable) - num_failed_before
            if num_failed:
                raise _full(variable, num_failed)

    def _checked_gradients(self, d_outputs: Sequence[ArrayLike]) -> dict[int, Array]:
        """Checks the gradients, and returns them as float32 arrays `[rows of the output, dim]`.

        The gradients of padding rows are zero.
        """
        if len(d_outputs) != len(self.shapes):
            problem = f"{len(d_outputs)} gradients came"
            raise ValueError(f"the lookup has {len(self.shapes)} outputs, but {problem}.")
        gradients: dict[int, Array] = {}
        for use in self.uses:
            what = f"table {use.variable.table.spec.name!r}: the gradient"
            for feature in use.features:
                shape = self.shapes[feature]
                check_gradient(d_outputs[feature], what)
                gradient = device_copy(d_outputs[feature], jnp.float32)
                if gradient.shape != shape:
                    raise ValueError(f"{what} has shape {gradient.shape}, the output {shape}.")
                gradient = gradient.reshape(-1, shape[-1])
                if self.num_padded:
                    gradient = jnp.pad(gradient, ((0, self.num_padded), (0, 0)))
                gradients[feature] = gradient
        return gradients

    def _run(self, program: _Program, gradients: Mapping[int, Array]) -> None:
        """Applies one optimizer step to the tables of `program`, and stores the new states."""
        batch = {name: self.batch[feature] for name, feature in program.features.items()}
        d_batch = {name: gradients[feature] for name, feature in program.features.items()}
        params, slots, steps = _step(program.engine, _arrays_of(program), batch, d_batch)
        for stack, use in program.uses.items():
            name = use.variable.table.spec.name
            state = use.variable.get_value()._replace(
                tables={name: params[stack]},
                slots={name: slots[stack]},
                step=steps[stack],
            )
            use.variable.set_value(state)

    def _may_fail_after_growth(self, use: TableUse) -> bool:
        """Enlarges a table with `when_full="grow"` that has too few free rows for the new keys.

        Returns: whether the step may still fail to give a new key a row (or a place in the list of
          keys that wait for admission).
        """
        table = use.variable.table
        if table.when_full not in ("error", "grow"):
            return False
        (params,) = state_of(use.variable).tables.values()
        num_missing = int(_num_missing(params.keys, use.num_new).max())
        if table.when_full == "grow" and num_missing > 0:
            size = table.rows_per_device
            make_larger(use.variable, max(2 * size, size + num_missing))
            num_missing = 0
        if num_missing > 0 or params.waiting is None:
            return num_missing > 0
        # Only the step computes how many keys start to wait for admission. Use an upper bound for
        # that number: all keys that the batch looks up in the table.
        num_keys = 0
        for feature in use.features:
            num_keys += jax.tree.leaves(self.batch[feature])[0].size
        return int(_num_missing(params.waiting, num_keys).max()) > 0


def _num_failed(variable: EmbeddingVariable) -> int:
    return int(variable.counts()["failed"].sum())


def look_up_variables(
    variables: Sequence[EmbeddingVariable],
    batch: Sequence[KeysOfFeature],
    combiners: Sequence[Combiner],
    *,
    training: bool,
) -> tuple[list[Float[Array, "_ _"]], StepOnce]:
    """Looks up several features together, with shared compiled programs and exchanges of rows.

    Args:
      variables: table of each feature. Features may share a table.
      batch: keys `[bags, width]` of each feature, or pairs `(keys, weights)`, sharded by bag.
      combiners: combiner of each feature. With the combiner "none", the output of a feature has the
        shape `[bags * width, dim]`.
      training: if True, the lookup returns the initial row for a new key, or zeros if no row is
        free for the key. If False, the lookup returns zeros for all new keys.

    Returns: the output of each feature, and a function that trains the tables.

    Raises: RuntimeError: a table with `when_full="error"` has too few free rows for the new keys.
      Inside `jit`, a full table raises no error. Use `EmbeddingVariable.counts` to read how many
      keys `failed`.
    """
    uses_by_variable: dict[int, TableUse] = {}
    for feature, variable in enumerate(variables):
        use = uses_by_variable.setdefault(id(variable), TableUse(variable))
        use.features.append(feature)
    uses = list(uses_by_variable.values())
    values = [variable.get_value() for variable in variables]
    grow = training and not is_traced((list(batch), values))
    outputs: dict[int, Array] = {}
    for program in _programs(uses, combiners, grow=grow):
        params, _, steps = _arrays_of(program)
        keys = {name: batch[feature] for name, feature in program.features.items()}
        step_numbers = steps if training else None
        pooled, statistics = program.engine.lookup(params, keys, step_numbers)
        for name, feature in program.features.items():
            outputs[feature] = pooled[name]
        for stack, use in program.uses.items():
            use.num_new = statistics.num_unknown[stack]
    if training:
        _check_room(uses)
    ordered = [outputs[feature] for feature in range(len(variables))]
    shapes = [jnp.shape(output) for output in ordered]
    return ordered, StepOnce(uses, combiners, batch, shapes)


def _check_room(uses: Sequence[TableUse]) -> None:
    """Checks that every table with `when_full="error"` has enough free rows for its new keys.

    Inside `jit`, the number of new keys is unknown, and nothing is checked.

    Raises: RuntimeError: a table has fewer free rows than new keys on one of its devices.
    """
    for use in uses:
        variable = use.variable
        if variable.table.when_full != "error" or is_traced(use.num_new):
            continue
        (params,) = variable.get_value().tables.values()
        num_missing = _num_missing(params.keys, use.num_new)
        if num_missing.max() > 0:
            raise _full(variable, int(num_missing.clip(0).sum()))


def _num_missing(keys: RowMap, num_new: int | Array | None) -> Int[np.ndarray, " devices"]:
    """For each device, the number of new keys minus the number of free rows.

    If a device has more new keys than free rows, some new keys on the device get no row.
    """
    num_free = on_host(keys.num_free).astype(np.int64)
    missing: np.ndarray = on_host(num_new) - num_free
    return missing


def _full(variable: EmbeddingVariable, num_failed: int) -> RuntimeError:
    """Error about new keys that got no row.

    The error message suggests settings that make room for new keys, and leaves out settings that
    the table already has.
    """
    table = variable.table
    storage = cast(Hashed, table.spec.storage)
    rooms = f"the devices use {variable.counts()['rows'].tolist()} rows"
    if table.when_full == "grow":
        # A table with `when_full="grow"` was enlarged before the step, so it has enough rows. A new
        # key failed only because the list of keys that wait for admission is full.
        num_waiting = storage.admission_capacity or table.rows_per_device
        rooms += f" and have room for {num_waiting} keys that wait for one"
        way_out = (
            "Make admission_capacity larger than the new keys of a batch, or admission_count 0"
        )
    elif storage.admission_count:
        way_out = (
            "Make max_vocabulary_size_per_gpu (for keys that wait for a row, admission_capacity) "
            "larger, or choose when_full='grow' (for rows), 'evict' (which spares the rows of the "
            "same step) or 'zero'"
        )
    else:
        way_out = (
            "Make max_vocabulary_size_per_gpu larger, or choose when_full='grow', 'evict' (which "
            "spares the rows of the same step) or 'zero'"
        )
    problem = f"{num_failed} new keys find no room; {rooms}"
    return RuntimeError(f"table {table.spec.name!r} is full: {problem}. {way_out}.")
