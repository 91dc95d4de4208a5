"""A table-batched module in numpy float64, written as loops over bags and ids; and how modules are made for tests."""

import jax
import numpy as np
from numpy.testing import assert_allclose

from rsembed import tbe as rt
from tests.tbe.row_formulas import DEFAULTS, LR, VARIANTS, rowwise_adagrad

# Two features of two bags.
IDS, OFFSETS = (
    np.array([3, 1, 1, 4, 0, 2, 1]),
    np.array([0, 3, 3, 4, 7]),
)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}  # float32 sums of a few numbers against float64


def variant(name):
    """Arguments of the module for a row formula."""
    return {"optimizer": VARIANTS[name][0], **VARIANTS[name][1]}


def make(
    specs, *, location=rt.EmbeddingLocation.DEVICE, uniform="numpy", **arguments
) -> rt.TableBatchedEmbeddingBags:
    """A module with `(rows, dim)` tables of random weights; SGD at the rate of the formulas by default.

    The weights are in [-1, 1). numpy draws them, as a program of JAX that draws is compiled for every shape. Where
    `uniform` is a pair of bounds, the module draws by itself, and where it is None nobody does.
    """
    arguments = {"optimizer": rt.OptimType.EXACT_SGD, "learning_rate": LR, **arguments}
    module = rt.TableBatchedEmbeddingBags(
        [(*spec, location, rt.ComputeDevice.CPU) for spec in specs], **arguments
    )
    if uniform == "numpy":
        for number, shape in enumerate(specs):
            drawn = np.random.default_rng(number).uniform(-1, 1, shape)
            module.set_embedding_weights(number, drawn.astype(np.float32))
    elif uniform is not None:
        module.init_embedding_weights_uniform(*uniform)
    return module


def tables_of(module):
    """Weights and states of a module as numpy arrays, copied."""
    weights = [np.array(w) for w in module.split_embedding_weights()]
    return weights, [[np.array(s) for s in states] for states in module.split_optimizer_states()]


def assert_same_bits(module, other, *, rtol=0, atol=0):
    """Tables and states of two modules are equal, or as close as is said."""
    for one, two in zip(
        *(jax.tree.leaves(tables_of(each)) for each in (module, other)), strict=True
    ):
        assert_allclose(one, two, rtol=rtol, atol=atol)


def gradient_like(output, seed=0):
    return np.random.default_rng(seed).normal(size=output.shape).astype(np.float32)


def train(module, ids, offsets, weights=None, d_output=None, **arguments):
    """One step; the gradient of the output is 1 unless given. Returns the output and what backward returned."""
    output, backward = module.vjp(ids, offsets, weights, **arguments)
    return output, backward(np.ones(output.shape, np.float32) if d_output is None else d_output)


