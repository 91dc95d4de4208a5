"""Adam in the two forms of TensorFlow, under the original's names; any rule of `rsembed.optimizers` serves as well."""

from rsembed.optimizers import LazyAdam, TensorFlowAdam

Adam = TensorFlowAdam
LazyAdam = LazyAdam
