"""Bad states, gradients and losses of a collection."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from tests.bad_calls.world import (
    KEY,
    batch,
    collection,
    gradients,
    keyed,
    keyed_state,
    other,
    row_gradients,
    state,
)


def lookup(embedding_state, ids=None):
    return collection().lookup(embedding_state, ids or batch())


def update(**changes):
    return collection().update(state(), batch(), gradients(**changes))


def stepped(**changes):
    """A step from a state with changed fields."""
    return collection().update(state()._replace(**changes), batch(), gradients())


def donated():
    state = other().init(KEY(0))
    jax.jit(
        lambda state: other().update(state, {"title": [[1]]}, {"title": VALUES}), donate_argnums=0
    )(state)
    return state


def with_tables(**tables):
    return collection().with_tables(state(), tables)


def served(batch, *, tables=None, of=None):
    """A lookup for serving, in its own tables, in `tables`, or in tables of a collection `of`."""
    lookup, served_tables = rs.for_serving(collection(), state())
    if of is not None:
        _, served_tables = rs.for_serving(of, of.init(KEY(0)))
    return lookup(served_tables if tables is None else tables, batch)


def applied(row_gradients):
    return collection().apply(state(), row_gradients)


ROW, VALUES = np.array([1]), np.ones((1, 4), np.float32)


def by_hand(rows=ROW, values=VALUES, num_rows=(("word_user", 14),)):
    """Applies row gradients that were not made by a collection."""
    return applied(rs.RowGradients({"word_user": rows}, {"word_user": values}, num_rows))


def changed(**fields):
    return applied(dataclasses.replace(row_gradients(), **fields))


def changed_keys(**arrays):
    row_grads = keyed().row_gradients({"who": np.array([5])}, {"who": np.ones((1, 4), np.float32)})
    return keyed().apply(
        keyed_state(),
        dataclasses.replace(
            row_grads, **{name: {"client": array} for name, array in arrays.items()}
        ),
    )


def grad(loss, params=None, **options):
    """`value_and_grad` of a loss that depends on parameters and activations."""
    params = jnp.ones(4) if params is None else params
    return rs.value_and_grad(loss, collection(), **options)(params, state(), batch())


def loss_of(params, activations):
    return jnp.sum(params * activations["title"])


def damaged():
    """A state in which row 3 of the table `word` has a NaN."""
    values = np.ones((9, 4), np.float32)
    values[3, 1] = np.nan
    return collection().with_tables(state(), {"word": values}, allow_nonfinite=True)


BAD = """
# init
collection().init(0) => TypeError: PRNG key ... jax.random.key(0)
collection().init(jax.random.split(KEY(0))) => ValueError: PRNG key ... jax.random.key(0) ... (2,)
started(initializer=lambda key, shape: jnp.zeros(3)) => ValueError: table 'word' ... initializer ... (3,) ... (9, 4)
started(initializer=lambda key: key) => TypeError: table 'word' ... initializer(key, (9, 4)) ... lambda key, shape
started(initializer=lambda key, shape: None) => ValueError: table 'word' ... initializer returned [] ... (9, 4)
# States
lookup(None) => TypeError: collection.init ... EmbeddingState ... NoneType
collection().lookup(batch(), state()) => TypeError: EmbeddingState ... dict
lookup(rs.EmbeddingState({}, {}, jnp.zeros((), jnp.int32), None, None))
    => ValueError: does not belong ... tables are {} ... collection.init
lookup(state()._replace(tables={"word_user": jnp.ones((14, 4), jnp.bfloat16)}, layout=None))
    => ValueError: does not belong ... bfloat16[14, 4]
stepped(slots={"word_user": (jnp.ones(3),)}) => ValueError: does not belong ... slots ... float32[3]
stepped(slots={}) => ValueError: the state does not belong to this collection: slots are {},
near().prefetch(near_state()._replace(slots={}), {"what": [[1]]})
    => ValueError: table 'item' is on the host, where optimizer state moves ... keep the slots in the state
collection().lookup(state()._replace(tables=[jnp.ones((14,4))]), batch())
    => ValueError: the state does not belong to this collection: tables are
