"""Optimizers for embedding rows.

Settings that are used only by programs written for FBGEMM are in `rsembed.tbe`.
"""

from rsembed.optimizers import regularization, regularized, rules
from rsembed.optimizers.base import (
    Custom as Custom,
    OptimizerSpec as OptimizerSpec,
    from_optax as from_optax,
)
from rsembed.optimizers.regularized import LAMB as LAMB, LARS as LARS, AdamW as AdamW
from rsembed.optimizers.rules import (
    FTRL as FTRL,
    SGD as SGD,
    Adagrad as Adagrad,
    Adam as Adam,
    LaProp as LaProp,
    LazyAdam as LazyAdam,
    RowWiseAdagrad as RowWiseAdagrad,
    TorchAdagrad as TorchAdagrad,
)


def _place_of_rule(name: str) -> str:
    """Hint for an AttributeError: the current location of a renamed optimizer, or ''."""
    rule = name.removesuffix("OptimizerSpec")
    if rule in globals():
        return f"; use {__name__}.{rule}"
    for module in (rules, regularized, regularization):
        defining_module = getattr(vars(module).get(rule), "__module__", "")
        if defining_module.startswith(__name__):
            return f"; use {defining_module}.{rule}"
    return ""


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_place_of_rule(name)}")
