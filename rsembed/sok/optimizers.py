"""TensorFlow's two variants of Adam, by TensorFlow's names.

Embedding variables also accept all optimizers of `rsembed.optimizers`.
"""

from rsembed import optimizers

Adam = optimizers.rules.TensorFlowAdam
LazyAdam = optimizers.LazyAdam
