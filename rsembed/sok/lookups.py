"""Lookups of several embedding variables in one exchange, and the one optimizer step that may follow.

What compiled programs do is the engine of the core, over the tables of some variables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from rsembed.bags import Bags, as_bags, check_unmasked, device_copy, is_traced
from rsembed.collection.devices import Devices
from rsembed.collection.engine import STACKS_TOGETHER, Engine
from rsembed.collection.inputs import is_unknown
from rsembed.collection.stack import Stack
from rsembed.kernels.contract import Step
from rsembed.keys import Keys
from rsembed.row_gradients import SingleUse, check_gradient
from rsembed.sok.variables import EmbeddingVariable, VariableTable, give_room, state_of
from rsembed.specs import Combiner, FeatureSpec
from rsembed.storage.protocol import on_host
from rsembed.storage.row_map import RowMap

T = TypeVar("T")
KeysOfBags = Keys | Bags | ArrayLike | Sequence[object]
"""Keys as users have them; see `key_bags`."""
WeightsOfKeys = ArrayLike | Sequence[object] | None
ByStack = dict[str, PyTree]
TRAINED = "backward was called before: a lookup trains once. Look up again for another step."


# Batches


def checked_combiner(combiner: str, what: str) -> Combiner:
    """The combiner in lower case. Raises: ValueError: `what` is not sum, mean or sqrtn."""
    if str(combiner).lower() not in ("sum", "mean", "sqrtn"):
        raise ValueError(f"{what} must be 'sum', 'mean' or 'sqrtn', got {combiner!r}.")
    return cast(Combiner, combiner.lower())


def key_bags(keys: KeysOfBags, weights: WeightsOfKeys, feature: str, devices: Devices) -> Bags:
    """Bags of keys, one for each leading position of `keys`.

    Args:
      keys: an integer array or `Keys` `[..., keys per bag]`, in which -1 is no key; `Bags`; or a list of keys per bag.
      weights: one float per key, in the same form, or None.
      feature: named in errors.
      devices: those of the table.

    Raises: TypeError or ValueError, naming the feature.
    """
    check_unmasked(keys, f"feature {feature!r}: keys")
    if isinstance(keys, Bags) or (isinstance(keys, (list, tuple)) and not isinstance(keys, Keys)):
        try:
            return as_bags(keys if isinstance(keys, Bags) and weights is None else (keys, weights), feature=feature)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} Lists hold one flat list of keys per bag: [[1, 2], [3], []].") from error
    array = keys if isinstance(keys, (Keys, jax.Array)) else np.asarray(keys)
    if array.ndim < 2:
        raise ValueError(
            f"feature {feature!r}: keys need an axis of bags and one of keys per bag, got shape {array.shape}."
        )
    if weights is not None:
        weights = weights if isinstance(weights, jax.Array) else np.asarray(weights)
        if weights.shape != array.shape:
            raise ValueError(f"feature {feature!r}: weights have shape {weights.shape}, keys {array.shape}.")
        weights = weights.reshape(-1, array.shape[-1])
    return of_any_width(as_bags((array.reshape(-1, array.shape[-1]), weights), feature=feature), devices)


def of_any_width(bags: Bags, devices: Devices) -> Bags:
    """Bags without a fixed width, so that several processes can agree on one; unchanged in a single process."""
    is_part = devices.num_processes > 1 and not is_unknown(bags)
    return dataclasses.replace(bags, dense_shape=None) if is_part else bags


# Programs


@functools.lru_cache(maxsize=256)
def engine_of(tables: tuple[VariableTable, ...], features: tuple[tuple[int, Combiner], ...]) -> Engine:
    """The core's engine for some tables and the features that read them, both named by their numbers.

    Args:
      tables: on the same devices.
      features: for each, the number of its table, and how its rows are pooled.
    """
    stacks: dict[str, Stack] = {}
    for number, table in enumerate(tables):
        own = table.collection.logical.stacks[table.spec.name]
        plan = own.layout.stack
        placements = tuple(
            dataclasses.replace(plan.features[0], name=str(feature), combiner=combiner)
            for feature, (of_table, combiner) in enumerate(features)
            if of_table == number
        )
        layout = dataclasses.replace(own.layout, stack=dataclasses.replace(plan, features=placements))
        stacks[str(number)] = type(own)(layout, own.rows)
    specs = _numbered(FeatureSpec(str(k), tables[number].spec) for k, (number, _) in enumerate(features))
    return Engine(specs, stacks, tables[0].context.devices)


def _numbered(values: Iterable[T]) -> dict[str, T]:
    """Dictionary of values by their number as text, the names that engines of `engine_of` use."""
    return {str(number): value for number, value in enumerate(values)}


def _programs(
    variables: Sequence[EmbeddingVariable], features: Sequence[tuple[int, Combiner]]
) -> Iterator[tuple[Engine, list[int], list[int]]]:
    """Engines of at most `STACKS_TOGETHER` variables, with the numbers of their variables and of their features.

    To compile a program takes time that grows with the square of its tables, and tables that are alike share what is
    compiled: of a hundred like tables, a quarter at a time.
    """
    of_kind: dict[int, list[int]] = {}
    for number, variable in enumerate(variables):
        of_kind.setdefault(id(variable.table.kind), []).append(number)
    like_beside_like = list(itertools.chain.from_iterable(of_kind.values()))
    size = -(-len(variables) // max(-(-len(variables) // STACKS_TOGETHER), 1))
    for first in range(0, len(variables), size or 1):
        own = like_beside_like[first : first + size]
        tables = tuple(variables[number].table.kind for number in own)
        read, pooled = [], []
        for feature, (number, combiner) in enumerate(features):
            if number in own:
                read.append(feature)
                pooled.append((own.index(number), combiner))
        yield engine_of(tables, tuple(pooled)), own, read


def _arrays_of(variables: Sequence[EmbeddingVariable]) -> tuple[ByStack, ByStack, ByStack]:
    """Parameters, slots and step of every variable, each by the variable's number as text."""
    params, slots, steps = ByStack(), ByStack(), ByStack()
    for number, variable in enumerate(variables):
        state, name = state_of(variable), variable.table.spec.name
        own = str(number)
        params[own], slots[own], steps[own] = state.tables[name], state.slots[name], state.step
    return params, slots, steps


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(
    engine: Engine,
    arrays: tuple[ByStack, ByStack, ByStack],
    batch: Mapping[str, PyTree],
    d_outputs: Mapping[str, Float[Array, "_ _"]],
) -> tuple[ByStack, ByStack, ByStack]:
    """Parameters, slots and steps after one optimizer step with gradients of the outputs."""
    params, slots, numbers = arrays
    steps = {
        name: Step(stack.rule.get_hyperparameters(numbers[name]), stack.rule, None, numbers[name])
        for name, stack in engine.stacks.items()
    }
    stepped, stepped_slots = engine.update(params, slots, batch, d_outputs, steps)
    return stepped, stepped_slots, {name: number + 1 for name, number in numbers.items()}


