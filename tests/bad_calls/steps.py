"""Bad states, gradients and losses of a collection."""

import jax
import jax.numpy as jnp
import numpy as np

import rsembed as rs
from tests.bad_calls.world import (
    KEY,
    batch,
    collection,
    feature,
    gradients,
    other,
    other_row_gradients,
    other_state,
    row_gradients,
    state,
    table,
)

NAN = float("nan")
STATELESS = rs.EmbeddingState({}, {}, jnp.zeros((), jnp.int32), None, None)


def lookup(given, ids=None):
    return collection().lookup(given, ids or batch())


def update(**changes):
    return collection().update(state(), batch(), gradients(**changes))


def with_tables(**tables):
    return collection().with_tables(state(), tables)


def reshaped(**tables):
    """The state with arrays that somebody put in by hand."""
    return state()._replace(tables=state().tables | tables, layout=None)


def grad(loss, **options):
    """The gradients of a loss of parameters and activations."""
    return rs.value_and_grad(loss, collection(), **options)(jnp.ones(4), state(), batch())


def loss_of(params, activations):
    return jnp.sum(params * activations["title"])


def started(initializer, **fields):
    """The state of a table with this initializer."""
    return rs.EmbeddingCollection([feature(table_spec=table(initializer=initializer, **fields))]).init(KEY(0))


def by_hand(name, num_rows, dim=4):
    """Gradients of one row that belong to no collection."""
    return rs.RowGradients({name: jnp.array([1])}, {name: jnp.ones((1, dim))}, ((name, num_rows),))


def as_numpy(tree):
    """The state with tables that are arrays of numpy."""
    return tree._replace(tables={name: np.asarray(array) for name, array in tree.tables.items()})


