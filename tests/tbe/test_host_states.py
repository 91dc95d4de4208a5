"""Host and device of cached tables stay together: with outstanding programs, and with states of other times."""

import copy
import functools
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
    "apply": lambda module: module.apply(
        module.vjp(batch(7), OFFSETS)[1].row_gradients(np.ones((1, 4)))
    ),
    "prefetch": lambda module: module.prefetch(batch(7), OFFSETS),
    "split_embedding_weights": lambda module: [
        np.array(w) for w in module.split_embedding_weights()
    ],
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
        # The first step makes room for rows without a place: then no other program is compiled.
        for seed in range(2):
            compiled_step(module, batch(seed), one).block_until_ready()
    for seed, (entry, run) in enumerate(ENTRIES.items()):
        results = []
        for module in (plain, cached):
            start_slow_step(module, seed) if module is cached else compiled_step(
                module, batch(seed), one
            )
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
WAY_OUT = "state does not match its tables on the host.*state_dict and load_state_dict"


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


# Threads


@pytest.mark.slow
def test_lookups_of_several_threads_read_their_own_rows_while_one_trains_others():
    plain, cached = pair()
    fixed, trained = np.arange(0, 200, dtype=np.int32), np.arange(200, 400, dtype=np.int32)
    rng = np.random.default_rng(0)
    batches = [rng.choice(fixed, 100) for _ in range(20)]
    expected = [np.asarray(plain(ids, OFFSETS)) for ids in batches]

    def look_up(number):
        return np.asarray(cached(batches[number % 20], OFFSETS))

    def other_work(number):
        cached.prefetch(rng.choice(fixed, 20), np.array([0, 20]))
        cached(batches[0], OFFSETS)
        cached.flush()
        return train(cached, trained[number : number + 100], OFFSETS)

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(look_up, number) for number in range(120)]
        # One thread trains at a time, as always.
        for number in range(10):
            pool.submit(other_work, number).result()
        found = [each.result() for each in work]
    for number, output in enumerate(found):
        np.testing.assert_array_equal(output, expected[number % 20])
    for number in range(10):
        train(plain, trained[number : number + 100], OFFSETS)
    assert_same_bits(plain, cached)


# Ctrl-C


FILES = (
    "tbe/module.py",
    "tbe/tables.py",
    "tbe/host_rows.py",
    "storage/set_associative.py",
    "storage/backing_store.py",
)
KEEPERS = {"keep", "keep_arrays"}
"""Functions in which Ctrl-C waits; see `rsembed.storage.donation.kept`."""


def is_interrupted(call, at_line):
    """Whether Ctrl-C came: as that line of the module's files is about to run, of all that the call runs."""
    left = at_line

    def before_line(frame, event, argument):
        nonlocal left
        if event == "line":
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
        return before_line

    def enter(frame, event, argument):
        code = frame.f_code
        return (
            before_line
            if code.co_filename.endswith(FILES) and code.co_name not in KEEPERS
            else None
        )

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def looked_up_twice(module, seed):
    """A step whose rows have moved since its lookup."""
    output, backward = module.vjp(batch(seed), OFFSETS)
    module(batch(seed + 1), OFFSETS)
    backward(np.ones_like(output))


def applied(module, seed):
    output, backward = module.vjp(batch(seed), OFFSETS)
    module.apply(backward.row_gradients(np.ones_like(output)))


INTERRUPTED = {
    "lookup": lambda module, seed: module(batch(seed), OFFSETS),
    "step": lambda module, seed: train(module, batch(seed), OFFSETS),
    "late step": looked_up_twice,
    "apply": applied,
    "prefetch": lambda module, seed: (
        module.prefetch(batch(seed), OFFSETS),
        module(batch(seed), OFFSETS),
    ),
    "save": lambda module, seed: (module.state_dict(), module.reset_cache_states()),
}


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "prefetch",
        *(
            pytest.param(own, marks=pytest.mark.slow)
            for own in ("lookup", "late step", "apply", "save")
        ),
    ],
)
def test_ctrl_c_before_any_line_leaves_the_step_done_or_not_and_a_module_that_goes_on(name):
    run = INTERRUPTED[name]
    plain, cached = pair(prefetch_pipeline=name == "prefetch")
    for seed in range(3):
        for module in (plain, cached):
            run(module, seed)
            train(module, batch(seed + 3), OFFSETS)
    for at_line in range(0, 10_000, 29):
        before = int(plain.step)
        was_interrupted = is_interrupted(lambda: run(cached, at_line), at_line)  # noqa: B023
        cached(batch(at_line + 5), OFFSETS)  # goes on
        if int(cached.step) > before:
            run(plain, at_line)
        assert int(cached.step) == int(plain.step)
        if at_line % 145 == 0 or not was_interrupted:
            for module in (plain, cached):
                train(module, batch(at_line + 1), OFFSETS)
            assert_same_bits(plain, cached)
        if not was_interrupted:
            break
    assert at_line > 100 and not was_interrupted


@pytest.fixture
def _interrupts_raise():
    """Ctrl-C raises KeyboardInterrupt, also in a process that was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Python loses an interrupt that comes in a callback of a weak reference or of its garbage collector.
@pytest.mark.slow_rows("True")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_interrupts_raise")
@pytest.mark.parametrize("is_cached", [False, True])
def test_ctrl_c_at_any_time_of_a_loop_of_steps_loses_no_module(is_cached):
    plain, module = pair()
    module = module if is_cached else plain
    for seed in range(4):
        train(module, batch(seed), OFFSETS)
    num_interrupts = 0
    for number in range(20):
        timer = threading.Timer(0.02 + 0.003 * number, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            while time.monotonic() - start < 2.0:
                train(module, batch(number), OFFSETS)
        except (KeyboardInterrupt, ValueError) as error:
            # JAX reports an interrupt during its comparison of static arguments as a ValueError.
            assert isinstance(error, KeyboardInterrupt) or "KeyboardInterrupt" in str(error)
            num_interrupts += 1
        done = int(module.step)
        train(module, batch(number), OFFSETS)
        assert int(module.step) == done + 1
        assert np.isfinite(module.state_dict()["table_0.weight"]).all()
    assert num_interrupts >= 15
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_compiled_step_that_did_not_return_its_state_is_refused_until_a_state_dict_is_loaded():
    plain, module = pair()
    for each in (plain, module):
        train(each, batch(0), OFFSETS)
    saved, before = plain.state_dict(), jax.tree.map(jnp.copy, nnx.state(module))
    compiled_step(module, batch(1), 1.0)
    nnx.update(module, before)  # as Ctrl-C leaves it
    with pytest.raises(
        RuntimeError,
        match=r"Ctrl-C, an error or another thread interrupted.*load the latest state",
    ):
        module(batch(1), OFFSETS)
    module.load_state_dict(saved)
    for each in (plain, module):
        train(each, batch(1), OFFSETS)
    assert_same_bits(plain, module)
