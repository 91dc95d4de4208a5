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

from rsembed.bags import Bags, as_bags, check_ids_dtype, check_values, device_copy, is_traced, narrow_ids
from rsembed.checks import check_type
from rsembed.collection.inputs import padded
from rsembed.kernels import api
from rsembed.kernels.contract import Segment
from rsembed.parallel.agreement import is_global
from rsembed.sok.initialize import Context
from rsembed.specs import Combiner


def read_ids(table: Any, ids: Any, weights: Any, where: str) -> Bags:
    """The bags of a plain table. Raises: TypeError or ValueError: it is none, or an id is no row; named `where`."""
    check_type(table.get_value() if isinstance(table, nnx.Variable) else table, Float[Array, "rows dim"], where)
    if isinstance(weights, jax.core.Tracer) and isinstance(ids, np.ndarray):  # differentiated by their weights
        read_ids(table, ids, None, where)
        ids = jnp.asarray(ids)
    bags = as_bags(ids if weights is None else (ids, weights), feature=where)
    check_ids_dtype(bags, feature=where)
    if is_own(bags):
        check_values(bags, feature=where, table=where, vocabulary_size=_values(table).shape[0])
    return bags


def is_own(bags: Bags) -> bool:
    """Whether the bags are those of this process, to be seen here: not inside `jit`, no global arrays."""
    return not is_traced(bags) and not any(map(is_global, jax.tree.leaves(bags)))


def pool(table: Any, bags: Bags, combiner: Combiner) -> Float[Array, "batch dim"]:
    """Pooled rows, where the table is."""
    weights = None if bags.weights is None else device_copy(bags.weights, jnp.float32)
    offsets = device_copy(bags.offsets, jnp.int32)
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
    return _pool_everywhere(_values(table), context.place(padded(bags, width)), combiner, context)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _pool_everywhere(values: Array, batch: Any, combiner: Combiner, context: Context) -> Array:
    def on_device(values: Array, batch: Any) -> Array:
        return pool(values, as_bags(batch, feature="samples of this device"), combiner)

    pooled: Array = context.on_each(on_device, (P(), P(context.axis)))(values, batch)
    return pooled


def _values(table: Any) -> Any:
    return table.get_value() if isinstance(table, nnx.Variable) else jnp.asarray(table)
