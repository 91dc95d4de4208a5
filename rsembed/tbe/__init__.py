"""Table-batched embeddings: FBGEMM's TBE training module on any JAX backend."""

from rsembed.optimizers.regularization import (
    CounterBasedRegularizationDefinition as CounterBasedRegularizationDefinition,
    CounterWeightDecayMode as CounterWeightDecayMode,
    CowClipDefinition as CowClipDefinition,
    EmainplaceModeDefinition as EmainplaceModeDefinition,
    EnsembleModeDefinition as EnsembleModeDefinition,
    GlobalWeightDecayDefinition as GlobalWeightDecayDefinition,
    GradSumDecay as GradSumDecay,
    LearningRateMode as LearningRateMode,
    StepMode as StepMode,
    TailIdThreshold as TailIdThreshold,
    WeightDecayMode as WeightDecayMode,
)
from rsembed.optimizers.regularized import (
    CounterAdagrad as CounterAdagrad,
    CowClipAdagrad as CowClipAdagrad,
    DecayedAdagrad as DecayedAdagrad,
)
from rsembed.tbe.arguments import (
    BoundsCheckMode as BoundsCheckMode,
    CacheAlgorithm as CacheAlgorithm,
    EmbOptimType as EmbOptimType,
    MultiPassPrefetchConfig as MultiPassPrefetchConfig,
    OptimType as OptimType,
    PoolingMode as PoolingMode,
    RecordCacheMetrics as RecordCacheMetrics,
    SparseType as SparseType,
    TBEStatsReporterConfig as TBEStatsReporterConfig,
)
from rsembed.tbe.functional import TBEState as TBEState
from rsembed.tbe.module import (
    SplitTableBatchedEmbeddingBagsCodegen as SplitTableBatchedEmbeddingBagsCodegen,
    TableBatchedEmbeddingBags as TableBatchedEmbeddingBags,
)
from rsembed.tbe.plan import (
    ComputeDevice as ComputeDevice,
    EmbeddingLocation as EmbeddingLocation,
    TBEPlan as TBEPlan,
)
from rsembed.tbe.tables import TBEVariable as TBEVariable
