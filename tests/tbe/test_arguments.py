import functools

import pytest

from rsembed.tbe import CounterWeightDecayMode as Decay
from rsembed.tbe import EmbOptimType as Optim
from rsembed.tbe import SparseType, WeightDecayMode, records
from rsembed.tbe.arguments import OptimizerArguments, states_of, unused_arguments
from rsembed.tbe.rules import make_rule

ROWWISE = Optim.EXACT_ROWWISE_ADAGRAD
COUNTER, COWCLIP, GLOBAL = WeightDecayMode.COUNTER, WeightDecayMode.COWCLIP, WeightDecayMode.DECOUPLE_GLOBAL
counter, cowclip = records.CounterBasedRegularizationDefinition, records.CowClipDefinition
by_counter = functools.partial(dict, weight_decay_mode=COUNTER)
by_cowclip = functools.partial(dict, weight_decay_mode=COWCLIP)
DEPRECATED = ("SGD", "ROWWISE_ADAGRAD", "SHAMPOO", "SHAMPOO_V2", "MADGRAD", "EXACT_ROWWISE_WEIGHTED_ADAGRAD")
OFFERED = [optimizer for optimizer in Optim if optimizer.name not in DEPRECATED]
ROW_COUNTS = records.UserEnabledConfigDefinition(use_rowwise_bias_correction=True)

REFUSED = [
    *((Optim[name], {}, f"optimizer {name} is deprecated.* choose one of .*EXACT_SGD") for name in DEPRECATED),
    (ROWWISE, by_counter(), "counter_based_regularization .*COUNTER need each other.* is None; set both"),
    (ROWWISE, {"counter_based_regularization": counter()}, "counter_based_regularization .* is given; set both"),
    (ROWWISE, by_cowclip(), "cowclip_regularization .*COWCLIP need each other.* is None"),
    (ROWWISE, {"cowclip_regularization": cowclip(lower_bound=1.0)}, "cowclip_regularization .* is given"),
    (ROWWISE, {"weight_decay_mode": GLOBAL}, "global_weight_decay .*DECOUPLE_GLOBAL need each other.* is None"),
    (ROWWISE, {"global_weight_decay": records.GlobalWeightDecayDefinition()}, "global_weight_decay .* is given"),
    (Optim.ADAM, {"global_weight_decay": records.GlobalWeightDecayDefinition()}, "global_weight_decay .* is given"),
    *(
        (optimizer, {"weight_decay_mode": mode}, f"{mode.name} exists for EXACT_ROWWISE_ADAGRAD only.*{optimizer.name}")
        for optimizer in (Optim.ENSEMBLE_ROWWISE_ADAGRAD, Optim.EMAINPLACE_ROWWISE_ADAGRAD, Optim.ADAM)
        for mode in (COUNTER, COWCLIP, GLOBAL)
    ),
    *(
        (
            ROWWISE,
            by_counter(counter_based_regularization=counter(counter_weight_decay_mode=mode, counter_halflife=halflife)),
            f"{mode.name} .*counter_halflife {halflife} .*set a positive counter_halflife",
        )
        for mode in (Decay.L2, Decay.DECOUPLE)
        for halflife in (-1, 0)
    ),
    (
        ROWWISE,
        by_counter(counter_based_regularization=counter(grad_sum_decay=records.GradSumDecay.CTR_DECAY)),
        "grad_sum_decay CTR_DECAY .* use GradSumDecay.NO_DECAY",
    ),
    (ROWWISE, by_cowclip(cowclip_regularization=cowclip()), "every update is clipped to nothing; set lower_bound"),
    (
        ROWWISE,
        by_cowclip(cowclip_regularization=cowclip(counter_weight_decay_mode=Decay.ADAGRADW, lower_bound=1.0)),
        "ADAGRADW has no meaning here; choose NONE, L2 or DECOUPLE",
    ),
    (Optim.EXACT_ADAGRAD, {"eps": 0.0}, "eps must be positive, got 0.0"),
    (Optim.LAMB, {"eps": -1e-8}, "eps must be positive, got -1e-08"),
    (Optim.ADAM, {"beta1": 1.0}, r"beta1 must be in \[0, 1\), got 1.0"),
    (Optim.PARTIAL_ROWWISE_LAMB, {"beta2": -0.1}, r"beta2 must be in \[0, 1\), got -0.1"),
    (
        Optim.ADAM,
        {"optimizer_state_dtypes": {"momentum3": SparseType.BF16}},
        "ADAM has no state 'momentum3' .*choose among momentum1, momentum2",
    ),
    (
        Optim.ROWWISE_RMSPROP_AR,
        {"optimizer_state_dtypes": {"prev_iter": SparseType.FP16}},
        "ROWWISE_RMSPROP_AR has no state 'prev_iter' with a dtype to choose; choose among momentum1",
    ),
    (
        Optim.EXACT_SGD,
        {"optimizer_state_dtypes": {"momentum1": SparseType.FP16}},
        "EXACT_SGD has no state 'momentum1' .*leave the argument out",
    ),
    (
        Optim.ADAM,
        {"optimizer_state_dtypes": {"momentum1": SparseType.INT8}},
        r"optimizer_state_dtypes\['momentum1'\]: INT8 .*FP32, FP16, BF16",
    ),
]


