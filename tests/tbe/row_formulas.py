"""Published formulas of all row rules, for one row in numpy float64."""

from functools import partial

import numpy as np

from rsembed import tbe as rt
from rsembed.tbe import CounterWeightDecayMode as Decay, LearningRateMode as Rate, TailIdThreshold

LR = 0.1
MAX_COUNTER = 5.0
FIRST_STEP = 7

# Arguments of a formula: the row, its gradient, its states by name, the number of the step (the
# first is 1), and the arguments of the rule. It changes the states in place, and returns the new
# row.


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
    mode = a["weight_decay_mode"]
    decay = a["weight_decay"]
    config = a.get("global_weight_decay")
    if config is not None and t >= config.start_iter and decay > 0:
        if state["prev_iter"] != 0:
            w = w * max(config.lower_bound, (1 - LR * decay) ** max(t - state["prev_iter"] - 1, 0))
        state["prev_iter"] = t
    effective = g + decay * w if mode == "L2" else g
    state["momentum1"] = state["momentum1"] + np.mean(effective**2)
    rate = LR / (np.sqrt(state["momentum1"]) + a["eps"])
    keep = 1.0
    if mode == "L2":
        keep = 1 - rate * decay
    if mode in ("DECOUPLE", "DECOUPLE_GLOBAL"):
        keep = 1 - LR * decay
    w = keep * w - rate * g
    return w * min(1, a["max_norm"] / norm(w)) if norm(w) else w


def counter_adagrad(w, g, state, t, a):
    config = a["counter_based_regularization"]
    decay = a["weight_decay"]
    halflife = config.counter_halflife
    mode = config.counter_weight_decay_mode
    bound = config.adjustment_ub
    gap = gap_of(state, t)
    seen = next_counter(state, t, halflife)
    effective = g + decay * w if mode == Decay.L2 else g
    state["momentum1"] = state["momentum1"] + np.mean(effective**2)
    root = np.sqrt(state["momentum1"]) + a["eps"]
    rate = LR / root
    keep = 1.0
    if config.adjustment_iter <= 0 or t > config.adjustment_iter:
        tail = config.tail_id_threshold
        if seen > (np.floor(tail.val * MAX_COUNTER) if tail.is_ratio else tail.val):
            if config.learning_rate_mode == Rate.TAIL_ID_LR_INCREASE:
                rate *= np.clip((MAX_COUNTER / (seen + 1)) ** bound, 1, 10)
            if config.learning_rate_mode == Rate.TAIL_ID_LR_DECREASE:
                rate *= np.clip(((seen + 1) / MAX_COUNTER) ** bound, 0.1, 1)
            if config.learning_rate_mode == Rate.COUNTER_SGD:
                rate = LR / (np.sqrt(bound * seen) + a["eps"])
        if mode == Decay.ADAGRADW:
            if halflife == -1:
                rate = LR / root * np.sqrt(seen)
            if halflife == -2:
                rate = min(LR * seen, bound) / root
            lazy = (1 - LR * decay) ** (min(gap, t - config.adjustment_iter) - 1)
            rate *= lazy
            keep = (1 - LR * decay) * lazy
        if mode == Decay.DECOUPLE:
            keep = 1 - halflife / seen * decay * LR
        if mode == Decay.L2:
            keep = 1 - halflife / seen * decay * LR / root
    state["prev_iter"] = t
    state["row_counter"] = seen
    return keep * w - rate * g


def cowclip_adagrad(w, g, state, t, a):
    config = a["cowclip_regularization"]
    decay = a["weight_decay"]
    seen = next_counter(state, t, config.counter_halflife)
    effective = g + decay * w if config.counter_weight_decay_mode == Decay.L2 else g
    state["momentum1"] = state["momentum1"] + np.mean(effective**2)
    limit = seen * max(config.weight_norm_coefficient * norm(w), config.lower_bound)
    clip = min(1, limit / norm(effective)) if norm(effective) else 1
    rate = LR / (np.sqrt(state["momentum1"]) + a["eps"]) * clip
    keep = {Decay.DECOUPLE: 1 - LR * decay, Decay.L2: 1 - decay * rate}.get(
        config.counter_weight_decay_mode, 1
    )
    state["prev_iter"] = t
    state["row_counter"] = seen
    return keep * w - rate * g


def adam(w, g, state, t, a, *, partial=False, lamb=False):
    if "row_counter" in state:
        state["row_counter"] = t = state["row_counter"] + 1
    square = np.mean(g**2) if partial else g**2
    state["momentum1"] = a["beta1"] * state["momentum1"] + (1 - a["beta1"]) * g
    state["momentum2"] = a["beta2"] * state["momentum2"] + (1 - a["beta2"]) * square
    m = state["momentum1"] / (1 - a["beta1"] ** t)
    v = state["momentum2"] / (1 - a["beta2"] ** t)
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


L2 = {"weight_decay_mode": "L2", "weight_decay": 0.5}
DECOUPLE = L2 | {"weight_decay_mode": "DECOUPLE"}


