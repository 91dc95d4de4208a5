"""Bad calls of the Flax layers, NNX and Linen."""

from functools import cache

import jax.numpy as jnp
import optax
from flax import linen as nn, nnx as flax_nnx

from rsembed import linen, nnx
from tests.bad_calls.world import KEY, batch, collection


class Model(flax_nnx.Module):
    def __init__(self):
        self.words = nnx.Embeddings(collection(), rngs=flax_nnx.Rngs(0))
        self.dense = flax_nnx.Param(jnp.ones(4))

    def __call__(self, ids):
        return self.words(ids)["title"] @ self.dense.get_value()


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.Dense(1)(linen.Embeddings(collection(), name="words")(ids)["title"])


class RematerializedModel(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return nn.remat(linen.Embeddings)(collection(), name="words")(ids)["title"].sum()


def loss_of(model, ids):
    return model(ids).sum()


@cache
def model():
    return Model()


@cache
def gradients():
    return nnx.value_and_grad(loss_of)(model(), batch())[1]


@cache
def variables():
    return LinenModel().init(KEY(0), batch())


def create(**options):
    defaults = {"apply_fn": LinenModel().apply, "variables": variables(), "tx": optax.sgd(0.1)}
    return linen.TrainState.create(**defaults | options)


def stacked():
    """Two batches, stacked along a new first axis."""
    return {"title": jnp.array([[[1], [2]]] * 2), "author": jnp.array([[1, 2]] * 2)}


BAD = """
# NNX
model().words({"title": [[1]]}) => ValueError: batch ... missing ['author']
flax_nnx.grad(loss_of)(model(), batch()) => RuntimeError: 'word' ... untrained ... rs.nnx.value_and_grad
nnx.value_and_grad(lambda m, b: (loss_of(m, b), 1))(model(), batch()) => TypeError: has_aux=True
nnx.Optimizer(model(), optax.sgd(0.1)).update(model(), None)
    => TypeError: gradients ... NoneType ... rs.nnx.value_and_grad
nnx.Optimizer(model(), optax.sgd(0.1)).update(flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0)), gradients())
    => ValueError: gradients ... layers ['words'
gradients().with_rows({"wrods": row_gradients()}) => ValueError: ['wrods'] ... ['words']
gradients() + 1 => TypeError: Gradients
gradients() * gradients() => TypeError: Gradients
gradients() * NAN => ValueError: factor of gradients ... nan
gradients() * "2" => TypeError: factor of gradients must be a number, got '2'
nnx.Optimizer(model(), None) => TypeError: rs.nnx.Optimizer: tx must be ... GradientTransformation
nnx.Optimizer(model(), optax.MultiSteps(optax.sgd(0.1), 2)) => TypeError: tx has optax.MultiSteps ... rs.combine
nnx.Optimizer(model(), optax.apply_if_finite(optax.sgd(0.1), 2))
    => ValueError: rs.nnx.Optimizer: tx has optax.apply_if_finite ... jax.lax.cond ... rs.global_norm
# Linen
linen.Embeddings("word").init(KEY(0), batch()) => TypeError: collection ... EmbeddingCollection ... 'word'
create(tx=None) => TypeError: rs.linen.TrainState: tx must be ... GradientTransformation
create(tx=optax.chain(optax.apply_if_finite(optax.sgd(0.1), 2)))
    => ValueError: rs.linen.TrainState: tx has optax.apply_if_finite ... jax.lax.cond ... rs.global_norm
create(tx=optax.MultiSteps(optax.sgd(0.1), 2))
    => TypeError: rs.linen.TrainState: tx has optax.MultiSteps ... (first + second) / 2 ... rs.combine
create().replace(
    opt_state=optax.apply_if_finite(optax.sgd(0.1), 2).init(create().params)).apply_gradients(None)
    => ValueError: rs.linen.TrainState: tx has optax.apply_if_finite ... jax.lax.cond ... rs.global_norm
jax.grad(lambda params: create().replace(params=params).apply(batch()).sum())(create().params)
    => RuntimeError: layer of tables 'word', 'user' would stay untrained ... rs.linen.value_and_grad
create(variables={}) => ValueError: variables ... init ... 'params'
create().apply_gradients(None) => TypeError: gradients ... NoneType ... rs.linen.value_and_grad
linen.value_and_grad(lambda apply, given: apply(given).sum())(variables(), batch()) => TypeError: TrainState ... dict
nnx.value_and_grad(
    lambda model, given: jax.vmap(lambda batch: loss_of(model, batch))(stacked()).sum())(model(), batch())
    => RuntimeError: the loss looks up rows of the layers ['words'], or of some,
nnx.value_and_grad(lambda m, g: nnx.value_and_grad(loss_of)(m, g)[0])(model(), batch())
    => RuntimeError: value_and_grad in the loss of another value_and_grad
linen.Embeddings(collection(), frozen="no").init(KEY(0), batch())
    => TypeError: Embeddings: frozen must be True or False, got 'no' (str).
linen.value_and_grad(lambda apply, given:
    jax.lax.scan(lambda total, batch: (total + apply(batch).sum(), None), 0.0, stacked())[0])(create(), batch())
    => RuntimeError: the loss looks up rows of the layers ['words'], or of some,
linen.value_and_grad(lambda apply, given: apply(given))(
    create(apply_fn=RematerializedModel().apply, variables=RematerializedModel().init(KEY(0), batch())), batch())
    => RuntimeError: the loss looks up rows of the layers ['words'], or of some, ... call the layer before it
linen.value_and_grad(
    lambda apply, given: jax.vmap(lambda batch: apply(batch).sum())(stacked()).sum())(create(), batch())
    => RuntimeError: the loss looks up rows of the layers ['words'], or of some,
"""

ACCEPTED = """
model().words(batch(title=[[1, 2], [3]])) => model().words(batch())
model().words(collection().prepare(batch())) => model().words(batch())
"""
