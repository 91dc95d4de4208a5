"""EmbeddingCollection: all tables of a model behind three functional calls, and gradients of a model that reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

from rsembed.bags import check_not_taken, is_traced
from rsembed.checks import PositiveInt, check_type, describe, validated
from rsembed.collection import host_rows, inputs
from rsembed.collection.devices import Devices
from rsembed.collection.engine import Engine, unzip_dict
from rsembed.collection.placement import (
    LogicalTables,
    make_stacks,
    placement_of_tables,
    plan_placed,
)
from rsembed.collection.prepared import PreparedBatch, identity_of
from rsembed.collection.stack import Activations, Batch, ByName, EmbeddingState
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.initial_values import table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import Step
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients, check_belong
from rsembed.specs import FeatureSpec, TableSpec, features_of, tables_of
from rsembed.stacking import StackingPlan


class EmbeddingCollection:
    """The embedding tables of a model, read by named features.

    Tables of equal dim, dtype and optimizer are stored under each other and served by one kernel call. Lookups and
    steps work inside `jax.jit` and `jax.lax.scan`, where tables are updated in place if the state is donated;
    `prepare`, `prefetch`, `evict` and what reads or writes whole tables with keys come before or behind.

    On a mesh, every device looks up its own samples and keeps its own part of the tables, and the numbers are those
    of one device. A gradient is that of the loss over the global batch: whatever the devices' samples contribute to a
    row is added up before the row is stepped, once.

    Args:
      features: FeatureSpecs, nested in lists or dicts.
      mesh: the devices that share the tables; None keeps them on one.
      sharding_axis: axis (or axes) of the mesh over which samples and tables are split; None takes all. Devices along
        other axes hold copies.
      placement: by table name, or one for all: `row` (default) gives neighbouring rows different owners, `table` gives
        each table one owner, `column` every device some columns of all rows, `replicated` every device a copy.
      exchange_capacity: distinct rows that two devices exchange in one round, for `row` and `table`. Any number gives
        the same result; few save memory, many save rounds. None takes what skewed ids need for one round. Only of
        new keys of one batch that meet a full hashed table, or no more room to wait for admission, do the rounds decide
        which get the last rows and places: those of earlier rounds do, and a key that is admitted leaves its place to
        later rounds only.
      implementation: name of a kernel implementation to insist on; None takes the fastest that can serve. With
        "reference", lookups and steps are plain JAX throughout. Other names say how rows are pooled and stepped;
        finding keys and exchanging rows take the fastest.
      bounds_check: outside `jit`, `raise` turns an id outside its table into an error, `ignore` lets it contribute
        nothing, as it does inside `jit`; `lookup(..., return_statistics=True)` counts such ids.

    Raises: ValueError: an option is unknown, or the tables or shapes of features do not fit the mesh.

    Example:
      >>> import jax, numpy as np, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=100, embedding_dim=4, optimizer=rs.optimizers.SGD(0.1))
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> collection.lookup(state, {"context": [[1, 2], [3]]})["context"].shape
      (2, 4)
    """

    @validated
    def __init__(
        self,
        features: PyTree,
        *,
        mesh: Mesh | None = None,
        sharding_axis: str | Sequence[str] | None = None,
        placement: str | Mapping[str, str] | None = None,
        exchange_capacity: PositiveInt | None = None,
        implementation: str | None = None,
        bounds_check: Literal["raise", "ignore"] = "raise",
    ):
        api.check_implementation(implementation)
        self.features: dict[str, FeatureSpec] = {
            feature.name: feature for feature in features_of(features)
        }
        self.table_specs: dict[str, TableSpec] = tables_of(features)
        self.implementation = implementation
        self.bounds_check = bounds_check
        self.devices = Devices.of(mesh, sharding_axis)
        placements = placement_of_tables(self.table_specs, self.devices, placement)
        self.plan: StackingPlan = plan_placed(features, placements)
        self._stacks = make_stacks(
            self.plan,
            features,
            placements,
            self.devices,
            exchange_capacity=exchange_capacity,
            implementation=implementation,
        )
        inputs.check_output_shapes(self.features, self.devices)
        self.layout = Fingerprint.of(
            {n: stack.layout.facts(self.table_specs) for n, stack in self._stacks.items()}
        )
        self._engine = Engine(self.features, self._stacks, self.devices, implementation)
        self._list_of_feature = {
            f.name: stack.name for stack in self.plan.stacks for f in stack.features
        }
        self._made_for = identity_of(
            self.features, self._list_of_feature, self.devices, bounds_check
        )
        self._num_rows = tuple(
            sorted((name, stack.layout.num_rows) for name, stack in self._stacks.items())
        )
        self.logical = LogicalTables(self.table_specs, self._stacks)
        self._on_host = self.logical.on_host
        made = partial(
            EmbeddingCollection, mesh=mesh, sharding_axis=sharding_axis, placement=placement
        )
        options = {"exchange_capacity": exchange_capacity, "implementation": implementation}
        self._made_again = partial(
            made, list(self.features.values()), bounds_check=bounds_check, **options
        )

    def __reduce__(self) -> tuple[object, ...]:
        return self._made_again, ()  # for the workers of an input pipeline

    def __deepcopy__(self, memo: object) -> EmbeddingCollection:
        return self  # all that changes is in the state

    def __repr__(self) -> str:
        return f"EmbeddingCollection of {len(self.table_specs)} tables, {len(self.features)} features\n{self.plan}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    # State

    def init(self, key: PRNGKeyArray) -> EmbeddingState:
        """Fresh tables and optimizer state.

        A table's values depend on `key`, the table's name and its initializer alone, not on the other tables, nor on
        the number of devices.

        Raises: TypeError: `key` is no PRNG key. ValueError: an initializer of yours gives a number that is not finite;
          inside `jit`, and for rows of keys, which are drawn later, that is not seen (for keys one row is tried).
        """
        check_type(key, PRNGKeyArray, "init: key")
        tables, slots = self._engine.init(key)
        for name, stack in self._stacks.items():
            stack.check_start(tables[name], slots[name])
        rest = jnp.zeros((), jnp.int32), jax.random.fold_in(key, 0x726F756E)
        step, key = self.devices.place(rest, PartitionSpec())
        for name, own in self._on_host.items():
            own.storage.begin(tables[name])
        fresh = EmbeddingState(tables, slots, step, key, self.layout)
        return host_rows.with_new_generation(self._on_host, fresh)

    def prefetch(self, state: EmbeddingState, batch: Batch) -> EmbeddingState:
        """The state with the rows of a batch near, where tables are on the host; not inside `jit`.

        Call it before a compiled step, with the batch that the step will read; other batches may be fetched before it,
        while the device still works on the last one. The state is given away, as to a step that donates it. Without
        tables on the host, nothing happens.

        Raises: RuntimeError: more rows are wanted than there are places, the state is of an earlier time, or this is
          inside `jit`; then the given state is as it was.
        """
        self.check_state(state, parts=["tables"])
        if not self._on_host:
            return state
        batch = self.prepare(batch)
        if is_traced((state, batch)):
            raise RuntimeError(
                "prefetch works beside compiled programs; call it outside of jit, before the step."
            )
        near = host_rows.fetched(
            self._on_host, state, dict.fromkeys(self._on_host, batch), donates=True
        )
        return host_rows.with_new_generation(self._on_host, near)

    def _fetched(self, state: EmbeddingState, wanted: Mapping[str, PyTree]) -> EmbeddingState:
        """State whose device memory holds every row that `wanted` reads; unchanged inside `jit`."""
        if not self._on_host or is_traced((state, wanted)):
            return state
        return host_rows.fetched(self._on_host, state, wanted, donates=False)

    @functools.cached_property
    def template(self) -> EmbeddingState:
        """A state of shapes and shardings instead of arrays, which `checkpoint.load(path, like=...)` fills."""
        tables, slots = jax.eval_shape(self._engine.init, jax.random.key(0))
        step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
        state = EmbeddingState(tables, slots, step, key, self.layout)
        if self.devices.mesh is None:
            return state
        everywhere: PyTree = self.devices.sharding(PartitionSpec())
        own = {name: self.devices.sharding(stack.partition) for name, stack in self._stacks.items()}
        shardings = EmbeddingState(own, own, everywhere, everywhere, self.layout)
        placed: EmbeddingState = jax.tree.map(
            lambda sharding, shapes: jax.tree.map(
                lambda leaf: leaf.update(sharding=sharding), shapes
            ),
            shardings,
            state,
        )
        return placed

    def check_state(
        self, state: EmbeddingState, *, parts: Sequence[str] = ("tables", "slots", "step")
    ) -> None:
        """Whether a state is this collection's; every method that takes one asks.

        Args:
          state: whatever is used as one.
          parts: what is going to be used of it. A lookup needs no slots, which a state for serving may leave out.

        Raises: ValueError: its tables, their rules or the place of their rows differ (names what differs), or an array
          has another shape or dtype. TypeError: it is no state. RuntimeError: a step took its arrays over, or this
          process was forked.
        """
        check_not_forked("the collection")
        check_type(state, EmbeddingState, "the state, which collection.init makes,")
        if state.layout is not None:
            check_same(
                state.layout,
                self.layout,
                what="the state does not belong to this collection",
                way_out="Save it with the collection that made it and load it with load_collection (resize=True for "
                "tables of another size or dtype), or take over tables and optimizer state with "
                "collection.with_tables(collection.init(key), tables, slots=slots).",
            )
        way_out = (
            "go on with the state that the step returned or, where an error or Ctrl-C kept it from returning one, load "
            "the latest checkpoint"
        )
        for part in parts:
            found, expected = getattr(state, part), getattr(self.template, part)
            check_not_taken(found, f"the state has lost its {part}", way_out)
            if jax.tree.map(_shape_and_kind, found) != jax.tree.map(_shape_and_kind, expected):
                shown, wanted = jax.tree.map(_shown, found), jax.tree.map(_shown, expected)
                raise ValueError(
                    f"the state does not belong to this collection: {part} are {shown}, expected {wanted}; use a state "
                    "of collection.init, or load one with load_collection."
                )
        if "tables" in parts:
            for name, stack in self._stacks.items():
                stack.storage.check_params(state.tables[name], stack.table)

    def tables(self, state: EmbeddingState) -> ByName:
        """The logical tables by name (copies; on a mesh, every device gets one).

        Of a table with keys, a dictionary of numpy arrays: `keys` in ascending order, their `values`, one `slot_<name>`
        per slot, `last_step`, `count`, and what else belongs to them.
        """
        self.check_state(state, parts=["tables"])
        found = [
            stack.values(state.tables[name], state.slots.get(name))
            for name, stack in self._stacks.items()
        ]
        return {name: values for own in found for name, values in own.items()}

    def counts(self, state: EmbeddingState) -> dict[str, dict[str, np.ndarray]]:
        """By table with a storage that counts: what happened on each device so far, such as new keys and failures."""
        self.check_state(state, parts=["tables"])
        found = [stack.counts(state.tables[name]) for name, stack in self._stacks.items()]
        return {name: counts for own in found for name, counts in own.items() if counts}

    def slots(self, state: EmbeddingState) -> ByName:
        """The optimizer state of every logical table (copies), in the named tuple of its optimizer.

        Of a table with keys, in the order of `tables(state)[name]["keys"]`; of other storages, as these have it.
        """
        self.check_state(state)
        found = [
            stack.slots(state.tables[name], state.slots[name])
            for name, stack in self._stacks.items()
        ]
        return {name: slots for own in found for name, slots in own.items()}

    @validated
    def with_tables(
        self,
        state: EmbeddingState,
        tables: Mapping[str, PyTree],
        *,
        slots: Mapping[str, PyTree] | None = None,
        allow_nonfinite: bool = False,
    ) -> EmbeddingState:
        """The state with some tables replaced, for example by pretrained vectors; other tables and slots stay.

        A table with keys takes what `tables` returns of it, and needs only `keys` and `values`: slots that are left out
        start anew, rows of other keys stay, and rows without `last_step` count as used now.
        Whole tables move between storages: rows have their numbers for keys, and a tensor train takes the cores closest
        to an array.

        Args:
          state: from `init`. Its step stays, so that rules which count steps, such as Adam, begin at its number;
            `state._replace(step=jnp.int32(int(old_state.step)))` takes over another one.
          tables: new values by table name.
          slots: new optimizer state by table name, of equal shape and dtype: what `slots` returns of a table, or the
            dictionary that `load(path).tree["slots"]` has of it. A table with keys has them in the order of its `keys`
            in `tables`, or else of those in the state. None keeps the slots of the state.
          allow_nonfinite: whether NaN, infinity and negative sums of squares are taken as they are. By default they are
            refused, since one NaN spreads to all that reads its row. Inside `jit` nothing is checked.

        Raises: ValueError: a table is unknown, or values or slots do not fit it or are not finite. NotImplementedError:
          its storage takes no rows. RuntimeError: inside `jit`, a table has keys, or is on the host.
        """
        self.check_state(state)
        return self.logical.with_tables(state, tables, slots or {}, allow_nonfinite=allow_nonfinite)

    def evict(
        self,
        state: EmbeddingState,
        table: str,
        *,
        keep: int | None = None,
        unused_for: int | None = None,
        norm_below: float | None = None,
    ) -> tuple[EmbeddingState, dict[str, np.ndarray]]:
        """Takes their rows from keys of a table, for any of the reasons; not inside `jit`. The state is given away.

        Args:
          state: whose.
          table: name of one with keys.
          keep: as many keys keep their rows, over all devices: those that the table's `eviction` lets go last.
          unused_for: keys go that were not used in training for more than this many steps; those that wait for
            admission are no longer counted.
          norm_below: keys go whose rows have a smaller L2 norm.

        Returns: the state, and what belonged to the keys, as `tables` returns it: for a file, or
          another store. `with_tables` brings it back, as used now.

        Raises: ValueError: none of the reasons is given, or one is out of range; there is no such table, or it has no
          keys. RuntimeError: this is inside `jit`.
        """
        self.check_state(state, parts=["tables"])
        return self.logical.evicted(
            state, table, keep=keep, unused_for=unused_for, norm_below=norm_below
        )

    # Forward

    def prepare(self, batch: Batch) -> PreparedBatch:
        """The batch checked on the host and brought to the device, ready for a jitted step.

        Do this before `jit`: inside it, ids are int32 and cannot be checked, only counted.

        Arrays stay arrays. The bags of all ragged features that share a stack of tables become one list of ids, which
        has one of few sizes: a stream of batches needs few compiled programs. A feature without a combiner keeps its
        number of ids. The result is a pytree that reads as a mapping by feature.

        On a mesh, each process gives its own samples, equally many, and gets the global batch, split by sample. A list
        has a part for each device, with room for as many ids as the largest part has. A ragged feature without a
        combiner becomes an array `[batch, ids]`, padded to its longest bag.

        Args:
          batch: for every feature `Bags`, an integer array `[batch]` or `[batch, ids]` (`-1` is no id), nested lists,
            a column of a data frame, or a pair `(ids, weights)`. Inside `jit` on a mesh, arrays only.

        Raises: TypeError or ValueError, naming feature, sample, id, table and the way out.
        """
        return inputs.prepare(
            self.features,
            batch,
            self.devices,
            bounds_check=self.bounds_check,
            lists=self._list_of_feature,
            made_for=self._made_for,
        )

    def lookup(
        self, state: EmbeddingState, batch: Batch, *, return_statistics: bool = False
    ) -> PyTree:
        """Activations of every feature, float32; on a mesh, split by sample.

        Args:
          state: from `init`.
          batch: see `prepare`.
          return_statistics: also return `LookupStatistics`.

        Returns: `{feature: [batch, dim]}`; for combiner `none` one vector per id, shaped as the ids were.
        """
        self.check_state(state, parts=["tables"])
        batch = self.prepare(batch)
        state = self._fetched(state, dict.fromkeys(self._on_host, batch))
        activations, statistics = self._engine.lookup(state.tables, batch)
        return (activations, statistics) if return_statistics else activations

    # Backward

    def lookup_vjp(
        self, state: EmbeddingState, batch: Batch
    ) -> tuple[Activations, Callable[[PyTree], RowGradients]]:
        """Activations, and a function from their gradients to the `RowGradients` of the tables.

        Example:
          >>> import jax, jax.numpy as jnp, rsembed as rs
          >>> table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=2)
          >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])
          >>> activations, pullback = collection.lookup_vjp(collection.init(jax.random.key(0)), {"f": [[4, 4], [7]]})
          >>> row_gradients = pullback({"f": jnp.ones((2, 2))})
          >>> row_gradients.rows["t"][0].item(), row_gradients.values["t"][0].tolist()
          (4, [2.0, 2.0])
        """
        batch = self.prepare(batch)
        self.check_state(state, parts=["tables"])
        state = self._fetched(state, dict.fromkeys(self._on_host, batch))
        numbers = dict.fromkeys(self._stacks, state.step)
        return self._engine.lookup(state.tables, batch, numbers)[0], partial(
            self.row_gradients, batch
        )

    def row_gradients(self, batch: Batch, d_activations: Mapping[str, PyTree]) -> RowGradients:
        """The gradients of distinct rows that follow from those of a batch's activations; no table is read."""
        batch = self.prepare(batch)
        d_outputs = inputs.d_outputs(self.features, batch, d_activations)
        rows, values = unzip_dict(self._engine.row_gradients(batch, d_outputs))
        found = RowGradients(
            rows, values, self._num_rows, self._engine.gradient_shardings(), self.layout
        )
        all_here = self.devices.mesh is None and all(
            own.storage.ids_are_rows for own in self._stacks.values()
        )
        return (
            found.summed_from(self._engine, batch, d_outputs)
            if all_here and is_traced(rows)
            else found
        )

    def apply(self, state: EmbeddingState, row_gradients: RowGradients) -> EmbeddingState:
        """One optimizer step for every row in `row_gradients`, and only for those.

        Raises: ValueError: the gradients are another collection's.
        """
        axes = {
            name: (1 + own.storage.takes_keys, own.table.embedding_dim)
            for name, own in self._stacks.items()
        }
        check_belong(row_gradients, self.layout, self._num_rows, axes)
        self.check_state(state)
        if row_gradients.summands is not None:
            engine, *given = row_gradients.summands
            return self._stepped(state, {}, engine.update, *given)
        rows = row_gradients.rows
        gradients = {name: (rows[name], row_gradients.values[name]) for name in self._stacks}
        return self._stepped(state, rows, self._engine.apply, gradients)

    def update(
        self, state: EmbeddingState, batch: Batch, d_activations: Mapping[str, PyTree]
    ) -> EmbeddingState:
        """Row gradients and optimizer step in one kernel: the same numbers as `apply(state, pullback(...))`."""
        batch = self.prepare(batch)
        d_outputs = inputs.d_outputs(self.features, batch, d_activations)
        self.check_state(state)
        return self._stepped(
            state, dict.fromkeys(self._on_host, batch), self._engine.update, batch, d_outputs
        )

    def _stepped(
        self,
        given: EmbeddingState,
        wanted: Mapping[str, PyTree],
        step_stacks: Callable[..., PyTree],
        *gradients: PyTree,
    ) -> EmbeddingState:
        state = self._fetched(given, wanted)
        steps = {}
        for stack in self.plan.stacks:
            rule, rounding = stack.spec.optimizer, None
            if stack.tables[0].stochastic_rounding:
                key = jax.random.fold_in(state.key, state.step)
                # A layout tells rows of all tables apart; a storage those of its own.
                if self.table_specs[stack.tables[0].name].storage is not None:
                    keys = table_keys(key, [table.name for table in stack.tables])
                    key = keys if len(stack.tables) > 1 else keys[0]
                rounding = api.stochastic_rounding(key)
            steps[stack.name] = Step(
                rule.get_hyperparameters(state.step), rule, rounding, state.step
            )
        tables, slots = step_stacks(state.tables, state.slots, *gradients, steps)
        for name, kept in self._stacks.items():
            if not is_traced(tables[name]):
                kept.storage.check_step(state.tables[name], tables[name], kept.table)
        stepped = EmbeddingState(tables, slots, state.step + 1, state.key, state.layout)
        # Nothing can fail any more.
        return stepped if state is given else host_rows.with_new_generation(self._on_host, stepped)