class Oracle:
    """Tables that are read and trained bag by bag and id by id.

    `formula` and `arguments` are a row formula of `row_formulas` and its arguments; the weights are rounded to `dtype`
    when they are stored, as `stochastic_rounding=False` does.
    """

    def __init__(
        self, module, features, pooling, formula, arguments, *, dtype=np.float32, clamp=np.inf
    ):
        weights, states = tables_of(module)
        self.tables = [w.astype(np.float64) for w in weights]
        names = [table.state_names for table in module.plan.tables]
        self.states = [
            dict(zip(n, map(np.float64, s), strict=True))
            for n, s in zip(names, states, strict=True)
        ]
        self.features, self.pooling, self.formula, self.dtype, self.clamp = (
            features,
            pooling,
            formula,
            dtype,
            clamp,
        )
        self.arguments, self.t = DEFAULTS | arguments, int(module.step) + 1

    def bags(self, ids, offsets, weights, bags_per_feature):
        """For every bag: its feature, and the place, row and factor of its ids."""
        bag = 0
        for feature, (table, count) in enumerate(zip(self.features, bags_per_feature, strict=True)):
            for _ in range(count):
                places = [p for p in range(offsets[bag], offsets[bag + 1]) if ids[p] != -1]
                share = 1 / len(places) if self.pooling == "mean" and places else 1.0
                factors = [share * (1.0 if weights is None else float(weights[p])) for p in places]
                yield (
                    feature,
                    table,
                    [(p, int(ids[p]), f, share) for p, f in zip(places, factors, strict=True)],
                )
                bag += 1

    def read(self, table, row):
        """The row as lookups see it: with the decay that DECOUPLE_GLOBAL owes it."""
        config, last = (
            self.arguments.get("global_weight_decay"),
            self.states[table].get("prev_iter"),
        )
        if (
            config is None
            or self.formula is not rowwise_adagrad
            or self.t < config.start_iter
            or not last[row]
        ):
            return self.tables[table][row]
        kept = (1 - LR * self.arguments["weight_decay"]) ** max(self.t - last[row] - 1, 0)
        return self.tables[table][row] * max(config.lower_bound, kept)

    def pooled(self, ids, offsets, weights, bags_per_feature):
        """One pooled row per bag, in the order of the bags; for no pooling one row per id, zeros for no id."""
        if self.pooling == "none":
            rows = np.zeros((len(ids), max(table.shape[1] for table in self.tables)))
            for _, table, members in self.bags(ids, offsets, weights, bags_per_feature):
                for place, row, _, _ in members:
                    rows[place, : self.tables[table].shape[1]] = self.read(table, row)
            return rows
        found = []
        for _, table, members in self.bags(ids, offsets, weights, bags_per_feature):
            total = np.zeros(self.tables[table].shape[1])
            for _, row, factor, _ in members:
                total = total + factor * self.read(table, row)
            found.append(total)
        return found

    def backward(self, ids, offsets, weights, bags_per_feature, d_bags):
        """Steps every touched row once, and returns the gradient of the weights.

        `d_bags` has one gradient per bag, for no pooling one per id.
        """
        sums, d_weights = {}, np.zeros(len(ids))
        for bag, (_, table, members) in enumerate(
            self.bags(ids, offsets, weights, bags_per_feature)
        ):
            for place, row, factor, share in members:
                dim = self.tables[table].shape[1]
                d_row = np.clip(
                    d_bags[place][:dim] if self.pooling == "none" else d_bags[bag],
                    -self.clamp,
                    self.clamp,
                )
                sums[table, row] = sums.get((table, row), 0.0) + factor * d_row
                d_weights[place] = share * (d_row @ self.read(table, row))
        for (table, row), gradient in sums.items():
            state = {name: np.array(values[row]) for name, values in self.states[table].items()}
            new = self.formula(
                self.tables[table][row].copy(), gradient, state, self.t, self.arguments
            )
            self.tables[table][row] = new.astype(np.float32).astype(self.dtype)
            for name, value in state.items():
                self.states[table][name][row] = value
        self.t += 1
        return d_weights

    def assert_agrees(self, module, *, rtol, atol):
        weights, states = tables_of(module)
        for found, wanted in zip(weights, self.tables, strict=True):
            assert_allclose(found.astype(np.float64), wanted, rtol=rtol, atol=atol)
        for found, wanted in zip(states, self.states, strict=True):
            for mine, (name, yours) in zip(found, wanted.items(), strict=True):
                assert_allclose(mine.astype(np.float64), yours, rtol=rtol, atol=atol, err_msg=name)


def by_rank(rows, sizes):
    """Pooled rows of all bags, feature after feature, as the flat output for variable batch sizes wants them."""
    starts = np.concatenate([[0], np.cumsum([sum(own) for own in sizes])])
    flat = []
    for rank in range(len(sizes[0])):
        for feature, own in enumerate(sizes):
            first = starts[feature] + sum(own[:rank])
            flat += list(rows[first : first + own[rank]])
    return np.concatenate([np.zeros(0), *flat])


def side_by_side(rows, dims):
    """The same for equal batch sizes: features next to each other."""
    batch = len(rows) // len(dims)
    parts = [
        np.array(rows[f * batch : (f + 1) * batch]).reshape(batch, dim)
        for f, dim in enumerate(dims)
    ]
    return np.concatenate(parts, axis=1)
