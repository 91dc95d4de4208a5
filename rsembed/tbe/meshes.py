"""The tables of a module over the devices of a mesh: the core's engine, in the form of a table-batched call.

Samples and rows are split. A batch is what the core makes of it: of each feature an array `[bags, ids]`, filled up with
-1, because all devices must run one program on equal shapes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import global_array_to_host_local_array
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rsembed.bags import PAD_ID, Bags
from rsembed.collection import inputs
from rsembed.collection.engine import Engine
from rsembed.collection.placement import make_stacks
from rsembed.collection.stack import Stack
from rsembed.kernels.contract import JaggedBatch, Step
from rsembed.optimizers import Slots
from rsembed.specs import FeatureSpec
from rsembed.stacking import plan_stacking
from rsembed.tbe.plan import TBEPlan

Arrays = Sequence[Array]


@no_type_check  # a pytree holds placeholders while JAX transforms it
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitBatch:
    """A batch over the devices of a mesh, which share its bags.

    Args:
      ids: of each feature; -1 is no id.
      weights: weight of every id; None means ones.
    """

    ids: tuple[Int[Array, "bags _"], ...]
    weights: tuple[Float[Array, "bags _"], ...] | None

    @property
    def num_bags(self) -> int:
        """Bags of every feature."""
        return self.ids[0].shape[0]


AnyBatch: TypeAlias = JaggedBatch | SplitBatch
"""On one device, and on a mesh."""


class MeshTables:
    """The tables of a plan with devices, each group of them a stack of the core."""

    def __init__(self, plan: TBEPlan):
        if plan.devices is None:
            raise ValueError("the tables are on one device; make the module with mesh= to share them.")
        self.devices, self.plan = plan.devices, plan
        self.dims = [plan.tables[t].dim for t in plan.features]
        self.num_rows = [plan.tables[t].num_rows for t in plan.features]
        specs = [table.spec() for table in plan.tables]
        pairs = zip(plan.feature_names, plan.features, strict=True)
        self.features = {name: FeatureSpec(name=name, table_spec=specs[t]) for name, t in pairs}
        readers = list(self.features.values())
        stacks = make_stacks(
            plan_stacking(readers, groups=[[specs[t].name for t in group.tables] for group in plan.groups], pad=False),
            readers,
            {table.name: table.shared_by for table in plan.tables},
            self.devices,
            exchange_capacity=None,
            implementation=None,
        )
        self.names: list[str] = list(stacks)
        self.stacks: list[Stack] = list(stacks.values())
        self.engine = Engine(self.features, stacks, self.devices)

    # Arrays of groups

    def empty(self, group: int, shape: Sequence[int], dtype: Any, fill: float) -> Array:
        """An array with `shape[1:]` for each row of a group, laid out over the devices."""
        stack = self.stacks[group]
        whole = functools.partial(jnp.full, (stack.layout.num_rows, *shape[1:]), fill, dtype)
        return jax.jit(whole, out_shardings=self.devices.sharding(stack.partition))()

    def everywhere(self, tree: Any) -> Any:
        """Numbers of a state, which every device has."""
        return self.devices.place(tree, PartitionSpec())

    # Batches

    def of_jagged(self, batch: JaggedBatch) -> SplitBatch:
        """A checked batch of this process, outside `jit`, split by sample."""
        ids, offsets, bags, first_bag = np.asarray(batch.ids), np.asarray(batch.offsets), dict[str, Bags](), 0
        for name, block in zip(self.features, batch.blocks, strict=True):
            ends = offsets[first_bag : first_bag + block.num_bags + 1]
            own, first_bag = slice(int(ends[0]), int(ends[-1])), first_bag + block.num_bags
            weights = None if batch.weights is None else np.asarray(batch.weights[own])
            bags[name] = Bags(ids[own], ends - ends[0], weights)
        return self.read(bags)

    def read(self, bags: Mapping[str, Any]) -> SplitBatch:
        """Whatever the core takes for a batch, split by sample. Raises: as `prepare` of the core; ValueError."""
        given = inputs.prepare(self.features, bags, self.devices, bounds_check="ignore")
        pairs = [own if isinstance(own, tuple) else (own, None) for own in map(given.__getitem__, self.features)]
        ids = tuple(ids if ids.ndim == 2 else ids[:, None] for ids, _ in pairs)
        if len({own.shape[0] for own in ids}) > 1:
            sizes = {name: own.shape[0] for name, own in zip(self.features, ids, strict=True)}
            raise ValueError(f"on a mesh all features need equally many bags, got {sizes}; add bags without ids.")
        if all(weights is None for _, weights in pairs):
            return SplitBatch(ids, None)
        weights = [jnp.ones(ids.shape) if weights is None else weights.reshape(ids.shape) for ids, weights in pairs]
        return SplitBatch(ids, tuple(weights))

    def repaired(self, batch: SplitBatch) -> tuple[SplitBatch, Int[Array, ""]]:
        """A batch whose ids nobody could check, those outside their table as 0; and how many there were."""
        ids, num_outside = [], jnp.zeros((), jnp.int32)
        for own, num_rows in zip(batch.ids, self.num_rows, strict=True):
            is_outside = (own < PAD_ID) | (own >= num_rows)
            num_outside += jnp.sum(is_outside, dtype=jnp.int32)
            ids.append(jnp.where(is_outside, 0, own))
        return dataclasses.replace(batch, ids=tuple(ids)), num_outside

    def in_order(self, by_feature: Arrays, batch: JaggedBatch) -> Float[Array, " nnz"]:
        """What belongs to the ids of a split batch, in the order of the batch that it was; 0 for ids in no bag."""
        offsets, first_bag, mesh = np.asarray(batch.offsets), 0, self.devices.known_mesh
        local = [global_array_to_host_local_array(own, mesh, self.devices.split) for own in by_feature]  # type: ignore[arg-type]
        found = [jnp.zeros(int(offsets[0]))]
        for own, block in zip(local, batch.blocks, strict=True):
            ends = offsets[first_bag : first_bag + block.num_bags + 1]
            bag, first_bag = np.repeat(np.arange(block.num_bags), np.diff(ends)), first_bag + block.num_bags
            found.append(own[bag, np.arange(ends[0], ends[-1]) - ends[:-1][bag]])
        return jnp.concatenate([*found, jnp.zeros(batch.ids.shape[0] - int(offsets[-1]))])

    # One device's share of these is the engine's

    def lookup(self, weights: Arrays, batch: SplitBatch) -> Float[Array, "bags dims"]:
        """Pooled rows, features side by side; `looked_up` is differentiable in the weights of the ids."""
        activations, _ = self.engine.lookup(self._by_name(weights), self._with_gains(batch))
        return jnp.concatenate([activations[name] for name in self.features], axis=1)

    def weight_gradients(
        self, weights: Arrays, batch: SplitBatch, d_output: Array
    ) -> tuple[Float[Array, "bags _"], ...]:
        """Gradients of the weights of the ids, by feature."""
        given = self._with_gains(batch), self._by_feature(batch, d_output)
        found = self.engine.weight_gradients(self._by_name(weights), *given)
        d_gains = [found[name].reshape(ids.shape) for name, ids in zip(self.features, batch.ids, strict=True)]
        if self.plan.pooling == "mean":
            d_gains = [own * share for own, share in zip(d_gains, self._shares(batch), strict=True)]
        return tuple(d_gains)

    def row_gradients(self, batch: SplitBatch, d_output: Array) -> list[tuple[Array, Array]]:
        """Rows and values of `RowGradients`, by group."""
        found = self.engine.row_gradients(self._with_gains(batch), self._by_feature(batch, d_output))
        return [found[name] for name in self.names]

    def gradient_shardings(self) -> Any:
        """How these are split, by name of the group: what `RowGradients` keep."""
        found = {name: split for name, *split in self.engine.gradient_shardings() or ()}
        return tuple(
            sorted((group.name, *found[name]) for group, name in zip(self.plan.groups, self.names, strict=True))
        )

    def update(
        self, weights: Arrays, slots: Sequence[Slots], batch: SplitBatch, d_output: Array, steps: Sequence[Step]
    ) -> tuple[list[Array], list[Slots]]:
        """Arrays and slots after a step with the gradients of the global batch."""
        tables, own_slots = map(self._by_name, (weights, slots))
        given = self._with_gains(batch), self._by_feature(batch, d_output)
        return self._by_group(self.engine.update(tables, own_slots, *given, self._by_name(steps)))

    def apply(
        self, weights: Arrays, slots: Sequence[Slots], gradients: Sequence[tuple[Array, Array]], steps: Sequence[Step]
    ) -> tuple[list[Array], list[Slots]]:
        """The same with `row_gradients`."""
        return self._by_group(self.engine.apply(*map(self._by_name, (weights, slots, gradients, steps))))

    def _by_name(self, by_group: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, by_group, strict=True))

    def _by_group(self, found: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        weights, slots = ([own[name] for name in self.names] for own in found)
        return weights, slots

    def _shares(self, batch: SplitBatch) -> list[Float[Array, "bags 1"]]:
        """One over the number of ids in each bag: a mean divides by that, whatever the weights."""
        pairs = zip(batch.ids, self.num_rows, strict=True)
        counts = [jnp.sum((ids >= 0) & (ids < rows), axis=1, keepdims=True) for ids, rows in pairs]
        return [1.0 / jnp.maximum(count, 1).astype(jnp.float32) for count in counts]

    def _with_gains(self, batch: SplitBatch) -> dict[str, Any]:
        """The batch as the engine takes it, whose tables add up."""
        weights: Sequence[Array] | None = batch.weights
        if self.plan.pooling == "mean":
            shares, ones = self._shares(batch), [jnp.ones(ids.shape) for ids in batch.ids]
            weights = [own * share for own, share in zip(weights or ones, shares, strict=True)]
        if weights is None:
            return dict(zip(self.features, batch.ids, strict=True))
        return dict(zip(self.features, zip(batch.ids, weights, strict=True), strict=True))

    def _by_feature(self, batch: SplitBatch, d_output: Array) -> dict[str, Float[Array, "bags dim"]]:
        parts = jnp.split(d_output.reshape(batch.num_bags, sum(self.dims)), np.cumsum(self.dims)[:-1].tolist(), axis=1)
        return dict(zip(self.features, parts, strict=True))


@functools.lru_cache(maxsize=64)
def tables_on_mesh(plan: TBEPlan) -> MeshTables:
    """What looks up and trains the tables of a plan with devices."""
    return MeshTables(plan)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def looked_up(tables: MeshTables, weights: tuple[Array, ...], batch: SplitBatch) -> Float[Array, "bags dims"]:
    """Pooled rows, features side by side; differentiable in the weights of the ids."""
    return tables.lookup(weights, batch)


def _lookup_forward(tables: MeshTables, weights: tuple[Array, ...], batch: SplitBatch) -> Any:
    return tables.lookup(weights, batch), (weights, batch)


def _lookup_backward(tables: MeshTables, saved: Any, d_output: Array) -> Any:
    weights, batch = saved
    d_weights = None if batch.weights is None else tables.weight_gradients(weights, batch, d_output)
    no_gradient: Any = tuple(np.zeros(ids.shape, jax.dtypes.float0) for ids in batch.ids)
    return None, SplitBatch(no_gradient, d_weights)


looked_up.defvjp(_lookup_forward, _lookup_backward)
