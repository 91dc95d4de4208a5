"""TensorFlow's two variants of Adam, by TensorFlow's names.

Embedding variables accept every optimizer of `sok.optimizers` and of `rsembed.optimizers`.
"""

from rsembed import optimizers

Adam = optimizers.rules.TensorFlowAdam
LazyAdam = optimizers.LazyAdam
