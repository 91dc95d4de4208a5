"""Tensor-train embedding tables."""

from rsembed.tt.cores import bag as bag, full_weight as full_weight, rows as rows
from rsembed.tt.module import (
    TableBatchedTTEmbeddingBag as TableBatchedTTEmbeddingBag,
    TTEmbeddingBag as TTEmbeddingBag,
)
from rsembed.tt.new_cores import (
    from_dense as from_dense,
    from_tensorly as from_tensorly,
    init_cores as init_cores,
    round_cores as round_cores,
    to_tensorly as to_tensorly,
)
from rsembed.tt.programs import (
    FusedParam as FusedParam,
    OptimType as OptimType,
    TTGradients as TTGradients,
)
from rsembed.tt.spec import TTSpec as TTSpec, suggested_tt_shapes as suggested_tt_shapes
from rsembed.tt.storage import TensorTrain as TensorTrain
