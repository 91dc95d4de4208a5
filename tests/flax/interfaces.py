"""The same interface to a small model for the core, NNX and Linen, for tests of all three."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

import rsembed as rs
from tests.flax import test_linen, test_nnx, world


class Linen(world.Core):
    """The model with a layer of `rs.linen`."""

    def __init__(self, *storages, tx=world.TX, on_mesh=False):
        self.collection, *_, state = test_linen.new(*storages, on_mesh=on_mesh)
        self.model = state.replace(tx=tx, opt_state=tx.init(state.params))

    def value_and_grad(self, model, batch, labels):
        def loss_fn(apply, ids):
            return world.loss_of(apply(ids), labels)

        return rs.linen.value_and_grad(loss_fn)(model, batch)

    def stepped(self, model, gradients):
        return model.apply_gradients(gradients)

    def parts(self, gradients):
        return gradients.dense, list(gradients.rows.values())

    def replaced(self, gradients, dense, rows):
        by_layer = dict(zip(gradients.calls, rows, strict=True))
        return dataclasses.replace(gradients, dense=dense).with_rows(by_layer)

    def contents(self, model):
        return model.params["head"]["kernel"], world.contents(
            self.collection, model.embeddings["words"]
        )


class NNX(Linen):
    """The model with a layer of `rs.nnx`.

    `model` is the state of the model and its optimizer, which is an argument of jitted functions.
    """

    def __init__(self, *storages, tx=world.TX, on_mesh=False):
        self.collection = world.collection(*storages, on_mesh=on_mesh)
        model = test_nnx.Model(self.collection)
        self.graph, self.model = nnx.split((model, rs.nnx.Optimizer(model, tx)))

    def value_and_grad(self, model, batch, labels):
        network, _ = nnx.merge(self.graph, model)

        def loss_fn(network):
            return world.loss_of(network(batch), labels)

        return rs.nnx.value_and_grad(loss_fn)(network)

    def stepped(self, model, gradients):
        network, optimizer = nnx.merge(self.graph, model)
        optimizer.update(network, gradients)
        return nnx.state((network, optimizer))

    def contents(self, model):
        network, _ = nnx.merge(self.graph, model)
        return test_nnx.trained_parts(network)


ALL = {"core": world.Core, "nnx": NNX, "linen": Linen}


def gradients_of(interface, model=None, labels=world.LABELS, samples=slice(None)):
    """Gradients for four bags with repeated ids, or for those bags that `samples` selects."""
    bags = [[3, 5, 3], [5], [7, 3], [0, 5]][samples]
    batch = interface.collection.prepare({name: bags for name in interface.collection.features})
    model = interface.model if model is None else model
    return interface.value_and_grad(model, batch, jnp.asarray(labels[samples]))[1]
