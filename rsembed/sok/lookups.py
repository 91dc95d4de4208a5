"""Lookups of several embedding variables in one exchange, and the one optimizer step that may follow.

What compiled programs do is the engine of the core, over the tables of some variables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from rsembed.bags import Bags, as_bags, device_copy, is_traced
from rsembed.collection.engine import Engine
from rsembed.collection.stack import Stack
from rsembed.kernels.contract import Step
from rsembed.keys import Keys
from rsembed.row_gradients import check_gradient
from rsembed.sok.variables import EmbeddingVariable, VariableTable, make_larger, state_of
from rsembed.specs import Combiner, FeatureSpec
from rsembed.storage.hashed import GrowingKeys, Hashed
from rsembed.storage.protocol import on_host
from rsembed.storage.row_map import RowMap

KeysOfBags = Keys | Bags | ArrayLike | Sequence[object]
"""Keys as users have them; see `key_bags`."""
WeightsOfKeys = ArrayLike | Sequence[object] | None
ByStack = dict[str, PyTree]
STACKS_TOGETHER = 25
"""Most variables whose lookups are one program."""


def checked_combiner(combiner: str, what: str) -> Combiner:
    """The combiner in lower case. Raises: ValueError: `what` is not sum, mean or sqrtn."""
    if str(combiner).lower() not in ("sum", "mean", "sqrtn"):
        raise ValueError(f"{what} must be 'sum', 'mean' or 'sqrtn', got {combiner!r}.")
    return cast(Combiner, combiner.lower())


def key_bags(keys: KeysOfBags, weights: WeightsOfKeys, feature: str) -> Bags:
    """Bags of keys, one for each leading position of `keys`.

    Args:
      keys: an integer array or `Keys` `[..., keys per bag]`, in which -1 is no key; or what `as_bags` takes.
      weights: one float per key, in the same form, or None.
      feature: named in errors.

    Raises: TypeError or ValueError, naming the feature.
    """
    if isinstance(keys, Bags) and weights is None:
        return as_bags(keys, feature=feature)
    given: list[PyTree] = [keys, weights]
    for place, part in enumerate(given):
        if getattr(part, "ndim", 0) > 2:  # samples and slots are one axis of bags
            given[place] = part.reshape(-1, part.shape[-1])
    return as_bags(tuple(given), feature=feature)


@functools.lru_cache(maxsize=256)
def engine_of(tables: tuple[tuple[VariableTable, tuple[Combiner, ...], bool], ...]) -> Engine:
    """The core's engine of tables on the same devices, each with how the features that read it pool its rows.

    It names tables and features by their place. The flag of a table says that it gets room for new keys between a
    lookup and its step.
    """
    stacks: dict[str, Stack] = {}
    features: dict[str, FeatureSpec] = {}
    for number, (table, combiners, grows) in enumerate(tables):
        own = table.collection.logical.stacks[table.spec.name]
        plan, placements = own.layout.stack, []
        for place, combiner in enumerate(combiners):
            name = f"{number}.{place}"
            features[name] = FeatureSpec(name, table.spec)
            placements.append(dataclasses.replace(plan.features[0], name=name, combiner=combiner))
        layout = dataclasses.replace(own.layout, stack=dataclasses.replace(plan, features=tuple(placements)))
        rows = own.rows
        if grows:
            settings = {field.name: getattr(own.storage, field.name) for field in dataclasses.fields(Hashed)}
            rows = dataclasses.replace(rows, storage=GrowingKeys(**settings))
        stacks[str(number)] = type(own)(layout, rows)
    return Engine(features, stacks, tables[0][0].context.devices)


def _programs(
    variables: Sequence[EmbeddingVariable],
    features: Sequence[tuple[EmbeddingVariable, Combiner]],
    *,
    grow: Sequence[bool],
) -> Iterator[tuple[Engine, dict[str, int], dict[str, int]]]:
    """Engines of at most `STACKS_TOGETHER` variables, with the numbers of their variables and features by name.

    `grow` says which variables get room for new keys between this lookup and its step.

    To compile a program takes time that grows with the square of its tables, and tables that are alike share what is
    compiled: of a hundred like tables, a quarter at a time.
    """
    of_kind: dict[int, list[int]] = {}
    for number, variable in enumerate(variables):
        of_kind.setdefault(id(variable.table.kind), []).append(number)
    like_beside_like = list(itertools.chain.from_iterable(of_kind.values()))
    size = -(-len(variables) // max(-(-len(variables) // STACKS_TOGETHER), 1))
    for first in range(0, len(variables), size or 1):
        own, tables, read = like_beside_like[first : first + size], [], []
        for number in own:
            places = [place for place, (variable, _) in enumerate(features) if variable is variables[number]]
            combiners = tuple(features[place][1] for place in places)
            tables.append((variables[number].table.kind, combiners, grow[number]))
            read += places
        engine = engine_of(tuple(tables))
        yield engine, dict(zip(engine.stacks, own, strict=True)), dict(zip(engine.features, read, strict=True))


def _arrays_of(variables: Sequence[EmbeddingVariable], numbers: Mapping[str, int]) -> tuple[ByStack, ByStack, ByStack]:
    """Parameters, slots and step of each variable of these numbers, by name of its stack."""
    params, slots, steps = ByStack(), ByStack(), ByStack()
    for stack, number in numbers.items():
        state = state_of(variables[number])
        (params[stack],), (slots[stack],), steps[stack] = state.tables.values(), state.slots.values(), state.step
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


@dataclasses.dataclass(eq=False)
class StepOnce:
    """Trains the tables of a lookup with the gradients of its outputs, once.

    Args:
      variables: distinct ones.
      features: for each output, its variable, and how its rows were pooled.
      batch: keys of each output.
      wanted: by number of the variable, how many of its keys were going to get a row, by device.
      shapes: of the gradients.
      num_padded: rows of the outputs, after those of the gradients, that have none.
      is_used: whether they were trained.
    """

    variables: Sequence[EmbeddingVariable]
    features: Sequence[tuple[EmbeddingVariable, Combiner]]
    batch: Sequence[PyTree]
    wanted: Mapping[int, Int[Array, " devices"]]
    shapes: list[tuple[int, ...]]
    num_padded: int = 0
    is_used: bool = False

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
        for (variable, _), d_output, shape in zip(self.features, d_outputs, self.shapes, strict=True):
            what = f"table {variable.table.spec.name!r}: the gradient"
            check_gradient(d_output, what)
            gradient = device_copy(d_output, jnp.float32)
            if gradient.shape != shape:
                raise ValueError(f"{what} has shape {gradient.shape}, the output {shape}.")
            gradient, padding = gradient.reshape(-1, shape[-1]), ((0, self.num_padded), (0, 0))
            gradients.append(jnp.pad(gradient, padding) if self.num_padded else gradient)
        if self.is_used:
            raise RuntimeError("backward was called before: a lookup trains once. Look up again for another step.")
        self.is_used = True
        is_eager = not is_traced((self.batch, gradients, [variable.get_value() for variable in self.variables]))
        failed_before = [self._make_room(number) if is_eager else None for number in range(len(self.variables))]
        never = [False] * len(self.variables)  # they have grown
        # A program takes the old arrays away: what it gives is kept before the next one may fail.
        for engine, own, read in _programs(self.variables, self.features, grow=never):
            batch, d_batch = ({name: values[k] for name, k in read.items()} for values in (self.batch, gradients))
            params, slots, steps = _step(engine, _arrays_of(self.variables, own), batch, d_batch)
            for stack, number in own.items():
                state, name = self.variables[number].get_value(), self.variables[number].table.spec.name
                stepped = state._replace(tables={name: params[stack]}, slots={name: slots[stack]}, step=steps[stack])
                self.variables[number].set_value(stepped)
        for variable, before in zip(self.variables, failed_before, strict=True):
            if before is not None and (num_failed := int(variable.counts()["failed"].sum()) - before):
                raise _full(variable, num_failed)

    def _make_room(self, number: int) -> int | None:
        """Enlarges a full table if it may grow; returns how many keys failed so far, if some may fail now."""
        variable, table = self.variables[number], self.variables[number].table
        (params,) = state_of(variable).tables.values()
        if table.when_full not in ("error", "grow"):
            return None
        missing, size = int(_missing(params.keys, self.wanted[number]).max()), table.rows_per_device
        if table.when_full == "grow" and missing > 0:
            make_larger(variable, max(2 * size, size + missing))
            missing = 0
        if missing <= 0 and params.waiting is not None:  # for admission, at most all keys of the batch
            own = [keys for (of, _), keys in zip(self.features, self.batch, strict=True) if of is variable]
            missing = int(_missing(params.waiting, sum(jax.tree.leaves(keys)[0].size for keys in own)).max())
        return int(variable.counts()["failed"].sum()) if missing > 0 else None


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
      training: new keys read as what their rows are going to start from, else zeros. Keys for which no row is left
        read zeros in both cases.

    Raises: RuntimeError: a table has no room for new keys and is to say so. Inside `jit`, `counts` say it later.
    """
    distinct = list({id(variable): variable for variable in variables}.values())
    features = list(zip(variables, combiners, strict=True))
    outputs: dict[int, Array] = {}
    wanted: dict[int, Array] = {}
    is_eager = not is_traced((list(batch), [variable.get_value() for variable in distinct]))
    grow = [training and is_eager and variable.table.when_full == "grow" for variable in distinct]
    for engine, own, read in _programs(distinct, features, grow=grow):
        params, _, steps = _arrays_of(distinct, own)
        keys = {name: batch[number] for name, number in read.items()}
        found, statistics = engine.lookup(params, keys, steps if training else None)
        for name, number in read.items():
            outputs[number] = found[name]
        for stack, number in own.items():
            wanted[number] = statistics.num_unknown[stack]
    for number, variable in enumerate(distinct) if training else ():
        if variable.table.when_full != "error" or is_traced(wanted):
            continue
        (own_params,) = variable.get_value().tables.values()
        if (missing := _missing(own_params.keys, wanted[number])).max() > 0:
            raise _full(variable, int(missing.clip(0).sum()))
    ordered = [outputs[number] for number in range(len(features))]
    return ordered, StepOnce(distinct, features, batch, wanted, list(map(jnp.shape, ordered)))


