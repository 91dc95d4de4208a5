"""EmbeddingCollection: all tables of a model behind three functional calls: init, lookup, update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from rsembed.bags import PAD_ID, Bags, as_bags, check_ids_dtype, check_values, is_traced, narrow_ids
from rsembed.initial_values import initial_rows, table_key
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.kernels.reference import Rounding
from rsembed.optimizers import Slots
from rsembed.row_gradients import RowGradients
from rsembed.specs import FeatureSpec, RowStorage, TableSpec, features_of, tables_of
from rsembed.stacking import StackingPlan, StackPlan, plan_stacking, stack_and_shard, unshard_and_unstack

Activations = dict[str, Float[Array, "..."]]
Batch = Mapping[str, Any]

# Tables are filled block by block, so that the random numbers of a block are all that init needs beside the table.
INIT_BLOCK_VALUES = 1 << 20


class EmbeddingState(NamedTuple):
    """Everything that training changes; donate it to your step.

    Args:
      tables: one array `[rows, dim]` per stack, or what its table's storage keeps instead.
      slots: optimizer state beside each table.
      step: number of updates so far.
      key: randomness of stochastic rounding; unused otherwise.
    """

    tables: dict[str, Any]
    slots: dict[str, Any]
    step: Int[Array, ""]
    key: PRNGKeyArray


class LookupStatistics(NamedTuple):
    """What a lookup did with the ids of each feature."""

    num_ids: dict[str, Int[Array, ""]]
    num_out_of_range: dict[str, Int[Array, ""]]


class _Stored(NamedTuple):
    """A table that is no array of rows, and what it is."""

    storage: RowStorage
    table: TableSpec


class EmbeddingCollection:
    """The embedding tables of a model, read by named features.

    Tables of equal dim, dtype and optimizer are stored under each other and served by one kernel call. All methods
    work inside `jax.jit` and `jax.lax.scan`; with the state donated, tables are updated in place.

    Args:
      features: FeatureSpecs, nested in lists or dicts.
      implementation: name of a kernel implementation to insist on; None takes the fastest that can serve.
      bounds_check: outside `jit`, `raise` turns an id outside its table into an error, `ignore` lets it contribute
        nothing, as it does inside `jit`; `lookup(..., return_statistics=True)` counts such ids.

    Example:
      >>> import jax, numpy as np, rsembed as rs
      >>> table = rs.TableSpec(name="word", vocabulary_size=100, embedding_dim=4, optimizer=rs.SGDOptimizerSpec(0.1))
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="context", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> collection.lookup(state, {"context": [[1, 2], [3]]})["context"].shape
      (2, 4)
    """

    def __init__(
        self,
        features: Any,
        *,
        implementation: str | None = None,
        bounds_check: str = "raise",
    ):
        if bounds_check not in ("raise", "ignore"):
            raise ValueError(f"bounds_check must be 'raise' or 'ignore', got {bounds_check!r}.")
        api.check_implementation(implementation)
        self.features: dict[str, FeatureSpec] = {feature.name: feature for feature in features_of(features)}
        self.table_specs: dict[str, TableSpec] = tables_of(features)
        self.plan: StackingPlan = plan_stacking(features, pad=False)
        self.implementation = implementation
        self.bounds_check = bounds_check

    def __repr__(self) -> str:
        return f"EmbeddingCollection of {len(self.table_specs)} tables, {len(self.features)} features\n{self.plan}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    # State

    def init(self, key: PRNGKeyArray) -> EmbeddingState:
        """Fresh tables and optimizer state.

        A table's values depend on `key`, the table's name and its initializer alone, not on the other tables.
        """
        tables, slots = {}, {}
        for stack in self.plan.stacks:
            tables[stack.name], slots[stack.name] = self._init_stack(stack, key)
        return EmbeddingState(tables, slots, jnp.zeros((), jnp.int32), jax.random.fold_in(key, 0x726F756E))

    def _init_stack(self, stack: StackPlan, key: PRNGKeyArray) -> tuple[Any, Any]:
        stored = self._stored(stack)
        if stored is not None:
            params = stored.storage.init(table_key(key, stored.table.name), stored.table)
            return params, stored.storage.init_slots(params, stored.table)

        def fill(keys: Array) -> tuple[Array, Slots]:
            rows, dim = stack.spec.stack_vocab_size, stack.spec.stack_embedding_dim
            arrays = [api.allocate((rows, dim), jnp.dtype(stack.dtype), implementation=self.implementation)]
            one_row = jax.ShapeDtypeStruct((1, dim), jnp.float32)
            for slot in jax.eval_shape(stack.spec.optimizer.init_slots, one_row):
                shape = (rows, *slot.shape[1:])
                arrays.append(api.allocate(shape, slot.dtype, implementation=self.implementation))
            carry = tuple(arrays)
            for group in self._tables_alike(stack):
                carry = self._fill_tables(stack, group, keys, carry)
            return carry[0], carry[1:]

        keys = jnp.stack([table_key(key, table.name) for table in stack.tables])
        return jax.jit(fill)(keys)

    def _stored(self, stack: StackPlan) -> _Stored | None:
        """The table of a stack that is no array of rows; such a table is alone in its stack."""
        table = self.table_specs[stack.tables[0].name]
        return None if table.storage is None else _Stored(table.storage, table)

    def _tables_alike(self, stack: StackPlan) -> list[list[int]]:
        """Positions of tables with equal size and initializer: one compiled loop fills them all."""
        groups: dict[Any, list[int]] = {}
        for position, table in enumerate(stack.tables):
            groups.setdefault((self.table_specs[table.name].initializer, table.rows), []).append(position)
        return list(groups.values())

    def _fill_tables(
        self, stack: StackPlan, positions: list[int], keys: Array, arrays: tuple[Array, ...]
    ) -> tuple[Array, ...]:
        spec = self.table_specs[stack.tables[positions[0]].name]
        block = min(spec.vocabulary_size, max(1, INIT_BLOCK_VALUES // spec.embedding_dim))
        blocks_per_table = -(-spec.vocabulary_size // block)
        first_rows = jnp.asarray([stack.tables[p].setting.row_offset_in_shard for p in positions], jnp.int32)
        own_keys = keys[jnp.asarray(positions)]

        def fill_block(i: Array, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
            table = i // blocks_per_table
            # The last block overlaps the one before it: the same rows get the same values twice.
            start = jnp.minimum((i % blocks_per_table) * block, spec.vocabulary_size - block)
            values = initial_rows(own_keys[table], spec, start + jnp.arange(block, dtype=jnp.int32))
            parts = (values, *stack.spec.optimizer.init_slots(values))
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(array, part.astype(array.dtype), first_rows[table] + start, 0)
                for array, part in zip(arrays, parts, strict=True)
            )

        return jax.lax.fori_loop(0, blocks_per_table * len(positions), fill_block, arrays)

    def tables(self, state: EmbeddingState) -> dict[str, Float[Array, "vocabulary dim"]]:
        """The logical tables by name (copies)."""
        dense = dict(state.tables)
        for stack in self.plan.stacks:
            stored = self._stored(stack)
            if stored is not None:
                dense[stack.name] = stored.storage.fetch(dense[stack.name], _all_rows(stored.table), stored.table)
        return unshard_and_unstack(self.plan, dense)

    def slots(self, state: EmbeddingState) -> dict[str, Any]:
        """The optimizer state of every logical table (copies), in the named tuple of its optimizer."""
        result = {}
        for stack in self.plan.stacks:
            if self._stored(stack) is not None:
                result[stack.tables[0].name] = state.slots[stack.name]
                continue
            for table in stack.tables:
                first, last = table.setting.row_offset_in_shard, table.setting.row_offset_in_shard + table.rows
                own = tuple(slot[first:last] for slot in state.slots[stack.name])
                result[table.name] = stack.spec.optimizer.pack_slots(own)
        return result

    def with_tables(self, state: EmbeddingState, tables: Mapping[str, Any]) -> EmbeddingState:
        """The state with some tables replaced, for example by pretrained vectors; slots stay as they are.

        Raises: ValueError: a table is unknown or has another shape.
        """
        current = self.tables(state)
        for name, values in tables.items():
            if name not in current:
                raise ValueError(f"unknown table {name!r}; the collection has {list(current)}.")
            if self.table_specs[name].storage is not None:
                raise NotImplementedError(
                    f"table {name!r} is kept as {self.table_specs[name].storage}, which cannot take any rows; replace "
                    "what state.tables holds for it."
                )
            if np.shape(values) != current[name].shape:
                raise ValueError(f"table {name!r} has shape {current[name].shape}, the new values {np.shape(values)}.")
            current[name] = jnp.asarray(values, current[name].dtype)
        stacked = stack_and_shard(self.plan, current)
        flat = {name: array.reshape(-1, array.shape[-1]) for name, array in stacked.items()}
        kept = {s.name: state.tables[s.name] for s in self.plan.stacks if self._stored(s) is not None}
        return state._replace(tables=flat | kept)

    # Input

    def prepare(self, batch: Batch) -> dict[str, Bags]:
        """Checks a batch on the host and brings it into canonical form, ready for a jitted step.

        Do this before `jit`: inside it, ids are int32 and cannot be checked, only counted.

        Args:
          batch: for every feature `Bags`, an integer array `[batch]` or `[batch, ids]` (`-1` is no id), nested lists,
            or a pair `(ids, weights)`.

        Raises: TypeError or ValueError, naming feature, sample, id, table and the way out.
        """
        self._check_names(batch, "batch")
        return {name: self._prepare_feature(feature, batch[name]) for name, feature in self.features.items()}

    def _check_names(self, given: Mapping[str, Any], what: str) -> None:
        missing, unknown = sorted(set(self.features) - set(given)), sorted(set(given) - set(self.features))
        if missing or unknown:
            raise ValueError(
                f"{what} does not match the features: missing {missing}, unknown {unknown}; it needs exactly one entry "
                f"for each of {sorted(self.features)}."
            )

    def _prepare_feature(self, feature: FeatureSpec, value: Any) -> Bags:
        table = feature.table_spec
        bags = as_bags(value, feature=feature.name)
        check_ids_dtype(bags, feature=feature.name)
        _check_batch_size(feature, bags)
        if not is_traced(bags):
            check_values(
                bags,
                feature=feature.name,
                table=table.name,
                vocabulary_size=table.vocabulary_size,
                allow_out_of_range=self.bounds_check == "ignore",
            )
        return dataclasses.replace(
            bags,
            ids=jnp.asarray(narrow_ids(bags.ids)),
            offsets=jnp.asarray(bags.offsets).astype(jnp.int32),
            weights=None if bags.weights is None else jnp.asarray(bags.weights).astype(jnp.float32),
        )

    def _segments(self, stack: StackPlan, bags: Mapping[str, Bags]) -> list[Segment]:
        """Ids of the stack's features as rows of the stacked table."""
        segments = []
        for feature in stack.features:
            spec, own = self.features[feature.name].table_spec, bags[feature.name]
            valid = (own.ids >= 0) & (own.ids < spec.vocabulary_size)
            first_row = self.plan.table(spec.name)[1].setting.row_offset_in_shard
            rows = jnp.where(valid, own.ids + first_row, NO_ROW)
            offsets = None if feature.combiner == "none" else jnp.asarray(own.offsets)
            weights = None if own.weights is None else jnp.asarray(own.weights)
            segments.append(Segment(rows, offsets, weights, feature.combiner))
        return segments

    # Forward and backward

    def lookup(self, state: EmbeddingState, batch: Batch, *, return_statistics: bool = False) -> Any:
        """Activations of every feature, float32.

        Args:
          state: from `init`.
          batch: see `prepare`.
          return_statistics: also return `LookupStatistics`.

        Returns: `{feature: [batch, dim]}`; for combiner `none` one vector per id, shaped as the ids were.
        """
        bags = self.prepare(batch)
        activations: Activations = {}
        for stack in self.plan.stacks:
            outputs = self._pooled(stack, state.tables[stack.name], self._segments(stack, bags))
            for feature, output in zip(stack.features, outputs, strict=True):
                activations[feature.name] = self._to_activation(feature.name, bags[feature.name], output)
        activations = {name: activations[name] for name in self.features}
        return (activations, self._statistics(bags)) if return_statistics else activations

    def _pooled(self, stack: StackPlan, table: Any, segments: list[Segment]) -> Sequence[Array]:
        stored = self._stored(stack)
        if stored is not None:  # rows are made for this batch, and pooled from where they stand in it
            table = stored.storage.fetch(table, jnp.concatenate([segment.rows for segment in segments]), stored.table)
            first = 0
            for number, segment in enumerate(segments):
                places = first + jnp.arange(segment.rows.shape[0], dtype=jnp.int32)
                is_row = (segment.rows >= 0) & (segment.rows < stored.table.vocabulary_size)
                segments[number] = dataclasses.replace(segment, rows=jnp.where(is_row, places, NO_ROW))
                first += segment.rows.shape[0]
        quantization = stack.spec.quantization_config
        return api.lookup(table, segments, quantization=quantization, implementation=self.implementation)

    def _to_activation(self, name: str, bags: Bags, output: Array) -> Array:
        feature = self.features[name]
        output = output[:, : feature.output_dim] if feature.output_dim < output.shape[1] else output
        if feature.output_shape is not None:
            return output.reshape(feature.output_shape)
        if feature.table_spec.combiner == "none" and bags.dense_shape is not None:
            return output.reshape(*bags.dense_shape, output.shape[1])
        return output

    def _statistics(self, bags: Mapping[str, Bags]) -> LookupStatistics:
        num_ids, num_out_of_range = {}, {}
        for name, own in bags.items():
            used = jnp.arange(own.ids.shape[0], dtype=jnp.int32) < own.offsets[-1]
            inside = (own.ids >= 0) & (own.ids < self.features[name].table_spec.vocabulary_size)
            num_ids[name] = jnp.sum(used & inside)
            num_out_of_range[name] = jnp.sum(used & ~inside & (own.ids != PAD_ID))
        return LookupStatistics(num_ids, num_out_of_range)

    def lookup_vjp(self, state: EmbeddingState, batch: Batch) -> tuple[Activations, Callable[[Any], RowGradients]]:
        """Activations, and a function from their gradients to the `RowGradients` of the tables.

        Example:
          >>> import jax, jax.numpy as jnp, rsembed as rs
          >>> table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=2)
          >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])
          >>> activations, pullback = collection.lookup_vjp(collection.init(jax.random.key(0)), {"f": [[4, 4], [7]]})
          >>> pullback({"f": jnp.ones((2, 2))}).to_dense()["t"][4].tolist()
          [2.0, 2.0]
        """
        bags = self.prepare(batch)

        def pullback(d_activations: Mapping[str, Any]) -> RowGradients:
            rows, values = {}, {}
            for stack in self.plan.stacks:
                segments = self._segments(stack, bags)
                rows[stack.name], values[stack.name] = api.row_gradients(
                    stack.spec.stack_vocab_size,
                    segments,
                    self._d_outputs(stack, segments, d_activations),
                    implementation=self.implementation,
                )
            num_rows = tuple(sorted((stack.name, stack.spec.stack_vocab_size) for stack in self.plan.stacks))
            return RowGradients(rows, values, num_rows)

        return self.lookup(state, batch), pullback

    def _d_outputs(self, stack: StackPlan, segments: list[Segment], d_activations: Mapping[str, Any]) -> list[Array]:
        self._check_names(d_activations, "the activation gradients")
        d_outputs = []
        for feature, segment in zip(stack.features, segments, strict=True):
            gradient = jnp.asarray(d_activations[feature.name]).astype(jnp.float32)
            columns = self.features[feature.name].output_dim
            if gradient.ndim < 2 or gradient.shape[-1] != columns or gradient.size != segment.num_outputs * columns:
                raise ValueError(
                    f"feature {feature.name!r}: the activation gradient has shape {gradient.shape}, but the "
                    f"activations hold {segment.num_outputs} vectors of {columns}."
                )
            gradient = gradient.reshape(segment.num_outputs, columns)
            missing = stack.spec.stack_embedding_dim - columns
            d_outputs.append(jnp.pad(gradient, ((0, 0), (0, missing))) if missing else gradient)
        return d_outputs

    def apply(self, state: EmbeddingState, row_gradients: RowGradients) -> EmbeddingState:
        """One optimizer step for every row in `row_gradients`, and only for those."""
        tables, slots = dict(state.tables), dict(state.slots)
        for stack in self.plan.stacks:
            name = stack.name
            rows, values = row_gradients.rows[name], row_gradients.values[name]
            tables[name], slots[name] = self._apply_to_stack(stack, state, rows, values)
        return EmbeddingState(tables, slots, state.step + 1, state.key)

    def _apply_to_stack(self, stack: StackPlan, state: EmbeddingState, rows: Array, values: Array) -> tuple[Any, Any]:
        optimizer, stored = stack.spec.optimizer, self._stored(stack)
        table, slots, hyper = (
            state.tables[stack.name],
            state.slots[stack.name],
            optimizer.get_hyperparameters(state.step),
        )
        if stored is not None:
            return stored.storage.step(table, slots, rows, values, hyper, stored.table)
        rounding = self._rounding(stack, state)
        return api.apply_rows(
            table, slots, rows, values, hyper, optimizer, rounding=rounding, implementation=self.implementation
        )

    def update(self, state: EmbeddingState, batch: Batch, d_activations: Mapping[str, Any]) -> EmbeddingState:
        """Row gradients and optimizer step in one kernel: the same numbers as `apply(state, pullback(...))`."""
        bags = self.prepare(batch)
        tables, slots = dict(state.tables), dict(state.slots)
        for stack in self.plan.stacks:
            name, segments = stack.name, self._segments(stack, bags)
            d_outputs = self._d_outputs(stack, segments, d_activations)
            if self._stored(stack) is not None:
                rows, values = api.row_gradients(
                    stack.spec.stack_vocab_size, segments, d_outputs, implementation=self.implementation
                )
                tables[name], slots[name] = self._apply_to_stack(stack, state, rows, values)
                continue
            tables[name], slots[name] = api.update(
                tables[name],
                slots[name],
                segments,
                d_outputs,
                stack.spec.optimizer.get_hyperparameters(state.step),
                stack.spec.optimizer,
                rounding=self._rounding(stack, state),
                implementation=self.implementation,
            )
        return EmbeddingState(tables, slots, state.step + 1, state.key)

    def _rounding(self, stack: StackPlan, state: EmbeddingState) -> Rounding | None:
        if not stack.tables[0].stochastic_rounding:
            return None
        return api.stochastic_rounding(table_key(jax.random.fold_in(state.key, state.step), stack.name))


