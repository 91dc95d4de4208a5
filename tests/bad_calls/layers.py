"""Bad models, losses and steps of Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx as fn

import rsembed as rs
from rsembed import linen, nnx
from tests.bad_calls.flax_layers import create, layer, model, train_state
from tests.bad_calls.flax_layers import gradients as model_gradients
from tests.bad_calls.world import (
    KEY,
    batch,
    collection,
    feature,
    other,
    other_row_gradients,
    row_gradients,
    state,
    table,
)

Bags = rs.Bags
IDS, OFFSETS = np.array([1, 2, 3]), np.array([0, 2, 3], np.int32)
NAN = float("nan")


def one(**o):
    return rs.EmbeddingCollection([feature()], **o)


def plan(**o):
    return rs.plan_stacking([feature("a", table("s")), feature("b", table("t"))], **o)


def stored(storage, rows=9, **fields):
    return rs.EmbeddingCollection([feature(table_spec=table(storage=storage, vocabulary_size=rows, **fields))])


vg = nnx.value_and_grad
lvg = linen.value_and_grad


def mloss(m, g):
    return m(g).sum()


def stacked():
    return jax.tree.map(lambda x: jnp.stack([x, x]), {"title": jnp.array([[1], [2]]), "author": jnp.array([1, 2])})


def scan_loss(m, g):
    def body(c, b):
        return c + m.words(b)["title"].sum(), None

    return jax.lax.scan(body, 0.0, stacked())[0]


def nscan_loss(m, g):
    def body(mm, b):
        return mm.words(b)["title"].sum()

    return (
        fn.scan(body, in_axes=(None, 0), out_axes=0)(m, stacked()).sum()
        if False
        else fn.vmap(body, in_axes=(None, 0))(m, stacked()).sum()
    )


def cond_loss(m, g):
    return jax.lax.cond(True, lambda: m.words(g)["title"].sum(), lambda: 0.0)


def while_loss(m, g):
    return jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + m.words(g)["title"].sum()), (0, 0.0))[1]


def vmap_loss(m, g):
    return jax.vmap(lambda b: m.words(b)["title"].sum())(stacked()).sum()


def jit_loss(m, g):
    return jax.jit(lambda b: m.words(b)["title"].sum())(batch(title=jnp.array([[1], [2]]), author=jnp.array([1, 2])))


def remat_loss(m, g):
    return jax.checkpoint(lambda b: m.words(b)["title"].sum())(
        batch(title=jnp.array([[1], [2]]), author=jnp.array([1, 2]))
    )


def grad_inside(m, g):
    return jax.grad(lambda w: (m.words(g)["title"] @ w).sum())(jnp.ones(4)).sum()


def J():
    return batch(title=jnp.array([[1], [2]]), author=jnp.array([1, 2]))


def opt(m=None):
    return nnx.Optimizer(m or model(), optax.sgd(0.1))


def llscan(apply, g):
    return jax.lax.scan(lambda c, b: (c + apply(b).sum(), None), 0.0, stacked())[0]


def llvmap(apply, g):
    return jax.vmap(lambda b: apply(b).sum())(stacked()).sum()


def llcond(apply, g):
    return jax.lax.cond(True, lambda: apply(g).sum(), lambda: 0.0)


def lljit(apply, g):
    return jax.jit(lambda b: apply(b).sum())(J())


def llgrad(apply, g):
    return jax.grad(lambda x: (apply(g) * x).sum())(1.0)


class Two(fn.Module):
    def __init__(self):
        self.a = nnx.Embeddings(other(), rngs=fn.Rngs(0))

    def __call__(self, g):
        return self.a(g)["title"].sum()


def ltwo():
    class M(nn.Module):
        @nn.compact
        def __call__(self, g):
            return nn.Dense(1)(linen.Embeddings(other(), name="w")(g)["title"])

    v = M().init(KEY(0), {"title": [[1]]})
    return linen.TrainState.create(apply_fn=M().apply, variables=v, tx=optax.sgd(0.1))


BAD = {
    "layer None": (
        lambda: layer(collection=None),
        TypeError, "Embeddings: collection must be of type EmbeddingCollection,", "got None (NoneType)",
    ),
    "layer rngs key": (
        lambda: layer(rngs=KEY(0)), TypeError, "Embeddings: rngs must be of type Rngs, as in nnx.Rngs(0),",
    ),
    "layer set_state serving": (
        lambda: model().words.set_state(state()._replace(slots={})),
        ValueError, "the state does not belong to this collection: slots are {},",
    ),
    "layer prefetch None": (
        lambda: model().words.prefetch(None),
        TypeError, "batch, with one entry for each of ['author', 'title'], must", "got None (NoneType)",
    ),
    "nnx: returns None": (
        lambda: vg(lambda m, g: None)(model(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got", "got None (NoneType); take its mean",
    ),
    "nnx: returns text": (
        lambda: vg(lambda m, g: "x")(model(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got", "got 'x' (str); take its mean",
    ),
    "nnx: returns int": (
        lambda: vg(lambda m, g: m(g).sum().astype(int))(model(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got an",
    ),
    "nnx: returns pair": (
        lambda: vg(lambda m, g: (m(g).sum(), 1))(model(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got",
    ),
    "nnx: aux missing": (
        lambda: vg(mloss, has_aux=True)(model(), batch()),
        TypeError, "value_and_grad: loss_fn must return (loss, aux); or pass",
    ),
    "nnx: returns dict": (
        lambda: vg(lambda m, g: {"loss": m(g).sum()})(model(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got",
    ),
    "nnx: returns complex": (
        lambda: vg(lambda m, g: m(g).sum() * 1j)(model(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got an",
    ),
    "nnx: vmap": (
        lambda: vg(vmap_loss)(model(), batch()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
    "nnx: nested vg": (
        lambda: vg(lambda m, g: vg(mloss)(m, g)[0])(model(), batch()),
        RuntimeError, "value_and_grad of a model inside its own value_and_grad",
    ),
    "nnx.grad jit": (
        lambda: fn.jit(fn.grad(mloss))(model(), J()),
        RuntimeError, "the Embeddings layer of tables 'word', 'user' would stay",
    ),
    "opt tx function": (
        lambda: nnx.Optimizer(model(), optax.sgd),
        TypeError, "Optimizer: tx must be of type GradientTransformation, got a", "got a value of type function",
    ),
    "opt update model None": (
        lambda: opt().update(None, model_gradients()), ValueError, "gradients are of layers ['words'], but this",
    ),
    "with_rows None": (
        lambda: model_gradients().with_rows(None),
        TypeError, "Gradients.with_rows: rows must be a mapping (each of type", "got None (NoneType)",
    ),
    "with_rows rg": (
        lambda: model_gradients().with_rows(row_gradients()),
        TypeError, "Gradients.with_rows: rows must be a mapping (each of type", "got a value of type RowGradients",
    ),
    "with_rows other": (
        lambda: opt().update(model(), model_gradients().with_rows({"words": other_row_gradients()})),
        ValueError, "the row gradients do not belong to this collection: word is",
    ),
    "linen None": (
        lambda: linen.Embeddings(None).init(KEY(0), batch()),
        TypeError, "Embeddings: collection must be of type EmbeddingCollection,", "got None (NoneType)",
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
    "linen: cond": (
        lambda: lvg(llcond)(train_state(), J()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
    "linen: jit": (
        lambda: lvg(lljit)(train_state(), batch()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
    "linen: grad": (
        lambda: lvg(llgrad)(train_state(), batch()),
        RuntimeError, "the loss looks up rows of the layers ['words'], or of some,",
    ),
    "linen: returns None": (
        lambda: lvg(lambda a, g: None)(train_state(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got", "got None (NoneType); take its mean",
    ),
    "linen: returns text": (
        lambda: lvg(lambda a, g: "x")(train_state(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got", "got 'x' (str); take its mean",
    ),
    "linen: returns int": (
        lambda: lvg(lambda a, g: a(g).sum().astype(int))(train_state(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got an",
    ),
    "linen: returns dict": (
        lambda: lvg(lambda a, g: {"l": a(g).sum()})(train_state(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got",
    ),
    "linen: returns pair": (
        lambda: lvg(lambda a, g: (a(g).sum(), 1))(train_state(), batch()),
        TypeError, "value_and_grad: the loss must be a scalar of floats, got",
    ),
}  # fmt: skip
