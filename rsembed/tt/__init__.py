"""Tensor-train embedding tables."""

from rsembed.tt.cores import bag as bag
from rsembed.tt.cores import full_weight as full_weight
from rsembed.tt.cores import rows as rows
from rsembed.tt.cores import weight_block as weight_block
from rsembed.tt.initial_cores import init_cores as init_cores
from rsembed.tt.shapes import cheapest_p_shapes as cheapest_p_shapes
from rsembed.tt.shapes import suggested_tt_shapes as suggested_tt_shapes
from rsembed.tt.spec import TTSpec as TTSpec