def decaying(*config):
    return {
        "weight_decay_mode": "DECOUPLE_GLOBAL",
        "weight_decay": 0.5,
        "global_weight_decay": rt.GlobalWeightDecayDefinition(*config),
    }


def counting(decay=Decay.NONE, **config):
    regularization = rt.CounterBasedRegularizationDefinition(decay, **config)
    return {
        "weight_decay_mode": "COUNTER",
        "weight_decay": 0.0 if decay == Decay.NONE else 0.4,
        "counter_based_regularization": regularization,
    }


def clipping(decay=Decay.NONE, **config):
    return {
        "weight_decay_mode": "COWCLIP",
        "weight_decay": 0.4,
        "cowclip_regularization": rt.CowClipDefinition(decay, **config),
    }


ROWWISE = {
    "rowwise": {},
    "rowwise_l2": L2,
    "rowwise_decouple": DECOUPLE,
    "rowwise_max_norm": {"max_norm": 1.5, **L2},
    "global": decaying(),
    "global_bounded_starting_late": decaying(FIRST_STEP + 2, 0.9),
}
COUNTERS = {
    "counter": counting(),
    "counter_l2": counting(Decay.L2, counter_halflife=4),
    "counter_decouple": counting(
        Decay.DECOUPLE, counter_halflife=10, adjustment_iter=FIRST_STEP + 1
    ),
    "counter_adagradw": counting(Decay.ADAGRADW, adjustment_iter=FIRST_STEP),
    "counter_adagradw_bounded": counting(Decay.ADAGRADW, counter_halflife=-2, adjustment_ub=0.3),
    "counter_adagradw_increase": counting(
        Decay.ADAGRADW,
        counter_halflife=30,
        learning_rate_mode=Rate.TAIL_ID_LR_INCREASE,
        adjustment_ub=2.0,
    ),
    "counter_decrease": counting(
        learning_rate_mode=Rate.TAIL_ID_LR_DECREASE,
        adjustment_ub=4.0,
        tail_id_threshold=TailIdThreshold(0.25, True),
    ),
    "counter_sgd": counting(
        learning_rate_mode=Rate.COUNTER_SGD,
        adjustment_ub=0.7,
        tail_id_threshold=TailIdThreshold(0.7, True),
    ),
    "counter_sgd_tail": counting(
        learning_rate_mode=Rate.COUNTER_SGD, tail_id_threshold=TailIdThreshold(2.25)
    ),
}
CLIPS = {
    "cowclip": clipping(counter_halflife=0, weight_norm_coefficient=0.5, lower_bound=0.01),
    "cowclip_l2": clipping(Decay.L2, counter_halflife=3, lower_bound=0.2),
    "cowclip_decouple": clipping(Decay.DECOUPLE, weight_norm_coefficient=0.1),
}
VARIANTS = {
    "sgd": ("EXACT_SGD", {}, sgd),
    "adagrad": ("EXACT_ADAGRAD", {}, adagrad),
    "ensemble": ("ENSEMBLE_ROWWISE_ADAGRAD", {"max_norm": 2.0, **L2}, rowwise_adagrad),
    "emainplace": ("EMAINPLACE_ROWWISE_ADAGRAD", DECOUPLE, rowwise_adagrad),
    "adam": ("ADAM", {"beta1": 0.8, "beta2": 0.99}, adam),
    "adamw": ("ADAM", {"weight_decay": 0.3, "beta1": 0.0}, adam),
    "partial_adam": ("PARTIAL_ROWWISE_ADAM", {"weight_decay": 0.3}, partial(adam, partial=True)),
    "lamb": ("LAMB", {"weight_decay": 0.3}, partial(adam, lamb=True)),
    "partial_lamb": (
        "PARTIAL_ROWWISE_LAMB",
        {"beta1": 0.7},
        partial(adam, lamb=True, partial=True),
    ),
    "lars": ("LARS_SGD", {"momentum": 0.8, "eta": 0.2, "weight_decay": 0.3}, lars),
}
"""Optimizer, other arguments of the module, and formula, by name."""
for formula, rules in (
    (rowwise_adagrad, ROWWISE),
    (counter_adagrad, COUNTERS),
    (cowclip_adagrad, CLIPS),
):
    for name, arguments in rules.items():
        VARIANTS[name] = ("EXACT_ROWWISE_ADAGRAD", arguments, formula)
for name, (optimizer, arguments, formula) in VARIANTS.items():
    if formula not in (sgd, lars):
        # A sum that should be 0 can be a rounding error. With a large epsilon, its effect is small.
        VARIANTS[name] = (optimizer, {"eps": 0.1, **arguments}, formula)
DEFAULTS = {
    "eps": 1e-8,
    "momentum": 0.9,
    "eta": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "weight_decay_mode": "NONE",
    "max_norm": np.inf,
    "ar_alpha": 0.0,
    "ema_beta": 0.99,
    "min_shrinkage": 0.1,
}
