"""Optimizers of embedding rows."""

from rsembed.optimizers.base import Custom as Custom
from rsembed.optimizers.base import Hyperparameters as Hyperparameters
from rsembed.optimizers.base import LearningRate as LearningRate
from rsembed.optimizers.base import OptaxOptimizerSpec as OptaxOptimizerSpec
from rsembed.optimizers.base import OptimizerSpec as OptimizerSpec
from rsembed.optimizers.base import Slots as Slots
from rsembed.optimizers.base import from_optax as from_optax
from rsembed.optimizers.regularization import (
    CounterBasedRegularizationDefinition as CounterBasedRegularizationDefinition,
)
from rsembed.optimizers.regularization import CounterWeightDecayMode as CounterWeightDecayMode
from rsembed.optimizers.regularization import CowClipDefinition as CowClipDefinition
from rsembed.optimizers.regularization import EmainplaceModeDefinition as EmainplaceModeDefinition
from rsembed.optimizers.regularization import EnsembleModeDefinition as EnsembleModeDefinition
from rsembed.optimizers.regularization import GlobalWeightDecayDefinition as GlobalWeightDecayDefinition
from rsembed.optimizers.regularization import GradSumDecay as GradSumDecay
from rsembed.optimizers.regularization import LearningRateMode as LearningRateMode
from rsembed.optimizers.regularization import StepMode as StepMode
from rsembed.optimizers.regularization import TailIdThreshold as TailIdThreshold
from rsembed.optimizers.regularization import WeightDecayMode as WeightDecayMode
from rsembed.optimizers.regularization import global_decay_factor as global_decay_factor
from rsembed.optimizers.regularized import LAMB as LAMB
from rsembed.optimizers.regularized import LARS as LARS
from rsembed.optimizers.regularized import AdamW as AdamW
from rsembed.optimizers.regularized import CounterAdagrad as CounterAdagrad
from rsembed.optimizers.regularized import CowClipAdagrad as CowClipAdagrad
from rsembed.optimizers.regularized import DecayedAdagrad as DecayedAdagrad
from rsembed.optimizers.rules import F2A as F2A
from rsembed.optimizers.rules import FTRL as FTRL
from rsembed.optimizers.rules import SGD as SGD
from rsembed.optimizers.rules import Adagrad as Adagrad
from rsembed.optimizers.rules import AdagradMomentum as AdagradMomentum
from rsembed.optimizers.rules import AdagradMomentumSlotVariables as AdagradMomentumSlotVariables
from rsembed.optimizers.rules import AdagradSlotVariables as AdagradSlotVariables
from rsembed.optimizers.rules import Adam as Adam
from rsembed.optimizers.rules import AdamSlotVariables as AdamSlotVariables
from rsembed.optimizers.rules import F2ASlotVariables as F2ASlotVariables
from rsembed.optimizers.rules import FTRLSlotVariables as FTRLSlotVariables
from rsembed.optimizers.rules import LaProp as LaProp
from rsembed.optimizers.rules import LaPropSlotVariables as LaPropSlotVariables
from rsembed.optimizers.rules import LazyAdam as LazyAdam
from rsembed.optimizers.rules import RowWiseAdagrad as RowWiseAdagrad
from rsembed.optimizers.rules import SGDSlotVariables as SGDSlotVariables
from rsembed.optimizers.rules import TensorFlowAdam as TensorFlowAdam
from rsembed.optimizers.rules import TorchAdagrad as TorchAdagrad


def _place_of_rule(name: str) -> str:
    """Where a rule is that other systems and older programs call `AdamOptimizerSpec`, as the end of a sentence."""
    rule = name.removesuffix("OptimizerSpec")
    return f"; use {__name__}.{rule}" if rule in globals() else ""


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_place_of_rule(name)}")
