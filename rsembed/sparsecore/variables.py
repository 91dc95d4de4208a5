"""The arrays that travel: preprocessed input and embedding variables, all pytrees keyed by stack name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, Union

import jax
import numpy as np

from rsembed.fingerprint import Fingerprint
from rsembed.optimizers import Slots

T = TypeVar("T")
# A tree: `Nested[FeatureSpec]` is a FeatureSpec, or (lists or dicts of) lists or dicts of them.
Nested = Union[T, Sequence[T], Mapping[str, T]]  # noqa: UP007  (X | Y cannot be subscripted)
ArrayLike = jax.Array | np.ndarray

PADDING_VALUE = 2**31 - 1
"""Id and sample of places in a buffer that hold no entry."""


class _TableAndSlot(NamedTuple):
    table: Any
    slot: Any


@jax.tree_util.register_pytree_with_keys_class
class EmbeddingVariables(_TableAndSlot):
    """One physical table and its optimizer state: a pair of arrays (or of whatever a tree like them holds).

    Attributes:
      table: rows of all shards, `[rows, columns]`, shard after shard.
      slot: named tuple of arrays with the same rows, as the optimizer names them.
      layout: where the rows lie, by which lookups and updates know whether specs and variables belong together. It is
        part of the tree's structure. None means that nobody told, as for variables that were put together by hand.
    """

    layout: Fingerprint | None = None

    def __new__(cls, table: Any, slot: Any, layout: Fingerprint | None = None) -> EmbeddingVariables:
        variables = super().__new__(cls, table, slot)
        variables.layout = layout
        return variables

    def slots(self) -> Slots:
        """The slots as a plain tuple, as kernels take them."""
        return tuple(jax.tree.leaves(self.slot))

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], Fingerprint | None]:
        """The children by attribute, as for any named tuple, and the layout."""
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in self._fields), self.layout

    @classmethod
    def tree_unflatten(cls, layout: Fingerprint | None, children: tuple[Any, Any]) -> EmbeddingVariables:
        """The inverse."""
        return cls(*children, layout=layout)


class SparseDenseMatmulInput(NamedTuple):
    """Ids of a batch, partitioned: for every core, one partition per shard it reads from.

    All four are dicts by stack name of flat arrays, device after device, core after core.

    Attributes:
      lhs_row_pointers: ends of the partitions, in places of the core's part of the buffer.
      lhs_embedding_ids: row inside the shard.
      lhs_sample_ids: sample of the core.
      lhs_gains: factor of the row in the sample's activation.
    """

    lhs_row_pointers: dict[str, Any]
    lhs_embedding_ids: dict[str, Any]
    lhs_sample_ids: dict[str, Any]
    lhs_gains: dict[str, Any]


class StackLimits(NamedTuple):
    """The limits that a buffer was laid out with."""

    stack_name: str
    max_ids_per_partition: int
    max_unique_ids_per_partition: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreprocessedInput:
    """A preprocessed batch, ready for the devices.

    Attributes:
      sparse_dense_matmul_input: the partitioned ids.
      num_minibatches: one number per local device; 1 without minibatching.
      limits: the limits of every stack, by name. They belong to the tree's structure, so a jitted step is traced anew
        when they change, whatever holds the specs. Empty means unknown: buffers are then taken as completely full.
      has_minibatches: whether the buffers are laid out for minibatches; None means that nobody told.
      layout: the places of rows and samples that it was partitioned for, likewise.
    """

    sparse_dense_matmul_input: SparseDenseMatmulInput
    num_minibatches: Any = dataclasses.field(default_factory=lambda: np.array(1))
    limits: tuple[StackLimits, ...] = dataclasses.field(default=(), metadata={"static": True})
    has_minibatches: bool | None = dataclasses.field(default=None, metadata={"static": True})
    layout: Fingerprint | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def lhs_row_pointers(self) -> dict[str, Any]:
        """Ends of the partitions."""
        return self.sparse_dense_matmul_input.lhs_row_pointers

    @property
    def lhs_embedding_ids(self) -> dict[str, Any]:
        """Row inside the shard."""
        return self.sparse_dense_matmul_input.lhs_embedding_ids

    @property
    def lhs_sample_ids(self) -> dict[str, Any]:
        """Sample of the core."""
        return self.sparse_dense_matmul_input.lhs_sample_ids

    @property
    def lhs_gains(self) -> dict[str, Any]:
        """Factor of the row."""
        return self.sparse_dense_matmul_input.lhs_gains

    def check_minibatching(self, enable_minibatching: bool) -> None:
        """Raises: ValueError: the buffers are known to be laid out otherwise."""
        if self.has_minibatches not in (None, enable_minibatching):
            raise ValueError(
                f"enable_minibatching={enable_minibatching}, but the input was preprocessed with "
                f"enable_minibatching={self.has_minibatches}; pass the same to both."
            )

    def max_ids_per_partition(self, stack_name: str) -> int | None:
        """The limit that a stack's buffer was laid out with, or None if unknown."""
        by_name = {limits.stack_name: limits.max_ids_per_partition for limits in self.limits}
        return by_name.get(stack_name)
