"""Arrays on a mesh with explicit axes, which is what `jax.make_mesh` gives by default.

Their types say how they are split, and most operations then want to be told how their result is. Here nobody knows, so
functions and modules work on copies on every device.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


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
