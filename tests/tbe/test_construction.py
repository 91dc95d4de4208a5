"""Constructor and published names: members, records, signature, ignored arguments, and states."""

import dataclasses
import inspect
import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose

from rsembed import tbe as rt
from tests.tbe.oracle import CACHED, IDS, OFFSETS, make, train, variant

Type = rt.SparseType
ROWWISE = "EXACT_ROWWISE_ADAGRAD"
ONE_BAG = np.array([0, 1])
PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "tbe_names.json").read_text())
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


def test_members_have_the_published_values():
    for kind, published in MEMBERS.items():
        members = {f"{name}={member.value}" for name, member in kind.__members__.items()}
        assert members == set(published.split())


@pytest.mark.parametrize("wanted", RECORDS, ids=lambda wanted: wanted.partition("(")[0])
def test_records_have_the_published_fields_in_order_and_are_frozen(wanted):
    kind = getattr(rt, wanted.partition("(")[0])
    assert re.sub(r"<\w+\.(\w+): -?\d+>", r"\1", repr(kind())) == wanted
    assert hash(kind()) == hash(kind())
    with pytest.raises(dataclasses.FrozenInstanceError):
        kind().any_name = 1


def test_the_published_arguments_stand_in_their_order_and_newer_ones_need_their_name():
    _, *parameters = inspect.signature(rt.TableBatchedEmbeddingBags.__init__).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    module = PUBLISHED["package"]["split_table_batched_embeddings_ops_training"]
    recorded = module["SplitTableBatchedEmbeddingBagsCodegen"]
    assert len(positional) == 40 and positional == [name for name in recorded if name in positional]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[40:])


WITHOUT_EFFECT = {
    "beta1, momentum: no effect": {"optimizer": ROWWISE, "beta1": 0.5, "momentum": 0.1},
    "weight_decay_mode: no effect": {"optimizer": "ADAM", "weight_decay_mode": "L2"},
    "cache_algorithm, cache_load_factor, cache_sets: no effect, because no table has a cache": {
        "cache_sets": 2,
        "cache_load_factor": 0.5,
        "cache_algorithm": "LFU",
    },
    "prefetch_pipeline: no effect, because no table has a cache": {
        "location": CACHED,
        "enforce_hbm": True,
        "prefetch_pipeline": True,
    },
    "uvm_non_rowwise_momentum, use_experimental_tbe, uvm_host_mapped: no effect": {
        "use_experimental_tbe": True,
        "uvm_host_mapped": True,
        "uvm_non_rowwise_momentum": True,
    },
    "weight_decay: no effect": {"optimizer": ROWWISE, "weight_decay": 0.1},
    "max_norm: no effect": {"max_norm": 1.0} | variant("counter"),
    "ensemble_mode: no effect": {
        "optimizer": ROWWISE,
        "ensemble_mode": rt.EnsembleModeDefinition(),
    },
    "cache_reserved_memory: no effect, because cache_sets is set": {
        "location": CACHED,
        "cache_sets": 1,
        "cache_reserved_memory": 1.0,
    },
    "cache_reserved_memory: no effect, because .* the device does not": {
        "location": CACHED,
        "cache_reserved_memory": 1.0,
    },
    "max_gradient: no effect": {"max_gradient": 0.5},
}


@pytest.mark.parametrize("message", WITHOUT_EFFECT)
def test_arguments_without_effect_are_named_in_one_warning(message):
    with pytest.warns(UserWarning, match=message) as caught:
        make([(40, 4)], **WITHOUT_EFFECT[message])
    assert len(caught) == 1


def test_tables_live_on_the_device_that_was_asked_for():
    other = jax.devices()[1]
    for device in (other, "cpu:1", 1):
        module = make([(4, 4)], device=device)
        assert module.state.get_value().weights["table_0"].devices() == {other}


@pytest.mark.parametrize(
    ("optimizer", "sums", "location"),
    [
        ("ADAM", 0.1, rt.EmbeddingLocation.DEVICE),
        ("EXACT_ADAGRAD", 1.0, CACHED),
        ("EXACT_ROWWISE_ADAGRAD", 1.0, CACHED),
    ],
)
def test_sixteen_bit_states_are_kept_as_asked(optimizer, sums, location):
    asked = {"momentum1": Type.BF16}
    if optimizer == "ADAM":
        asked["momentum2"] = Type.FP16
    module = make([(40, 4)], optimizer=optimizer, optimizer_state_dtypes=asked, location=location)
    train(module, np.array([1]), ONE_BAG)
    (states,) = module.split_optimizer_states()
    assert [state.dtype for state in states] == [state.dtype for state in asked.values()]
    assert (states[0].ndim == 1) == ("ROWWISE" in optimizer)
    assert_allclose(states[0].astype(np.float32)[1], sums, rtol=2**-8)


