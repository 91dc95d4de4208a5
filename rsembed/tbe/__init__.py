"""Table-batched embeddings: FBGEMM's TBE training module on any JAX backend."""

from rsembed.refusals import refused_names as _refused_names
from rsembed.tbe.dense import DenseTableBatchedEmbeddingBags as DenseTableBatchedEmbeddingBags
from rsembed.tbe.dense import DenseTableBatchedEmbeddingBagsCodegen as DenseTableBatchedEmbeddingBagsCodegen
from rsembed.tbe.functional import TBEState as TBEState
from rsembed.tbe.module import SplitTableBatchedEmbeddingBagsCodegen as SplitTableBatchedEmbeddingBagsCodegen
from rsembed.tbe.module import TableBatchedEmbeddingBags as TableBatchedEmbeddingBags
from rsembed.tbe.module import TBEVariable as TBEVariable
from rsembed.tbe.plan import TBEPlan as TBEPlan
from rsembed.tbe.records import BoundsCheckMode as BoundsCheckMode
from rsembed.tbe.records import CacheAlgorithm as CacheAlgorithm
from rsembed.tbe.records import ComputeDevice as ComputeDevice
from rsembed.tbe.records import CounterBasedRegularizationDefinition as CounterBasedRegularizationDefinition
from rsembed.tbe.records import CounterWeightDecayMode as CounterWeightDecayMode
from rsembed.tbe.records import CowClipDefinition as CowClipDefinition
from rsembed.tbe.records import EmainplaceModeDefinition as EmainplaceModeDefinition
from rsembed.tbe.records import EmbeddingLocation as EmbeddingLocation
from rsembed.tbe.records import EmbOptimType as EmbOptimType
from rsembed.tbe.records import EnsembleModeDefinition as EnsembleModeDefinition
from rsembed.tbe.records import GlobalWeightDecayDefinition as GlobalWeightDecayDefinition
from rsembed.tbe.records import GradSumDecay as GradSumDecay
from rsembed.tbe.records import LearningRateMode as LearningRateMode
from rsembed.tbe.records import MultiPassPrefetchConfig as MultiPassPrefetchConfig
from rsembed.tbe.records import OptimType as OptimType
from rsembed.tbe.records import PoolingMode as PoolingMode
from rsembed.tbe.records import RecordCacheMetrics as RecordCacheMetrics
from rsembed.tbe.records import SparseType as SparseType
from rsembed.tbe.records import StepMode as StepMode
from rsembed.tbe.records import TailIdThreshold as TailIdThreshold
from rsembed.tbe.records import TBEStatsReporterConfig as TBEStatsReporterConfig
from rsembed.tbe.records import UserEnabledConfigDefinition as UserEnabledConfigDefinition
from rsembed.tbe.records import WeightDecayMode as WeightDecayMode
from rsembed.tbe.refused import NAMES as _REFUSED

__getattr__ = _refused_names(__name__, _REFUSED, globals())
