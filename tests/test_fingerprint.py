import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import rsembed as rs
from rsembed.fingerprint import Fingerprint, check_same, identity

FACTS = {"shards": 4, "tables": {"word": {"rows": 10, "dim": 2}, "topic": {"rows": 3, "dim": 2}}}


def test_facts_come_back_and_do_not_depend_on_their_order():
    reordered = {
        "tables": {"topic": {"dim": 2, "rows": 3}, "word": {"dim": 2, "rows": 10}},
        "shards": 4,
    }
    assert Fingerprint.of(FACTS).facts == FACTS
    assert Fingerprint.of(FACTS) == Fingerprint.of(reordered)
    assert hash(Fingerprint.of(FACTS)) == hash(Fingerprint.of(reordered))


def test_check_same_names_every_difference_and_the_way_out():
    other = Fingerprint.of({"shards": 2, "tables": {"word": {"rows": 10, "dim": 2}}})
    message = r"^the file is another's: shards is 4, expected 2; tables/topic is not expected\. Convert it\.$"
    with pytest.raises(ValueError, match=message):
        check_same(
            Fingerprint.of(FACTS), other, what="the file is another's", way_out="Convert it."
        )
    check_same(other, other, what="", way_out="")


def test_a_fingerprint_travels_through_jit_and_two_of_them_do_not_mix():
    mine, other = Fingerprint.of(FACTS), Fingerprint.of({"shards": 2})
    assert jax.jit(lambda tree: tree)((jnp.ones(2), mine))[1] == mine
    with pytest.raises(ValueError, match="pytree"):
        jax.tree.map(jnp.add, (jnp.ones(2), mine), (jnp.ones(2), other))


NAMES = [
    "adam", "adamw", "adamax", "adamaxw", "nadam", "nadamw", "amsgrad", "radam", "adabelief", "adan",
    "yogi", "lamb", "sgd", "rmsprop", "adagrad", "adadelta", "lion", "lars", "novograd", "fromage",
    "sm3", "rprop", "optimistic_gradient_descent",
]  # fmt: skip


def test_every_transformation_of_optax_has_its_own_identity():
    identities = [identity(getattr(optax, name)(1e-3)) for name in NAMES]
    assert len(set(identities)) == len(NAMES)


def test_values_of_hyperparameters_do_not_change_an_identity():
    assert identity(optax.adam(1e-3, b1=0.5)) == identity(optax.adam(1.0, b1=0.9))
    assert (
        rs.optimizers.Adam(0.1).identity
        == rs.optimizers.Adam(lambda step: 0.1 / (1 + step), beta_1=0.8).identity
    )
    assert (
        rs.from_optax(optax.adam(0.1)).identity
        == rs.from_optax(optax.adam(0.3), learning_rate=2.0).identity
    )


def test_what_chooses_between_formulas_changes_an_identity():
    assert identity(optax.sgd(0.1, momentum=0.9)) != identity(
        optax.sgd(0.1, momentum=0.9, nesterov=True)
    )
    assert rs.optimizers.Adam(0.1).identity != rs.optimizers.SGD(0.1).identity
    signed = rs.optimizers.Custom(0.1, lambda g, w, lr: w - lr * jnp.sign(g))
    smooth = rs.optimizers.Custom(0.1, lambda g, w, lr: w - lr * jnp.tanh(g))
    assert signed.identity != smooth.identity
    with_slot = rs.optimizers.Custom(
        0.1, functools.partial(optax.tree.add), slot_variable_initializers_tuple=(0.0,)
    )
    assert with_slot.identity != signed.identity