@pytest.mark.parametrize(("optimizer", "arguments", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_with_a_way_out(optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_rule(optimizer, **arguments)


@pytest.mark.parametrize(
    ("optimizer", "given", "names"),
    [
        (Optim.EXACT_SGD, {"eps": 1.0, "learning_rate": 3.0, "weight_decay": 0.0}, ["eps"]),
        (Optim.EXACT_ADAGRAD, {"eps": 1.0, "weight_decay": 0.1, "max_norm": 1.0}, ["weight_decay", "max_norm"]),
        (Optim.ADAM, {"weight_decay_mode": WeightDecayMode.L2, "weight_decay": 0.1}, ["weight_decay_mode"]),
        (Optim.ADAM, {"pooling_mode": 3, "beta1": 0.5}, []),
        (Optim.LARS_SGD, {"eps": 1.0, "momentum": 0.5, "eta": 1.0}, ["eps"]),
        (ROWWISE, {"weight_decay": 0.1}, ["weight_decay"]),
        (ROWWISE, {"weight_decay": 0.1, "weight_decay_mode": WeightDecayMode.L2, "max_norm": 1.0}, []),
        (ROWWISE, {"weight_decay_mode": COUNTER, "max_norm": 1.0, "weight_decay": 0.1}, ["max_norm"]),
        (ROWWISE, {"weight_decay_mode": COWCLIP, "max_norm": 1.0}, ["max_norm"]),
        (Optim.EMAINPLACE_ROWWISE_ADAGRAD, {"ensemble_mode": records.EnsembleModeDefinition()}, ["ensemble_mode"]),
        (Optim.ENSEMBLE_ROWWISE_ADAGRAD, {"ensemble_mode": records.EnsembleModeDefinition()}, []),
        (Optim.ROWWISE_RMSPROP_AR, {"ar_alpha": 1.0, "weight_decay": 0.1}, ["weight_decay"]),
        (Optim.NONE, {"learning_rate": 1.0, "momentum": 0.9}, ["learning_rate"]),
        (Optim.ADAM, {"extra_optimizer_config": ROW_COUNTS}, []),
        (Optim.LAMB, {"extra_optimizer_config": ROW_COUNTS}, ["extra_optimizer_config.use_rowwise_bias_correction"]),
        (Optim.LAMB, {"extra_optimizer_config": None}, []),
        (
            Optim.ADAM,
            {"extra_optimizer_config": records.UserEnabledConfigDefinition(use_writeback_bwd_prehook=True)},
            ["extra_optimizer_config.use_writeback_bwd_prehook"],
        ),
    ],
)
def test_arguments_that_an_optimizer_does_not_read_are_listed(optimizer, given, names):
    assert unused_arguments(optimizer, given) == names


@pytest.mark.parametrize("optimizer", OFFERED)
def test_defaults_are_never_listed(optimizer):
    assert unused_arguments(optimizer, vars(OptimizerArguments())) == []


@pytest.mark.parametrize(
    ("optimizer", "options", "names", "torch_names"),
    [
        (Optim.EXACT_SGD, {}, (), ()),
        (Optim.NONE, {}, (), ()),
        (Optim.EXACT_ADAGRAD, {}, ("momentum1",), ("sum",)),
        (ROWWISE, by_counter(), ("momentum1", "prev_iter", "row_counter"), ("sum", "prev_iter", "row_counter")),
        (ROWWISE, by_cowclip(), ("momentum1", "prev_iter", "row_counter"), ("sum", "prev_iter", "row_counter")),
        (ROWWISE, {"weight_decay_mode": GLOBAL}, ("momentum1", "prev_iter"), ("sum", "prev_iter")),
        (ROWWISE, {"weight_decay_mode": WeightDecayMode.L2}, ("momentum1",), ("sum",)),
        (Optim.ADAM, {}, ("momentum1", "momentum2"), ("exp_avg", "exp_avg_sq")),
        (
            Optim.ADAM,
            {"extra_optimizer_config": ROW_COUNTS},
            ("momentum1", "momentum2", "row_counter"),
            ("exp_avg", "exp_avg_sq", "row_counter"),
        ),
        (Optim.LAMB, {"extra_optimizer_config": ROW_COUNTS}, ("momentum1", "momentum2"), ("exp_avg", "exp_avg_sq")),
        (Optim.ENSEMBLE_ROWWISE_ADAGRAD, {}, ("momentum1", "momentum2"), ("sum", "sparse_ema")),
        (Optim.ROWWISE_RMSPROP_AR, {}, ("momentum1", "prev_iter"), ("sum", "prev_iter")),
        (Optim.LARS_SGD, {}, ("momentum1",), ("momentum1",)),
        (Optim.FTRL, {}, ("momentum1", "momentum2"), ("sum", "linear")),
    ],
)
def test_states_have_their_published_names_in_order(optimizer, options, names, torch_names):
    states = states_of(optimizer, OptimizerArguments(**options))
    assert tuple(states) == names
    assert tuple(states.values()) == torch_names


def test_a_deprecated_optimizer_has_no_states():
    with pytest.raises(ValueError, match="optimizer SHAMPOO is deprecated"):
        states_of(Optim.SHAMPOO, OptimizerArguments())
