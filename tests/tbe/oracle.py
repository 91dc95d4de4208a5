"""A table-batched module as loops over bags and ids in numpy float64, and modules for tests."""

import jax
import numpy as np
from numpy.testing import assert_allclose

from rsembed import tbe as rt
from rsembed.kernels.contract import Call, IdList, Segment
from tests import oracles
from tests.tbe.row_formulas import DEFAULTS, LR, VARIANTS

# A batch of two features with two bags each.
IDS = np.array([3, 1, 1, 4, 0, 2, 1])
OFFSETS = np.array([0, 3, 3, 4, 7])
# Tolerance of float32 sums of a few numbers, compared with float64.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
CACHED = rt.EmbeddingLocation.MANAGED_CACHING


def variant(name):
    """Arguments of a module with the optimizer of `VARIANTS[name]`."""
    optimizer, arguments, _ = VARIANTS[name]
    return {"optimizer": optimizer, **arguments}


def make(
    specs, *, location=rt.EmbeddingLocation.DEVICE, uniform="numpy", **arguments
) -> rt.TableBatchedEmbeddingBags:
    """A module with random weights, by default with SGD.

    Args:
      specs: pairs of number of rows and number of columns.
      location: location of all tables.
      uniform: "numpy": weights in [-1, 1) are drawn in numpy, because JAX would compile a program
        for each shape. A pair of bounds: the module draws the weights. None: weights are 0.
      **arguments: other arguments of the module. The default of `learning_rate` is `LR`.
    """
    module = rt.TableBatchedEmbeddingBags(
        [(*spec, location, rt.ComputeDevice.CPU) for spec in specs],
        **{"learning_rate": LR, **arguments},
    )
    if uniform == "numpy":
        for number, shape in enumerate(specs):
            drawn = np.random.default_rng(number).uniform(-1, 1, shape)
            module.set_embedding_weights(number, drawn.astype(np.float32))
    elif uniform is not None:
        module.init_embedding_weights_uniform(*uniform)
    return module


def tables_of(module):
    """Copies of a module's weights and states in numpy."""
    return jax.tree.map(
        np.array, (module.split_embedding_weights(), module.split_optimizer_states())
    )


def assert_same_bits(module, other, *, rtol=0, atol=0):
    """Asserts equal or close tables and states of two modules, in the dtypes of `module`."""
    arrays = jax.tree.leaves(tables_of(module))
    for one, two in zip(arrays, jax.tree.leaves(tables_of(other)), strict=True):
        assert_allclose(one, two.astype(one.dtype), rtol=rtol, atol=atol)


def gradient_like(output, seed=0):
    return np.random.default_rng(seed).normal(size=output.shape).astype(np.float32)


def train(module, ids, offsets, weights=None, d_output=None, **arguments):
    """Runs one step, and returns the output and the result of the backward function.

    The default gradient of the output is 1.
    """
    output, backward = module.vjp(ids, offsets, weights, **arguments)
    if d_output is None:
        d_output = np.ones(output.shape, np.float32)
    return output, backward(d_output)


def apply(module, *batch):
    """Runs one step with row gradients."""
    output, backward = module.vjp(*batch)
    module.apply(backward.row_gradients(np.ones_like(output)))


CALLS = {
    "lookup": lambda module, *batch: module(*batch),
    "train": lambda module, *batch: train(module, *batch)[0],
    "apply": apply,
    "weights": lambda module, *_: jax.tree.map(np.array, module.split_embedding_weights()),
    "states": lambda module, *_: jax.tree.map(np.array, module.split_optimizer_states()),
    "state_dict": lambda module, *_: module.state_dict()["table_0.weight"],
    "uniform": lambda module, *_: module.init_embedding_weights_uniform(-1, 1),
}
"""Functions of a module and a batch that read or write tables."""


