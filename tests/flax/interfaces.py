"""One training step of the core, of NNX and of Linen, written by the same three functions."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import rsembed as rs
from tests.flax import test_linen, test_nnx, world


def loss_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels).mean()


class Core:
    """The functional core, with optax beside it, as its pages show."""

    def __init__(self, *storages, tx=world.TX, on_mesh=False):
        self.collection = world.collection(*storages, on_mesh=on_mesh)
        self.tx = tx
        self.model = (world.HEAD, tx.init(world.HEAD), self.collection.init(world.KEY))

    def gradients(self, model, batch, labels):
        """Dense and row gradients, as a pair."""
        head, _, state = model

        def loss_fn(head, activations):
            return loss_of(world.joined(activations) @ head, labels)

        return rs.value_and_grad(loss_fn, self.collection)(head, state, batch)[1]

    def stepped(self, model, gradients):
        """The model after a step."""
        head, opt_state, state = model
        dense, rows = gradients
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = self.tx.update(dense, opt_state, head)
        return optax.apply_updates(head, updates), opt_state, self.collection.apply(state, rows)

    def parts(self, gradients):
        """Dense gradients, and row gradients as a list."""
        return gradients[0], [gradients[1]]

    def replaced(self, gradients, dense, rows):
        """The gradients with other parts."""
        return dense, rows[0]

    def contents(self, model):
        """The head; tables, slots and number of steps."""
        return model[0], world.contents(self.collection, model[2])


class Linen(Core):
    """`rs.linen`."""

    def __init__(self, *storages, tx=world.TX, on_mesh=False):
        self.collection, _, module, state = test_linen.new(*storages, on_mesh=on_mesh)
        variables = {
            "params": state.params,
            "embeddings": {"words": {"tables": state.embeddings["words"]}},
        }
        self.model = rs.linen.TrainState.create(apply_fn=module.apply, variables=variables, tx=tx)

    def gradients(self, model, batch, labels):
        return rs.linen.value_and_grad(lambda apply, ids: loss_of(apply(ids), labels))(
            model, batch
        )[1]

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
    """`rs.nnx`; the model and its optimizer, split into what jitted functions take."""

    def __init__(self, *storages, tx=world.TX, on_mesh=False):
        self.collection = world.collection(*storages, on_mesh=on_mesh)
        model = test_nnx.Model(self.collection)
        self.graph, self.model = nnx.split((model, rs.nnx.Optimizer(model, tx)))

    def gradients(self, model, batch, labels):
        network, _ = nnx.merge(self.graph, model)
        return rs.nnx.value_and_grad(lambda network: loss_of(network(batch), labels))(network)[1]

    def stepped(self, model, gradients):
        network, optimizer = nnx.merge(self.graph, model)
        optimizer.update(network, gradients)
        return nnx.state((network, optimizer))

    def contents(self, model):
        network, _ = nnx.merge(self.graph, model)
        return test_nnx.trained_parts(network)


ALL = {"core": Core, "nnx": NNX, "linen": Linen}


def batch_of(interface, samples=slice(None)):
    """Bags of different sizes of four samples, or of some of them; ids repeat within and between samples."""
    bags = [[3, 5, 3], [5], [7, 3], [0, 5]]
    return interface.collection.prepare(
        {name: bags[samples] for name in interface.collection.features}
    )


def labels_of(samples=slice(None)):
    return jnp.asarray(world.LABELS[samples])
