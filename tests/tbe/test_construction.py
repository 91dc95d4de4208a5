"""The constructor: its published signature, arguments that change nothing, and what does not go together."""

import inspect
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rsembed import tbe as rt
from tests.tbe.oracle import make, tables_of, train
from tests.tbe.row_formulas import VARIANTS

Optim, Location, Device, Decay = rt.OptimType, rt.EmbeddingLocation, rt.ComputeDevice, rt.WeightDecayMode
ROWWISE, CACHED = Optim.EXACT_ROWWISE_ADAGRAD, Location.MANAGED_CACHING
PUBLISHED = (
    "embedding_specs feature_table_map cache_algorithm cache_load_factor cache_sets cache_reserved_memory "
    "cache_precision weights_precision output_dtype enforce_hbm optimizer record_cache_metrics gather_uvm_cache_stats "
    "stochastic_rounding gradient_clipping max_gradient max_norm learning_rate eps momentum weight_decay "
    "weight_decay_mode eta beta1 beta2 ensemble_mode counter_based_regularization cowclip_regularization pooling_mode "
    "device bounds_check_mode uvm_non_rowwise_momentum use_experimental_tbe prefetch_pipeline stats_reporter_config "
    "table_names optimizer_state_dtypes multipass_prefetch_config global_weight_decay uvm_host_mapped"
)


def test_the_published_arguments_stand_in_their_order_and_newer_ones_need_their_name():
    parameters = list(inspect.signature(rt.TableBatchedEmbeddingBags.__init__).parameters.values())[1:]
    published = PUBLISHED.split()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == published
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[len(published) :])


def test_both_names_of_the_module_and_of_the_optimizers_are_one():
    assert rt.SplitTableBatchedEmbeddingBagsCodegen is rt.TableBatchedEmbeddingBags
    assert rt.OptimType is rt.EmbOptimType


WITHOUT_EFFECT = {
    "beta1, momentum: no effect": {"optimizer": ROWWISE, "beta1": 0.5, "momentum": 0.1},
    "weight_decay_mode: no effect": {"optimizer": Optim.ADAM, "weight_decay_mode": Decay.L2},
    "cache_algorithm, cache_load_factor, cache_sets: no effect, as no table is behind a cache": dict(
        cache_sets=2, cache_load_factor=0.5, cache_algorithm=rt.CacheAlgorithm.LFU
    ),
    "prefetch_pipeline: no effect, as no table is behind a cache": dict(
        location=CACHED, enforce_hbm=True, prefetch_pipeline=True
    ),
    "uvm_non_rowwise_momentum, use_experimental_tbe, uvm_host_mapped: no effect": dict(
        use_experimental_tbe=True, uvm_host_mapped=True, uvm_non_rowwise_momentum=True
    ),
    "weight_decay: no effect": {"optimizer": ROWWISE, "weight_decay": 0.1},
    "max_norm: no effect": {"optimizer": ROWWISE, "max_norm": 1.0, **VARIANTS["counter"][1]},
    "ensemble_mode: no effect": {"optimizer": ROWWISE, "ensemble_mode": rt.EnsembleModeDefinition()},
    "cache_reserved_memory: no effect, as cache_sets says how large caches are": dict(
        location=CACHED, cache_sets=1, cache_reserved_memory=1.0
    ),
    "cache_reserved_memory: no effect, as .* the device does not": {"location": CACHED, "cache_reserved_memory": 1.0},
    "max_gradient: no effect": {"max_gradient": 0.5},
}


@pytest.mark.parametrize("message", WITHOUT_EFFECT)
def test_arguments_without_effect_are_named_in_one_warning(message):
    with pytest.warns(UserWarning, match=message) as caught:
        make(((40, 4),), **WITHOUT_EFFECT[message])
    assert len(caught) == 1


def test_the_published_example_runs_on_any_device():
    specs = [(3, 8, Location.DEVICE, Device.CUDA), (5, 4, Location.MANAGED, Device.CUDA)]
    module = rt.SplitTableBatchedEmbeddingBagsCodegen(specs)
    assert module(np.array([1, 4]), np.array([0, 1, 2])).shape == (1, 12)


