"""Host and device of cached tables stay together: with outstanding programs, and with states of other times."""

import copy
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rsembed import tbe as rt
from tests.tbe.oracle import assert_same_bits, make, tables_of, train

CACHED = rt.EmbeddingLocation.MANAGED_CACHING
ROWS, OFFSETS = 400, np.array([0, 100], np.int32)
ADAGRAD = rt.OptimType.EXACT_ROWWISE_ADAGRAD


def batch(seed):
    return np.random.default_rng(seed).integers(0, ROWS, 100).astype(np.int32)


def pair(**caching):
    """The same module on the device and behind a cache of 32 rows."""
    plain = make(((ROWS, 4),), optimizer=ADAGRAD)
    return plain, make(((ROWS, 4),), location=CACHED, cache_sets=1, optimizer=ADAGRAD, **caching)


@jax.jit
def one_after(turns):
    """1, after a while."""
    product = jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ y), jnp.full((400, 400), 1e-3))
    return jnp.float32(1) + 0 * product[0, 0]


@functools.cache
def turns_of_a_while():
    """As many as take this machine a third of a second."""
    one_after(1).block_until_ready()
    start = time.perf_counter()
    one_after(40).block_until_ready()
    return max(40, int(40 * 0.33 / (time.perf_counter() - start)))


@nnx.jit
def compiled_step(module, ids, d_output):
    output, backward = module.vjp(ids, OFFSETS)
    backward(jnp.ones_like(output) * d_output)
    return output


ENTRIES = {
    "lookup": lambda module: module(batch(7), OFFSETS),
    "vjp": lambda module: train(module, batch(7), OFFSETS)[0],
    "apply": lambda module: module.apply(module.vjp(batch(7), OFFSETS)[1].row_gradients(np.ones((1, 4)))),
    "prefetch": lambda module: module.prefetch(batch(7), OFFSETS),
    "split_embedding_weights": lambda module: [np.array(w) for w in module.split_embedding_weights()],
    "split_optimizer_states": lambda module: np.array(module.split_optimizer_states()[0][0]),
    "state_dict": lambda module: module.state_dict()["table_0.weight"],
    "reset_cache_states": lambda module: module.reset_cache_states(),
    "load_state_dict": lambda module: module.load_state_dict(
        {"table_0.weight": np.ones((ROWS, 4)), "table_0.sum": np.ones(ROWS)}
    ),
    "uniform": lambda module: module.init_embedding_weights_uniform(-1, 1),
}


def start_slow_step(module, seed):
    one = one_after(turns_of_a_while())
    compiled_step(module, batch(seed), one)
    assert not one.is_ready(), "the step must still wait for its input, or nothing is tested"


def test_eager_work_after_a_compiled_step_waits_for_it():
    (plain, cached), one = pair(), jnp.float32(1)
    for module in (plain, cached):
        for seed in range(2):  # the first step makes room for rows without a place: then no other program is compiled
            compiled_step(module, batch(seed), one).block_until_ready()
    for seed, (entry, run) in enumerate(ENTRIES.items()):
        results = []
        for module in (plain, cached):
            start_slow_step(module, seed) if module is cached else compiled_step(module, batch(seed), one)
            results.append((run(module), module(batch(20), OFFSETS), tables_of(module)))
        for mine, yours in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_array_equal(mine, yours, err_msg=entry)


def test_updates_and_counts_after_a_compiled_step_wait_for_it():
    plain, cached = pair(gather_uvm_cache_stats=True)
    for module in (plain, cached):
        for seed in range(2):
            compiled_step(module, batch(seed), jnp.float32(1)).block_until_ready()
        output, backward = module.vjp(batch(1), OFFSETS)
        start_slow_step(module, 2)
        backward(np.ones_like(output))
    assert_same_bits(plain, cached)
    calls = cached.get_uvm_cache_stats().calls
    start_slow_step(cached, 3)
    assert cached.get_uvm_cache_stats().calls == calls + 1


# States of another time, or of another module

TAKEN = "has lost its tables.*state_dict and load_state_dict"
WAY_OUT = "state is not the one that belongs to its tables on the host.*state_dict and load_state_dict"


BETWEEN = {name: ENTRIES[name] for name in ("vjp", "lookup", "prefetch", "uniform")}
BETWEEN["compiled"] = lambda module: compiled_step(module, batch(1), 1.0)


@pytest.mark.parametrize("between", BETWEEN)
def test_an_nnx_state_of_an_earlier_time_is_refused_until_the_way_out_is_taken(between):
    other, module = pair()
    train(module, batch(0), OFFSETS)
    saved, early = module.state_dict(), jax.tree.map(jnp.copy, nnx.state(module))
    BETWEEN[between](module)
    nnx.update(module, early)
    for entry in set(ENTRIES) - {"load_state_dict"}:
        with pytest.raises(RuntimeError, match=WAY_OUT):
            ENTRIES[entry](module)
    for each in (module, other):
        each.load_state_dict(saved)
        train(each, batch(3), OFFSETS)
    assert_same_bits(module, other)


def test_a_compiled_step_refuses_a_state_of_an_earlier_time():
    module = pair()[1]
    early = jax.tree.map(jnp.copy, nnx.state(module))
    compiled_step(module, batch(0), 1.0)
    nnx.update(module, early)
    with pytest.raises(jax.errors.JaxRuntimeError, match=WAY_OUT):
        jax.block_until_ready(compiled_step(module, batch(1), 1.0))
        jax.effects_barrier()


def test_a_state_of_another_time_than_a_lookup_and_its_update_is_refused():
    module = pair()[1]
    early = jax.tree.map(jnp.copy, nnx.state(module))
    output, backward = module.vjp(batch(0), OFFSETS)
    between = jax.tree.map(jnp.copy, nnx.state(module))
    nnx.update(module, early)
    with pytest.raises(RuntimeError, match=WAY_OUT):
        backward(output)
    nnx.update(module, between)
    module.vjp(batch(0), OFFSETS)[1](output)


def test_the_state_of_another_module_with_a_cache_is_refused():
    first, second = pair()[1], pair()[1]
    for module in (first, second):
        train(module, batch(0), OFFSETS)
    nnx.update(second, jax.tree.map(jnp.copy, nnx.state(first)))
    with pytest.raises(RuntimeError, match=WAY_OUT):
        second(batch(1), OFFSETS)
    second.reset_cache_states(discard=True)
    second(batch(1), OFFSETS)


def test_a_clone_cannot_be_used_beside_its_original_but_a_deep_copy_or_a_merged_one_can():
    plain, module = pair()
    clone, deep = nnx.clone(module), copy.deepcopy(module)
    train(module, batch(0), OFFSETS)
    with pytest.raises(RuntimeError, match=TAKEN):
        clone(batch(0), OFFSETS)
    for seed in range(2):
        deep = nnx.merge(*nnx.split(deep))
        for each in (plain, deep):
            train(each, batch(seed), OFFSETS)
    assert_same_bits(plain, deep)
