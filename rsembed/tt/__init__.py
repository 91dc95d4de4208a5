"""Tensor-train embedding tables."""

from rsembed.tt.cores import bag as bag
from rsembed.tt.cores import full_weight as full_weight
from rsembed.tt.cores import rows as rows
from rsembed.tt.module import TableBatchedTTEmbeddingBag as TableBatchedTTEmbeddingBag
from rsembed.tt.module import TTEmbeddingBag as TTEmbeddingBag
from rsembed.tt.new_cores import from_dense as from_dense
from rsembed.tt.new_cores import from_tensorly as from_tensorly
from rsembed.tt.new_cores import init_cores as init_cores
from rsembed.tt.new_cores import round_cores as round_cores
from rsembed.tt.new_cores import to_tensorly as to_tensorly
from rsembed.tt.programs import FusedParam as FusedParam
from rsembed.tt.programs import OptimType as OptimType
from rsembed.tt.programs import TTGradients as TTGradients
from rsembed.tt.spec import TTSpec as TTSpec
from rsembed.tt.spec import suggested_tt_shapes as suggested_tt_shapes
from rsembed.tt.storage import TensorTrain as TensorTrain
