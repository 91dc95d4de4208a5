"""Bad optimizers and bad storages."""

import jax
import numpy as np
import optax.contrib  # noqa: F401, used by calls of the table

import rsembed as rs
from tests.bad_calls.world import (
    KEY,
    feature,
    table,
)


def stepped(rule):
    """Traces a step of one row with an optimizer."""
    one = rs.EmbeddingCollection([feature(table_spec=table(optimizer=rule))])
    arguments = {"title": [[1]]}, {"title": np.ones((1, 4), np.float32)}
    return jax.eval_shape(lambda: one.update(one.init(KEY(0)), *arguments))


def custom(function, **fields):
    return rs.optimizers.Custom(0.1, function, **fields)


def stored(storage, rows=9, **options):
    spec = table(storage=storage, vocabulary_size=rows)
    return rs.EmbeddingCollection([feature(table_spec=spec)], **options)


def host_read(initializer):
    spec = table(storage=rs.HostCached(cache_rows=4), initializer=initializer)
    one = rs.EmbeddingCollection([feature(table_spec=spec)])
    return one.lookup(one.init(KEY(0)), {"title": [[1]]})


def host_rows(cache_rows):
    """The table after a step with a device cache of `cache_rows` rows."""
    one = stored(rs.HostCached(cache_rows=cache_rows))
    ones = {"title": np.ones((2, 4), np.float32)}
    return one.tables(one.update(one.init(KEY(0)), {"title": [[1, 2], [8, 1]]}, ones))


def with_rows(rule=None, **rows):
    """Writes rows and slots into a keyed table with four rows, and returns the table."""
    spec = table(vocabulary_size=4, storage=rs.Hashed(), optimizer=rule or rs.optimizers.SGD(0.1))
    one = rs.EmbeddingCollection([feature(table_spec=spec)])
    arrays = {"keys": np.array([1, 2], np.uint64), "values": np.ones((2, 4), np.float32)} | rows
    return one.tables(one.with_tables(one.init(KEY(0)), {"word": arrays}))