# Lookups


@dataclasses.dataclass(eq=False)
class StepOnce:
    """Trains the tables of a lookup with the gradients of its outputs, once.

    Args:
      variables: distinct ones.
      features: for each output, the number of its variable, and how its rows were pooled.
      batch: keys of each output.
      wanted: by number of the variable, how many of its keys were going to get a row, by device.
      num_rows: of each output; a gradient may have fewer rows than it, then the last ones have none.
      shapes: shapes that gradients must have.
    """

    variables: Sequence[EmbeddingVariable]
    features: Sequence[tuple[int, Combiner]]
    batch: Sequence[PyTree]
    wanted: Mapping[int, Int[Array, " devices"]]
    num_rows: Sequence[int]
    shapes: list[tuple[int, ...]]
    permit: SingleUse = dataclasses.field(default_factory=functools.partial(SingleUse, TRAINED))

    def __call__(self, *d_outputs: ArrayLike) -> None:
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
        gradients: list[Array] = []
        given = zip(self.features, d_outputs, self.shapes, self.num_rows, strict=True)
        for (number, _), d_output, shape, num_rows in given:
            what = f"table {self.variables[number].table.spec.name!r}: the gradient"
            check_gradient(d_output, what)
            gradient = device_copy(d_output, jnp.float32)
            if gradient.shape != shape:
                raise ValueError(f"{what} has shape {gradient.shape}, the output {shape}.")
            gradient = gradient.reshape(-1, shape[-1])
            missing = num_rows - gradient.shape[0]
            gradients.append(jnp.pad(gradient, ((0, missing), (0, 0))) if missing else gradient)
        self.permit.use()
        is_eager = not is_traced((self.batch, gradients, [variable.get_value() for variable in self.variables]))
        failed_before = [self._make_room(number) if is_eager else None for number in range(len(self.variables))]
        # A program takes the old arrays away: what it gives is kept before the next one may fail.
        for engine, own, read in _programs(self.variables, self.features):
            variables = [self.variables[number] for number in own]
            batch, d_batch = (_numbered(values[feature] for feature in read) for values in (self.batch, gradients))
            params, slots, steps = _step(engine, _arrays_of(variables), batch, d_batch)
            for stack, variable in _numbered(variables).items():
                state, name = variable.get_value(), variable.table.spec.name
                stepped = state._replace(tables={name: params[stack]}, slots={name: slots[stack]}, step=steps[stack])
                variable.set_value(stepped)
        for variable, before in zip(self.variables, failed_before, strict=True):
            if before is not None and (num_failed := int(variable.counts()["failed"].sum()) - before):
                raise _full(variable, num_failed)

    def _make_room(self, number: int) -> int | None:
        """Enlarges a full table if it may grow; for one with when_full='error', returns the failed keys so far."""
        variable = self.variables[number]
        if variable.table.when_full not in ("error", "grow"):
            return None
        (params,) = state_of(variable).tables.values()
        num_rows, num_waiting = int(_missing(params.keys, self.wanted[number]).max()), 0
        if params.waiting is not None:  # at most all keys of the batch
            own = [keys for (of, _), keys in zip(self.features, self.batch, strict=True) if of == number]
            num_waiting = int(_missing(params.waiting, sum(jax.tree.leaves(keys)[0].size for keys in own)).max())
        if max(num_rows, num_waiting) <= 0:
            return None
        if variable.table.when_full == "error":
            return int(variable.counts()["failed"].sum())
        give_room(variable, num_rows, num_waiting)
        return None


