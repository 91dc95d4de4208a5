"""The devices that share the tables of a collection, and functions that run on all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from rsembed.kernels.devices import check_threads
from rsembed.parallel.agreement import processes_of


@dataclasses.dataclass(frozen=True)
class Devices:
    """One device (`mesh` is None), or the devices along some axes of a mesh.

    Args:
      mesh: mesh that contains the devices. An abstract mesh is accepted, because inside a
        `shard_map` JAX only has the abstract mesh.
      axes: axes of the mesh over which samples and tables are split. Devices along axes that are
        not in `axes` hold copies of the tables and repeat the computation.
    """

    mesh: Mesh | AbstractMesh | None = None
    axes: tuple[str, ...] = ()

    @staticmethod
    def of(mesh: Mesh | None, axis: str | Sequence[str] | None) -> Devices:
        """Devices along some axes of a mesh.

        Raises: ValueError: an axis is unknown or repeated, or there is no mesh.
        """
        if mesh is None:
            if axis is not None:
                raise ValueError(
                    f"sharding_axis={axis!r} needs a mesh; pass mesh=jax.make_mesh(...)."
                )
            return Devices()
        if axis is None:
            axis = mesh.axis_names
        axes = (axis,) if isinstance(axis, str) else tuple(axis)
        if not axes or not set(axes) <= set(mesh.axis_names) or len(set(axes)) != len(axes):
            raise ValueError(
                f"sharding_axis={axis!r} must name axes of the mesh once each, which has {mesh.axis_names}."
            )
        check_threads(mesh)
        # With explicit axes, users would have to state shardings in the code of their dense layers.
        automatic = (AxisType.Auto,) * mesh.devices.ndim
        return Devices(Mesh(mesh.devices, mesh.axis_names, axis_types=automatic), axes)

    @property
    def known_mesh(self) -> Mesh | None:
        """The mesh. None if there is no mesh, or if it is an abstract mesh without devices."""
        return self.mesh if isinstance(self.mesh, Mesh) else None

    @functools.cached_property
    def num_devices(self) -> int:
        """Number of parts into which samples and tables are split."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @functools.cached_property
    def num_processes(self) -> int:
        """Number of processes that have devices of the mesh. Each process has different samples."""
        mesh = self.known_mesh
        return 1 if mesh is None else len(processes_of(mesh))

    @functools.cached_property
    def num_parts_here(self) -> int:
        """Number of parts on devices of this process, for an array with the partition `split`."""
        mesh = self.known_mesh
        if mesh is None:
            return self.num_devices
        indices = self.sharding(self.split).addressable_devices_indices_map((self.num_devices,))
        return len({index[0].start for index in indices.values() if index is not None})

    @functools.cached_property
    def identity(self) -> str:
        """String that identifies the devices, the shape of the mesh and the chosen axes."""
        mesh = self.known_mesh
        if mesh is None:
            return f"{self.num_devices} {self.axes}"
        numbers = [device.id for device in mesh.devices.flat]
        return f"{dict(mesh.shape)} {numbers} {self.axes}"

    @property
    def split(self) -> PartitionSpec:
        """Partition along the first axis, for samples and for sharded rows."""
        return PartitionSpec(self.axes)

    def sharding(self, partition: PartitionSpec) -> NamedSharding:
        """Sharding of a global array that `partition` splits over the mesh.

        Raises: ValueError: there is no mesh.
        """
        if self.mesh is None:
            raise ValueError("one device alone has no sharding.")
        return NamedSharding(self.mesh, partition)

    def place(self, tree: PyTree, partition: PartitionSpec) -> PyTree:
        """Reshards the arrays of a tree. On one device, `tree` is returned unchanged."""
        if self.mesh is None:
            return tree
        # `device_put` rejects some arrays if the sharding spans several processes, so a compiled
        # program reshards the arrays.
        return jax.jit(_same, out_shardings=self.sharding(partition))(tree)

    def place_from_host(self, tree: PyTree, partition: PartitionSpec) -> PyTree:
        """Copies numpy arrays to the devices, sharded by a partition.

        All processes of the mesh must call `place_from_host` with equal arrays. On a mesh, JAX
        arrays in `tree` are returned unchanged.
        """
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        sharding = self.sharding(partition)

        def placed(leaf: PyTree) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return leaf
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(placed, tree)

    def on_each(
        self,
        function: Callable[..., PyTree],
        in_specs: PyTree,
        out_specs: PyTree,
    ) -> Callable[..., PyTree]:
        """Function of global arrays that runs `function` on every device.

        Args:
          function: function that runs on one device, with that device's part of each array.
          in_specs: partition specs of the arguments, as for `jax.shard_map`.
          out_specs: partition specs of the results.

        Returns: a function of global arrays, on one device `function` itself, on a mesh a compiled
          function. On a mesh, the returned function raises ValueError if a mesh with explicit axes
          is set during the call.
        """
        if self.mesh is None:
            return function
        # Kernels do not declare over which mesh axes their results vary, so `check_vma` is off.
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

        @functools.wraps(function)
        def on_each_device(*args: PyTree) -> PyTree:
            context = jax.sharding.get_abstract_mesh()
            if AxisType.Explicit in context.axis_types:
                raise ValueError(
                    f"a mesh of explicit axes {context.axis_names} is set, and tables on a mesh work under automatic "
                    "axes: leave jax.set_mesh out, or make its mesh by rsembed.parallel.make_mesh or by "
                    "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))."
                )
            return mapped(*args)

        return jax.jit(on_each_device)

    # Inside `on_each`:

    def index(self) -> Array:
        """Index of this device along the axes that split the tables."""
        return jnp.zeros((), jnp.int32) if self.mesh is None else jax.lax.axis_index(self.axes)

    def total(self, tree: PyTree) -> PyTree:
        """Sum of each array of a tree over all devices."""
        return tree if self.mesh is None else jax.lax.psum(tree, self.axes)

    def gather(self, array: Array) -> Array:
        """Concatenates the arrays of all devices along the first axis."""
        if self.mesh is None or array.shape[0] == 0:  # XLA cannot gather empty arrays.
            return array
        return jax.lax.all_gather(array, self.axes, tiled=True)

    def columns_of_all(self, array: Array) -> Array:
        """Converts a matrix that is split by row to a matrix that is split by column."""
        return jax.lax.all_to_all(array, self.axes, split_axis=1, concat_axis=0, tiled=True)

    def rows_of_all(self, array: Array) -> Array:
        """Converts a matrix that is split by column to a matrix that is split by row."""
        return jax.lax.all_to_all(array, self.axes, split_axis=0, concat_axis=1, tiled=True)


def _same(tree: PyTree) -> PyTree:
    return tree
