"""`Init`: what every layer and table of the wing needs to know before it is made."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rsembed.checks import PositiveInt, validated
from rsembed.collection.devices import Devices
from rsembed.kernels.devices import check_threads
from rsembed.parallel import runtime


@dataclasses.dataclass(frozen=True)
class Context:
    """The devices that share tables.

    Attributes:
      mesh: a mesh with one axis over them.
      axis: its name.
      global_batch_size: samples of all devices in a step; None takes any number that the devices divide.
    """

    mesh: Mesh
    axis: str
    global_batch_size: int | None = None

    @property
    def num_devices(self) -> int:
        """Devices, and so shards of every table."""
        return self.mesh.shape[self.axis]

    @functools.cached_property
    def devices(self) -> Devices:
        """The devices in the form that the core takes."""
        return Devices.of(self.mesh, self.axis)

    def check_batch(self, num_samples: int, name: str) -> None:
        """Raises: ValueError: the samples of all processes are not as many as agreed."""
        processes = self.devices.num_processes
        if self.global_batch_size not in (None, num_samples * processes):
            raise ValueError(
                f"{name}: {num_samples} samples in each of {processes} processes, but sok.Init was told "
                f"global_batch_size={self.global_batch_size}; change one of them, or leave it out to take any batch."
            )

    def place(self, tree: Any) -> Any:
        """Arrays of this process, cut among the devices of all; copies, since JAX may take over what it is given."""
        sharding = NamedSharding(self.mesh, P(self.axis))
        place = functools.partial(jax.make_array_from_process_local_data, sharding)
        return jax.tree.map(place, jax.tree.map(np.array, tree))


_current: Context | None = None


@validated
def Init(
    global_batch_size: PositiveInt | None = None, *, mesh: Mesh | None = None, axis: str = "shard", **distributed: Any
) -> Context:
    """Starts the distributed runtime, if there are several processes, and says which devices share tables.

    Call it once, before any layer is made; a second call changes what later layers get.

    Args:
      global_batch_size: samples of a step over all devices; buffers need it no longer, so it is only checked.
      mesh: devices with an axis named `axis`, and no other; None takes all.
      axis: name of the mesh axis.
      **distributed: for `parallel.runtime.init`.

    Raises: ValueError: the mesh has other axes, or the batch does not divide among its devices.
    Source: Sparse Operation Kit, `sok.Init`.

    Example:
      >>> from rsembed import sok
      >>> sok.Init(global_batch_size=64).num_devices in (1, 2, 4, 8)
      True
    """
    global _current
    runtime.init(**distributed)
    mesh = runtime.make_mesh(axis) if mesh is None else mesh
    if mesh.axis_names != (axis,):
        raise ValueError(f"sok.Init: the mesh must have the one axis {axis!r}, got {mesh.axis_names}; pass axis=.")
    check_threads(mesh)
    context = Context(mesh, axis, global_batch_size)
    if global_batch_size is not None and global_batch_size % context.num_devices:
        raise ValueError(
            f"sok.Init: global_batch_size={global_batch_size} does not divide among {context.num_devices} devices."
        )
    _current = context
    return context


def current_context(context: Context | None = None) -> Context:
    """The context given, or that of the last `Init`.

    Raises: RuntimeError: there is none.
    """
    found = _current if context is None else context
    if found is None:
        raise RuntimeError("call sok.Init() first: it says which devices share the tables. Or pass context=.")
    return found