def _all_rows(table: TableSpec) -> Int[Array, " vocab"]:
    return jnp.arange(table.vocabulary_size, dtype=jnp.int32)


def _check_batch_size(feature: FeatureSpec, bags: Bags) -> None:
    expected, got, unit = feature.num_samples, bags.num_bags, "samples"
    if feature.table_spec.combiner == "none" and feature.output_shape is not None:
        got, unit = bags.ids.shape[0], "ids"
    if expected is not None and expected != got:
        raise ValueError(
            f"feature {feature.name!r}: the batch has {got} {unit}, but the spec declares {expected}; change the "
            "batch, or leave input_shape and output_shape None to accept any."
        )


def value_and_grad(
    loss_fn: Callable[..., Any], collection: EmbeddingCollection, *, has_aux: bool = True
) -> Callable[..., Any]:
    """Value and gradients of a loss, with sparse gradients for the tables.

    Args:
      loss_fn: `loss_fn(params, activations, *args)` returns `(loss, aux)`, or only the loss with `has_aux=False`.
      collection: looks up `activations`.
      has_aux: as in `jax.value_and_grad`.

    Returns: a function `(params, state, batch, *args) -> (value, (dense_grads, row_gradients))`.

    Example:
      >>> import jax, jax.numpy as jnp, rsembed as rs
      >>> table = rs.TableSpec(name="t", vocabulary_size=9, embedding_dim=2)
      >>> collection = rs.EmbeddingCollection([rs.FeatureSpec(name="f", table_spec=table)])
      >>> state = collection.init(jax.random.key(0))
      >>> def loss_fn(params, activations):
      ...     return jnp.sum(params * activations["f"])
      >>> step = value_and_grad(loss_fn, collection, has_aux=False)
      >>> loss, (dense_grads, row_gradients) = step(jnp.ones(()), state, {"f": [[4], [7]]})
      >>> state = collection.apply(state, row_gradients)
    """

    def with_gradients(params: Any, state: EmbeddingState, batch: Batch, *args: Any) -> Any:
        activations, pullback = collection.lookup_vjp(state, batch)
        value, (d_params, d_activations) = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=has_aux)(
            params, activations, *args
        )
        return value, (d_params, pullback(d_activations))

    return with_gradients