BAD = """
# Hyperparameters
jax.jit(lambda rate: rs.optimizers.SGD(rate).learning_rate)(0.1)
    => TypeError: SGD: learning_rate ... traced ... callable of step
rs.optimizers.SGD(lambda step, epoch: 0.1) => ValueError: 'step', 'epoch' ... functools.partial
rs.optimizers.SGD(lambda step: 0.1 / step).get_learning_rate() => ValueError: SGD ... pass step=
rs.optimizers.SGD(lambda step: NAN).get_learning_rate(3)
    => ValueError: SGD: what the schedule learning_rate gives at step 3 must be in (-inf, inf), got nan
started(initializer=lambda key, shape: jnp.full(shape, NAN))
    => ValueError: table 'word': what its initializer gives: nan in row 0 is not finite
started(initializer=lambda key, shape: jnp.zeros(shape).at[7, 2].set(1e6), dtype="float16")
    => ValueError: table 'word': what its initializer gives: inf in row 7 is not finite ... dtype
started(initializer=lambda key, shape: jnp.full(shape, NAN), storage=rs.Hashed())
    => ValueError: table 'word': what its initializer gives for a row: nan
started(optimizer=custom(lambda g, w, m, lr: (w, m),
    slot_variable_initializers_tuple=(lambda key, shape: jnp.full(shape, NAN),)))
    => ValueError: nan in row 0 is not finite
host_read(lambda key, shape: jnp.full(shape, NAN))
    => ValueError: table 'word': what its initializer gives for ... of its rows: nan
with_rows(rs.optimizers.Adagrad(0.1), slot_accumulator=np.full((2, 4), -1.0))
    => ValueError: table 'word': its slot_accumulator: -1.0 in row 0 is negative ... allow_nonfinite=True
with_rows(rs.optimizers.Adam(0.1), slot_momentum=np.ones((2, 4)), slot_velocity=np.full((2, 4), np.inf))
    => ValueError: table 'word': its slot_velocity: inf in row 0 is not finite
stepped(rs.optimizers.SGD(lambda step: "0.1")) => TypeError: schedule learning_rate ... str
rs.optimizers.FTRL(0.0)
    => ValueError: FTRL: learning_rate must be in (0, inf), got 0.0: the linear term is divided by it
rs.from_optax(optax.sgd(0.1), learning_rate=NAN) => ValueError: OptaxOptimizerSpec: learning_rate must be in
rs.optimizers.LaProp(rms_clip_threshold=-1.0) => ValueError: LaProp: rms_clip_threshold ... clip_by_global_norm
rs.optimizers.AdamW(slot_dtypes=("int8", None))
    => ValueError: AdamW: slot_dtypes=('int8 ... float32, bfloat16 or float16
rs.optimizers.AdamW(slot_dtypes=("float16",) * 3)
    => ValueError: AdamW: slot_dtypes=('float16' ... which are ['float32', 'float32']; give one entry each
rs.tbe.CowClipAdagrad(slot_dtypes=(None, "float32", None)) => ValueError: CowClipAdagrad: slot_dtypes= ... int32
rs.optimizers.AdamW().get_hyperparameters() => ValueError: AdamW counts updates; pass step=
rs.tbe.DecayedAdagrad(weight_decay_mode=rs.tbe.WeightDecayMode.COUNTER)
    => ValueError: COUNTER is a rule of its own; use CounterAdagrad
rs.tbe.DecayedAdagrad(global_weight_decay=rs.tbe.GlobalWeightDecayDefinition())
    => ValueError: weight_decay_mode NONE and global_weight_decay= ... set WeightDecayMode.DECOUPLE_GLOBAL
# Rules of others
rs.from_optax("adam") => TypeError: from_optax ... GradientTransformation ... str
rs.from_optax(optax.polyak_sgd()) => TypeError: from_optax ... from its gradient alone ... 'value'
rs.from_optax(optax.lookahead(optax.sgd(0.1), 5, 0.5)) => TypeError: from_optax: optax.lookahead keeps two copies
rs.from_optax(optax.noisy_sgd(0.1, key=0)) => TypeError: from_optax ... random key ... every row ... same noise
rs.from_optax(optax.contrib.dpsgd(0.1, 1.0, 1.0, 0)) => TypeError: from_optax ... random key
rs.from_optax(optax.MultiSteps(optax.sgd(0.1), 4))
    => TypeError: from_optax ... gradient_transformation() ... rsembed.combine
rs.tbe.TableBatchedEmbeddingBags(
    [(9, 4, rs.tbe.EmbeddingLocation.HOST, rs.tbe.ComputeDevice.CPU)], optimizer=rs.from_optax(optax.adam(0.1)))
    => NotImplementedError: states of optimizers of other packages have no names
custom(None) => TypeError: Custom: custom_computation_fn ... (gradient, row, *slots, lr)
stepped(custom(lambda g, w, lr: (w - lr * g).sum())) => ValueError: 'custom' ... row and its 0 slots ... (1, 4) ... ()
stepped(custom(lambda g, w: w - g)) => TypeError: custom optimizer 'custom' ... 3 arguments (gradient, row, *slots, lr)
custom(lambda g, w, m, lr: (w, m), slot_variable_initializers_tuple=("zeros",))
    => TypeError: slot_variable_initializers_tuple ... a number ... str
stored(rs.Hashed(when_full="drop")) => ValueError: table 'word': when_full must be 'error' or 'grow' ... 'drop'
stored(rs.Hashed(when_full="grow")) => ValueError: table 'word' ... vocabulary_size
stored(rs.Hashed(eviction="fifo")) => ValueError: table 'word': eviction must be 'lru' or 'lfu', got 'fifo'
stored(rs.Hashed(admission_capacity=2)) => ValueError: table 'word' ... takes an admission_count
stored(rs.Hashed(key_dtype=None)) => ValueError: key_dtype None ... uint64
stored(rs.HostCached(cache_rows="2")) => TypeError: cache_rows ... integer ... '2'
stored(rs.Hashed(admission_count=-1)) => ValueError: table 'word': admission_count ... -1
stored(rs.Hashed(admission_count=1.5)) => TypeError: table 'word': admission_count ... 1.5
stored(rs.Hashed(key_dtype="int16")) => ValueError: table 'word' ... 'int16' ... int32 ... uint64
stored(rs.Hashed(), rows=2**40) => ValueError: 1099511627776 rows ... 2147483647 ... ['word']
stored(rs.Hashed(), mesh=mesh(), placement={"word": "table"})
    => ValueError: table 'word' ... 'table' ... only 'row'
keyed().with_tables(keyed_state(), {"client": np.ones((4, 3))}) => ValueError: table 'client' ... (4, 3) ... (4, 4)
keyed().with_tables(keyed_state(), {"client": {"values": np.ones((2, 4))}}) => ValueError: table 'client' ... 'keys'
with_rows(keys=np.array([1, 1], np.uint64)) => ValueError: table 'word' ... distinct ... 1 is not
with_rows(keys=np.array([1.0, 2.0])) => TypeError: table 'word' ... keys ... float64
with_rows(values=np.full((2, 4), "a")) => TypeError: table 'word' ... values ... numbers
with_rows(keys=np.arange(5), values=np.ones((5, 4)))
    => ValueError: table 'word': 5 imported keys ... capacity=4); grow the table
with_rows(momentum=np.ones((2, 4))) => ValueError: table 'word' ... momentum
# HostCached
stored(rs.HostCached(cache_rows=0)) => ValueError: table 'word': cache_rows ... 0
stored(rs.HostCached(cache_rows=2, eviction="random"))
    => ValueError: table 'word': eviction must be 'lru' or 'lfu', got 'random'
near().prefetch(near().init(KEY(0)), {"what": [[1, 2, 3]]})
    => RuntimeError: table 'item': 1 ids of the batch ... cache_rows=2
jax.jit(near().prefetch)(near_state(), {"what": jnp.array([1])}) => RuntimeError: prefetch ... outside of jit
near().with_tables(near_state(), {"item": np.ones((9, 3))}) => ValueError: table 'item' ... (9, 4) ... (9, 3)
stored(rs.Hashed(when_full=None))
    => TypeError: table 'word': when_full must be 'error' or 'grow' or 'evict' or 'zero', got None
stored(rs.Hashed(when_full="evict", eviction=None)) => TypeError: eviction must be 'lru' or 'lfu', got None
stored(rs.Hashed(admission_count=2, admission_capacity=1.5))
    => TypeError: table 'word': admission_capacity must be an integer or None, got 1.5 (float)
stored(rs.Hashed(admission_probability=0.0))
    => ValueError: table 'word': admission_probability must be in (0, 1], got 0.0
stored(rs.Hashed(admission_probability="0.5"))
    => TypeError: table 'word': admission_probability must be a number, got '0.5' (str)
stored(rs.Hashed(key_dtype=np.uint64)) => TypeError: table 'word': key_dtype must be a text, got ... type
stored(rs.Hashed(key_dtype=bool)) => ValueError: table 'word': key_dtype 'bool' is not one of int32, int64,
stored(rs.HostCached(cache_rows=2, eviction=["lru"]))
    => TypeError: table 'word': eviction must be 'lru' or 'lfu', got ['lru']
stored(rs.tt.TensorTrain((0,))) => ValueError: table 'word': TTSpec: tt_ranks[0] must be in [1, inf), got 0
stored(rs.tt.TensorTrain((2.5,))) => TypeError: TensorTrain: tt_ranks[0] must be an integer, got 2.5 (float)
stored(rs.tt.TensorTrain((2,), tt_q_shapes="22"))
    => TypeError: TensorTrain: tt_q_shapes must be a list (each an integer) ... got '22' (str)
stored(rs.tt.TensorTrain((2,), weight_dist=None))
    => TypeError: TensorTrain: weight_dist must be 'normal' or ... got None
"""


