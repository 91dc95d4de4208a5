"""Embedding tables for JAX. Subpackages such as `rsembed.tbe` are imported on first use."""

import importlib
import importlib.metadata

from rsembed.bags import Bags as Bags, Jagged as Jagged
from rsembed.collection import (
    EmbeddingCollection as EmbeddingCollection,
    EmbeddingState as EmbeddingState,
    for_serving as for_serving,
    value_and_grad as value_and_grad,
)
from rsembed.kernels.api import pairwise_interaction as pairwise_interaction
from rsembed.keys import hash_keys as hash_keys
from rsembed.optimizers import OptimizerSpec as OptimizerSpec, from_optax as from_optax
from rsembed.row_gradients import (
    RowGradients as RowGradients,
    clip_by_global_norm as clip_by_global_norm,
    combine as combine,
    global_norm as global_norm,
    scale as scale,
)
from rsembed.specs import (
    FeatureSpec as FeatureSpec,
    QuantizationConfig as QuantizationConfig,
    TableSpec as TableSpec,
)
from rsembed.stacking import plan_stacking as plan_stacking
from rsembed.storage import Hashed as Hashed, HostCached as HostCached

_WINGS = (
    "checkpoint",
    "datasets",
    "fdo",
    "linen",
    "nnx",
    "parallel",
    "plot",
    "sok",
    "sparsecore",
    "tbe",
    "tt",
)
_NAMES = [
    name
    for name, value in globals().items()
    if getattr(value, "__module__", "").startswith("rsembed.")
]


def __getattr__(name: str) -> object:
    if name in _WINGS:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__version__":
        return importlib.metadata.version(__name__)
    near = importlib.import_module(f"{__name__}.optimizers")._place_of_rule(name)
    near = near or importlib.import_module(f"{__name__}.checks").did_you_mean(name, __dir__())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return sorted([*_NAMES, *_WINGS, "optimizers", "__version__"])
