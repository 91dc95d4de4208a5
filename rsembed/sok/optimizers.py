"""TensorFlow's two variants of Adam, by TensorFlow's names.

Other optimizers of the core work as well.
"""

from rsembed import optimizers

Adam = optimizers.rules.TensorFlowAdam
LazyAdam = optimizers.LazyAdam
