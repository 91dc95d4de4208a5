"""Which tables share an array, and which features read them: the static side of a table-batched module."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rsembed.fingerprint import ELSEWHERE, Fingerprint
from rsembed.kernels.contract import NO_ROW, Block, JaggedBatch
from rsembed.optimizers import (
    CounterAdagradOptimizerSpec,
    DecayedAdagradOptimizerSpec,
    LearningRate,
    OptimizerSpec,
)
from rsembed.stacking import split_by_memory
from rsembed.tbe import records
from rsembed.tbe.meshes import MeshTables, Sharing, SplitBatch

Placement = Literal["device", "cached", "host"]
BagSizes = tuple[tuple[int, ...], ...]
"""Bags of feature f from rank r, as `sizes[f][r]`."""


class TablePlan(NamedTuple):
    """One logical table.

    Args:
      name: as in messages and state dicts.
      optimizer: what `rule` was made from.
      num_rows: rows.
      dim: columns.
      learning_rate: initial rate, or a callable of nothing or of the 0-based step.
      dtype: of the stored rows.
      rule: how touched rows are stepped; None only returns their gradients.
      placement: `device`; `cached`, on the host behind a cache on the device; or `host`, where every batch takes its
        rows to the device and back.
      shared_by: how the devices of a mesh share it: `row`, `table`, `column` or `replicated`, as one device has it.
      rounds_stochastically: how stepped rows are brought to a dtype other than float32.
      whole_table_mode: what happens to all rows before the lookup of a step.
      copy_dtypes: of the copies of the table that this keeps, behind the slots of the rule.
      keeps_first_gradients: rows are stepped with the gradient of the first bag that reads them, not with the sum.
      state_names: names of its optimizer states.
      torch_state_names: the same, after torch's optimizers.
    """

    name: str
    optimizer: records.TableOptimizer
    num_rows: int
    dim: int
    learning_rate: LearningRate
    dtype: str
    rule: OptimizerSpec | None = None
    placement: Placement = "device"
    shared_by: str = "replicated"
    rounds_stochastically: bool = True
    whole_table_mode: records.EnsembleModeDefinition | records.EmainplaceModeDefinition | None = None
    copy_dtypes: tuple[str, ...] = ()
    keeps_first_gradients: bool = False
    state_names: tuple[str, ...] = ()
    torch_state_names: tuple[str, ...] = ()

    @property
    def is_cached(self) -> bool:
        """Whether its rows must be brought to the device."""
        return self.placement != "device"

    @property
    def global_decay(self) -> records.GlobalWeightDecayDefinition | None:
        """The decay that untouched rows owe, and that lookups see."""
        return self.rule.global_weight_decay if isinstance(self.rule, DecayedAdagradOptimizerSpec) else None

    def contents(self) -> dict[str, Any]:
        """What its numbers mean: hyperparameters may change from one run to the next, these facts may not."""
        states, own = list(self.state_names), self.optimizer
        optimizer = own.name if isinstance(own, records.EmbOptimType) else own.identity
        return {"rows": self.num_rows, "dim": self.dim, "optimizer": optimizer, "states": states}

    def first_slots(self) -> tuple[np.ndarray, ...]:
        """What all optimizer states of a row begin as, `[1, dim]` or `[1, 1]` each."""
        own = () if self.rule is None else self.rule.init_slots(jnp.zeros((1, self.dim), jnp.float32))
        return (*map(np.asarray, own), *(np.zeros((1, self.dim), jnp.dtype(dtype)) for dtype in self.copy_dtypes))


class GroupPlan(NamedTuple):
    """Tables of one shape, rule and placement, which share one array: table `tables[k]` begins at `first_rows[k]`.

    Args:
      name: the names of its tables, or of the first and how many follow; no two groups of a plan share a name.
      table: the first of them, which speaks for all in everything but name and size.
      tables: numbers of all of them.
      first_rows: see above.
      num_rows: rows of the array.
    """

    name: str
    table: TablePlan
    tables: tuple[int, ...]
    first_rows: tuple[int, ...]
    num_rows: int


@dataclasses.dataclass(frozen=True)
class TBEPlan:
    """The static side of a module: hashable, so that compiled programs are shared by modules that look alike.

    Args:
      tables: logical tables.
      features: table of every feature.
      pooling: `sum`, `mean` or `none`.
      split: how a mesh shares the tables; None on one device.
    """

    tables: tuple[TablePlan, ...]
    features: tuple[int, ...]
    pooling: str
    split: Sharing | None = None

    def __post_init__(self) -> None:
        # Compiled programs are looked up by the plan in every call, and a hash over all tables takes its time.
        object.__setattr__(self, "_hash", hash((self.tables, self.features, self.pooling, self.split)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    @functools.cached_property
    def groups(self) -> tuple[GroupPlan, ...]:
        """Tables that have everything but name and size in common; an array holds less than 2**31 - 1 rows."""
        alike: dict[TablePlan, list[int]] = {}
        for number, table in enumerate(self.tables):
            alike.setdefault(table._replace(name="", num_rows=0), []).append(number)
        num_rows = {number: table.num_rows for number, table in enumerate(self.tables)}
        groups = []
        for own in split_by_memory(alike.values(), num_rows, NO_ROW - 1):
            # The first name tells the group already, if it can be told where that ends.
            names = [self.tables[t].name.replace("\\", "\\\\").replace("+", "\\+") for t in own]
            name = "+".join(names) if len(names) < 4 else f"{names[0]}+{len(names) - 1} more"
            *first_rows, end = itertools.accumulate((num_rows[t] for t in own), initial=0)
            groups.append(GroupPlan(name, self.tables[own[0]], tuple(own), tuple(first_rows), end))
        return tuple(groups)

    @functools.cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Group of every table, and its first row there."""
        found = {
            table: (number, first_row)
            for number, group in enumerate(self.groups)
            for table, first_row in zip(group.tables, group.first_rows, strict=True)
        }
        return tuple(found[table] for table in range(len(self.tables)))

    @functools.cached_property
    def on_mesh(self) -> MeshTables:
        """What serves the calls of tables that a mesh shares. Raises: ValueError: none does."""
        if self.split is None:
            raise ValueError("the tables are on one device; make the module with mesh= to share them.")
        return MeshTables(self.tables, self.features, self.groups, self.split)

    @functools.cached_property
    def num_rows(self) -> tuple[int, ...]:
        """Rows of every group's array, those included that only fill up the devices of a mesh."""
        if self.split is None:
            return tuple(group.num_rows for group in self.groups)
        return tuple(stack.layout.num_rows for stack in self.on_mesh.stacks)

    def everywhere(self, tree: Any) -> Any:
        """Numbers of a state, where the devices want them."""
        return tree if self.split is None else self.on_mesh.everywhere(tree)

    def rows_of(self, table: int, ids: Int[np.ndarray, " ids"]) -> Int[np.ndarray, " ids"]:
        """Where rows of a table lie in the arrays of its group."""
        group, first_row = self.places[table]
        return ids + first_row if self.split is None else self.on_mesh.rows_of(group, table, ids)

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        """Columns of every group's array."""
        return tuple(group.table.dim for group in self.groups)

    @property
    def has_cache(self) -> bool:
        """Whether rows of some table must be brought to the device first."""
        return any(table.is_cached for table in self.tables)

    @functools.cached_property
    def has_passes(self) -> bool:
        """Whether training steps begin with what `functional.begin_step` does."""
        rules = CounterAdagradOptimizerSpec
        return any(t.whole_table_mode is not None or isinstance(t.rule, rules) for t in self.tables)

    @functools.cached_property
    def row_layout(self) -> Fingerprint:
        """What rows are counted in: where every table lies among the groups."""
        return Fingerprint.of({"tables": {table.name: self._place_facts(t) for t, table in enumerate(self.tables)}})

    @functools.cached_property
    def layout(self) -> Fingerprint:
        """What a state belongs to: the same, and all that gives its arrays their meaning."""
        stored = [
            {"dtype": table.dtype, "placement": table.placement, **table.contents(), **self._place_facts(t)}
            for t, table in enumerate(self.tables)
        ]
        facts: dict[str, Any] = {"tables": dict(zip((table.name for table in self.tables), stored, strict=True))}
        if self.has_cache:
            names = [table.name for table in self.tables if table.is_cached]
            facts[ELSEWHERE] = f"rows of tables {names} are on the host, beside their cache; save module.state_dict()."
        return Fingerprint.of(facts)

    @functools.cached_property
    def contents(self) -> Fingerprint:
        """What a state dict belongs to, wherever the tables lie and whatever they are stored in."""
        return Fingerprint.of({"tables": {table.name: table.contents() for table in self.tables}})

    def _place_facts(self, table: int) -> dict[str, Any]:
        group, first_row = self.places[table]
        rows, dim = self.tables[table].num_rows, self.tables[table].dim
        facts: dict[str, Any] = {"group": group, "first_row": first_row, "rows": rows, "dim": dim}
        if self.split is not None:
            facts |= {"shared_by": self.tables[table].shared_by, "num_devices": self.split.devices.num_devices}
        return facts

    def num_bags(self, num_offsets: int, sizes: BagSizes | None) -> tuple[int, ...]:
        """Bags of every feature.

        Raises: ValueError: the length of the offsets does not fit.
        """
        num_features = len(self.features)
        if sizes is None:
            bags = (num_offsets - 1) // num_features
            if num_offsets < 1 or bags * num_features + 1 != num_offsets:
                raise ValueError(
                    f"offsets has {num_offsets} entries, which is not batch size * {num_features} features + 1; pass "
                    "one offset per bag, feature after feature, and the end of the last bag."
                )
            return (bags,) * num_features
        if len(sizes) != num_features or len({len(own) for own in sizes}) > 1:
            raise ValueError(
                f"batch_size_per_feature_per_rank must have {num_features} rows, one per feature, of equal length; "
                f"got lengths {[len(own) for own in sizes]}."
            )
        bags_of_feature = tuple(sum(own) for own in sizes)
        if sum(bags_of_feature) + 1 != num_offsets:
            raise ValueError(
                f"batch_size_per_feature_per_rank adds up to {sum(bags_of_feature)} bags, which needs as many offsets "
                f"plus 1, but there are {num_offsets}."
            )
        return bags_of_feature

    def batch(
        self,
        ids: Int[Array | np.ndarray, " nnz"],
        offsets: Int[Array | np.ndarray, " bags_plus_1"],
        weights: Float[Array | np.ndarray, " nnz"] | None,
        sizes: BagSizes | None = None,
    ) -> JaggedBatch:
        """Ids as the kernels read them.

        Args:
          ids: ids of all features, feature after feature.
          offsets: see `num_bags`.
          weights: per id.
          sizes: bags by feature and rank, for variable batch sizes.
        """
        layout = "columns" if sizes is None else "blocks"
        blocks = _blocks(self, offsets.shape[0], sizes)
        return JaggedBatch(ids, offsets, weights, self.pooling, blocks, layout)  # type: ignore[arg-type]

    def here(self, batch: JaggedBatch) -> JaggedBatch:
        """A batch for one device. Raises: ValueError: a mesh shares the tables."""
        if self.split is not None:
            raise ValueError("a mesh shares the tables: split the batch by module.prepare, or plan.on_mesh.of_jagged.")
        return batch

    def output_shape(self, batch: JaggedBatch | SplitBatch) -> tuple[int, ...]:
        """Shape of what a lookup returns."""
        if isinstance(batch, JaggedBatch):
            return batch.output_shape(self.dims)
        return batch.num_bags, sum(self.tables[t].dim for t in self.features)

    def bags_of(self, batch: JaggedBatch) -> tuple[int, ...]:
        """Bags of every feature in a batch."""
        num_features = len(self.features)
        return tuple(sum(block.num_bags for block in batch.blocks[f::num_features]) for f in range(num_features))

    def near(self, batch: JaggedBatch, places: Int[Array, " nnz"], num_places: Sequence[int]) -> JaggedBatch:
        """The batch with places in arrays of `num_places` rows, one number per group, for ids of cached tables."""
        return dataclasses.replace(batch, ids=places, blocks=_near_blocks(self, batch.blocks, tuple(num_places)))


@functools.lru_cache(maxsize=256)
def _blocks(plan: TBEPlan, num_offsets: int, sizes: BagSizes | None) -> tuple[Block, ...]:
    bags = plan.num_bags(num_offsets, sizes)
    first_bags = itertools.accumulate(bags, initial=0)
    blocks = [
        Block(first_bag, num_bags, *plan.places[table], plan.tables[table].num_rows)
        for table, first_bag, num_bags in zip(plan.features, first_bags, bags, strict=False)
    ]
    if sizes is None:
        return tuple(blocks)
    return tuple(
        block._replace(first_bag=block.first_bag + sum(own[:rank]), num_bags=own[rank])
        for rank in range(len(sizes[0]))
        for block, own in zip(blocks, sizes, strict=True)
    )


@functools.lru_cache(maxsize=256)
def _near_blocks(plan: TBEPlan, blocks: tuple[Block, ...], num_places: tuple[int, ...]) -> tuple[Block, ...]:
    return tuple(
        block._replace(first_row=0, num_rows=num_places[block.table])
        if plan.groups[block.table].table.is_cached
        else block
        for block in blocks
    )
