"""`EmbeddingCollection` for the embedding tables of a model, and `value_and_grad` for its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import PRNGKeyArray, PyTree

from rsembed.arrays import check_not_taken, is_traced
from rsembed.checks import PositiveInt, check_type, describe, validated
from rsembed.collection import host_rows, inputs
from rsembed.collection.devices import Devices
from rsembed.collection.engine import Engine
from rsembed.collection.placement import (
    LogicalTables,
    make_stacks,
    placement_of_tables,
    plan_placed,
)
from rsembed.collection.prepared import PreparedBatch, identity_of
from rsembed.collection.stack import (
    ActivationGradients,
    Activations,
    ArrayStack,
    Batch,
    ByName,
    EmbeddingState,
)
from rsembed.fingerprint import Fingerprint, check_same
from rsembed.initial_values import table_keys
from rsembed.kernels import api
from rsembed.kernels.contract import Step
from rsembed.parallel.agreement import check_not_forked
from rsembed.row_gradients import RowGradients, check_belong
from rsembed.specs import FeatureSpec, TableSpec, features_of, tables_of
from rsembed.stacking import StackingPlan, StackPlan
from rsembed.storage.protocol import ByTable


class EmbeddingCollection:
    """The embedding tables of a model, and the features that read rows of these tables.

    Tables that agree in dim, dtype, rounding, quantization, optimizer, storage and placement are
    stacked: they share arrays and kernel calls. Lookups and steps work inside `jax.jit` and
    `jax.lax.scan`. Steps update tables in place if the state is donated. Call `prepare`, `prefetch`,
    `evict`, and anything that reads or writes whole keyed tables, outside the jitted step.

    On a mesh, every device looks up its part of the samples and stores its part of the tables.
    Lookups and steps give the same results as on one device. Each step uses the gradients of the
    global batch. The gradients of a row are summed over all devices, and the row is updated once.

    Args:
      features: FeatureSpecs, nested in lists or dicts.
      mesh: mesh of devices that share the tables. None: one device.
      sharding_axis: axis or axes of the mesh over which samples and tables are split. None: all
        axes. Devices along axes that are not in `sharding_axis` hold copies of the tables.
      placement: one placement for all tables, or a mapping from table names to placements. With the
        placement `row`, the default of most tables, neighbouring rows are on different devices.
        With the placement `table`, all rows of a table are on one device. With the placement
        `column`, every device has some columns of all rows. With the placement `replicated`, every
        device has a copy of the table.
      exchange_capacity: with the placements `row` and `table`, the maximum number of distinct rows
        that a device requests from one owner in one exchange round. A small capacity saves memory,
        and a large capacity saves exchange rounds. None: a capacity that is usually large enough
        for a single exchange round if the distribution of ids is skewed. Lookups and steps give the
        same results with every capacity, unless a table with `storage=Hashed(...)`, or its list of
        keys that wait for admission, becomes full within one batch. The last free rows of a table,
        or entries of its list, go to the new keys of earlier exchange rounds. When a key that waits
        for admission gets a row, its list entry becomes free for later exchange rounds.
      implementation: name of a kernel implementation. None: the fastest implementation that is
        available. With "reference", lookups and steps are plain JAX. A name other than "reference"
        applies only to the kernels that pool or update rows, and the kernels that look up keys or
        exchange rows use the fastest implementation.
      bounds_check: treatment of ids outside their table. With `raise`, the default, an id outside
        its table is an error outside `jit`. With `ignore`, and always inside `jit`, an id outside
        its table contributes nothing, and `lookup(..., return_statistics=True)` counts the id.

    Raises: ValueError: an option is unknown, a table does not support its placement, or the
      declared output of a feature cannot be split over the devices.

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
        self.features: dict[str, FeatureSpec] = {}
        for feature in features_of(features):
            self.features[feature.name] = feature
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
        facts_by_stack = {}
        num_rows_by_stack = {}
        list_of_feature = {}
        for name, stack in self._stacks.items():
            facts_by_stack[name] = stack.layout.facts(self.table_specs)
            num_rows_by_stack[name] = stack.layout.num_rows
            for placed_feature in stack.layout.stack.features:
                list_of_feature[placed_feature.name] = name
        self.layout = Fingerprint.of(facts_by_stack)
        self._num_rows = tuple(sorted(num_rows_by_stack.items()))
        self._list_of_feature = list_of_feature
        self._engine = Engine(self.features, self._stacks, self.devices, implementation)
        self._made_for = identity_of(
            self.features,
            self._list_of_feature,
            self.devices,
            bounds_check,
        )
        self.logical = LogicalTables(self.table_specs, self._stacks)
        self._on_host = self.logical.on_host
        self._arguments: dict[str, Any] = {
            "mesh": mesh,
            "sharding_axis": sharding_axis,
            "placement": placement,
            "exchange_capacity": exchange_capacity,
            "implementation": implementation,
            "bounds_check": bounds_check,
        }

    def __reduce__(self) -> tuple[object, ...]:
        # A collection is pickled for the workers of an input pipeline.
        make = functools.partial(EmbeddingCollection, **self._arguments)
        return make, (list(self.features.values()),)

    def __deepcopy__(self, memo: object) -> EmbeddingCollection:
        return self  # A collection is immutable. Training changes the state, not the collection.

    def __repr__(self) -> str:
        return f"EmbeddingCollection of {len(self.table_specs)} tables, {len(self.features)} features\n{self.plan}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    # State

    def init(self, key: PRNGKeyArray) -> EmbeddingState:
        """New state with initial tables and optimizer state.

        The initial values of a table depend only on `key`, the table's name and the table's
        initializer. The initial values of a table do not depend on other tables or on the number of
        devices.

        Raises:
          TypeError: `key` is not a PRNG key.
          ValueError: a custom initializer returns a number that is not finite. Inside `jit`,
            initial values are not checked. For a keyed table, which draws its rows during training,
            `init` draws and checks a single row.
        """
        check_type(key, PRNGKeyArray, "init: key")
        tables, slots = self._engine.init(key)
        for name, stack in self._stacks.items():
            stack.check_start(tables[name], slots[name])
        step = jnp.zeros((), jnp.int32)
        rounding_key = jax.random.fold_in(key, 0x726F756E)
        step, rounding_key = self.devices.place((step, rounding_key), PartitionSpec())
        for name, prefetch in self._on_host.items():
            prefetch.storage.begin(tables[name])
        fresh = EmbeddingState(tables, slots, step, rounding_key, self.layout)
        return host_rows.with_new_generation(self._on_host, fresh)

    def prefetch(self, state: EmbeddingState, batch: Batch) -> EmbeddingState:
        """Copies the rows of a batch from tables on the host to the device. Returns the new state.

        Call `prefetch` outside `jit`, before a compiled step, with the batch that the step will
        read. If `prefetch` is called for another batch before this step, the rows of the first
        batch may be evicted. `state` is donated: use only the returned state. Without tables on the
        host, `state` is returned unchanged.

        Raises: RuntimeError: the batch reads more rows than the device caches, `state` is older
          than the rows on the host, or `prefetch` is called inside `jit`. After an error, `state`
          stays valid.
        """
        self.check_state(state, parts=["tables"])
        if not self._on_host:
            return state
        batch = self.prepare(batch)
        if is_traced((state, batch)):
            raise RuntimeError(
                "prefetch works beside compiled programs; call it outside of jit, before the step."
            )
        fetched = host_rows.fetched(self._on_host, state, batch, donates=True)
        return host_rows.with_new_generation(self._on_host, fetched)

    def _fetched(self, state: EmbeddingState, wanted: PreparedBatch | ByName) -> EmbeddingState:
        """Copies rows from the host to the device caches, and returns the new state.

        Inside `jit`, or without tables on the host, `state` is returned unchanged.

        Args:
          state: state of the collection. `state` stays valid.
          wanted: rows to copy: a batch that reads the rows, or the rows of `RowGradients`.
        """
        if not self._on_host or is_traced((state, wanted)):
            return state
        return host_rows.fetched(self._on_host, state, wanted, donates=False)

    @functools.cached_property
    def template(self) -> EmbeddingState:
        """State with shapes and shardings instead of arrays, for `checkpoint.load(path, like=...)`."""
        tables, slots = jax.eval_shape(self._engine.init, jax.random.key(0))
        step, key = jax.eval_shape(lambda: (jnp.zeros((), jnp.int32), jax.random.key(0)))
        state = EmbeddingState(tables, slots, step, key, self.layout)
        if self.devices.mesh is None:
            return state
        everywhere: PyTree = self.devices.sharding(PartitionSpec())
        of_stacks = {}
        for name, stack in self._stacks.items():
            of_stacks[name] = self.devices.sharding(stack.partition)
        shardings = EmbeddingState(of_stacks, of_stacks, everywhere, everywhere, self.layout)

        def placed(sharding: PyTree, shapes: PyTree) -> PyTree:
            return jax.tree.map(lambda shape: shape.update(sharding=sharding), shapes)

        template: EmbeddingState = jax.tree.map(placed, shardings, state)
        return template

    def check_state(
        self,
        state: EmbeddingState,
        *,
        parts: Sequence[str] = ("tables", "slots", "step"),
    ) -> None:
        """Checks that a state belongs to this collection.

        All public methods of the collection with a `state` argument call `check_state`.

        Args:
          state: the value to check.
          parts: fields of the state to check. A lookup needs no slots, so a state for serving may
            have none.

        Raises:
          ValueError: tables, optimizers or the layout of rows differ between the state and the
            collection (the message names the difference), or an array has the wrong shape or dtype.
          TypeError: `state` is not an EmbeddingState.
          RuntimeError: the arrays of the state were donated, or this process was forked from a
            process that used JAX.
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
            arrays = getattr(state, part)
            expected = getattr(self.template, part)
            check_not_taken(arrays, f"the state has lost its {part}", way_out)
            if jax.tree.map(_shape_and_kind, arrays) != jax.tree.map(_shape_and_kind, expected):
                texts = _dtypes_and_shapes(arrays).items()
                expected_texts = _dtypes_and_shapes(expected).items()
                # A collection may have hundreds of stacks, too many for an error message.
                wrong = dict(sorted(texts - expected_texts)[:3])
                right = dict(sorted(expected_texts - texts)[:3])
                raise ValueError(
                    f"the state does not belong to this collection: {part} are {wrong}, expected {right}; use a "
                    "state of collection.init, or load one with load_collection."
                )
        if "tables" in parts:
            for name, stack in self._stacks.items():
                stack.storage.check_params(state.tables[name], stack.table)

    def tables(self, state: EmbeddingState) -> ByName:
        """Copies of all tables by name. On a mesh, every device gets a copy of each table.

        A keyed table is a dictionary of numpy arrays: `keys` in ascending order, `values` (the row
        of each key), one `slot_<name>` per slot, `last_step` and `count`. The dictionary of a table
        with `admission_count` has the arrays `waiting_keys`, `waiting_last_step` and
        `waiting_count` in addition.
        """
        self.check_state(state, parts=["tables"])
        tables: ByName = {}
        for name, stack in self._stacks.items():
            tables |= stack.values(state.tables[name], state.slots.get(name, ()))
        return tables

    def each_table(self, state: EmbeddingState) -> Iterator[tuple[str, PyTree]]:
        """Yields the name and rows of each table.

        The rows have the same form as in the result of `tables`, but `each_table` needs less
        memory. The rows may be the arrays of the state, so do not donate the state while the rows
        are in use.
        """
        self.check_state(state, parts=["tables"])
        for name, stack in self._stacks.items():
            yield from stack.each_table(state.tables[name], state.slots.get(name, ()))

    def counts(self, state: EmbeddingState) -> dict[str, dict[str, np.ndarray]]:
        """Counters of each table, such as the number of keys inserted so far, for each device.

        A table without counters, such as a dense table, is not in the result.
        """
        self.check_state(state, parts=["tables"])
        counts = {}
        for name, stack in self._stacks.items():
            for table_name, counts_of_table in stack.counts(state.tables[name]).items():
                if counts_of_table:
                    counts[table_name] = counts_of_table
        return counts

    def slots(self, state: EmbeddingState) -> ByName:
        """Copies of the optimizer state of all tables, by table name.

        The slots of a table have the structure that its optimizer defines, usually a named tuple.
        The slots of a keyed table are in the order of the keys in `tables(state)[name]["keys"]`.
        Some storages return slots in a form of their own, see `optimizer_state` of the storage's
        class.
        """
        self.check_state(state)
        slots: ByName = {}
        for name, stack in self._stacks.items():
            slots |= stack.slots(state.tables[name], state.slots[name])
        return slots

    @validated
    def with_tables(
        self,
        state: EmbeddingState,
        tables: ByTable,
        *,
        slots: ByTable | None = None,
        allow_nonfinite: bool = False,
    ) -> EmbeddingState:
        """Replaces some tables, for example by pretrained vectors. Returns the new state.

        Tables that are not in `tables` do not change.

        For a keyed table, pass a dictionary in the form that `tables` returns. Only `keys` and
        `values` are required. Slots that are not in the dictionary get their initial values. If
        `last_step` is not in the dictionary, all keys in the dictionary are treated as used in the
        current step. Rows of keys that are not in the dictionary do not change.

        To move a table to another storage, pass an array of all its rows. If the new storage is
        keyed, row `i` of the array gets the key `i`. If the new storage is a tensor train, its
        cores approximate the array.

        Args:
          state: from `init`. The new state keeps the step number of `state`, from which optimizers
            that count steps, such as Adam, continue. To continue from another step number, pass
            `state._replace(step=jnp.int32(int(old_state.step)))`.
          tables: new values by table name.
          slots: new optimizer state by table name, in the form of the method `slots` or of
            `load(path).tree["slots"]`. Slots of a keyed table are in the order of the `keys` in
            `tables`. If `tables` does not contain the table, the slots are in the order of the keys
            that `tables(state)` returns. Without `slots`, only the replaced rows of keyed tables
            change their slots. Each replaced row gets its slots from the dictionary of the table,
            or initial slots if the dictionary has no slots.
          allow_nonfinite: whether to accept NaN, infinity and negative sums of squares in `tables`
            and `slots`. By default, NaN, infinity and negative sums of squares are errors, because
            a single NaN in a row spreads to every model output that depends on the row. Inside
            `jit`, the numbers in `tables` and `slots` are not checked.

        Raises:
          ValueError: a table is unknown, or its values or slots have the wrong shape or dtype or
            are not finite.
          NotImplementedError: the storage of a table does not accept new rows.
          RuntimeError: the method is called inside `jit`, and a table has keys or is on the host.
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
        """Evicts keys of a table. Returns the new state, and the evicted keys with their rows.

        A key is evicted if at least one of the conditions `keep`, `unused_for` and `norm_below`
        applies to the key. Do not call `evict` inside `jit`. `state` is donated: use only the
        returned state.

        Args:
          state: state to evict keys from.
          table: name of a keyed table.
          keep: keeps at most this number of keys, counted over all devices. The table's `eviction`
            policy decides which keys are evicted first. None: no limit.
          unused_for: evicts keys that no training step has used for more than this number of steps.
            Keys that wait for admission are removed if their last occurrence is more than
            `unused_for` steps ago. None: no limit.
          norm_below: evicts keys of rows with an L2 norm below this number. None: no limit.

        Returns: the new state, and a dictionary with the evicted keys, their rows and their slots,
          in the form that `tables` has for a keyed table. To restore the evicted keys, pass
          `{table: dictionary}` to `with_tables`.

        Raises:
          ValueError: all conditions are None, one is out of range, or the table is unknown or has
            no keys.
          RuntimeError: the method is called inside `jit`.
        """
        self.check_state(state, parts=["tables"])
        return self.logical.evicted(
            state,
            table,
            keep=keep,
            unused_for=unused_for,
            norm_below=norm_below,
        )

    # Forward

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Checks a batch on the host and moves it to the device, for a jitted step.

        Call `prepare` outside `jit`. Inside `jit`, ids are int32 and cannot be checked, only
        counted. The result is a pytree, and a mapping from features to ids.

        An array of ids keeps its shape. The bags of all ragged features that read one stack of
        tables are joined into one list of ids. The list is padded to one of a few sizes, so a
        stream of batches needs few compiled programs. On one device, the ids of a ragged feature
        without a combiner are not padded.

        On a mesh, each process passes the same number of samples and gets the global batch, split
        by sample. The list of ids of a stack has one part per device, and all parts are padded to
        one length. A ragged feature without a combiner becomes an array `[batch, ids]`, with all
        bags padded to one length.

        Args:
          batch: for every feature `Bags`, an integer array `[batch]` or `[batch, ids]` (`-1` is
            padding), nested lists, a column of a data frame, or a pair `(ids, weights)`. Inside
            `jit` on a mesh, only arrays are accepted.

        Raises: TypeError or ValueError: the batch is wrong. The error message names the feature,
          sample, id and table, and says what to change.
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
        self,
        state: EmbeddingState,
        batch: Batch,
        *,
        return_statistics: bool = False,
    ) -> PyTree:
        """Float32 activations of every feature. On a mesh, activations are split by sample.

        Args:
          state: state of the collection, from `init` or a step.
          batch: see `prepare`.
          return_statistics: whether to return a pair of the activations and `LookupStatistics`.

        Returns: `{feature: [batch, dim]}`. With combiner `none`, a feature has one vector per id,
          so its activations have the shape of its ids plus a last axis `dim`.
        """
        self.check_state(state, parts=["tables"])
        batch = self.prepare(batch)
        state = self._fetched(state, batch)
        activations, statistics = self._engine.lookup(state.tables, batch)
        return (activations, statistics) if return_statistics else activations

    # Backward

    def lookup_vjp(
        self,
        state: EmbeddingState,
        batch: Batch,
    ) -> tuple[Activations, Callable[[PyTree], RowGradients]]:
        """Activations of a batch, and a function that converts their gradients to `RowGradients`.

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
        state = self._fetched(state, batch)
        numbers = dict.fromkeys(self._stacks, state.step)
        activations, _ = self._engine.lookup(state.tables, batch, numbers)
        return activations, functools.partial(self.row_gradients, batch)

    def row_gradients(self, batch: Batch, d_activations: ActivationGradients) -> RowGradients:
        """Gradients of the distinct rows of a batch, from the gradients of the activations.

        `row_gradients` needs only the batch and the gradients, and does not read the tables.
        """
        batch = self.prepare(batch)
        d_outputs = inputs.d_outputs(self.features, batch, d_activations)
        rows, values = self._engine.row_gradients(batch, d_outputs)
        shardings = self._engine.gradient_shardings()
        gradients = RowGradients(rows, values, self._num_rows, shardings, self.layout)
        are_arrays = all(isinstance(stack, ArrayStack) for stack in self._stacks.values())
        if are_arrays and self.devices.mesh is None and is_traced(rows):
            return gradients.summed_from(self._engine, batch, d_outputs)
        return gradients

    def apply(self, state: EmbeddingState, row_gradients: RowGradients) -> EmbeddingState:
        """Applies one optimizer step to every row in `row_gradients`, and returns the new state.

        Raises: ValueError: the gradients belong to a different collection.
        """
        axes = {}
        for name, stack in self._stacks.items():
            num_axes_of_rows = 2 if stack.storage.takes_keys else 1
            axes[name] = num_axes_of_rows, stack.table.embedding_dim
        check_belong(row_gradients, self.layout, self._num_rows, axes)
        self.check_state(state)
        if row_gradients.summands is not None:
            engine, batch, d_outputs = row_gradients.summands
            return self._stepped(state, {}, engine.update, batch, d_outputs)
        rows = dict(row_gradients.rows)
        return self._stepped(state, rows, self._engine.apply, rows, row_gradients.values)

    def update(
        self,
        state: EmbeddingState,
        batch: Batch,
        d_activations: ActivationGradients,
    ) -> EmbeddingState:
        """Runs one step with the gradients of a batch, and returns the new state.

        The result equals `apply(state, pullback(d_activations))`. If possible, a single kernel call
        sums the row gradients and updates the rows.
        """
        batch = self.prepare(batch)
        d_outputs = inputs.d_outputs(self.features, batch, d_activations)
        self.check_state(state)
        return self._stepped(state, batch, self._engine.update, batch, d_outputs)

    def _stepped(
        self,
        state: EmbeddingState,
        wanted: PreparedBatch | ByName,
        step_stacks: Callable[..., PyTree],
        *gradients: PyTree,
    ) -> EmbeddingState:
        """Runs one step of all stacks, and returns the new state.

        Args:
          state: state before the step.
          wanted: rows to copy from the host: a batch that reads the rows, or the rows of
            `RowGradients`.
          step_stacks: `apply` or `update` of the engine.
          gradients: rows and values of the row gradients for `apply`, or the batch and the output
            gradients for `update`.
        """
        fetched = self._fetched(state, wanted)
        steps = {stack.name: self._step_of(stack, fetched) for stack in self.plan.stacks}
        tables, slots = step_stacks(fetched.tables, fetched.slots, *gradients, steps)
        for name, stack in self._stacks.items():
            if not is_traced(tables[name]):
                stack.storage.check_step(fetched.tables[name], tables[name], stack.table)
        stepped = EmbeddingState(tables, slots, fetched.step + 1, fetched.key, fetched.layout)
        if fetched is state:
            return stepped
        # If the step raises an error, the caller's `state` must still be valid.
        # `with_new_generation` makes `state` invalid, so it is called only after the step.
        return host_rows.with_new_generation(self._on_host, stepped)

    def _step_of(self, stack: StackPlan, state: EmbeddingState) -> Step:
        """`Step` of a stack: optimizer rule, hyperparameters, rounding noise and step number."""
        rule = stack.spec.optimizer
        rounding = None
        if stack.tables[0].stochastic_rounding:
            key = jax.random.fold_in(state.key, state.step)
            # The rounding noise of dense rows depends on the table's name. If tables have a
            # `storage`, rows of two tables may have the same row number, so every table gets a
            # different PRNG key.
            if self.table_specs[stack.tables[0].name].storage is not None:
                keys = table_keys(key, [table.name for table in stack.tables])
                key = keys if len(stack.tables) > 1 else keys[0]
            rounding = api.stochastic_rounding(key)
        return Step(rule.get_hyperparameters(state.step), rule, rounding, state.step)


def _shape_and_kind(leaf: object) -> tuple[tuple[int, ...], object]:
    """Shape and dtype of an array.

    The dtype of PRNG keys is `prng_key` for every implementation, such as "rbg".
    """
    if not isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return (), type(leaf)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape, jax.dtypes.prng_key
    return leaf.shape, leaf.dtype


def _dtypes_and_shapes(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of each array of a tree as a text, by path, for error messages."""
    texts = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        shape, kind = _shape_and_kind(leaf)
        name = getattr(kind, "__name__", kind)
        texts[jax.tree_util.keystr(path)] = f"{name}{list(shape)}"
    return texts


