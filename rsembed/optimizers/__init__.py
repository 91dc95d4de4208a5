"""Optimizers of embedding rows."""

from rsembed.optimizers.base import Hyperparameters as Hyperparameters
from rsembed.optimizers.base import LearningRate as LearningRate
from rsembed.optimizers.base import OptimizerSpec as OptimizerSpec
from rsembed.optimizers.base import Slots as Slots
from rsembed.optimizers.custom import CustomOptimizerSpec as CustomOptimizerSpec
from rsembed.optimizers.custom import OptaxOptimizerSpec as OptaxOptimizerSpec
from rsembed.optimizers.custom import from_optax as from_optax
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
from rsembed.optimizers.rules import RowWiseAdagradOptimizerSpec as RowWiseAdagradOptimizerSpec
from rsembed.optimizers.rules import SGDOptimizerSpec as SGDOptimizerSpec
from rsembed.optimizers.rules import SGDSlotVariables as SGDSlotVariables
from rsembed.optimizers.rules import TorchAdagradOptimizerSpec as TorchAdagradOptimizerSpec
