"""Helpers of many tests: meshes, modules of scripts, columns like those of pandas, equal trees."""

import functools
import importlib.util
import sys

import jax
import numpy as np
from jax.sharding import Mesh


def module_of(path):
    """A file outside of packages, imported as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their annotations there
    spec.loader.exec_module(module)
    return module


def mesh_of(*shape, axes="xyz"):
    """Mesh of the first devices, with axes x, y and z."""
    devices = jax.devices()[: int(np.prod(shape))]
    return Mesh(np.asarray(devices).reshape(shape), tuple(axes[: len(shape)]))


def made_mesh(num_devices):
    """Mesh of `jax.make_mesh`, with an explicit axis. None if `num_devices` is None."""
    if num_devices is None:
        return None
    return jax.make_mesh((num_devices,), ("x",), devices=jax.devices()[:num_devices])


def assert_same(tree, other):
    """Checks that the trees have the same structure and equal arrays."""
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def assert_close(tree, other, **tolerances):
    """Checks that the trees have the same structure and arrays within the tolerances."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerances), tree, other)


class NA:
    """Like pandas.NA: no comparison has a truth value."""

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")

    def __ne__(self, other):
        return self

    __eq__, __hash__ = __ne__, object.__hash__


class Column:
    """Like columns of pandas, polars and Arrow: an iterable that numpy reads as an array of objects."""

    def __init__(self, values):
        self.values = values

    def __iter__(self):
        return iter(self.values)

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.values, np.ndarray):
            return self.values
        array = np.empty(len(self.values), object)
        array[:] = self.values
        return array