stepped(step=None) => ValueError: the state does not belong to this collection: step are
stepped(step=jnp.ones(())) => ValueError: the state does not belong to this collection: step are
stepped(step=jnp.zeros(2, jnp.int32)) => ValueError: the state does not belong to this collection: step are
other().lookup(donated(), {"title": [[1]]}) => RuntimeError: the state has lost its tables to a step that took its
other().lookup_vjp(donated(), {"title": [[1]]})
    => RuntimeError: lost its tables to a step ... Ctrl-C ... load the latest checkpoint
# with_tables and evict
with_tables(word="x") => TypeError: table 'word': its values must be an array of numbers, got 'x' (str)
with_tables(word=np.where(np.arange(36).reshape(9, 4) == 22, NAN, 1.0))
    => ValueError: table 'word': its values: nan in row 5 is not finite; clean the numbers, or pass allow_nonfinite=True
with_tables(word=jnp.full((9, 4), -jnp.inf)) => ValueError: table 'word': its values: -inf in row 0 is not finite
with_tables(word_user=np.ones((14,4))) => ValueError: unknown table 'word_user' (did you mean 'word'?); the
collection().evict(state(), "word", keep=5)
    => ValueError: table 'word' is kept as an array: rows leave tables of keys, with storage=Hashed
keyed().evict(keyed_state(), "e", keep=5) => ValueError: unknown table 'e'
jax.jit(lambda state: keyed().evict(state, "client", keep=5)[0])(keyed_state()) => RuntimeError: outside of jit
keyed().evict(keyed_state(), "client", keep=-1)
    => ValueError: evict from table 'client': keep must be in [0, inf), got -1
keyed().evict(keyed_state(), "client", keep=1.5)
    => TypeError: evict from table 'client': keep must be an integer, got 1.5 (float)
keyed().evict(keyed_state(), "client", norm_below="1")
    => TypeError: evict from table 'client': norm_below must be a number, got '1' (str)
keyed().evict(state(), "client", keep=1) => ValueError: the state does not belong to this collection: client is
jax.jit(keyed().counts)(keyed_state()) => RuntimeError: rows by key, and counts, come to the host; read them
jax.jit(keyed().tables)(keyed_state()) => RuntimeError: rows by key, and counts, come to the host; read them
near().prefetch(near_state(), {"what": [[9]]}) => ValueError: feature 'what': id 9 in sample 0 is outside table 'item'
with_tables(wrod=np.ones((9, 4))) => ValueError: unknown table 'wrod' ... 'word' ... 'user'
with_tables(word={"keys": [3], "values": np.ones((1, 4))})
    => ValueError: table 'word' has no keys: give it an array of all rows [9, 4], not a mapping
jax.jit(lambda values: near().with_tables(near_state(), {"item": values}))(np.ones((9, 4)))
    => RuntimeError: 'item' is kept as ... with_tables writes its rows beside compiled programs
jax.jit(lambda values: keyed().with_tables(keyed_state(), {"client": values}))(np.ones((4, 4)))
    => RuntimeError: 'client' is kept as ... with_tables writes its rows beside compiled programs
jax.jit(keyed().with_tables)(keyed_state(), {}, slots={"client": {}}) => RuntimeError: table 'client' ... outside of jit
collection().with_tables(state(), {}, slots={"wrod": ()}) => ValueError: unknown table 'wrod' ... 'word'
collection().with_tables(state(), {}, slots=[()]) => TypeError: slots must be a mapping
collection().with_tables(state(), {}, slots={"word": {"mu": np.ones((9, 4))}})
    => ValueError: table 'word': its slots must be [], those of SGD, got ['mu']; give them as collection.slots(state)
# for_serving
rs.for_serving(collection(), with_tables(word=np.full((9, 4), 1e6)), dtype="float16")
    => ValueError: for_serving: table 'word' in float16: inf in row 0 ... too large; take dtype="bfloat16"
rs.for_serving(collection(), damaged(), dtype="int8") => ValueError: for_serving: table 'word': nan in row 3
rs.for_serving(collection(), damaged()) => ValueError: for_serving: table 'word': nan in row 3 ... allow_nonfinite
rs.for_serving(collection(), state(), dtype="int4")
    => ValueError: for_serving: dtype of table 'word' 'int4' is not one of