def _missing(keys: RowMap, wanted: int | Array) -> Int[np.ndarray, " devices"]:
    """Number of free places that each device lacks for its new keys; negative where some are left."""
    missing: np.ndarray = on_host(wanted) - on_host(keys.num_free).astype(np.int64)
    return missing


def _full(variable: EmbeddingVariable, num_failed: int) -> RuntimeError:
    """The error for new keys without room, whose way out is none that the table has taken already."""
    table, storage = variable.table, cast(Hashed, variable.table.spec.storage)
    rooms = f"the devices use {variable.counts()['rows'].tolist()} rows"
    if table.when_full == "grow":  # then rows have room, and only the keys that wait for one may have none
        rooms += f" and have room for {storage.admission_capacity or table.rows_per_device} keys that wait for one"
        way_out = "Make admission_capacity larger than the new keys of a batch, or admission_count 0"
    elif storage.admission_count:
        way_out = (
            "Make max_vocabulary_size_per_gpu (for keys that wait for a row, admission_capacity) larger, or choose "
            "when_full='grow' (for rows), 'evict' (which spares the rows of the same step) or 'zero'"
        )
    else:
        way_out = (
            "Make max_vocabulary_size_per_gpu larger, or choose when_full='grow', 'evict' (which spares the rows of "
            "the same step) or 'zero'"
        )
    return RuntimeError(f"table {table.spec.name!r} is full: {num_failed} new keys find no room; {rooms}. {way_out}.")