class Oracle:
    """Tables that are read and trained by loops over bags and ids.

    Args:
      module: module with the initial tables and states.
      name: name in `VARIANTS` of the row formula and its arguments.
      features: table of each feature.
      pooling: pooling mode of the module.
      sizes: number of bags by feature and rank, if they differ.
      clamp: bound to which gradients of the output are clipped.

    Rows are rounded to the nearest value when they are stored, as with `stochastic_rounding=False`.
    """

    def __init__(self, module, name, features=(0,), pooling="SUM", *, sizes=None, clamp=np.inf):
        weights, states = tables_of(module)
        self.dtype = weights[0].dtype
        self.tables = [table.astype(np.float64) for table in weights]
        self.states = []
        for table, table_states in zip(module.plan.tables, states, strict=True):
            self.states.append(
                dict(zip(table.state_names, map(np.float64, table_states), strict=True))
            )
        self.features = features
        self.combiner = {"SUM": "sum", "MEAN": "mean_by_count", "NONE": "none"}[pooling]
        self.sizes = sizes
        self.clamp = clamp
        _, arguments, self.formula = VARIANTS[name]
        self.arguments = DEFAULTS | arguments
        self.t = int(module.step) + 1

    def call(self, ids, offsets, weights):
        """The lookup of a batch. It has a segment for each feature of a rank, in output order."""
        sizes = self.sizes
        layout = "blocks"
        if sizes is None:
            num_features = len(self.features)
            sizes = [[(len(offsets) - 1) // num_features]] * num_features
            layout = "columns"
        ends = np.cumsum(sizes).reshape(np.shape(sizes))
        segments = []
        for rank in range(len(sizes[0])):
            for feature, table in enumerate(self.features):
                size = sizes[feature][rank]
                first_bag = ends[feature, rank] - size
                segments.append(Segment(0, first_bag, size, self.combiner, table))
        return Call((IdList(ids, offsets, weights),), tuple(segments), layout)

    def tables_as_read(self):
        """Tables that lookups read. With DECOUPLE_GLOBAL, rows are decayed for skipped steps."""
        config = self.arguments.get("global_weight_decay")
        if config is None or self.t < config.start_iter:
            return self.tables
        tables = []
        for table, states in zip(self.tables, self.states, strict=True):
            last = states["prev_iter"]
            kept = (1 - LR * self.arguments["weight_decay"]) ** np.maximum(self.t - last - 1, 0)
            factors = np.where(last > 0, np.maximum(config.lower_bound, kept), 1)
            tables.append(factors[:, None] * table)
        return tables

    def lookup(self, ids, offsets, weights=None):
        """Output of the module."""
        (output,) = oracles.lookup(self.tables_as_read(), self.call(ids, offsets, weights))
        return output

    def backward(self, ids, offsets, weights, d_output):
        """Steps each row of the batch once, and returns the gradient of the weights."""
        call = self.call(ids, offsets, weights)
        gradients = [np.clip(d_output, -self.clamp, self.clamp)]
        (d_weights,) = oracles.weight_gradients(self.tables_as_read(), call, gradients)
        num_rows = [len(table) for table in self.tables]
        dims = [table.shape[1] for table in self.tables]
        for number, by_row in enumerate(oracles.row_gradients(call, num_rows, dims, gradients)):
            table = self.tables[number]
            for row, gradient in by_row.items():
                state = {name: values[row] for name, values in self.states[number].items()}
                stepped = self.formula(table[row], gradient, state, self.t, self.arguments)
                table[row] = stepped.astype(np.float32).astype(self.dtype)
                for name, value in state.items():
                    self.states[number][name][row] = value
        self.t += 1
        return d_weights

    def assert_agrees(self, module, *, rtol, atol):
        weights, states = tables_of(module)
        for actual, wanted in zip(weights, self.tables, strict=True):
            assert_allclose(actual.astype(np.float64), wanted, rtol=rtol, atol=atol)
        for actual, wanted in zip(states, self.states, strict=True):
            for mine, (name, yours) in zip(actual, wanted.items(), strict=True):
                assert_allclose(mine.astype(np.float64), yours, rtol=rtol, atol=atol, err_msg=name)