served({"author": [1, 2]}) => ValueError: missing ['title']
served(batch(), of=other()) => ValueError: table 'word' must have rows [9, 4], got an array of float32 with shape (7, 4)
served(batch(), of=keyed()) => ValueError: reads table 'word' ... ['client'] lack; ... for_serving returned
served(batch(), tables=[]) => TypeError: tables must be a mapping, got [] (list); give the tables that for_serving
served(batch(), tables={"word": {}, "user": {}}) => ValueError: table 'word' must have rows [9, 4], got None
served(batch(title=np.ones((2, 2)))) => TypeError: feature 'title': ids must be integers, got float64
# Gradients of activations
collection().update(state(), batch(), {"title": np.ones((2, 4))}) => ValueError: gradients ... missing ['author']
update(date=np.ones((2, 4))) => ValueError: activation gradients ... unknown ['date']
collection().update(state(), batch(), np.ones((2, 4)))
    => TypeError: activation gradients ... mapping ... an array of float64
update(title=np.ones((1, 4))) => ValueError: feature 'title' ... gradient has shape (1, 4) ... 2 vectors of 4
update(title=np.ones(8)) => ValueError: feature 'title' ... (8,) ... 2 vectors of 4
update(title=np.ones((2, 4), int)) => TypeError: feature 'title' ... gradient ... floats ... int64
update(title=np.ma.masked_less(np.ones((2, 4)), 0)) => TypeError: feature 'title' ... masked array
update(title="ones") => TypeError: feature 'title' ... gradient ... str
# Row gradients
applied(None) => TypeError: lookup_vjp ... RowGradients ... NoneType
applied(other_row_gradients()) => ValueError: belong to another collection ... expected ... lookup_vjp
by_hand(num_rows=(("x", 9),)) => ValueError: belong to another collection ... x ... word_user ... lookup_vjp
by_hand(values=jnp.ones((1, 3))) => ValueError: 'word_user' ... (1, 3)
by_hand(rows=jnp.array([1.5])) => TypeError: RowGradients: rows['word_user'] must be an array of
by_hand(rows=jnp.array([[1]])) => ValueError: row gradients of stack 'word_user': rows (1, 1) and values
by_hand(rows=jnp.array([1, 2])) => ValueError: row gradients of stack 'word_user': rows (2,) and values
by_hand(rows=[1]) => ValueError: row gradients of stack 'word_user': rows () and values (1,
by_hand(rows="1") => TypeError: RowGradients: rows['word_user'] must be an array of ... got '1' (str)
by_hand(values=jnp.ones(4)) => ValueError: row gradients of stack 'word_user': rows (1,) and values
changed(values={"word_user": None})
    => TypeError: RowGradients: values['word_user'] must be an array of ... got None (NoneType)
changed(values={}) => ValueError: row gradients of stack 'word_user': rows (6,) and values ()
changed(rows={"x": jnp.array([1])}, values={"x": jnp.ones((1,4))})
    => ValueError: row gradients of stack 'word_user': rows () and values ()
changed(rows=None) => TypeError: RowGradients: rows must be a mapping (each an array of ... got None (NoneType)
by_hand(num_rows={"word_user": 14}) => ValueError: the row gradients belong to another collection or module: they
changed_keys(rows=jnp.array([1])) => ValueError: row gradients of stack 'client': rows (1,) and values (1,
changed_keys(rows=jnp.ones((1, 1), jnp.uint32)) => ValueError: stack 'client': rows (1, 1)
changed_keys(values=jnp.ones((1,3))) => ValueError: row gradients of stack 'client': rows (1, 3) and values (1,
applied(jax.tree.map(lambda x: jnp.stack([x, x]), row_gradients()))
    => ValueError: row gradients of stack 'word_user': rows (2, 6) and values
rs.scale(row_gradients(), NAN) => ValueError: scale: factor ... nan
rs.clip_by_global_norm(row_gradients(), -1.0) => ValueError: clip_by_global_norm: max_norm ... -1.0
rs.clip_by_global_norm(row_gradients(), 1.0, other_norm=NAN) => ValueError: other_norm ... nan
rs.combine() => TypeError: combine() missing 1 required positional argument
rs.combine([row_gradients()]) => TypeError: combine ... RowGradients ... list
rs.combine(row_gradients(), other_row_gradients()) => ValueError: belong to another collection ... combine
row_gradients() + other_row_gradients() => ValueError: belong to another collection ... combine
row_gradients() + 1 => TypeError: RowGradients
row_gradients() * row_gradients() => TypeError: RowGradients
row_gradients() * NAN => ValueError: factor of gradients ... nan
row_gradients() * "2" => TypeError: factor of gradients must be a number, got '2'
row_gradients() / jnp.ones(3) => ValueError: factor of gradients must be a number, got an array
row_gradients().rows.__setitem__("word_user", 1) => TypeError: rows['word_user'] ... copy ... dataclasses.replace
# value_and_grad
grad(loss_of, has_aux=True) => TypeError: loss_fn ... (loss, aux)
grad(lambda params, activations: activations["title"]) => TypeError: scalar ... (2, 4)
grad(lambda params, activations: jnp.sum(activations["title"]).astype(int)) => TypeError: float ... int32
grad(loss_of, jnp.ones(4, int)) => TypeError: value_and_grad: params must hold floats, got an array of
grad(lambda params, activations: activations["title"].sum(), {"k": KEY(0)})
    => TypeError: value_and_grad: params['k'] must hold floats, got an array
# The package
rs.pairwise_interaction(jnp.ones((3, 2))) => ValueError: vectors
rs.pairwise_interaction(jnp.ones((1, 2, 2)), implementation="fast") => ValueError: unknown implementation 'fast'
rs.opaque.wrap(jnp.ones(2), "row") => TypeError: kind 'row' are int32, got float32
jax.random.split(rs.opaque.wrap(jnp.arange(2), "row")[0])
    => TypeError: not keys of a random number generator
rs.sparsecores => AttributeError: 'rsembed' ... 'sparsecores' ... 'sparsecore'
rs.TableSpecs => AttributeError: module 'rsembed' has no attribute 'TableSpecs' (did you mean 'TableSpec'?)
rs.nothing => AttributeError: module 'rsembed' has no attribute 'nothing'
rs.AdamOptimizerSpec
    => AttributeError: module 'rsembed' has no attribute 'AdamOptimizerSpec'; use rsembed.optimizers.Adam
rs.RowWiseAdagrad
    => AttributeError: module 'rsembed' has no attribute 'RowWiseAdagrad'; use rsembed.optimizers.RowWiseAdagrad
rs.CowClipDefinition
    => AttributeError: 'CowClipDefinition'; use rsembed.optimizers.regularization.CowClipDefinition
rs.optimizers.AdamOptimizerSpec
    => AttributeError: module 'rsembed.optimizers' has no attribute 'AdamOptimizerSpec'; use rsembed.optimizers.Adam
"""

ACCEPTED = """
collection().tables(collection().init(jax.random.PRNGKey(3))) => collection().tables(collection().init(KEY(3)))
collection().tables(with_tables(word=[[1.0] * 4] * 9)) => collection().tables(with_tables(word=np.ones((9, 4))))
collection().tables(with_tables(word=np.ones((9, 4), int))) => collection().tables(with_tables(word=np.ones((9, 4))))
collection().tables(update(title=[[1.0] * 4] * 2)) => collection().tables(update())
collection().tables(update(title=np.ones((2, 4)))) => collection().tables(update())
rs.scale(row_gradients(), 2).values => rs.scale(row_gradients(), 2.0).values
jax.jit(rs.clip_by_global_norm)(row_gradients(), np.inf).values => row_gradients().values
rs.clip_by_global_norm(row_gradients(), np.inf).values => row_gradients().values
lookup(state()._replace(tables=jax.tree.map(np.asarray, state().tables))) => lookup(state())
rs.pairwise_interaction(jnp.ones((2, 3, 2), int)) => rs.pairwise_interaction(jnp.ones((2, 3, 2)))
other().tables(other_state())["word"].shape => (7, 4)
"""
