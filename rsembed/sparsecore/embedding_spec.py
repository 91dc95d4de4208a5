"""Specs of tables, features and optimizers, under the published names."""

from rsembed.optimizers import AdagradMomentumOptimizerSpec as AdagradMomentumOptimizerSpec
from rsembed.optimizers import AdagradMomentumSlotVariables as AdagradMomentumSlotVariables
from rsembed.optimizers import AdagradOptimizerSpec as AdagradOptimizerSpec
from rsembed.optimizers import AdagradSlotVariables as AdagradSlotVariables
from rsembed.optimizers import AdamOptimizerSpec as AdamOptimizerSpec
from rsembed.optimizers import AdamSlotVariables as AdamSlotVariables
from rsembed.optimizers import CustomOptimizerSpec as CustomOptimizerSpec
from rsembed.optimizers import F2AOptimizerSpec as F2AOptimizerSpec
from rsembed.optimizers import F2ASlotVariables as F2ASlotVariables
from rsembed.optimizers import FTRLOptimizerSpec as FTRLOptimizerSpec
from rsembed.optimizers import FTRLSlotVariables as FTRLSlotVariables
from rsembed.optimizers import Hyperparameters
from rsembed.optimizers import LaPropOptimizerSpec as LaPropOptimizerSpec
from rsembed.optimizers import LaPropSlotVariables as LaPropSlotVariables
from rsembed.optimizers import LearningRate as LearningRate
from rsembed.optimizers import OptimizerSpec as OptimizerSpec
from rsembed.optimizers import RowWiseAdagradOptimizerSpec as RowWiseAdagradOptimizerSpec
from rsembed.optimizers import SGDOptimizerSpec as SGDOptimizerSpec
from rsembed.optimizers import SGDSlotVariables as SGDSlotVariables
from rsembed.sparsecore.layout_record import CallablePlaceholder as CallablePlaceholder
from rsembed.specs import DEFAULT_ACTIVATION_MEM_BYTES_LIMIT as DEFAULT_ACTIVATION_MEM_BYTES_LIMIT
from rsembed.specs import CallableTableInitializer as CallableTableInitializer
from rsembed.specs import FeatureIdTransformation as FeatureIdTransformation
from rsembed.specs import FeatureSpec as FeatureSpec
from rsembed.specs import QuantizationConfig as QuantizationConfig
from rsembed.specs import StackedTableSpec as StackedTableSpec
from rsembed.specs import TableSettingInStack as TableSettingInStack
from rsembed.specs import TableSpec as TableSpec

HyperParameterType = Hyperparameters
NumericParameter = float
