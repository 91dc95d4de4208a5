"""TensorFlow's two variants of Adam, by their published names. Other optimizers work as well."""

from rsembed import optimizers

Adam = optimizers.rules.TensorFlowAdam
LazyAdam = optimizers.LazyAdam
