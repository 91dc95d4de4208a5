"""Arrays on a mesh with explicit axes, which is what `jax.make_mesh` gives by default.

Their types say how they are split, and most operations then want to be told how their result is. Here nobody knows
better than the compiler, so functions run as on automatic axes, and modules take copies on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Given = ParamSpec("Given")
Result = TypeVar("Result")


def explicit_mesh_of(tree: Any) -> AbstractMesh | None:
    """The mesh with explicit axes that an array of the tree lies on, or that is set; None if there is none."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def as_on_automatic_axes(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, for arrays on any mesh; with explicit axes its result lies whole on every device."""

    @functools.wraps(function)
    def call(*arguments: Given.args, **options: Given.kwargs) -> Result:
        mesh = explicit_mesh_of((arguments, options))
        if mesh is None:
            return function(*arguments, **options)
        leaves, structure = jax.tree.flatten((arguments, options))
        is_array = [isinstance(leaf, jax.Array) for leaf in leaves]  # ids of the host keep their 64 bits

        def of_arrays(*arrays: Any) -> Result:
            given = iter(arrays)
            filled = [next(given) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
            arguments, options = jax.tree.unflatten(structure, filled)
            return function(*arguments, **options)

        arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
        whole = NamedSharding(mesh, PartitionSpec())
        run = jax.sharding.auto_axes(of_arrays, axes=mesh.explicit_axes, out_sharding=whole)
        return run(*arrays)

    return call


def on_every_device(tree: Any) -> Any:
    """The tree, in which arrays that are split over explicit axes are copied to every device of their mesh."""
    return jax.tree.map(_whole, tree)


def _whole(array: Any) -> Any:
    if not isinstance(array, jax.Array):
        return array
    sharding = jax.typeof(array).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types or not any(sharding.spec):
        return array
    return jax.sharding.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))
