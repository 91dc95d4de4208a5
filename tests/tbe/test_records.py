import dataclasses
import enum

import pytest

from rsembed import tbe as rt

MEMBERS = {
    rt.EmbeddingLocation: "DEVICE=0 MANAGED=1 MANAGED_CACHING=2 HOST=3 MTIA=4",
    rt.ComputeDevice: "CPU=0 CUDA=1 GPU=1 MTIA=2 TPU=3",
    rt.CacheAlgorithm: "LRU=0 LFU=1",
    rt.PoolingMode: "SUM=0 MEAN=1 NONE=2",
    rt.BoundsCheckMode: "FATAL=0 WARNING=1 IGNORE=2 NONE=3 V2_IGNORE=4 V2_WARNING=5 V2_FATAL=6",
    rt.EmbOptimType: (
        "SGD=sgd EXACT_SGD=exact_sgd LAMB=lamb ADAM=adam EXACT_ADAGRAD=exact_adagrad LARS_SGD=lars_sgd FTRL=ftrl "
        "EXACT_ROWWISE_ADAGRAD=exact_row_wise_adagrad PARTIAL_ROWWISE_ADAM=partial_row_wise_adam NONE=none "
        "PARTIAL_ROWWISE_LAMB=partial_row_wise_lamb ENSEMBLE_ROWWISE_ADAGRAD=ensemble_row_wise_adagrad "
        "EMAINPLACE_ROWWISE_ADAGRAD=ema_in_place_row_wise_adagrad ROWWISE_RMSPROP_AR=row_wise_rmsprop_ar "
        "ROWWISE_ADAGRAD=row_wise_adagrad SHAMPOO=shampoo SHAMPOO_V2=shampoo_v2 MADGRAD=madgrad "
        "EXACT_ROWWISE_WEIGHTED_ADAGRAD=exact_row_wise_weighted_adagrad"
    ),
    rt.WeightDecayMode: "NONE=0 L2=1 DECOUPLE=2 COUNTER=3 COWCLIP=4 DECOUPLE_GLOBAL=5",
    rt.CounterWeightDecayMode: "NONE=0 L2=1 DECOUPLE=2 ADAGRADW=3",
    rt.LearningRateMode: "EQUAL=-1 TAIL_ID_LR_INCREASE=0 TAIL_ID_LR_DECREASE=1 COUNTER_SGD=2",
    rt.StepMode: "NONE=0 USE_COUNTER=1 USE_ITER=2",
    rt.GradSumDecay: "NO_DECAY=-1 CTR_DECAY=0",
    rt.SparseType: "FP32=fp32 FP16=fp16 BF16=bf16 FP8=fp8 NFP8=nfp8 INT8=int8 INT4=int4 INT2=int2 MX4=mx4",
}
DEFAULTS = {
    rt.TailIdThreshold: {"val": 0, "is_ratio": False},
    rt.CounterBasedRegularizationDefinition: {
        "counter_weight_decay_mode": rt.CounterWeightDecayMode.NONE,
        "counter_halflife": -1,
        "adjustment_iter": -1,
        "adjustment_ub": 1.0,
        "learning_rate_mode": rt.LearningRateMode.EQUAL,
        "grad_sum_decay": rt.GradSumDecay.NO_DECAY,
        "tail_id_threshold": {"val": 0, "is_ratio": False},
        "max_counter_update_freq": 1000,
    },
    rt.CowClipDefinition: {
        "counter_weight_decay_mode": rt.CounterWeightDecayMode.NONE,
        "counter_halflife": -1,
        "weight_norm_coefficient": 0.0,
        "lower_bound": 0.0,
    },
    rt.GlobalWeightDecayDefinition: {"start_iter": 0, "lower_bound": 0.0},
    rt.EnsembleModeDefinition: {
        "step_ema": 10000,
        "step_swap": 10000,
        "step_start": 0,
        "step_ema_coef": 0.6,
        "step_mode": rt.StepMode.USE_ITER,
    },
    rt.EmainplaceModeDefinition: {"step_ema": 10, "step_start": 0, "step_ema_coef": 0.6},
    rt.UserEnabledConfigDefinition: {
        "use_rowwise_bias_correction": False,
        "use_writeback_bwd_prehook": False,
        "writeback_first_feature_only": False,
        "precompute_writeback": False,
    },
    rt.RecordCacheMetrics: {"record_cache_miss_counter": False, "record_tablewise_cache_miss": False},
    rt.MultiPassPrefetchConfig: {"num_passes": 12, "min_splitable_pass_size": 6291456},
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_have_the_published_values(kind: type[enum.Enum]):
    found = {f"{name}={member.value}" for name, member in kind.__members__.items()}
    assert found == set(MEMBERS[kind].split())


def test_both_names_of_the_optimizer_enum_are_one():
    assert rt.OptimType is rt.EmbOptimType


@pytest.mark.parametrize("kind", DEFAULTS)
def test_records_have_the_published_fields_in_order_and_are_frozen(kind):
    record = kind()
    assert dataclasses.asdict(record) == DEFAULTS[kind]
    assert [field.name for field in dataclasses.fields(record)] == list(DEFAULTS[kind])
    assert hash(record) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, next(iter(DEFAULTS[kind])), 1)