BAD = {
    # init
    "a seed in place of a key": (lambda: collection().init(0), TypeError, "PRNG key", "0", "jax.random.key(0)"),
    "several keys": (
        lambda: collection().init(jax.random.split(KEY(0))), ValueError, "PRNG key", "(2,)", "jax.random.key(0)",
    ),
    "an initializer of another shape": (
        lambda: started(lambda key, shape: jnp.zeros(3)), ValueError, "table 'word'", "initializer", "(3,)", "(9, 4)",
    ),
    "an initializer of one argument": (
        lambda: started(lambda key: key), TypeError, "table 'word'", "initializer(key, (9, 4))", "lambda key, shape",
    ),
    "an initializer of None": (
        lambda: started(lambda key, shape: None), ValueError, "table 'word'", "initializer returned []", "(9, 4)",
    ),
    # States
    "no state": (lambda: lookup(None), TypeError, "EmbeddingState", "NoneType", "collection.init"),
    "batch and state the wrong way round": (
        lambda: collection().lookup(batch(), state()), TypeError, "EmbeddingState", "dict",
    ),
    "a state without tables": (
        lambda: lookup(STATELESS), ValueError, "does not belong", "tables are {}", "collection.init",
    ),
    "a table of another dtype": (
        lambda: lookup(reshaped(word_user=jnp.ones((14, 4), jnp.bfloat16))), ValueError, "does not belong",
        "bfloat16[14, 4]",
    ),
    "slots of another optimizer": (
        lambda: collection().update(reshaped()._replace(slots={"word_user": (jnp.ones(3),)}), batch(), gradients()),
        ValueError, "does not belong", "slots", "float32[3]",
    ),
    # with_tables
    "a table that is not there": (
        lambda: with_tables(wrod=np.ones((9, 4))), ValueError, "unknown table 'wrod'", "'word'", "'user'",
    ),
    "a row by key outside": (
        lambda: with_tables(word={"keys": [9], "values": np.ones((1, 4))}), ValueError, "table 'word'", "9 rows",
        "key 9",
    ),
    # Gradients of activations
    "a missing gradient": (
        lambda: collection().update(state(), batch(), {"title": np.ones((2, 4))}), ValueError, "gradients",
        "missing ['author']",
    ),
    "a gradient too many": (
        lambda: update(date=np.ones((2, 4))), ValueError, "activation gradients", "unknown ['date']",
    ),
    "gradients as an array": (
        lambda: collection().update(state(), batch(), np.ones((2, 4))), TypeError, "activation gradients", "mapping",
        "an array of float64",
    ),
    "a gradient of fewer samples": (
        lambda: update(title=np.ones((1, 4))), ValueError, "feature 'title'", "gradient has shape (1, 4)",
        "2 vectors of 4",
    ),
    "a gradient of one axis": (
        lambda: update(title=np.ones(8)), ValueError, "feature 'title'", "(8,)", "2 vectors of 4",
    ),
    "a gradient of integers": (
        lambda: update(title=np.ones((2, 4), int)), TypeError, "feature 'title'", "gradient", "floats", "int64",
    ),
    "a masked gradient": (
        lambda: update(title=np.ma.masked_less(np.ones((2, 4)), 0)), TypeError, "feature 'title'", "masked array",
    ),
    "a gradient of text": (lambda: update(title="ones"), TypeError, "feature 'title'", "gradient", "str"),
    # Row gradients
    "no row gradients": (
        lambda: collection().apply(state(), None), TypeError, "RowGradients", "NoneType", "lookup_vjp",
    ),
    "row gradients of another collection": (
        lambda: collection().apply(state(), other_row_gradients()), ValueError, "do not belong to this collection",
        "lookup_vjp",
    ),
    "row gradients of another stack": (
        lambda: collection().apply(state(), by_hand("x", 9)), ValueError, "do not belong to this collection", "x",
        "word_user", "lookup_vjp",
    ),
    "row gradients of another dim": (
        lambda: collection().apply(state(), by_hand("word_user", 14, dim=3)), ValueError, "'word_user'", "(1, 3)",
    ),
    "a factor of NaN": (lambda: rs.scale(row_gradients(), NAN), ValueError, "scale: factor", "nan"),
    "a negative norm": (
        lambda: rs.clip_by_global_norm(row_gradients(), -1.0), ValueError, "clip_by_global_norm: max_norm", "-1.0",
    ),
    "another norm of NaN": (
        lambda: rs.clip_by_global_norm(row_gradients(), 1.0, other_norm=NAN), ValueError, "other_norm", "nan",
    ),
    "nothing to combine": (lambda: rs.combine(), ValueError, "combine", "at least one RowGradients"),
    "a list to combine": (lambda: rs.combine([row_gradients()]), TypeError, "combine", "RowGradients", "list"),
    "gradients of two collections": (
        lambda: rs.combine(row_gradients(), other_row_gradients()), ValueError, "different collections", "combined",
    ),
    # value_and_grad
    "a loss without its aux": (lambda: grad(loss_of, has_aux=True), TypeError, "loss_fn", "(loss, aux)"),
    "a loss of vectors": (
        lambda: grad(lambda params, activations: activations["title"]), TypeError, "scalar", "(2, 4)",
    ),
    "a loss of integers": (
        lambda: grad(lambda params, activations: jnp.sum(activations["title"]).astype(int)), TypeError,
        "float", "int32",
    ),
    # Layers of the package
    "a module nobody knows": (lambda: rs.sparsecores, AttributeError, "'rsembed'", "'sparsecores'", "'sparsecore'"),
}  # fmt: skip

ACCEPTED = {
    "an old key of two numbers": (
        lambda: collection().tables(collection().init(jax.random.PRNGKey(3))),
        lambda: collection().tables(collection().init(KEY(3))),
    ),
    "values as lists": (
        lambda: collection().tables(with_tables(word=[[1.0] * 4] * 9)),
        lambda: collection().tables(with_tables(word=np.ones((9, 4)))),
    ),
    "values of integers": (
        lambda: collection().tables(with_tables(word=np.ones((9, 4), int))),
        lambda: collection().tables(with_tables(word=np.ones((9, 4)))),
    ),
    "gradients as lists": (
        lambda: collection().tables(update(title=[[1.0] * 4] * 2)), lambda: collection().tables(update()),
    ),
    "gradients of float64": (
        lambda: collection().tables(update(title=np.ones((2, 4)))), lambda: collection().tables(update()),
    ),
    "an integer factor": (lambda: rs.scale(row_gradients(), 2).values, lambda: rs.scale(row_gradients(), 2.0).values),
    "a norm without bound": (
        lambda: rs.clip_by_global_norm(row_gradients(), np.inf).values, lambda: row_gradients().values,
    ),
    "a state of numpy arrays": (lambda: lookup(as_numpy(state())), lambda: lookup(state())),
    "a pretrained table under another name": (lambda: other().tables(other_state())["word"].shape, lambda: (7, 4)),
}  # fmt: skip
