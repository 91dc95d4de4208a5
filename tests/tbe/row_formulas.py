"""The published formula of every row rule, for one row, in numpy float64."""

import functools

import numpy as np

from rsembed import tbe as rt
from rsembed.tbe import (
    CounterWeightDecayMode as Decay,
    EmbOptimType as Optim,
    LearningRateMode as Rate,
    TailIdThreshold,
    WeightDecayMode,
)

LR, MAX_COUNTER = 0.1, 5.0
FIRST_STEP = 7

# Arguments of a formula: the row, its gradient, its states by name (changed in place), the step from 1 on, and the
# arguments of the rule. The result is the new row.


def norm(x):
    return float(np.sqrt(np.sum(np.square(x))))


def gap_of(state, t):
    return 1 if state["prev_iter"] == 0 else t - state["prev_iter"]


def next_counter(state, t, halflife):
    if halflife > 0:
        return 1 + 2.0 ** (-gap_of(state, t) / halflife) * state["row_counter"]
    return 1 if halflife == 0 else state["row_counter"] + 1


def sgd(w, g, state, t, a):
    return w - LR * g


def adagrad(w, g, state, t, a):
    state["momentum1"] = state["momentum1"] + g**2
    return w - LR * g / (np.sqrt(state["momentum1"]) + a["eps"])


def rowwise_adagrad(w, g, state, t, a):
    mode, decay, config = a["weight_decay_mode"], a["weight_decay"], a.get("global_weight_decay")
    if config is not None and t >= config.start_iter and decay > 0:
        if state["prev_iter"] != 0:
            w = w * max(config.lower_bound, (1 - LR * decay) ** max(t - state["prev_iter"] - 1, 0))
        state["prev_iter"] = t
    effective = g + decay * w if mode == WeightDecayMode.L2 else g
    state["momentum1"] = state["momentum1"] + np.mean(effective**2)
    rate = LR / (np.sqrt(state["momentum1"]) + a["eps"])
    keep = 1.0
    if mode == WeightDecayMode.L2:
        keep = 1 - rate * decay
    if mode in (WeightDecayMode.DECOUPLE, WeightDecayMode.DECOUPLE_GLOBAL):
        keep = 1 - LR * decay
    w = keep * w - rate * g
    return w * a["max_norm"] / norm(w) if a["max_norm"] > 0 and norm(w) > a["max_norm"] else w


def counter_adagrad(w, g, state, t, a):
    config, decay = a["counter_based_regularization"], a["weight_decay"]
    halflife, mode, bound = (
        config.counter_halflife,
        config.counter_weight_decay_mode,
        config.adjustment_ub,
    )
    gap, seen = gap_of(state, t), next_counter(state, t, halflife)
    effective = g + decay * w if mode == Decay.L2 else g
    state["momentum1"] = state["momentum1"] + np.mean(effective**2)
    root = np.sqrt(state["momentum1"]) + a["eps"]
    rate, keep = LR / root, 1.0
    if config.adjustment_iter <= 0 or t > config.adjustment_iter:
        tail = config.tail_id_threshold
        if seen > (np.floor(tail.val * MAX_COUNTER) if tail.is_ratio else tail.val):
            if config.learning_rate_mode == Rate.TAIL_ID_LR_INCREASE:
                rate = LR / root * np.clip((MAX_COUNTER / (seen + 1)) ** bound, 1, 10)
            if config.learning_rate_mode == Rate.TAIL_ID_LR_DECREASE:
                rate = LR / root * np.clip(((seen + 1) / MAX_COUNTER) ** bound, 0.1, 1)
            if config.learning_rate_mode == Rate.COUNTER_SGD:
                rate = LR / (np.sqrt(bound * seen) + a["eps"])
        if mode == Decay.ADAGRADW:
            if halflife == -1:
                rate = LR / root * np.sqrt(seen)
            if halflife == -2:
                rate = min(LR * seen, bound) / root
            lazy = (1 - LR * decay) ** (min(gap, t - config.adjustment_iter) - 1)
            rate, keep = rate * lazy, (1 - LR * decay) * lazy
        if mode == Decay.DECOUPLE:
            keep = 1 - halflife / seen * decay * LR
        if mode == Decay.L2:
            keep = 1 - halflife / seen * decay * LR / root
    state["prev_iter"], state["row_counter"] = t, seen
    return keep * w - rate * g


