"""Lookups of several embedding variables in one exchange, and the step that may follow each of them once.

What compiled programs do is the engine of the core, over the tables of some variables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar, cast

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
from rsembed.storage import Hashed
from rsembed.storage.hashed_rows import numbers_of
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
    """The combiner in small letters. Raises: ValueError: it does not pool; names `what` asked for it."""
    if str(combiner).lower() not in ("sum", "mean", "sqrtn"):
        raise ValueError(f"{what} must be 'sum', 'mean' or 'sqrtn', got {combiner!r}.")
    return cast(Combiner, combiner.lower())


def key_bags(keys: KeysOfBags, weights: WeightsOfKeys, feature: str, devices: Devices) -> Bags:
    """One bag of keys per leading position of `keys`.

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
    """Bags on whose width several processes can agree, as they cannot on that of arrays."""
    is_part = devices.num_processes > 1 and not is_unknown(bags)
    return dataclasses.replace(bags, dense_shape=None) if is_part else bags


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


@functools.lru_cache(maxsize=256)
def _engine_of(program: Program) -> Engine:
    """The core's engine of the stack of each table, which are called by their numbers."""
    features: dict[str, FeatureSpec] = {}
    stacks: dict[str, Stack] = {}
    for t, (table, combiners) in enumerate(zip(program.tables, program.combiners, strict=True)):
        own = table.collection.logical.stacks[table.spec.name]
        plan = own.layout.stack
        placements = tuple(
            dataclasses.replace(plan.features[0], name=f"{t}/{k}", combiner=combiner)
            for k, combiner in enumerate(combiners)
        )
        layout = dataclasses.replace(own.layout, stack=dataclasses.replace(plan, features=placements))
        stacks[str(t)] = type(own)(layout, own.rows)
        features |= {feature.name: FeatureSpec(feature.name, table.spec) for feature in placements}
    return Engine(features, stacks, program.tables[0].context.devices)


class Part(NamedTuple):
    """The variables of a lookup that are read by one program.

    Attributes:
      engine: names stacks and features by numbers.
      variables: by stack.
      positions: of the lookup's features, by the engine's names for them.
    """

    engine: Engine
    variables: dict[str, EmbeddingVariable]
    positions: dict[str, int]

    def arrays(self) -> tuple[ByStack, ByStack, ByStack]:
        """Parameters, slots and number of the step to come, by stack."""
        params, slots, numbers = ByStack(), ByStack(), ByStack()
        for stack, variable in self.variables.items():
            state, name = state_of(variable), variable.table.spec.name
            params[stack], slots[stack], numbers[stack] = state.tables[name], state.slots[name], state.step
        return params, slots, numbers

    def by_feature(self, values: Sequence[T]) -> dict[str, T]:
        """Values of the lookup's features by the engine's names for them."""
        return {name: values[position] for name, position in self.positions.items()}


