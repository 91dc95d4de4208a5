"""What many tests begin and end with: meshes of the first devices, and the comparison of trees of arrays."""

import jax
import numpy as np
from jax.sharding import Mesh


def mesh_of(*shape, axes="xyz"):
    """Mesh of the first CPU devices; its axes are called x, y and z."""
    devices = jax.devices()[: int(np.prod(shape))]
    return Mesh(np.asarray(devices).reshape(shape), tuple(axes[: len(shape)]))


def made_mesh(num_devices):
    """Mesh as `jax.make_mesh` makes it, whose axis is explicit; None for None."""
    if num_devices is None:
        return None
    return jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])


def assert_same(tree, other):
    """Both trees have one structure, and equal arrays."""
    jax.tree.map(np.testing.assert_array_equal, tree, other)
