"""Lookups of several embedding variables in one exchange, and the step that may follow each of them once.

What compiled programs do is the engine of the core, over the tables of some variables.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.bags import Bags, as_bags, check_unmasked, device_copy, is_traced
from rsembed.collection.engine import STACKS_TOGETHER, Engine
from rsembed.collection.stack import Stack
from rsembed.kernels.contract import Step
from rsembed.keys import Keys
from rsembed.parallel.agreement import is_global
from rsembed.row_gradients import SingleUse, check_gradient
from rsembed.sok.initialize import Context
from rsembed.sok.variables import EmbeddingVariable, VariableTable, give_room, state_of
from rsembed.specs import Combiner, FeatureSpec
from rsembed.storage import Hashed
from rsembed.storage.hashed_rows import DynamicTable, numbers_of
from rsembed.storage.protocol import on_host

Arrays = tuple[DynamicTable, Any, Int[Array, ""]]
"""Arrays of a variable in a program: rows by key, slots and the number of the step to come."""
KeyBatch = Any
"""Keys `[bags, width]` of a feature, cut among devices by bag; or a pair of them and their weights."""
TRAINED = "backward was called before: a lookup trains once. Look up again for another step."


# Batches


def checked_combiner(combiner: str, what: str) -> Combiner:
    """The combiner in small letters. Raises: ValueError: it does not pool; names `what` asked for it."""
    if str(combiner).lower() not in ("sum", "mean", "sqrtn"):
        raise ValueError(f"{what} must be 'sum', 'mean' or 'sqrtn', got {combiner!r}.")
    return cast(Combiner, combiner.lower())


def key_bags(keys: Any, weights: Any, feature: str, context: Context | None) -> Bags:
    """One bag of keys per leading position of `keys`.

    Args:
      keys: an integer array or `Keys` `[..., keys per bag]`, in which -1 is no key; `Bags`; or a list of keys per bag.
      weights: one float per key, in the same form, or None.
      feature: named in errors.
      context: the devices.

    Raises: TypeError or ValueError, naming the feature.
    """
    check_unmasked(keys, f"feature {feature!r}: keys")
    if isinstance(keys, Bags) or (isinstance(keys, (list, tuple)) and not isinstance(keys, Keys)):
        try:
            return as_bags(keys if isinstance(keys, Bags) and weights is None else (keys, weights), feature=feature)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} Lists hold one flat list of keys per bag: [[1, 2], [3], []].") from error
    keys = keys if isinstance(keys, (Keys, jax.Array)) else np.asarray(keys)
    if keys.ndim < 2:
        raise ValueError(
            f"feature {feature!r}: keys need an axis of bags and one of keys per bag, got shape {keys.shape}."
        )
    if weights is not None:
        weights = weights if isinstance(weights, jax.Array) else np.asarray(weights)
        if weights.shape != keys.shape:
            raise ValueError(f"feature {feature!r}: weights have shape {weights.shape}, keys {keys.shape}.")
        weights = weights.reshape(-1, keys.shape[-1])
    bags = as_bags((keys.reshape(-1, keys.shape[-1]), weights), feature=feature)
    return of_any_width(bags, context)


def of_any_width(bags: Bags, context: Context | None) -> Bags:
    """Bags on whose width several processes can agree, as they cannot on that of arrays."""
    is_part = context is not None and context.devices.num_processes > 1 and is_known(bags)
    return dataclasses.replace(bags, dense_shape=None) if is_part else bags


def is_known(batch: Bags | Keys) -> bool:
    """Whether keys are here to be checked: not inside `jit`, and not those of other processes."""
    return not is_traced(batch) and not any(map(is_global, jax.tree.leaves(batch)))


# Programs


@dataclasses.dataclass(frozen=True)
class Program:
    """Lookups and steps of some tables, equal for all whose tables are alike: these share what is compiled.

    Args:
      kinds: of the tables.
      combiners: of the features of each table.
      tables: those that stand for all.
    """

    kinds: tuple[Hashable, ...]
    combiners: tuple[tuple[Combiner, ...], ...]
    tables: tuple[VariableTable, ...] = dataclasses.field(compare=False)

    @functools.cached_property
    def engine(self) -> Engine:
        """The core's engine of the stack of each table, which are called by their numbers."""
        features: dict[str, FeatureSpec] = {}
        stacks: dict[str, Stack] = {}
        for t, (table, combiners) in enumerate(zip(self.tables, self.combiners, strict=True)):
            own = table.collection.logical.stacks[table.spec.name]
            plan = own.layout.stack
            placements = tuple(
                dataclasses.replace(plan.features[0], name=_feature(t, k), combiner=combiner)
                for k, combiner in enumerate(combiners)
            )
            layout = dataclasses.replace(own.layout, stack=dataclasses.replace(plan, features=placements))
            stacks[str(t)] = type(own)(layout, own.rows)
            features |= {feature.name: FeatureSpec(feature.name, table.spec) for feature in placements}
        return Engine(features, stacks, self.tables[0].context.devices)

    @staticmethod
    def by_table(values: Sequence[Any]) -> dict[str, Any]:
        """Values of tables by their numbers."""
        return {str(t): value for t, value in enumerate(values)}

    @staticmethod
    def by_feature(values: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Values of the features of all tables by name."""
        return {_feature(t, k): value for t, own in enumerate(values) for k, value in enumerate(own)}


def _feature(table: int, number: int) -> str:
    return f"{table}/{number}"


@functools.partial(jax.jit, static_argnums=(0, 1))
def _look_up(
    is_training: bool, program: Program, arrays: Sequence[Arrays], batch: Sequence[Sequence[KeyBatch]]
) -> list[tuple[list[Float[Array, "_ _"]], Int[Array, " devices"]]]:
    """Pooled rows of the features of each table, and how many keys have no row or, in training, want one."""
    tables, bags = program.by_table([params for params, _, _ in arrays]), program.by_feature(batch)
    if is_training:
        numbers = program.by_table([step for *_, step in arrays])
        found, statistics = program.engine.lookup(tables, bags, numbers)
    else:
        found, statistics = program.engine.lookup(tables, bags)
    return [
        ([found[_feature(t, k)] for k in range(len(own))], cast(Array, statistics.traffic[str(t)].num_unknown))
        for t, own in enumerate(batch)
    ]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(
    program: Program,
    arrays: Sequence[Arrays],
    batch: Sequence[Sequence[KeyBatch]],
    d_outputs: Sequence[Sequence[Float[Array, "_ _"]]],
) -> list[Arrays]:
    """The arrays after one step with gradients of the outputs."""
    rules = [table.spec.optimizer for table in program.tables]
    steps = [
        Step(rule.get_hyperparameters(number), rule, None, number)
        for rule, (*_, number) in zip(rules, arrays, strict=True)
    ]
    params, slots, numbers = zip(*arrays, strict=True)
    own, own_slots, own_steps = map(program.by_table, (params, slots, steps))
    stepped, stepped_slots = program.engine.update(
        own, own_slots, program.by_feature(batch), program.by_feature(d_outputs), own_steps
    )
    return [(stepped[str(t)], stepped_slots[str(t)], number + 1) for t, number in enumerate(numbers)]


def _in_programs(
    function: Callable[..., list[Any]],
    keep: Callable[[int, Any], None],
    variables: Sequence[EmbeddingVariable],
    combiners: Sequence[Sequence[Combiner]],
    *args: Sequence[Any],
) -> None:
    """`function` of variables and what belongs to each of them, in programs of few tables.

    To compile one takes time that grows with the square of its tables, and tables that are alike share what is
    compiled: of a hundred like tables, a quarter at a time. A program takes the old arrays away, so what it gives is
    kept before the next one begins: an error there must not cost the tables of this one.
    """
    numbers: dict[Hashable, int] = {}
    kinds = [variable.table.kind for variable in variables]
    first_of_kind = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    like_beside_like = sorted(range(len(variables)), key=first_of_kind.__getitem__)
    size = -(-len(variables) // -(-len(variables) // STACKS_TOGETHER))
    for first in range(0, len(variables), size):
        own = like_beside_like[first : first + size]
        program = Program(
            tuple(kinds[number] for number in own),
            tuple(tuple(combiners[number]) for number in own),
            tuple(variables[number].table for number in own),
        )
        arrays = [_arrays_of(variables[number]) for number in own]
        found = function(program, arrays, *([of_all[number] for number in own] for of_all in args))
        for number, result in zip(own, found, strict=True):
            keep(number, result)


def _arrays_of(variable: EmbeddingVariable) -> Arrays:
    state, name = state_of(variable), variable.table.spec.name
    return state.tables[name], state.slots[name], state.step


# Lookups


@dataclasses.dataclass(eq=False)
class StepOnce:
    """Trains the tables of a lookup with the gradients of its outputs, once.

    Args:
      variables: distinct ones.
      batch: keys of the features of each.
      combiners: likewise.
      wanted: by device, how many keys of each were going to get a row.
      order: which of the variables each output comes from.
      shapes: of the outputs.
    """

    variables: Sequence[EmbeddingVariable]
    batch: Sequence[Sequence[KeyBatch]]
    combiners: Sequence[Sequence[Combiner]]
    wanted: Sequence[Int[Array, " devices"]]
    order: Sequence[int]
    shapes: list[tuple[int, ...]]
    permit: SingleUse = dataclasses.field(default_factory=functools.partial(SingleUse, TRAINED))

    def __call__(self, *d_outputs: Any) -> None:
        """One optimizer step of every row that the lookup read; new keys get theirs.

        An error in the step of a large group leaves each table either stepped or as it was, as its `step` says.

        Args:
          *d_outputs: gradient of each output; of the loss over the global batch.

        Raises:
          RuntimeError: a second call; or since the lookup a table has become full that is to say so.
          ValueError: a gradient has another shape than its output.
        """
        if len(d_outputs) != len(self.shapes):
            raise ValueError(f"the lookup has {len(self.shapes)} outputs, but {len(d_outputs)} gradients came.")
        gradients: list[list[Array]] = [[] for _ in self.variables]
        for number, d_output, shape in zip(self.order, d_outputs, self.shapes, strict=True):
            name = self.variables[number].table.spec.name
            check_gradient(d_output, f"table {name!r}: the gradient")
            gradient = device_copy(d_output, jnp.float32)
            if gradient.shape != shape:
                raise ValueError(f"table {name!r}: the gradient has shape {gradient.shape}, the output {shape}.")
            gradients[number].append(gradient.reshape(-1, shape[-1]))
        self.permit.use()
        failed_before = [self._prepared(number, gradients) for number in range(len(self.variables))]

        def keep(number: int, stepped: Arrays) -> None:
            variable = self.variables[number]
            params, slots, step = stepped
            name, state = variable.table.spec.name, variable.get_value()
            variable.set_value(state._replace(tables={name: params}, slots={name: slots}, step=step))

        _in_programs(_step, keep, self.variables, self.combiners, self.batch, gradients)
        for variable, before in zip(self.variables, failed_before, strict=True):
            if before is not None and (num_failed := _num_failed(variable) - before):
                raise _full(variable, num_failed)

    def _prepared(self, number: int, gradients: Sequence[Any]) -> int | None:
        """Makes room in a table that grows; of another that may not have any, how many keys found none before."""
        variable, wanted = self.variables[number], self.wanted[number]
        given = self.batch[number], gradients, variable.get_value()
        if not says_when_full(variable) or is_traced(given):
            return None
        params, _, _ = _arrays_of(variable)
        missing, num_waiting = _missing(params.keys, wanted), 0
        num_ids = sum(leaf.size for leaf in jax.tree.leaves(self.batch[number]))
        if params.waiting is not None and _missing(params.waiting, num_ids).max() > 0:
            unknown: list[Any] = []
            _in_programs(
                functools.partial(_look_up, False),
                lambda _, found: unknown.append(found[1]),
                [variable],
                [self.combiners[number]],
                [self.batch[number]],
            )
            num_waiting = _missing(params.waiting, unknown[0] - wanted).max()
        if max(missing.max(), num_waiting) <= 0:
            return None
        if not variable.table.grows:
            return _num_failed(variable)
        give_room(variable, int(missing.max()), int(num_waiting))
        return None


def look_up_variables(
    variables: Sequence[EmbeddingVariable],
    batch: Sequence[KeyBatch],
    combiners: Sequence[Combiner],
    *,
    training: bool,
) -> tuple[list[Float[Array, "_ _"]], StepOnce]:
    """Rows of several features in one exchange, and the function that trains their tables; nothing changes yet.

    Args:
      variables: the table of each feature; features may share one.
      batch: keys of each feature.
      combiners: of each feature; "none" gives `[bags * width, dim]`.
      training: new keys read as what their rows are going to start from, else zeros.

    Raises: RuntimeError: a table has no room for new keys and is to say so. Inside `jit`, `counts` say it later.
    """
    if not variables:
        return [], StepOnce((), (), (), (), (), [])
    own = list({id(variable): variable for variable in variables}.values())
    numbers = {id(variable): number for number, variable in enumerate(own)}
    order = [numbers[id(variable)] for variable in variables]
    by_variable = [[feature for n, feature in zip(order, batch, strict=True) if n == k] for k in range(len(own))]
    pooling = [[combiner for n, combiner in zip(order, combiners, strict=True) if n == k] for k in range(len(own))]
    found: dict[int, Any] = {}
    _in_programs(functools.partial(_look_up, training), found.__setitem__, own, pooling, by_variable)
    for number, variable in enumerate(own) if training else ():
        wanted = found[number][1]
        if not says_when_full(variable) or variable.table.grows or is_traced(wanted):
            continue
        if (missing := _missing(variable.get_value().tables[variable.table.spec.name].keys, wanted)).max() > 0:
            raise _full(variable, int(missing.clip(0).sum()))
    outputs = [iter(found[number][0]) for number in range(len(own))]
    ordered = [next(outputs[number]) for number in order]
    wanted_by_table = [found[number][1] for number in range(len(own))]
    return ordered, StepOnce(own, by_variable, pooling, wanted_by_table, order, [output.shape for output in ordered])


def says_when_full(variable: EmbeddingVariable) -> bool:
    """Whether new keys must find room, or an error says that there is none."""
    storage = variable.table.spec.storage
    return isinstance(storage, Hashed) and storage.when_full == "error"


def _missing(keys: Any, wanted: Any) -> Int[np.ndarray, " devices"]:
    """Places that each device lacks for so many new keys; negative where some are left."""
    missing: np.ndarray = on_host(wanted) - on_host(keys.num_free).astype(np.int64)
    return missing


def _num_failed(variable: EmbeddingVariable) -> int:
    return int(numbers_of(cast(Array, _arrays_of(variable)[0].counters.failed)).sum())


def _full(variable: EmbeddingVariable, num_failed: int) -> RuntimeError:
    return RuntimeError(
        f"table {variable.table.spec.name!r} is full: {num_failed} new keys find no room; the devices use "
        f"{variable.counts()['rows'].tolist()} rows. Make max_vocabulary_size_per_gpu (or admission_capacity) larger, "
        "or choose when_full='grow', 'evict' (which spares the rows of the same step) or 'zero'."
    )