def parts_of(variables: Sequence[EmbeddingVariable], combiners: Sequence[Combiner]) -> Iterator[Part]:
    """Features that read `variables`, in programs of few tables.

    To compile one takes time that grows with the square of its tables, and tables that are alike share what is
    compiled: of a hundred like tables, a quarter at a time.
    """
    features: dict[int, list[int]] = {}
    kinds: dict[Hashable, list[EmbeddingVariable]] = {}
    for position, variable in enumerate(variables):
        if id(variable) not in features:
            kinds.setdefault(variable.table.kind, []).append(variable)
        features.setdefault(id(variable), []).append(position)
    like_beside_like = list(itertools.chain(*kinds.values()))
    num_parts = -(-len(like_beside_like) // STACKS_TOGETHER)
    size = -(-len(like_beside_like) // max(num_parts, 1))
    for number in range(num_parts):
        chunk = like_beside_like[number * size : (number + 1) * size]
        own = {str(t): variable for t, variable in enumerate(chunk)}
        positions: dict[str, int] = {}
        pooling = []
        for stack, variable in own.items():
            places = features[id(variable)]
            positions |= {f"{stack}/{k}": place for k, place in enumerate(places)}
            pooling.append(tuple(combiners[place] for place in places))
        tables = tuple(variable.table for variable in own.values())
        yield Part(_engine_of(Program(tuple(table.kind for table in tables), tuple(pooling), tables)), own, positions)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _step(
    engine: Engine,
    arrays: tuple[ByStack, ByStack, ByStack],
    batch: Mapping[str, PyTree],
    d_outputs: Mapping[str, Float[Array, "_ _"]],
) -> tuple[ByStack, ByStack, ByStack]:
    """The arrays after one step with gradients of the outputs."""
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
      variables: the table of each output.
      batch: keys of each.
      combiners: likewise.
      num_rows: of each output; a gradient may have fewer rows than it, then the last ones have none.
      shapes: of the gradients.
      wanted: distinct variables, and by device how many keys of each were going to get a row.
    """

    variables: Sequence[EmbeddingVariable]
    batch: Sequence[PyTree]
    combiners: Sequence[Combiner]
    num_rows: Sequence[int]
    shapes: list[tuple[int, ...]]
    wanted: Sequence[tuple[EmbeddingVariable, Int[Array, " devices"]]]
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
        given = zip(self.variables, d_outputs, self.shapes, self.num_rows, strict=True)
        for variable, d_output, shape, num_rows in given:
            what = f"table {variable.table.spec.name!r}: the gradient"
            check_gradient(d_output, what)
            gradient = device_copy(d_output, jnp.float32)
            if gradient.shape != shape:
                raise ValueError(f"{what} has shape {gradient.shape}, the output {shape}.")
            gradient = gradient.reshape(-1, shape[-1])
            missing = num_rows - gradient.shape[0]
            gradients.append(jnp.pad(gradient, ((0, missing), (0, 0))) if missing else gradient)
        self.permit.use()
        failed_before = [self._make_room(*own, gradients) for own in self.wanted]
        # A program takes the old arrays away: what it gives is kept before the next one may fail.
        for part in parts_of(self.variables, self.combiners):
            batch, d_batch = part.by_feature(self.batch), part.by_feature(gradients)
            params, slots, steps = _step(part.engine, part.arrays(), batch, d_batch)
            for stack, variable in part.variables.items():
                name, state = variable.table.spec.name, variable.get_value()
                variable.set_value(
                    state._replace(tables={name: params[stack]}, slots={name: slots[stack]}, step=steps[stack])
                )
        for (variable, _), before in zip(self.wanted, failed_before, strict=True):
            if before is not None and (num_failed := _num_failed(variable) - before):
                raise _full(variable, num_failed)

    def _make_room(self, variable: EmbeddingVariable, wanted: Array, gradients: Sequence[Array]) -> int | None:
        """Makes room in a table that grows; of another that may not have any, how many keys found none before."""
        own = [position for position, other in enumerate(self.variables) if other is variable]
        batch, combiners = ([values[position] for position in own] for values in (self.batch, self.combiners))
        if not says_when_full(variable) or is_traced((batch, gradients, variable.get_value())):
            return None
        (params,) = state_of(variable).tables.values()
        missing, num_waiting = _missing(params.keys, wanted), 0
        num_ids = sum(leaf.size for leaf in jax.tree.leaves(batch))
        if params.waiting is not None and _missing(params.waiting, num_ids).max() > 0:
            _, again = look_up_variables([variable] * len(own), batch, combiners, training=False)
            num_waiting = _missing(params.waiting, again.wanted[0][1] - wanted).max()
        if max(missing.max(), num_waiting) <= 0:
            return None
        if not variable.table.grows:
            return _num_failed(variable)
        give_room(variable, int(missing.max()), int(num_waiting))
        return None


def look_up_variables(
    variables: Sequence[EmbeddingVariable],
    batch: Sequence[PyTree],
    combiners: Sequence[Combiner],
    *,
    training: bool,
) -> tuple[list[Float[Array, "_ _"]], StepOnce]:
    """Rows of several features in one exchange, and the function that trains their tables; nothing changes yet.

    Args:
      variables: the table of each feature; features may share one.
      batch: keys `[bags, width]` of each feature, cut among devices by bag; or a pair of them and their weights.
      combiners: of each feature; "none" gives `[bags * width, dim]`.
      training: new keys read as what their rows are going to start from, else zeros.

    Raises: RuntimeError: a table has no room for new keys and is to say so. Inside `jit`, `counts` say it later.
    """
    outputs: dict[int, Array] = {}
    wanted = []
    for part in parts_of(variables, combiners):
        params, _, numbers = part.arrays()
        found, statistics = part.engine.lookup(params, part.by_feature(batch), numbers if training else None)
        for name, position in part.positions.items():
            outputs[position] = found[name]
        for stack, variable in part.variables.items():
            num_unknown = cast(Array, statistics.traffic[stack].num_unknown)
            wanted.append((variable, num_unknown))
            if not training or not says_when_full(variable) or variable.table.grows or is_traced(num_unknown):
                continue
            if (missing := _missing(params[stack].keys, num_unknown)).max() > 0:
                raise _full(variable, int(missing.clip(0).sum()))
    ordered = [outputs[position] for position in range(len(variables))]
    shapes = [output.shape for output in ordered]
    return ordered, StepOnce(variables, batch, combiners, list(map(len, ordered)), shapes, wanted)


def says_when_full(variable: EmbeddingVariable) -> bool:
    """Whether new keys must find room, or an error says that there is none."""
    storage = variable.table.spec.storage
    return isinstance(storage, Hashed) and storage.when_full == "error"


def _missing(keys: RowMap, wanted: int | Array) -> Int[np.ndarray, " devices"]:
    """Places that each device lacks for so many new keys; negative where some are left."""
    missing: np.ndarray = on_host(wanted) - on_host(keys.num_free).astype(np.int64)
    return missing


def _num_failed(variable: EmbeddingVariable) -> int:
    (params,) = state_of(variable).tables.values()
    return int(numbers_of(params.counters.failed).sum())


def _full(variable: EmbeddingVariable, num_failed: int) -> RuntimeError:
    return RuntimeError(
        f"table {variable.table.spec.name!r} is full: {num_failed} new keys find no room; the devices use "
        f"{variable.counts()['rows'].tolist()} rows. Make max_vocabulary_size_per_gpu (or admission_capacity) larger, "
        "or choose when_full='grow', 'evict' (which spares the rows of the same step) or 'zero'."
    )
