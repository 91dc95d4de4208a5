"""Adam in the two forms of TensorFlow, by the original's names; any rule of `rsembed.optimizers` serves as well."""

from rsembed import optimizers

Adam = optimizers.rules.TensorFlowAdam
LazyAdam = optimizers.LazyAdam