ACCEPTED = """
rs.optimizers.SGD(lambda step: 0.5 * step).get_learning_rate(2) => 1.0
rs.optimizers.SGD(lambda: 0.5).get_learning_rate(None) => rs.optimizers.SGD(0.5).get_learning_rate()
rs.optimizers.SGD(optax.linear_schedule(1.0, 0.0, 10)).get_learning_rate(jnp.asarray(5)) => jnp.float32(0.5)
rs.optimizers.SGD(functools.partial(lambda scale, step: scale * step, 0.5)).get_learning_rate(2) => 1.0
rs.optimizers.SGD(lambda step: -1.0).get_learning_rate(0) => -1.0
rs.optimizers.FTRL(learning_rate=0.0, multiply_linear_by_learning_rate=True).learning_rate => 0.0
rs.optimizers.Adagrad(initial_accumulator_value=0.0).initial_accumulator_value => 0.0
rs.optimizers.Adam(beta_1=0.0, beta_2=0.0).beta_2 => 0.0
rs.optimizers.rules.AdagradMomentum(momentum=1.0, beta2=1.0).beta2 => 1.0
rs.optimizers.rules.F2A(max_lr_multiplier=np.inf).max_lr_multiplier => np.inf
rs.from_optax(optax.scale_by_adam(), learning_rate=-0.1).get_learning_rate() => -0.1
host_rows(np.int64(6)) => host_rows(6)
str(rs.optimizers.SGD(jnp.float32(0.5))) => str(rs.optimizers.SGD(0.5))
keyed().prepare({"who": [1, 2]}) => keyed().prepare({"who": np.array([1, 2])})
with_rows(values=np.ones((2, 4))) => with_rows()
"""
