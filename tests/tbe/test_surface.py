"""Names and forms of the original that programs around it use."""

import dataclasses
import enum
import re

import jax.numpy as jnp
import numpy as np
import pytest

import rsembed as rs
from rsembed import tbe as rt
from tests.tbe.oracle import make, train
from tests.tbe.row_formulas import VARIANTS

MEMBERS = {
    rt.EmbeddingLocation: "DEVICE=0 MANAGED=1 MANAGED_CACHING=2 HOST=3 MTIA=4",
    rt.ComputeDevice: "CPU=0 CUDA=1 GPU=1 MTIA=2 TPU=3",
    rt.CacheAlgorithm: "LRU=0 LFU=1",
    rt.PoolingMode: "SUM=0 MEAN=1 NONE=2",
    rt.BoundsCheckMode: "FATAL=0 WARNING=1 IGNORE=2 NONE=3",
    rt.EmbOptimType: (
        "EXACT_SGD=exact_sgd LAMB=lamb ADAM=adam EXACT_ADAGRAD=exact_adagrad LARS_SGD=lars_sgd "
        "EXACT_ROWWISE_ADAGRAD=exact_row_wise_adagrad PARTIAL_ROWWISE_ADAM=partial_row_wise_adam NONE=none "
        "PARTIAL_ROWWISE_LAMB=partial_row_wise_lamb ENSEMBLE_ROWWISE_ADAGRAD=ensemble_row_wise_adagrad "
        "EMAINPLACE_ROWWISE_ADAGRAD=ema_in_place_row_wise_adagrad"
    ),
    rt.WeightDecayMode: "NONE=0 L2=1 DECOUPLE=2 COUNTER=3 COWCLIP=4 DECOUPLE_GLOBAL=5",
    rt.CounterWeightDecayMode: "NONE=0 L2=1 DECOUPLE=2 ADAGRADW=3",
    rt.LearningRateMode: "EQUAL=-1 TAIL_ID_LR_INCREASE=0 TAIL_ID_LR_DECREASE=1 COUNTER_SGD=2",
    rt.StepMode: "NONE=0 USE_COUNTER=1 USE_ITER=2",
    rt.GradSumDecay: "NO_DECAY=-1 CTR_DECAY=0",
    rt.SparseType: "FP32=fp32 FP16=fp16 BF16=bf16",
}
RECORDS = """
TailIdThreshold(val=0, is_ratio=False)
CounterBasedRegularizationDefinition(counter_weight_decay_mode=NONE, counter_halflife=-1, adjustment_iter=-1, \
adjustment_ub=1.0, learning_rate_mode=EQUAL, grad_sum_decay=NO_DECAY, \
tail_id_threshold=TailIdThreshold(val=0, is_ratio=False), max_counter_update_freq=1000)
CowClipDefinition(counter_weight_decay_mode=NONE, counter_halflife=-1, weight_norm_coefficient=0.0, lower_bound=0.0)
GlobalWeightDecayDefinition(start_iter=0, lower_bound=0.0)
EnsembleModeDefinition(step_ema=10000, step_swap=10000, step_start=0, step_ema_coef=0.6, step_mode=USE_ITER)
EmainplaceModeDefinition(step_ema=10, step_start=0, step_ema_coef=0.6)
RecordCacheMetrics(record_cache_miss_counter=False, record_tablewise_cache_miss=False)
MultiPassPrefetchConfig(num_passes=12, min_splitable_pass_size=6291456)
""".strip().splitlines()


@pytest.mark.parametrize("kind", MEMBERS)
def test_members_have_the_published_values(kind: type[enum.Enum]):
    found = {f"{name}={member.value}" for name, member in kind.__members__.items()}
    assert found == set(MEMBERS[kind].split())


@pytest.mark.parametrize("wanted", RECORDS, ids=lambda wanted: wanted.partition("(")[0])
def test_records_have_the_published_fields_in_order_and_are_frozen(wanted):
    kind = getattr(rt, wanted.partition("(")[0])
    assert re.sub(r"<\w+\.(\w+): -?\d+>", r"\1", repr(kind())) == wanted
    assert hash(kind()) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, 1)