def _shape_and_kind(leaf: object) -> tuple[tuple[int, ...], object]:
    """Shape and kind of an array; PRNG keys are one kind, whichever generator made them."""
    if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return (), type(leaf)
    is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf.shape, jax.dtypes.prng_key if is_key else leaf.dtype


def _shown(leaf: object) -> str:
    shape, kind = _shape_and_kind(leaf)
    return f"{getattr(kind, '__name__', kind)}{list(shape)}"


@validated
def value_and_grad(
    loss_fn: Callable[..., Any], collection: EmbeddingCollection, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Value and gradients of a loss, with sparse gradients for the tables.

    Args:
      loss_fn: `loss_fn(params, activations, *args)` returns the loss, or `(loss, aux)` with `has_aux=True`.
      collection: looks up `activations`.
      has_aux: as in `jax.value_and_grad`.

    Returns: a function `(params, state, batch, *args) -> (value, (dense_grads, row_gradients))`.

    Raises: TypeError: with `has_aux` a loss comes alone, or it is no number.

    Example:
      >>> import jax, jax.numpy as jnp, rsembed as rs
      >>> table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=2)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> def loss_fn(params, activations):
      ...     return jnp.sum(params * activations["f"])
      >>> step = value_and_grad(loss_fn, collection)
      >>> loss, (dense_grads, row_gradients) = step(jnp.ones(()), state, {"f": [[4], [7]]})
      >>> state = collection.apply(state, row_gradients)
    """

    def checked_loss(*args: Any) -> Any:
        return check_loss(loss_fn(*args), has_aux=has_aux)

    def with_gradients(params: PyTree, state: EmbeddingState, batch: Batch, *args: Any) -> Any:
        activations, pullback = collection.lookup_vjp(state, batch)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                where = f"value_and_grad: params{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"{where} must hold floats, got {describe(leaf)}; pass it to loss_fn behind the batch."
                )
        value, (d_params, d_activations) = jax.value_and_grad(
            checked_loss, argnums=(0, 1), has_aux=has_aux
        )(params, activations, *args)
        return value, (d_params, pullback(d_activations))

    return with_gradients


def check_loss(result: Any, *, has_aux: bool) -> Any:
    """The result of a loss function. Raises: TypeError: it is no number, or with `has_aux` no pair."""
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError("value_and_grad: with has_aux=True, loss_fn must return (loss, aux).")
    loss = result[0] if has_aux else result
    if isinstance(loss, tuple) and not has_aux:
        raise TypeError(
            "value_and_grad: loss_fn returns a tuple; for (loss, aux), pass has_aux=True."
        )
    if getattr(loss, "shape", ()) or not jnp.issubdtype(
        getattr(loss, "dtype", type(loss)), jnp.floating
    ):
        raise TypeError(
            f"value_and_grad: the loss must be a scalar of floats, got {describe(loss)}; take its mean."
        )
    return result
