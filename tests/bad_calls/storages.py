"""Bad storages and optimizers of tables."""

import rsembed as rs
from rsembed.tt import TensorTrain
from tests.bad_calls.world import feature, table


def stored(storage, rows=9, **fields):
    return rs.EmbeddingCollection([feature(table_spec=table(storage=storage, vocabulary_size=rows, **fields))])


BAD = {
    "hashed when_full None": (
        lambda: stored(rs.Hashed(when_full=None)),
        ValueError, "table 'word': when_full None is not one of error, grow,",
    ),
    "hashed eviction None": (
        lambda: stored(rs.Hashed(when_full="evict", eviction=None)),
        ValueError, "table 'word': eviction None is not one of lru, lfu, age, l2.",
    ),
    "hashed capacity float": (
        lambda: stored(rs.Hashed(admission_count=2, admission_capacity=1.5)),
        TypeError, "table 'word': admission_capacity must be an integer, got", "got 1.5 (float)",
    ),
    "hashed prob 0": (
        lambda: stored(rs.Hashed(admission_probability=0.0)),
        ValueError, "table 'word': admission_probability must be in (0, 1], got", "got 0.0",
    ),
    "hashed prob text": (
        lambda: stored(rs.Hashed(admission_probability="0.5")),
        TypeError, "table 'word': admission_probability must be a number, got", "got '0.5' (str)",
    ),
    "hashed key bool": (
        lambda: stored(rs.Hashed(key_dtype=bool)),
        ValueError, "table 'word': key_dtype 'bool' is not one of int32, int64,",
    ),
    "host evict list": (
        lambda: stored(rs.HostCached(cache_rows=2, eviction=["lru"])),
        ValueError, "table 'word': eviction ['lru'] is not one of lru, lfu.",
    ),
    "tt ranks zero": (
        lambda: stored(TensorTrain((0,))),
        ValueError, "table 'word': tt_ranks must hold integers of at least 1,", "got 0",
    ),
    "tt ranks float": (
        lambda: stored(TensorTrain((2.5,))),
        TypeError, "TensorTrain: tt_ranks[0] must be an integer, got 2.5", "got 2.5 (float)",
    ),
    "tt q shapes text": (
        lambda: stored(TensorTrain((2,), tt_q_shapes="22")),
        TypeError, "TensorTrain: tt_q_shapes must be a list (each an integer)", "got '22' (str)",
    ),
    "tt bytes text": (
        lambda: stored(TensorTrain(bytes="1kB")),
        TypeError, "TTSpec.for_budget: bytes must be an integer or None, got", "got '1kB' (str)",
    ),
    "tt dist None": (
        lambda: stored(TensorTrain((2,), weight_dist=None)),
        ValueError, "TensorTrain: unknown weight_dist None; choose one of",
    ),
    "sgd rate None": (
        lambda: rs.SGDOptimizerSpec(None),
        TypeError, "SGDOptimizerSpec: learning_rate must be a number or a", "got None (NoneType)",
    ),
    "adam beta 1": (
        lambda: rs.AdamOptimizerSpec(0.1, beta_1=1.0),
        ValueError, "AdamOptimizerSpec: beta_1 must be in [0, 1), got 1.0.",
    ),
    "adagrad init neg": (
        lambda: rs.AdagradOptimizerSpec(0.1, initial_accumulator_value=-1.0),
        ValueError, "AdagradOptimizerSpec: initial_accumulator_value must be in", "got -1.0",
    ),
    "ftrl power": (
        lambda: rs.FTRLOptimizerSpec(0.1, learning_rate_power="x"),
        TypeError, "FTRLOptimizerSpec: learning_rate_power must be a number,", "got 'x' (str)",
    ),
    "lamb none": (
        lambda: rs.LAMBOptimizerSpec(0.1, weight_decay=None),
        TypeError, "LAMBOptimizerSpec: weight_decay must be a number, got None", "got None (NoneType)",
    ),
    "from_optax rate text": (
        lambda: rs.from_optax(__import__("optax").sgd(0.1), learning_rate="x"),
        TypeError, "OptaxOptimizerSpec: learning_rate must be a number, got 'x'", "got 'x' (str)",
    ),
}  # fmt: skip
