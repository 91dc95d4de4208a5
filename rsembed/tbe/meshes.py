"""Tables of a module on a mesh: the core's engine behind the interface of a table-batched call.

Samples and rows are split. A batch is what the core makes of it: of each feature an array `[bags, ids]`, filled up with
-1, because all devices must run one program on equal shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import global_array_to_host_local_array
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from rsembed.bags import Bags
from rsembed.collection import inputs
from rsembed.collection.engine import Engine
from rsembed.collection.placement import make_stacks
from rsembed.collection.stack import Stack
from rsembed.kernels.contract import Call
from rsembed.specs import FeatureSpec
from rsembed.stacking import plan_stacking
from rsembed.tbe.plan import TBEPlan

Group = TypeVar("Group")


AnyBatch: TypeAlias = Call | dict[str, Any]
"""A batch on one device; or on a mesh, by feature ids `[bags, ids]` or a pair of these and of their weights."""


class MeshTables:
    """Tables of a plan on a mesh; each of their groups is a stack of the core."""

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

    def empty(self, group: int, shape: Sequence[int], dtype: DTypeLike, fill: float) -> Array:
        """An array filled with `fill`, of `shape[1:]` for each row of a group, laid out over the devices."""
        stack = self.stacks[group]
        whole = functools.partial(jnp.full, (stack.layout.num_rows, *shape[1:]), fill, dtype)
        return jax.jit(whole, out_shardings=self.devices.sharding(stack.partition))()

    # Batches

    def of_jagged(self, batch: Call) -> dict[str, PyTree]:
        """A checked batch of this process, outside `jit`, split by sample. Raises: as `prepare` of the core."""
        ids, offsets, bags = np.asarray(batch.lists[0].ids), np.asarray(batch.lists[0].offsets), dict[str, Bags]()
        for name, block in zip(self.features, batch.segments, strict=True):
            ends = offsets[block.first_bag : block.first_bag + block.num_bags + 1]
            own = slice(int(ends[0]), int(ends[-1]))
            weights = None if batch.lists[0].weights is None else np.asarray(batch.lists[0].weights[own])
            bags[name] = Bags(ids[own], ends - ends[0], weights)
        return self.split(bags, bounds_check="ignore")

    def split(self, batch: Mapping[str, PyTree], *, bounds_check: str) -> dict[str, PyTree]:
        """A batch by feature as the engine reads it; one that is so already stays. Raises: as `prepare` of the core."""
        given = inputs.prepare(self.features, batch, self.devices, bounds_check=bounds_check)
        return {
            name: jax.tree.map(lambda own: own if own.ndim == 2 else own[:, None], own) for name, own in given.items()
        }

    def in_order(self, by_feature: Mapping[str, Array], batch: Call) -> Float[Array, " nnz"]:
        """Values per id in the order of the batch before it was split; 0 for ids in no bag."""
        offsets, mesh = np.asarray(batch.lists[0].offsets), self.devices.known_mesh
        local = [global_array_to_host_local_array(by_feature[name], mesh, self.devices.split) for name in self.features]  # type: ignore[arg-type]
        found = [jnp.zeros(int(offsets[0]))]
        for own, block in zip(local, batch.segments, strict=True):
            ends = offsets[block.first_bag : block.first_bag + block.num_bags + 1]
            bag = np.repeat(np.arange(block.num_bags), np.diff(ends))
            found.append(own[bag, np.arange(ends[0], ends[-1]) - ends[:-1][bag]])
        return jnp.concatenate([*found, jnp.zeros(batch.lists[0].ids.shape[0] - int(offsets[-1]))])

    # What the engine takes and gives

    def by_name(self, by_group: Iterable[Group]) -> dict[str, Group]:
        """Dictionary of the groups' values by the names of their stacks."""
        return dict(zip(self.names, by_group, strict=True))

    def by_group(self, by_name: Mapping[str, Group]) -> list[Group]:
        """List of the stacks' values in the order of groups."""
        return [by_name[name] for name in self.names]

    def lookup(self, weights: Sequence[Array], batch: Mapping[str, PyTree]) -> Float[Array, "bags dims"]:
        """Pooled rows, features side by side; differentiable in the weights of the ids."""
        activations, _ = self.engine.lookup(self.by_name(weights), self.with_gains(batch))
        return jnp.concatenate([activations[name] for name in self.features], axis=1)

    def gradient_shardings(self) -> tuple[tuple[str, NamedSharding, NamedSharding], ...]:
        """Shardings of rows and values of `RowGradients`, as sorted triples with the group's name."""
        by_stack = {name: (rows, values) for name, rows, values in self.engine.gradient_shardings() or ()}
        found = zip(self.plan.groups, self.by_group(by_stack), strict=True)
        return tuple(sorted((group.table.name, rows, values) for group, (rows, values) in found))

    def with_gains(self, batch: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
        """The batch with weights that turn the engine's sum into the plan's pooling."""
        if self.plan.pooling != "mean":  # which divides by the number of ids in a bag, whatever the weights
            return batch
        found = {}
        for name, num_rows in zip(self.features, self.num_rows, strict=True):
            ids, weights = own if isinstance(own := batch[name], tuple) else (own, jnp.ones(own.shape))
            count = jnp.sum((ids >= 0) & (ids < num_rows), axis=1, keepdims=True)
            found[name] = (ids, weights / jnp.maximum(count, 1).astype(jnp.float32))
        return found

    def by_feature(self, d_output: Array) -> dict[str, Float[Array, "bags dim"]]:
        """Gradient of each feature's pooled rows, cut from the gradient of the output."""
        parts = jnp.split(d_output.reshape(-1, sum(self.dims)), np.cumsum(self.dims)[:-1].tolist(), axis=1)
        return dict(zip(self.features, parts, strict=True))


@functools.lru_cache(maxsize=64)
def tables_on_mesh(plan: TBEPlan) -> MeshTables:
    """The `MeshTables` of a plan, made once per plan."""
    return MeshTables(plan)
