"""The devices of a mesh that share the tables, and the plain collectives between them."""

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

    Samples and tables are split over `axes`; devices along the other axes hold copies and compute the same. Inside a
    `shard_map`, which knows no more of its mesh, an abstract one will do.
    """

    mesh: Mesh | AbstractMesh | None = None
    axes: tuple[str, ...] = ()

    @staticmethod
    def of(mesh: Mesh | None, axis: str | Sequence[str] | None) -> Devices:
        """Raises: ValueError: an axis is not in the mesh, or named twice, or there is no mesh."""
        if mesh is None:
            if axis is not None:
                raise ValueError(f"sharding_axis={axis!r} needs a mesh; pass mesh=jax.make_mesh(...).")
            return Devices()
        axes = tuple(mesh.axis_names if axis is None else (axis,) if isinstance(axis, str) else axis)
        if not axes or not set(axes) <= set(mesh.axis_names) or len(set(axes)) != len(axes):
            raise ValueError(
                f"sharding_axis={axis!r} must name axes of the mesh once each, which has {mesh.axis_names}."
            )
        check_threads(mesh)
        # With explicit axes, every operation of the dense layers would have to say how its result is split.
        return Devices(Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim), axes)

    @property
    def known_mesh(self) -> Mesh | None:
        """The mesh, if there is one and it is not abstract."""
        return self.mesh if isinstance(self.mesh, Mesh) else None

    @functools.cached_property
    def num_devices(self) -> int:
        """Parts into which samples and tables are split."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @functools.cached_property
    def num_processes(self) -> int:
        """Processes that each bring their own samples."""
        mesh = self.known_mesh
        return 1 if mesh is None else len(processes_of(mesh))

    @functools.cached_property
    def num_parts_here(self) -> int:
        """Parts of a split array that this process holds."""
        mesh = self.known_mesh
        if mesh is None:
            return self.num_devices
        indices = self.sharding(self.split).addressable_devices_indices_map((self.num_devices,))
        return len({index[0].start for index in indices.values() if index is not None})

    @functools.cached_property
    def identity(self) -> str:
        """Text about the devices that is different for every mesh, and for every choice of its axes."""
        mesh = self.known_mesh
        if mesh is None:
            return f"{self.num_devices} {self.axes}"
        numbers = [device.id for device in mesh.devices.flat]
        return f"{dict(mesh.shape)} {numbers} {self.axes}"

    @property
    def split(self) -> PartitionSpec:
        """Leading axis split: samples, and rows that have one owner."""
        return PartitionSpec(self.axes)

    def sharding(self, partition: PartitionSpec) -> NamedSharding:
        """The sharding of a global array. Raises: ValueError: there is no mesh."""
        if self.mesh is None:
            raise ValueError("one device alone has no sharding.")
        return NamedSharding(self.mesh, partition)

    def place(self, tree: PyTree, partition: PartitionSpec) -> PyTree:
        """Arrays laid out as `partition` says; unchanged on one device."""
        if self.mesh is None:
            return tree
        # Not device_put, which knows only devices of this process.
        return jax.jit(_same, out_shardings=self.sharding(partition))(tree)

    def place_from_host(self, tree: PyTree, partition: PartitionSpec) -> PyTree:
        """Whole arrays of numpy, equal in every process, laid out as `partition` says; JAX's stay where they are."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        sharding = self.sharding(partition)

        def placed(leaf: PyTree) -> jax.Array:
            if isinstance(leaf, jax.Array):
                return leaf
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(placed, tree)

    def on_each(self, function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree) -> Callable[..., PyTree]:
        """`function` of what one device holds, as a function of global arrays.

        Raises: ValueError: it is called while a mesh of explicit axes is set.
        """
        if self.mesh is None:
            return function
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )  # kernels say nothing about how their results vary over the mesh

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
        """Number of this device."""
        return jnp.zeros((), jnp.int32) if self.mesh is None else jax.lax.axis_index(self.axes)

    def total(self, tree: PyTree) -> PyTree:
        """Sums over devices."""
        return tree if self.mesh is None else jax.lax.psum(tree, self.axes)

    def gather(self, array: Array) -> Array:
        """The parts of all devices, in their order."""
        if self.mesh is None or array.shape[0] == 0:  # of nothing, XLA gathers nothing but an error
            return array
        return jax.lax.all_gather(array, self.axes, tiled=True)

    def columns_of_all(self, array: Array) -> Array:
        """From all columns of own rows to own columns of all rows."""
        return jax.lax.all_to_all(array, self.axes, split_axis=1, concat_axis=0, tiled=True)

    def rows_of_all(self, array: Array) -> Array:
        """From own columns of all rows to all columns of own rows."""
        return jax.lax.all_to_all(array, self.axes, split_axis=0, concat_axis=1, tiled=True)


def _same(tree: PyTree) -> PyTree:
    return tree