def cowclip_adagrad(w, g, state, t, a):
    config, decay = a["cowclip_regularization"], a["weight_decay"]
    seen = next_counter(state, t, config.counter_halflife)
    effective = g + decay * w if config.counter_weight_decay_mode == Decay.L2 else g
    state["momentum1"] = state["momentum1"] + np.mean(effective**2)
    limit = seen * max(config.weight_norm_coefficient * norm(w), config.lower_bound)
    clip = min(1, limit / norm(effective)) if norm(effective) else 1
    rate = LR / (np.sqrt(state["momentum1"]) + a["eps"]) * clip
    keep = {Decay.DECOUPLE: 1 - LR * decay, Decay.L2: 1 - decay * rate}.get(
        config.counter_weight_decay_mode, 1
    )
    state["prev_iter"], state["row_counter"] = t, seen
    return keep * w - rate * g


def adam(w, g, state, t, a, *, partial=False, lamb=False):
    if "row_counter" in state:
        state["row_counter"] = t = state["row_counter"] + 1
    square = np.mean(g**2) if partial else g**2
    state["momentum1"] = a["beta1"] * state["momentum1"] + (1 - a["beta1"]) * g
    state["momentum2"] = a["beta2"] * state["momentum2"] + (1 - a["beta2"]) * square
    m, v = state["momentum1"] / (1 - a["beta1"] ** t), state["momentum2"] / (1 - a["beta2"] ** t)
    u = m / (np.sqrt(v) + a["eps"]) + a["weight_decay"] * w
    if lamb:
        return w - LR * (norm(w) / norm(u) if norm(w) and norm(u) else 1) * u
    return w - LR * u


def lars(w, g, state, t, a):
    rate = LR
    if norm(w) and norm(g):
        rate = LR * a["eta"] * norm(w) / (norm(g) + a["weight_decay"] * norm(w))
    state["momentum1"] = a["momentum"] * state["momentum1"] + rate * (g + a["weight_decay"] * w)
    return w - state["momentum1"]


