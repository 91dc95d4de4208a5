"""Flax NNX layers under the published names."""

from rsembed.refusals import refused_names as _refused_names
from rsembed.sparsecore.refused import NAMES_OF_NNX as _REFUSED

__getattr__ = _refused_names(__name__, _REFUSED, globals())