@validated
def value_and_grad(
    loss_fn: Callable[..., Any],
    collection: EmbeddingCollection,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Function that computes a loss, its dense gradients, and sparse gradients of the tables.

    Args:
      loss_fn: `loss_fn(params, activations, *args)` returns the loss, or `(loss, aux)` with
        `has_aux=True`.
      collection: collection that computes the argument `activations` of `loss_fn`.
      has_aux: whether `loss_fn` returns `aux` with the loss, as in `jax.value_and_grad`, by default
        False.

    Returns: a function `(params, state, batch, *args) -> (value, (dense_grads, row_gradients))`.
      The function raises TypeError if `loss_fn` does not return a scalar loss, or with
      `has_aux=True` a pair, or if `params` contains numbers that are not floats.

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

    def checked_loss(*args: object) -> Any:
        return check_loss(loss_fn(*args), has_aux=has_aux)

    def with_gradients(params: PyTree, state: EmbeddingState, batch: Batch, *args: object) -> Any:
        activations, pullback = collection.lookup_vjp(state, batch)
        for path, leaf in jax.tree.leaves_with_path(params):
            if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), jnp.inexact):
                where = f"value_and_grad: params{jax.tree_util.keystr(path)}"
                raise TypeError(
                    f"{where} must hold floats, got {describe(leaf)}; pass it to loss_fn behind the batch."
                )
        value, (d_params, d_activations) = jax.value_and_grad(
            checked_loss,
            argnums=(0, 1),
            has_aux=has_aux,
        )(params, activations, *args)
        return value, (d_params, pullback(d_activations))

    return with_gradients


def check_loss(result: Any, *, has_aux: bool) -> Any:
    """Checks the type of a loss function's result, and returns the result unchanged.

    Raises: TypeError: the loss is not a float scalar, or with `has_aux` the result is not a pair.
    """
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
