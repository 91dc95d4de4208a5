"""Arrays on a mesh with explicit axes, which is what `jax.make_mesh` gives by default.

Their types say how they are split, and most operations then want to be told how their result is. Here nobody knows, so
functions and modules work on copies on every device. Modules make the rows, which takes almost all of the time, on the
devices over which the type of the ids splits them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from rsembed.bags import Bags
from rsembed.tt.chain import Cores, pooled_rows


def on_every_device(tree: Any) -> Any:
    """The tree, in which arrays lie whole on every device of a mesh with explicit axes: their own, or that is set."""
    return jax.tree.map(_whole, tree)


def _whole(array: Any) -> Any:
    if not isinstance(array, jax.Array):
        return array
    sharding = jax.typeof(array).sharding
    mesh = jax.sharding.get_abstract_mesh() if sharding.mesh.empty else sharding.mesh
    if AxisType.Explicit not in mesh.axis_types or (mesh is sharding.mesh and not any(sharding.spec)):
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec()))


class Split(NamedTuple):
    """How ids are split.

    Attributes:
      mesh: with explicit axes.
      axes: over which the devices have ids of their own.
    """

    mesh: AbstractMesh
    axes: tuple[str, ...]

    @staticmethod
    def of(indices: Any) -> Split | None:
        """The split of ids by position, where their type names one."""
        ids = indices.ids if isinstance(indices, Bags) else indices
        if not isinstance(ids, jax.Array):
            return None
        mesh, spec = jax.typeof(ids).sharding.mesh, jax.typeof(ids).sharding.spec
        if not mesh.axis_names or set(mesh.axis_types) != {AxisType.Explicit} or not spec or spec[0] is None:
            return None
        return Split(mesh, spec[0] if isinstance(spec[0], tuple) else (spec[0],))


@functools.partial(jax.jit, static_argnames=("split", "slice_shapes", "num_bags", "implementation"))
def shared_rows(
    split: Split | None,
    cores: Cores,
    digits: tuple[Int[Array, " nnz"], ...],
    bags: Int[Array, " nnz"],
    gains: Float[Array, " nnz"],
    **options: Any,
) -> Float[Array, "bags dim"]:
    """`chain.pooled_rows`, of which each device makes the rows of its own lookups, and pulls their gradients back.

    The pooled rows are summed over devices, and so are, by what `shard_map` does to copies, the gradients of cores.
    """
    if split is None:
        return pooled_rows(cores, digits, bags, gains, **options)
    own, whole = PartitionSpec(split.axes), PartitionSpec()

    def of_own(cores: Cores, *lookups: Any) -> Array:
        return jax.lax.psum(pooled_rows(cores, *lookups, **options), split.axes)

    shared = jax.shard_map(of_own, mesh=split.mesh, in_specs=(whole, own, own, own), out_specs=whole)
    return shared(cores, *jax.sharding.reshard((digits, bags, gains), NamedSharding(split.mesh, own)))
