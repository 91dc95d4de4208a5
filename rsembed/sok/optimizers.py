"""TensorFlow's two variants of Adam, by TensorFlow's names.

All optimizers of `rsembed.optimizers` are accepted.
"""

from rsembed import optimizers

Adam = optimizers.rules.TensorFlowAdam
LazyAdam = optimizers.LazyAdam
