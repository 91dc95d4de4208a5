"""Bad optimizers, and bad places for rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rsembed as rs
from rsembed import tt
from tests.bad_calls.world import (
    KEY,
    feature,
    keyed,
    keyed_state,
    mesh,
    near,
    near_state,
    table,
)

NAN = float("nan")


def stepped(rule):
    """A step of one row by the rule."""
    one = rs.EmbeddingCollection([feature(table_spec=table(optimizer=rule))])
    given = {"title": [[1]]}, {"title": np.ones((1, 4), np.float32)}
    return jax.eval_shape(lambda: one.update(one.init(KEY(0)), *given))


def custom(function, **fields):
    return rs.optimizers.Custom(0.1, function, **fields)


def stored(storage, rows=9, **options):
    spec = table(storage=storage, vocabulary_size=rows)
    return rs.EmbeddingCollection([feature(table_spec=spec)], **options)


def with_rows(**rows):
    """The keyed table with these rows written."""
    given = {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | rows
    return keyed().with_tables(keyed_state(), {"client": given})


BAD = {
    # Hyperparameters
    "a traced rate": (
        lambda: jax.jit(lambda rate: rs.optimizers.SGD(rate).learning_rate)(0.1), TypeError,
        "SGD: learning_rate", "traced", "callable of step",
    ),
    "a schedule of two arguments": (
        lambda: rs.optimizers.SGD(lambda step, epoch: 0.1), ValueError, "'step', 'epoch'", "functools.partial",
    ),
    "a schedule without its step": (
        lambda: rs.optimizers.SGD(lambda step: 0.1 / step).get_learning_rate(), ValueError, "SGD",
        "pass step=",
    ),
    "a schedule of texts": (
        lambda: stepped(rs.optimizers.SGD(lambda step: "0.1")), TypeError, "learning_rate", "schedule", "str",
    ),
    "a negative clip": (
        lambda: rs.optimizers.LaProp(rms_clip_threshold=-1.0), ValueError, "LaProp: rms_clip_threshold",
        "clip_by_global_norm",
    ),
    "slots of integers": (
        lambda: rs.optimizers.AdamW(slot_dtypes=("int8", None)), ValueError, "AdamW: slot_dtypes",
        "int8", "float32, bfloat16 or float16",
    ),
    "too many slot dtypes": (
        lambda: rs.optimizers.AdamW(slot_dtypes=("float16",) * 3), ValueError, "slot_dtypes", "3", "2",
    ),
    # Rules of others
    "optax by name": (lambda: rs.from_optax("adam"), TypeError, "from_optax", "GradientTransformation", "str"),
    "optax that wants the loss": (
        lambda: rs.from_optax(optax.polyak_sgd()), TypeError, "from_optax", "from its gradient alone", "'value'",
    ),
    "no rule": (
        lambda: custom(None), TypeError, "Custom", "custom_computation_fn", "(gradient, row, *slots, lr)",
    ),
    "a rule that returns another shape": (
        lambda: stepped(custom(lambda g, w, lr: (w - lr * g).sum())), ValueError, "custom optimizer 'custom'", "(1, 4)",
        "()",
    ),
    "a rule of too few arguments": (
        lambda: stepped(custom(lambda g, w: w - g)), TypeError, "custom optimizer 'custom'",
        "(gradient, row, *slots, lr)", "3 arguments",
    ),
    "slots by name": (
        lambda: custom(lambda g, w, m, lr: (w, m), slot_variable_initializers_tuple=("zeros",)), TypeError,
        "slot_variable_initializers_tuple", "a number", "str",
    ),
    "a policy nobody knows": (
        lambda: stored(rs.Hashed(when_full="drop")), ValueError, "table 'word'", "when_full", "'drop'", "evict",
    ),
    "a table that grows": (lambda: stored(rs.Hashed(when_full="grow")), ValueError, "table 'word'", "vocabulary_size"),
    "an eviction nobody knows": (
        lambda: stored(rs.Hashed(eviction="fifo")), ValueError, "table 'word'", "eviction 'fifo'", "lru", "lfu",
    ),
    "room for keys that need not wait": (
        lambda: stored(rs.Hashed(admission_capacity=2)), ValueError, "table 'word'", "takes an admission_count",
    ),
    "keys of no dtype": (lambda: stored(rs.Hashed(key_dtype=None)), ValueError, "key_dtype None", "uint64"),
    "rows near as text": (lambda: stored(rs.HostCached(cache_rows="2")), TypeError, "cache_rows", "integer", "'2'"),
    "negative admission": (
        lambda: stored(rs.Hashed(admission_count=-1)), ValueError, "table 'word'", "admission_count", "-1",
    ),
    "half an admission": (
        lambda: stored(rs.Hashed(admission_count=1.5)), TypeError, "table 'word'", "admission_count", "1.5",
    ),
    "keys of 16 bits": (
        lambda: stored(rs.Hashed(key_dtype="int16")), ValueError, "table 'word'", "'int16'", "int32", "uint64",
    ),
    "too many hashed rows": (
        lambda: stored(rs.Hashed(), rows=2**40), ValueError, "['word']", "1099511627776 rows", "2147483647",
    ),
    "keys placed by table": (
        lambda: stored(rs.Hashed(), mesh=mesh(), placement={"word": "table"}), ValueError, "table 'word'", "'table'",
        "'row' or 'replicated'",
    ),
    "a dense array of another dim for a table of keys": (
        lambda: keyed().with_tables(keyed_state(), {"client": np.ones((4, 3))}), ValueError, "table 'client'", "(4, 3)",
        "(4, 4)",
    ),
    "rows without keys": (
        lambda: keyed().with_tables(keyed_state(), {"client": {"values": np.ones((2, 4))}}), ValueError,
        "table 'client'", "'keys'",
    ),
    "a key twice": (
        lambda: with_rows(keys=np.array([1, 1], np.uint64)), ValueError, "table 'client'", "distinct", "1 is not",
    ),
    "keys of floats in a table": (
        lambda: with_rows(keys=np.array([1.0, 2.0])), TypeError, "table 'client'", "keys", "float64",
    ),
    "negative keys in a table": (lambda: with_rows(keys=np.array([1, -5])), ValueError, "table 'client'", "-5"),
    "values of texts": (
        lambda: with_rows(values=np.full((2, 4), "a")), TypeError, "table 'client'", "values", "numbers",
    ),
    "more keys than rows": (
        lambda: with_rows(keys=np.arange(5), values=np.ones((5, 4))), ValueError, "table 'client'", "5 imported keys",
        "capacity=4", "grow the table",
    ),
    "what a table has no place for": (
        lambda: with_rows(momentum=np.ones((2, 4))), ValueError, "table 'client'", "momentum",
    ),
    # HostCached
    "no rows near": (lambda: stored(rs.HostCached(cache_rows=0)), ValueError, "table 'word'", "cache_rows", "0"),
    "a cache with an eviction nobody knows": (
        lambda: stored(rs.HostCached(cache_rows=2, eviction="random")), ValueError, "table 'word'", "eviction 'random'",
        "lru",
    ),
    "more rows than are near": (
        lambda: near().prefetch(near().init(KEY(0)), {"what": [[1, 2, 3]]}), RuntimeError, "table 'item'",
        "1 ids of the batch", "cache_rows=2",
    ),
    "prefetch inside jit": (
        lambda: jax.jit(near().prefetch)(near_state(), {"what": jnp.array([1])}), RuntimeError, "prefetch",
        "outside of jit",
    ),
    "host rows of another shape": (
        lambda: near().with_tables(near_state(), {"item": np.ones((9, 3))}), ValueError, "table 'item'", "(9, 4)",
        "(9, 3)",
    ),
    "no policy": (
        lambda: stored(rs.Hashed(when_full=None)),
        ValueError, "table 'word': when_full None is not one of error, grow,",
    ),
    "no eviction": (
        lambda: stored(rs.Hashed(when_full="evict", eviction=None)),
        ValueError, "table 'word': eviction None is not one of lru, lfu, age, l2.",
    ),
    "room to wait for half a key": (
        lambda: stored(rs.Hashed(admission_count=2, admission_capacity=1.5)),
        TypeError, "table 'word': admission_capacity must be an integer, got", "got 1.5 (float)",
    ),
    "a chance of zero": (
        lambda: stored(rs.Hashed(admission_probability=0.0)),
        ValueError, "table 'word': admission_probability must be in (0, 1], got", "got 0.0",
    ),
    "a chance as text": (
        lambda: stored(rs.Hashed(admission_probability="0.5")),
        TypeError, "table 'word': admission_probability must be a number, got", "got '0.5' (str)",
    ),
    "keys of truth values": (
        lambda: stored(rs.Hashed(key_dtype=bool)),
        ValueError, "table 'word': key_dtype 'bool' is not one of int32, int64,",
    ),
    "a list of evictions": (
        lambda: stored(rs.HostCached(cache_rows=2, eviction=["lru"])),
        ValueError, "table 'word': eviction ['lru'] is not one of lru, lfu.",
    ),
    "a train of rank zero": (
        lambda: stored(tt.TensorTrain((0,))),
        ValueError, "table 'word': tt_ranks must hold integers of at least 1,", "got 0",
    ),
    "a train of half a rank": (
        lambda: stored(tt.TensorTrain((2.5,))),
        TypeError, "TensorTrain: tt_ranks[0] must be an integer, got 2.5", "got 2.5 (float)",
    ),
    "factors of a train as text": (
        lambda: stored(tt.TensorTrain((2,), tt_q_shapes="22")),
        TypeError, "TensorTrain: tt_q_shapes must be a list (each an integer)", "got '22' (str)",
    ),
    "bytes of a train as text": (
        lambda: stored(tt.TensorTrain(bytes="1kB")),
        TypeError, "TTSpec.for_budget: bytes must be an integer or None, got", "got '1kB' (str)",
    ),
    "a train of no distribution": (
        lambda: stored(tt.TensorTrain((2,), weight_dist=None)),
        ValueError, "TensorTrain: unknown weight_dist None; choose one of",
    ),
}  # fmt: skip


ACCEPTED = {
    "a schedule of the step": (lambda: rs.optimizers.SGD(lambda step: 0.5 * step).get_learning_rate(2), lambda: 1.0),
    "a rate behind functools.partial": (
        lambda: rs.optimizers.SGD(functools.partial(lambda scale, step: scale * step, 0.5)).get_learning_rate(2),
        lambda: 1.0,
    ),
    "a rate as a JAX scalar": (
        lambda: str(rs.optimizers.SGD(jnp.float32(0.5))), lambda: str(rs.optimizers.SGD(0.5)),
    ),
    "keys as a list": (lambda: keyed().prepare({"who": [1, 2]}), lambda: keyed().prepare({"who": np.array([1, 2])})),
    "values of float64": (
        lambda: keyed().tables(with_rows(values=np.ones((2, 4)))), lambda: keyed().tables(with_rows()),
    ),
}  # fmt: skip