SPECS = ((9, 4), (6, 4), (5, 2))
IDS = np.array([3, 3, 8, 0, 5, 5, 1, 4])
OFFSETS = np.array([0, 2, 3, 5, 6, 7, 8])  # three features of two bags


def test_members_may_be_given_by_name_or_value(monkeypatch):
    spec = [(9, 4, rt.EmbeddingLocation.DEVICE, rt.ComputeDevice.CPU)]
    module = rt.TableBatchedEmbeddingBags(spec, pooling_mode=1, optimizer="exact_adagrad", weights_precision="FP16")
    assert (module.plan.pooling, module.plan.tables[0].dtype) == ("mean", "float16")
    assert module.plan.tables[0].optimizer == rt.OptimType.EXACT_ADAGRAD
    with pytest.raises(ValueError, match=r"pooling_mode: PoolingMode has no member 7; there are SUM, MEAN, NONE"):
        rt.TableBatchedEmbeddingBags(spec, pooling_mode=7)
    monkeypatch.setenv("FBGEMM_TBE_BOUNDS_CHECK_MODE", "0")
    strict = rt.TableBatchedEmbeddingBags(spec, bounds_check_mode=rt.BoundsCheckMode.IGNORE)
    with pytest.raises(ValueError, match="id 9"):
        strict(np.array([9]), np.array([0, 1]))


def test_one_table_can_be_set_by_number_or_name():
    module = make(SPECS, uniform=None)
    weights = np.arange(24.0).reshape(6, 4)
    module.set_embedding_weights("table_1", weights)
    module.set_embedding_weights(2, jnp.ones((5, 2)))
    found = module.split_embedding_weights()
    assert (found[0] == 0).all() and (found[2] == 1).all()
    np.testing.assert_array_equal(found[1], weights)
    with pytest.raises(ValueError, match=r"'table_1' has shape \(6, 4\), the new weights \(5, 4\)"):
        module.set_embedding_weights(1, weights[1:])
    with pytest.raises(ValueError, match="there is no table 3"):
        module.set_embedding_weights(3, weights)


def test_a_table_without_rows_reads_zeros_and_stands_in_nobodys_way():
    module = make(((9, 4), (0, 4), (0, 2)), optimizer=rt.OptimType.EXACT_ADAGRAD, uniform=(1, 2))
    ids, offsets = np.array([3, 3]), np.array([0, 2, 2, 2])
    out, backward = module.vjp(ids, offsets)
    assert out.shape == (1, 10) and (np.asarray(out)[:, 4:] == 0).all()
    backward(jnp.ones_like(out))
    assert [table.shape for table in module.split_embedding_weights()] == [(9, 4), (0, 4), (0, 2)]
    with pytest.warns(UserWarning, match="was corrected"):
        assert (np.asarray(module(np.array([3, 0]), np.array([0, 1, 2, 2])))[:, 4:] == 0).all()


def of(variant):
    return {"optimizer": VARIANTS[variant][0], **VARIANTS[variant][1]}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (of("counter_adagradw"), "sum prev_iter row_counter iter"),
        (of("cowclip"), "sum prev_iter row_counter iter"),
        (of("global"), "sum prev_iter iter"),
        (of("adam"), "exp_avg exp_avg_sq"),
        (of("ensemble"), "sum sparse_ema"),
        ({"optimizer": rs.optimizers.FTRL(0.1)}, "accumulator linear"),
        (of("lars"), "momentum1"),
        (of("sgd"), ""),
    ],
)
def test_states_have_their_published_names_and_the_number_of_steps_where_they_count_in_it(options, names):
    module = make(SPECS, **options)
    train(module, IDS, OFFSETS)
    assert len(module.split_optimizer_states()) == len(SPECS)
    for state in module.get_optimizer_state():
        assert list(state) == names.split()
        assert int(state.get("iter", 1)) == 1
