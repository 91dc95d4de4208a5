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
from rsembed.sok.variables import EmbeddingVariable, VariableTable, make_larger, state_of
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
        stack = table.collection.logical.stacks[table.spec.name]
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
            rows = dataclasses.replace(rows, storage=_growing(cast(Hashed, stack.storage)))
        stacks[str(number)] = type(stack)(layout, rows)
    return Engine(features, stacks, tables[0][0].context.devices)


def _growing(storage: Hashed) -> GrowingKeys:
    settings = {}
    for field in dataclasses.fields(Hashed):
        settings[field.name] = getattr(storage, field.name)
    return GrowingKeys(**settings)


class _Program(NamedTuple):
    """The `Engine` with the compiled programs for some of the embedding variables of a lookup.

    Attributes:
      engine: the engine, which has one stack per variable.
      variables: index of the variable of each stack, by the name of the stack in the engine.
      features: index of each feature in the lookup, by the name of the feature in the engine.
    """

    engine: Engine
    variables: dict[str, int]
    features: dict[str, int]


def _programs(
    variables: Sequence[EmbeddingVariable],
    features: Sequence[tuple[EmbeddingVariable, Combiner]],
    *,
    grow: Sequence[bool],
) -> Iterator[_Program]:
    """Distributes variables over one or more engines, and yields a `_Program` for each engine.

    An engine has at most `STACKS_TOGETHER` variables, because the compile time of a program grows
    with the square of the number of tables in the program. Variables are grouped by the `kind` of
    their tables, so that more lookups share an engine and the compiled programs of the engine.

    Args:
      variables: distinct embedding variables of all features.
      features: variable and combiner of each feature.
      grow: for each variable, whether its table may be enlarged between this lookup and the step.
    """
    numbers_by_kind: dict[int, list[int]] = {}
    for number, variable in enumerate(variables):
        numbers_by_kind.setdefault(id(variable.table.kind), []).append(number)
    ordered = list(itertools.chain.from_iterable(numbers_by_kind.values()))
    num_programs = max(-(-len(variables) // STACKS_TOGETHER), 1)
    size = -(-len(variables) // num_programs)
    for first in range(0, len(variables), size or 1):
        numbers = ordered[first : first + size]
        tables: list[EngineTable] = []
        feature_numbers: list[int] = []
        for number in numbers:
            combiners = []
            for feature_number, (variable, combiner) in enumerate(features):
                if variable is variables[number]:
                    combiners.append(combiner)
                    feature_numbers.append(feature_number)
            tables.append((variables[number].table.kind, tuple(combiners), grow[number]))
        engine = engine_of(tuple(tables))
        yield _Program(
            engine,
            dict(zip(engine.stacks, numbers, strict=True)),
            dict(zip(engine.features, feature_numbers, strict=True)),
        )


Arrays = tuple[ByStack, ByStack, ByStack]
"""Three dictionaries by stack name: parameters, optimizer slots and step counts of the tables."""


def _arrays_of(variables: Sequence[EmbeddingVariable], program: _Program) -> Arrays:
    params = ByStack()
    slots = ByStack()
    steps = ByStack()
    for stack, number in program.variables.items():
        state = state_of(variables[number])
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
      variables: distinct variables of the lookup.
      features: variable and combiner of each output.
      batch: keys of each output.
      wanted: number of new keys per device, by the index of their variable in `variables`.
      shapes: shapes of the outputs, which the gradients must have.
      num_padded: number of padding rows that were removed from the end of the output. Padding rows
        get a gradient of zero.
      is_used: whether this `StepOnce` has been called.
    """

    variables: Sequence[EmbeddingVariable]
    features: Sequence[tuple[EmbeddingVariable, Combiner]]
    batch: Sequence[KeysOfFeature]
    wanted: Mapping[int, Int[Array, " devices"]]
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
        values = [variable.get_value() for variable in self.variables]
        is_eager = not is_traced((self.batch, gradients, values))
        num_failed_before: dict[int, int] = {}
        if is_eager:
            for number in range(len(self.variables)):
                if self._may_fail_after_growth(number):
                    num_failed_before[number] = self._num_failed(number)
        # No table grows during the step. Outside `jit`, `_may_fail_after_growth` has already
        # enlarged the tables that had too few free rows. Inside `jit`, a table cannot grow.
        never_grow = [False] * len(self.variables)
        for program in _programs(self.variables, self.features, grow=never_grow):
            # `_run` donates the old arrays of the program's tables, and stores the new arrays in
            # the variables at once, so all variables are valid even if a later program fails.
            self._run(program, gradients)
        for number, before in num_failed_before.items():
            num_failed = self._num_failed(number) - before
            if num_failed:
                raise _full(self.variables[number], num_failed)

    def _checked_gradients(self, d_outputs: Sequence[ArrayLike]) -> list[Array]:
        """Checks the gradients, and returns them as float32 arrays `[rows of the output, dim]`.

        The gradients of padding rows are zero.
        """
        if len(d_outputs) != len(self.shapes):
            problem = f"{len(d_outputs)} gradients came"
            raise ValueError(f"the lookup has {len(self.shapes)} outputs, but {problem}.")
        gradients: list[Array] = []
        outputs = zip(self.features, d_outputs, self.shapes, strict=True)
        for (variable, _), d_output, shape in outputs:
            what = f"table {variable.table.spec.name!r}: the gradient"
            check_gradient(d_output, what)
            gradient = device_copy(d_output, jnp.float32)
            if gradient.shape != shape:
                raise ValueError(f"{what} has shape {gradient.shape}, the output {shape}.")
            gradient = gradient.reshape(-1, shape[-1])
            if self.num_padded:
                gradient = jnp.pad(gradient, ((0, self.num_padded), (0, 0)))
            gradients.append(gradient)
        return gradients

    def _run(self, program: _Program, gradients: list[Array]) -> None:
        """Applies one optimizer step to the tables of `program`, and stores the new states."""
        batch = {name: self.batch[number] for name, number in program.features.items()}
        d_batch = {name: gradients[number] for name, number in program.features.items()}
        arrays = _arrays_of(self.variables, program)
        params, slots, steps = _step(program.engine, arrays, batch, d_batch)
        for stack, number in program.variables.items():
            variable = self.variables[number]
            name = variable.table.spec.name
            state = variable.get_value()._replace(
                tables={name: params[stack]},
                slots={name: slots[stack]},
                step=steps[stack],
            )
            variable.set_value(state)

    def _num_failed(self, number: int) -> int:
        return int(self.variables[number].counts()["failed"].sum())

    def _may_fail_after_growth(self, number: int) -> bool:
        """Enlarges a table with `when_full="grow"` that has too few free rows for the new keys.

        Returns: whether the step may still fail to give a new key a row (or a place in the list of
          keys that wait for admission).
        """
        variable = self.variables[number]
        table = variable.table
        if table.when_full not in ("error", "grow"):
            return False
        (params,) = state_of(variable).tables.values()
        num_missing = int(_num_missing(params.keys, self.wanted[number]).max())
        if table.when_full == "grow" and num_missing > 0:
            size = table.rows_per_device
            make_larger(variable, max(2 * size, size + num_missing))
            num_missing = 0
        if num_missing > 0 or params.waiting is None:
            return num_missing > 0
        # Only the step computes how many keys start to wait for admission. Use an upper bound for
        # that number: all keys that the batch looks up in the table.
        num_keys = 0
        for (feature_variable, _), keys in zip(self.features, self.batch, strict=True):
            if feature_variable is variable:
                num_keys += jax.tree.leaves(keys)[0].size
        return int(_num_missing(params.waiting, num_keys).max()) > 0


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
    by_identity = {id(variable): variable for variable in variables}
    distinct = list(by_identity.values())
    features = list(zip(variables, combiners, strict=True))
    values = [variable.get_value() for variable in distinct]
    can_grow = training and not is_traced((list(batch), values))
    grow = [can_grow and variable.table.when_full == "grow" for variable in distinct]
    outputs: dict[int, Array] = {}
    wanted: dict[int, Array] = {}
    for program in _programs(distinct, features, grow=grow):
        params, _, steps = _arrays_of(distinct, program)
        keys = {name: batch[number] for name, number in program.features.items()}
        step_numbers = steps if training else None
        pooled, statistics = program.engine.lookup(params, keys, step_numbers)
        for name, number in program.features.items():
            outputs[number] = pooled[name]
        for stack, number in program.variables.items():
            wanted[number] = statistics.num_unknown[stack]
    if training and not is_traced(wanted):
        _check_room(distinct, wanted)
    ordered = [outputs[number] for number in range(len(features))]
    shapes = [jnp.shape(output) for output in ordered]
    return ordered, StepOnce(distinct, features, batch, wanted, shapes)


def _check_room(variables: Sequence[EmbeddingVariable], wanted: Mapping[int, Array]) -> None:
    """Checks that every table with `when_full="error"` has enough free rows for its new keys.

    Raises: RuntimeError: a table has fewer free rows than new keys on one of its devices.
    """
    for number, variable in enumerate(variables):
        if variable.table.when_full != "error":
            continue
        (params,) = variable.get_value().tables.values()
        num_missing = _num_missing(params.keys, wanted[number])
        if num_missing.max() > 0:
            raise _full(variable, int(num_missing.clip(0).sum()))


def _num_missing(keys: RowMap, wanted: int | Array) -> Int[np.ndarray, " devices"]:
    """For each device, the number of new keys minus the number of free rows.

    If a device has more new keys than free rows, some new keys on the device get no row.
    """
    num_free = on_host(keys.num_free).astype(np.int64)
    missing: np.ndarray = on_host(wanted) - num_free
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
