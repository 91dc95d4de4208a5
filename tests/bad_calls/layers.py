"""Bad models, losses and steps of Flax."""

import jax
import jax.numpy as jnp

from rsembed import linen, nnx
from tests.bad_calls.flax_layers import create, layer, model, train_state
from tests.bad_calls.flax_layers import gradients as model_gradients
from tests.bad_calls.world import (
    KEY,
    batch,
    collection,
)

vg = nnx.value_and_grad
lvg = linen.value_and_grad


def mloss(m, g):
    return m(g).sum()


def stacked():
    return jax.tree.map(lambda x: jnp.stack([x, x]), {"title": jnp.array([[1], [2]]), "author": jnp.array([1, 2])})


def vmap_loss(m, g):
    return jax.vmap(lambda b: m.words(b)["title"].sum())(stacked()).sum()


def llscan(apply, g):
    return jax.lax.scan(lambda c, b: (c + apply(b).sum(), None), 0.0, stacked())[0]


def llvmap(apply, g):
    return jax.vmap(lambda b: apply(b).sum())(stacked()).sum()


BAD = {
    "layer rngs key": (
        lambda: layer(rngs=KEY(0)), TypeError, "Embeddings: rngs must be of type Rngs, as in nnx.Rngs(0),",
    ),
    "nnx: vmap": (
        lambda: vg(vmap_loss)(model(), batch()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
    "nnx: nested vg": (
        lambda: vg(lambda m, g: vg(mloss)(m, g)[0])(model(), batch()),
        RuntimeError, "value_and_grad of a model inside its own value_and_grad",
    ),
    "with_rows None": (
        lambda: model_gradients().with_rows(None),
        TypeError, "Gradients.with_rows: rows must be a mapping (each of type", "got None (NoneType)",
    ),
    "linen frozen text": (
        lambda: linen.Embeddings(collection(), frozen="no").init(KEY(0), batch()),
        TypeError, "Embeddings: frozen must be True or False, got 'no' (str).",
    ),
    "create tx None": (
        lambda: create(tx=None), TypeError, "TrainState.create: tx must be of type", "got None (NoneType)",
    ),
    "linen: has_aux": (
        lambda: lvg(lambda a, g: a(g).sum(), has_aux=1),
        TypeError, "value_and_grad: has_aux must be True or False, got 1 (int).",
    ),
    "linen: scan": (
        lambda: lvg(llscan)(train_state(), batch()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
    "linen: vmap": (
        lambda: lvg(llvmap)(train_state(), batch()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
}  # fmt: skip