ROWWISE, COUNTER, COWCLIP = (
    Optim.EXACT_ROWWISE_ADAGRAD,
    WeightDecayMode.COUNTER,
    WeightDecayMode.COWCLIP,
)
L2, DECOUPLE = (
    {"weight_decay_mode": WeightDecayMode.L2},
    {"weight_decay_mode": WeightDecayMode.DECOUPLE},
)
GLOBAL = {"weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL, "weight_decay": 0.5}


def counting(**config):
    decays = config.get("counter_weight_decay_mode", Decay.NONE) != Decay.NONE
    return {
        "weight_decay_mode": COUNTER,
        "weight_decay": 0.4 if decays else 0.0,
        "counter_based_regularization": rt.CounterBasedRegularizationDefinition(**config),
    }


def clipping(**config):
    return {
        "weight_decay_mode": COWCLIP,
        "weight_decay": 0.4,
        "cowclip_regularization": rt.CowClipDefinition(**config),
    }


VARIANTS = {
    "sgd": (Optim.EXACT_SGD, {}, sgd),
    "adagrad": (Optim.EXACT_ADAGRAD, {"eps": 0.2}, adagrad),
    "rowwise": (ROWWISE, {"eps": 0.2}, rowwise_adagrad),
    "rowwise_l2": (ROWWISE, {"weight_decay": 0.5, **L2}, rowwise_adagrad),
    "rowwise_decouple": (ROWWISE, {"weight_decay": 0.5, **DECOUPLE}, rowwise_adagrad),
    "rowwise_max_norm": (ROWWISE, {"max_norm": 1.5, "weight_decay": 0.5, **L2}, rowwise_adagrad),
    "global": (
        ROWWISE,
        {"global_weight_decay": rt.GlobalWeightDecayDefinition(), **GLOBAL},
        rowwise_adagrad,
    ),
    "global_bounded_starting_late": (
        ROWWISE,
        {"global_weight_decay": rt.GlobalWeightDecayDefinition(FIRST_STEP + 2, 0.9), **GLOBAL},
        rowwise_adagrad,
    ),
    "ensemble": (
        Optim.ENSEMBLE_ROWWISE_ADAGRAD,
        {"weight_decay": 0.5, "max_norm": 2.0, **L2},
        rowwise_adagrad,
    ),
    "emainplace": (
        Optim.EMAINPLACE_ROWWISE_ADAGRAD,
        {"weight_decay": 0.5, **DECOUPLE},
        rowwise_adagrad,
    ),
    "adam": (Optim.ADAM, {"beta1": 0.8, "beta2": 0.99, "eps": 1e-4}, adam),
    "adamw": (Optim.ADAM, {"weight_decay": 0.3, "beta1": 0.0}, adam),
    "partial_adam": (
        Optim.PARTIAL_ROWWISE_ADAM,
        {"weight_decay": 0.3},
        functools.partial(adam, partial=True),
    ),
    "lamb": (Optim.LAMB, {"weight_decay": 0.3, "eps": 1e-4}, functools.partial(adam, lamb=True)),
    "partial_lamb": (
        Optim.PARTIAL_ROWWISE_LAMB,
        {"beta1": 0.7},
        functools.partial(adam, lamb=True, partial=True),
    ),
    "lars": (Optim.LARS_SGD, {"momentum": 0.8, "eta": 0.2, "weight_decay": 0.3}, lars),
}
COUNTERS = {
    "counter": {},
    "counter_l2": {"counter_weight_decay_mode": Decay.L2, "counter_halflife": 4},
    "counter_decouple": dict(
        counter_weight_decay_mode=Decay.DECOUPLE,
        counter_halflife=10,
        adjustment_iter=FIRST_STEP + 1,
    ),
    "counter_adagradw": {
        "counter_weight_decay_mode": Decay.ADAGRADW,
        "adjustment_iter": FIRST_STEP,
    },
    "counter_adagradw_bounded": dict(
        counter_weight_decay_mode=Decay.ADAGRADW, counter_halflife=-2, adjustment_ub=0.3
    ),
    "counter_adagradw_increase": {
        "counter_weight_decay_mode": Decay.ADAGRADW,
        "counter_halflife": 30,
        "learning_rate_mode": Rate.TAIL_ID_LR_INCREASE,
        "adjustment_ub": 2.0,
    },
    "counter_decrease": dict(
        learning_rate_mode=Rate.TAIL_ID_LR_DECREASE,
        adjustment_ub=4.0,
        tail_id_threshold=TailIdThreshold(0.25, True),
    ),
    "counter_sgd": dict(
        learning_rate_mode=Rate.COUNTER_SGD,
        adjustment_ub=0.7,
        tail_id_threshold=TailIdThreshold(0.7, True),
    ),
    "counter_sgd_tail": {
        "learning_rate_mode": Rate.COUNTER_SGD,
        "tail_id_threshold": TailIdThreshold(2.25),
    },
}
CLIPS = {
    "cowclip": {"counter_halflife": 0, "weight_norm_coefficient": 0.5, "lower_bound": 0.01},
    "cowclip_l2": {
        "counter_weight_decay_mode": Decay.L2,
        "counter_halflife": 3,
        "lower_bound": 0.2,
    },
    "cowclip_decouple": {
        "counter_weight_decay_mode": Decay.DECOUPLE,
        "weight_norm_coefficient": 0.1,
    },
}
VARIANTS |= {
    name: (ROWWISE, counting(**config), counter_adagrad) for name, config in COUNTERS.items()
}
VARIANTS |= {name: (ROWWISE, clipping(**config), cowclip_adagrad) for name, config in CLIPS.items()}
DEFAULTS = {
    "eps": 1e-8,
    "momentum": 0.9,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
}
DEFAULTS |= {"weight_decay_mode": WeightDecayMode.NONE, "max_norm": 0.0}
DEFAULTS |= {"ar_alpha": 0.0, "ema_beta": 0.99, "min_shrinkage": 0.1}
