"""Plain tables in a group: read on one device, or by every device for its samples where several processes have some."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from rsembed.bags import Bags, as_bags, check_ids_dtype, check_values, narrow_ids
from rsembed.collection.inputs import padded
from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW, Segment
from rsembed.parallel.agreement import is_global
from rsembed.sok.initialize import Context
from rsembed.specs import Combiner


def read_ids(table: Any, ids: Any, weights: Any, where: str) -> Bags:
    """The bags of a plain table. Raises: TypeError or ValueError: an id is no row of it; named `where`."""
    bags = as_bags(ids if weights is None else (ids, weights), feature=where)
    check_ids_dtype(bags, feature=where)
    if is_own(bags):
        check_values(bags, feature=where, table=where, vocabulary_size=_values(table).shape[0])
    return bags


def is_own(bags: Bags) -> bool:
    """Whether the bags are those of this process, to be seen here: not inside `jit`, no global arrays."""
    return not any(isinstance(leaf, jax.core.Tracer) or is_global(leaf) for leaf in jax.tree.leaves(bags))


def longest(bags: Bags) -> int:
    """Ids of the longest bag, at least 1, rounded up to a power of two."""
    return 1 << (int(np.diff(np.asarray(bags.offsets)).max(initial=1)) - 1).bit_length()


def pool(table: Any, bags: Bags, combiner: Combiner) -> Float[Array, "batch dim"]:
    """Pooled rows, where the table is."""
    weights = None if bags.weights is None else jnp.asarray(bags.weights).astype(jnp.float32)
    offsets = jnp.asarray(bags.offsets).astype(jnp.int32)
    return api.lookup(_values(table), [Segment(jnp.asarray(narrow_ids(bags.ids)), offsets, weights, combiner)])[0]


def pool_everywhere(
    table: Any, bags: Bags, combiner: Combiner, *, context: Context, width: int
) -> Float[Array, "batch dim"]:
    """Pooled rows of the samples of all processes, cut among the devices as those of embedding variables are.

    Args:
      table: equal in all processes.
      bags: of this process.
      combiner: how bags are pooled.
      context: the devices.
      width: ids per bag at most, in all processes.
    """
    ids, weights = padded(bags, width)
    batch = context.place((ids.reshape(bags.num_bags, -1), None if weights is None else weights.reshape(ids.shape)))
    return _pool_everywhere(_values(table), *batch, combiner, context)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _pool_everywhere(values: Array, ids: Array, weights: Array | None, combiner: Combiner, context: Context) -> Array:
    def on_device(values: Array, ids: Array, weights: Array | None) -> Array:
        num_bags, num_ids = ids.shape
        offsets = jnp.arange(num_bags + 1, dtype=jnp.int32) * num_ids
        rows = jnp.where(ids < 0, NO_ROW, ids).reshape(-1)
        own = None if weights is None else weights.reshape(-1)
        return api.lookup(values, [Segment(rows, offsets, own, combiner)])[0]

    part = P(context.axis)
    pooled: Array = context.on_each(on_device, (P(), part, part))(values, ids, weights)
    return pooled


def _values(table: Any) -> Any:
    return table.get_value() if isinstance(table, nnx.Variable) else jnp.asarray(table)
