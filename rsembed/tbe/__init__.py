"""Table-batched embeddings: FBGEMM's TBE training module on any JAX backend."""

from rsembed.optimizers.regularization import (
    CounterBasedRegularizationDefinition as CounterBasedRegularizationDefinition,
)
from rsembed.optimizers.regularization import CounterWeightDecayMode as CounterWeightDecayMode
from rsembed.optimizers.regularization import CowClipDefinition as CowClipDefinition
from rsembed.optimizers.regularization import EmainplaceModeDefinition as EmainplaceModeDefinition
from rsembed.optimizers.regularization import EnsembleModeDefinition as EnsembleModeDefinition
from rsembed.optimizers.regularization import (
    GlobalWeightDecayDefinition as GlobalWeightDecayDefinition,
)
from rsembed.optimizers.regularization import GradSumDecay as GradSumDecay
from rsembed.optimizers.regularization import LearningRateMode as LearningRateMode
from rsembed.optimizers.regularization import StepMode as StepMode
from rsembed.optimizers.regularization import TailIdThreshold as TailIdThreshold
from rsembed.optimizers.regularization import WeightDecayMode as WeightDecayMode
from rsembed.optimizers.regularized import CounterAdagrad as CounterAdagrad
from rsembed.optimizers.regularized import CowClipAdagrad as CowClipAdagrad
from rsembed.optimizers.regularized import DecayedAdagrad as DecayedAdagrad
from rsembed.tbe.arguments import BoundsCheckMode as BoundsCheckMode
from rsembed.tbe.arguments import CacheAlgorithm as CacheAlgorithm
from rsembed.tbe.arguments import EmbOptimType as EmbOptimType
from rsembed.tbe.arguments import MultiPassPrefetchConfig as MultiPassPrefetchConfig
from rsembed.tbe.arguments import OptimType as OptimType
from rsembed.tbe.arguments import PoolingMode as PoolingMode
from rsembed.tbe.arguments import RecordCacheMetrics as RecordCacheMetrics
from rsembed.tbe.arguments import SparseType as SparseType
from rsembed.tbe.arguments import TBEStatsReporterConfig as TBEStatsReporterConfig
from rsembed.tbe.functional import TBEState as TBEState
from rsembed.tbe.module import (
    SplitTableBatchedEmbeddingBagsCodegen as SplitTableBatchedEmbeddingBagsCodegen,
)
from rsembed.tbe.module import TableBatchedEmbeddingBags as TableBatchedEmbeddingBags
from rsembed.tbe.plan import ComputeDevice as ComputeDevice
from rsembed.tbe.plan import EmbeddingLocation as EmbeddingLocation
from rsembed.tbe.plan import TBEPlan as TBEPlan
from rsembed.tbe.tables import TBEVariable as TBEVariable