def look_up_variables(
    variables: Sequence[EmbeddingVariable],
    batch: Sequence[PyTree],
    combiners: Sequence[Combiner],
    *,
    training: bool,
) -> tuple[list[Float[Array, "_ _"]], StepOnce]:
    """Rows of several features from one exchange, and the function that trains their tables.

    Args:
      variables: the table of each feature; features may share one.
      batch: keys `[bags, width]` of each feature, cut among devices by bag; or a pair of them and their weights.
      combiners: of each feature; "none" gives `[bags * width, dim]`.
      training: new keys read as what their rows are going to start from, else zeros.

    Raises: RuntimeError: a table has no room for new keys and is to say so. Inside `jit`, `counts` say it later.
    """
    by_id = {id(variable): variable for variable in variables}
    distinct, numbers = list(by_id.values()), {own: number for number, own in enumerate(by_id)}
    features = [(numbers[id(variable)], combiner) for variable, combiner in zip(variables, combiners, strict=True)]
    outputs: dict[int, Array] = {}
    wanted: dict[int, Array] = {}
    for engine, own, read in _programs(distinct, features):
        params, _, steps = _arrays_of([distinct[number] for number in own])
        keys = _numbered(batch[feature] for feature in read)
        found, statistics = engine.lookup(params, keys, steps if training else None)
        outputs |= zip(read, found.values(), strict=True)
        for number, stack in zip(own, params, strict=True):
            wanted[number] = cast(Array, statistics.traffic[stack].num_unknown)
    for number, variable in enumerate(distinct) if training else ():
        if variable.table.when_full != "error" or is_traced(wanted):
            continue
        (own_params,) = variable.get_value().tables.values()
        if (missing := _missing(own_params.keys, wanted[number])).max() > 0:
            raise _full(variable, int(missing.clip(0).sum()))
    ordered = [outputs[feature] for feature in range(len(features))]
    shapes = [output.shape for output in ordered]
    return ordered, StepOnce(distinct, features, batch, wanted, list(map(len, ordered)), shapes)


def _missing(keys: RowMap, wanted: int | Array) -> Int[np.ndarray, " devices"]:
    """How many places each device lacks for its new keys; negative where some are left."""
    missing: np.ndarray = on_host(wanted) - on_host(keys.num_free).astype(np.int64)
    return missing


def _full(variable: EmbeddingVariable, num_failed: int) -> RuntimeError:
    return RuntimeError(
        f"table {variable.table.spec.name!r} is full: {num_failed} new keys find no room; the devices use "
        f"{variable.counts()['rows'].tolist()} rows. Make max_vocabulary_size_per_gpu (or admission_capacity) larger, "
        "or choose when_full='grow', 'evict' (which spares the rows of the same step) or 'zero'."
    )
