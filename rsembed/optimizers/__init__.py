"""Optimizers of embedding rows."""

from rsembed.optimizers.base import CustomOptimizerSpec as CustomOptimizerSpec
from rsembed.optimizers.base import Hyperparameters as Hyperparameters
from rsembed.optimizers.base import LearningRate as LearningRate
from rsembed.optimizers.base import OptaxOptimizerSpec as OptaxOptimizerSpec
from rsembed.optimizers.base import OptimizerSpec as OptimizerSpec
from rsembed.optimizers.base import Slots as Slots
from rsembed.optimizers.base import from_optax as from_optax
from rsembed.optimizers.compact import AdamWOptimizerSpec as AdamWOptimizerSpec
from rsembed.optimizers.compact import LAMBOptimizerSpec as LAMBOptimizerSpec
from rsembed.optimizers.compact import LARSOptimizerSpec as LARSOptimizerSpec
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
from rsembed.optimizers.regularized import CounterAdagradOptimizerSpec as CounterAdagradOptimizerSpec
from rsembed.optimizers.regularized import CowClipAdagradOptimizerSpec as CowClipAdagradOptimizerSpec
from rsembed.optimizers.regularized import DecayedAdagradOptimizerSpec as DecayedAdagradOptimizerSpec
from rsembed.optimizers.regularized import RowWiseRMSPropOptimizerSpec as RowWiseRMSPropOptimizerSpec
from rsembed.optimizers.rules import AdagradMomentumOptimizerSpec as AdagradMomentumOptimizerSpec
from rsembed.optimizers.rules import AdagradMomentumSlotVariables as AdagradMomentumSlotVariables
from rsembed.optimizers.rules import AdagradOptimizerSpec as AdagradOptimizerSpec
from rsembed.optimizers.rules import AdagradSlotVariables as AdagradSlotVariables
from rsembed.optimizers.rules import AdamOptimizerSpec as AdamOptimizerSpec
from rsembed.optimizers.rules import AdamSlotVariables as AdamSlotVariables
from rsembed.optimizers.rules import F2AOptimizerSpec as F2AOptimizerSpec
from rsembed.optimizers.rules import F2ASlotVariables as F2ASlotVariables
from rsembed.optimizers.rules import FTRLOptimizerSpec as FTRLOptimizerSpec
from rsembed.optimizers.rules import FTRLSlotVariables as FTRLSlotVariables
from rsembed.optimizers.rules import LaPropOptimizerSpec as LaPropOptimizerSpec
from rsembed.optimizers.rules import LaPropSlotVariables as LaPropSlotVariables
from rsembed.optimizers.rules import LazyAdamOptimizerSpec as LazyAdamOptimizerSpec
from rsembed.optimizers.rules import RowWiseAdagradOptimizerSpec as RowWiseAdagradOptimizerSpec
from rsembed.optimizers.rules import SGDOptimizerSpec as SGDOptimizerSpec
from rsembed.optimizers.rules import SGDSlotVariables as SGDSlotVariables
from rsembed.optimizers.rules import TensorFlowAdamOptimizerSpec as TensorFlowAdamOptimizerSpec
from rsembed.optimizers.rules import TorchAdagradOptimizerSpec as TorchAdagradOptimizerSpec