@pytest.mark.parametrize("optimizer", rt.OptimType)
def test_defaults_warn_of_nothing(optimizer):
    make(((40, 4), (30, 2)), optimizer=optimizer)


def test_tables_live_on_the_device_that_was_asked_for():
    other = jax.devices()[1]
    for device in (other, "cpu:1", 1):
        module = make(((4, 4),), device=device)
        module.init_embedding_weights_uniform(0, 1)
        assert module.state.get_value().weights[0].devices() == {other}


@pytest.mark.parametrize("location", [Location.DEVICE, CACHED])
@pytest.mark.parametrize(("optimizer", "sums"), [("ADAM", 0.1), ("EXACT_ADAGRAD", 1.0), ("EXACT_ROWWISE_ADAGRAD", 1.0)])
def test_sixteen_bit_states_are_kept_as_asked(optimizer, sums, location):
    asked = {"momentum1": rt.SparseType.BF16} | ({"momentum2": rt.SparseType.FP16} if optimizer == "ADAM" else {})
    module = make(((40, 4),), optimizer=optimizer, optimizer_state_dtypes=asked, location=location)
    train(module, np.array([1]), np.array([0, 1]))
    (states,) = module.split_optimizer_states()
    assert [state.dtype.name for state in states] == ["bfloat16", "float16"][: len(asked)]
    assert states[0].shape == ((40,) if "ROWWISE" in optimizer else (40, 4))
    np.testing.assert_allclose(np.asarray(states[0], np.float32)[1], sums, rtol=2**-8)


def test_state_bytes_are_those_of_the_arrays_also_of_a_slow_copy_in_16_bits():
    slow = {"optimizer": Optim.ENSEMBLE_ROWWISE_ADAGRAD, "optimizer_state_dtypes": {"momentum2": rt.SparseType.BF16}}
    for arguments in ({"optimizer": Optim.PARTIAL_ROWWISE_ADAM}, slow):
        module = make(((40, 4), (30, 6)), **arguments)
        weights, states = tables_of(module)
        kept = {
            f"table_{t}": {"weights": own.nbytes, "optimizer_states": sum(state.nbytes for state in states[t])}
            for t, own in enumerate(weights)
        }
        total = {what: sum(own[what] for own in kept.values()) for what in kept["table_0"]}
        assert module.state_bytes() == {**kept, "total": total}


def test_figures_are_reported_every_so_many_steps_to_a_function_or_the_log(caplog):
    reports = []
    config = rt.TBEStatsReporterConfig(2, lambda step, figures: reports.append((step, dict(figures))))
    module = make(((40, 4),), location=CACHED, stats_reporter_config=config, optimizer=ROWWISE)
    for _ in range(5):
        train(module, np.array([1, 2], np.int32), np.array([0, 1, 2]))
    assert [step for step, _ in reports] == [2, 4]
    figures = reports[0][1]
    assert figures["tbe.fwd_input_count"] == 2 and figures["tbe.fwd_input_size"] == 8
    assert figures["tbe.fwd_output_count"] == 8 and figures["tbe.fwd_output_size"] == 32
    assert figures["tbe.uvm.embeddings"] == 40 * 4 * 4 and figures["tbe.total_uvm_usage"] == 40 * 4 * 4 + 40 * 4
    assert figures["tbe.total_hbm_usage"] == figures["tbe.hbm.total_static_sparse"] == figures["tbe.hbm.cache"] > 0
    with caplog.at_level(logging.INFO, logger="rsembed"):
        train(make(((4, 2),), stats_reporter_config=rt.TBEStatsReporterConfig(1)), np.array([1]), np.array([0, 1]))
    assert "step 1: " in caplog.text and "tbe.fwd_input_count 1" in caplog.text


def test_compiled_steps_say_that_they_are_not_reported():
    module = make(((4, 2),), stats_reporter_config=rt.TBEStatsReporterConfig(1))
    with pytest.warns(UserWarning, match="stats_reporter_config: no effect inside jit"):
        nnx.jit(lambda module: module.vjp(jnp.asarray([1]), jnp.asarray([0, 1]))[1](jnp.ones((1, 2))))(module)