SLOW_COPY_IN_16_BITS = {
    "optimizer": "ENSEMBLE_ROWWISE_ADAGRAD",
    "optimizer_state_dtypes": {"momentum2": Type.BF16},
}


@pytest.mark.parametrize(
    ("options", "of_states"),
    [
        ({"optimizer": "PARTIAL_ROWWISE_ADAM"}, [160 * 4 + 40 * 4, 180 * 4 + 30 * 4]),
        (SLOW_COPY_IN_16_BITS, [40 * 4 + 160 * 2, 30 * 4 + 180 * 2]),
    ],
)
def test_state_bytes_are_those_of_the_arrays(options, of_states):
    assert make(((40, 4), (30, 6)), **options).state_bytes() == {
        "table_0": {"weights": 160 * 4, "optimizer_states": of_states[0]},
        "table_1": {"weights": 180 * 4, "optimizer_states": of_states[1]},
        "total": {"weights": 340 * 4, "optimizer_states": sum(of_states)},
    }


def test_figures_are_reported_every_so_many_steps_to_a_function_or_the_log(caplog):
    reports = {}
    config = rt.TBEStatsReporterConfig(2, reports.__setitem__)
    module = make([(40, 4)], location=CACHED, stats_reporter_config=config, optimizer=ROWWISE)
    for _ in range(5):
        train(module, np.array([1, 2], np.int32), np.array([0, 1, 2]))
    assert list(reports) == [2, 4]
    figures = reports[2]
    known = {
        "tbe.fwd_input_count": 2,
        "tbe.fwd_input_size": 8,
        "tbe.fwd_output_count": 8,
        "tbe.fwd_output_size": 32,
        "tbe.uvm.embeddings": 160 * 4,
        "tbe.total_uvm_usage": 160 * 4 + 40 * 4,
        "tbe.hbm.total_static_sparse": figures["tbe.hbm.cache"],
        "tbe.total_hbm_usage": figures["tbe.hbm.cache"],
    }
    assert known.items() <= figures.items() and figures["tbe.hbm.cache"] > 0
    logged = make([(4, 2)], stats_reporter_config=rt.TBEStatsReporterConfig(1))
    with caplog.at_level(logging.INFO, logger="rsembed"):
        train(logged, np.array([1]), ONE_BAG)
    assert "step 1: " in caplog.text and "tbe.fwd_input_count 1" in caplog.text


def test_compiled_steps_say_that_they_are_not_reported():
    module = make([(4, 2)], stats_reporter_config=rt.TBEStatsReporterConfig(1))
    with pytest.warns(UserWarning, match="stats_reporter_config: no effect inside jit"):
        nnx.jit(train)(module, jnp.asarray([1]), jnp.asarray(ONE_BAG))


def test_members_may_be_given_by_value_and_the_environment_overrules_bounds_checks(monkeypatch):
    module = make([(9, 4)], pooling_mode=1, optimizer="exact_adagrad")
    assert module.plan.pooling == "mean"
    assert module.plan.tables[0].optimizer == rt.OptimType.EXACT_ADAGRAD
    monkeypatch.setenv("FBGEMM_TBE_BOUNDS_CHECK_MODE", "0")
    strict = make([(9, 4)], bounds_check_mode="IGNORE")
    with pytest.raises(ValueError, match="id 9"):
        strict(np.array([9]), ONE_BAG)


def test_a_table_without_rows_reads_zeros_and_stands_in_nobodys_way():
    specs = [(9, 4), (0, 4), (0, 2)]
    module = make(specs, optimizer="EXACT_ADAGRAD")
    output, _ = train(module, np.array([3, 3]), np.array([0, 2, 2, 2]))
    assert output.shape == (1, 10) and not np.any(output[:, 4:])
    assert [table.shape for table in module.split_embedding_weights()] == specs
    with pytest.warns(UserWarning, match="was corrected"):
        output = module(np.array([3, 0]), np.array([0, 1, 2, 2]))
    assert not np.any(output[:, 4:])


@pytest.mark.slow_rows("counter_decouple-sum prev_iter row_counter", "global-sum prev_iter iter")
@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("counter_adagradw", "sum prev_iter row_counter iter"),
        ("counter_decouple", "sum prev_iter row_counter"),
        ("cowclip", "sum prev_iter row_counter"),
        ("global", "sum prev_iter iter"),
    ],
)
def test_states_have_their_published_names_and_the_number_of_steps_where_they_count_in_it(
    rule, names
):
    module = make(((5, 4), (6, 4)), **variant(rule))
    train(module, IDS, OFFSETS)
    for state in module.get_optimizer_state():
        assert list(state) == names.split()
        assert int(state.get("iter", 1)) == 1
