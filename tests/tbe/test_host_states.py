"""Cached tables agree with their rows on the host, also with pending programs and old states."""

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

from tests.tbe.oracle import CACHED, CALLS, assert_same_bits, make, tables_of, train

ROWS = 400
OFFSETS = np.array([0, 100], np.int32)
ONE = np.float32(1)


def batch(seed):
    ids = np.random.default_rng(seed).integers(0, ROWS, 100)
    return ids.astype(np.int32), OFFSETS


def pair(**caching):
    """Two modules with the same table, on the device and with a cache of 32 rows."""
    rule = {"optimizer": "EXACT_ROWWISE_ADAGRAD"}
    specs = ((ROWS, 4),)
    return make(specs, **rule), make(specs, location=CACHED, cache_sets=1, **rule, **caching)


def copied_state(module):
    return jax.tree.map(jnp.copy, nnx.state(module))


@jax.jit
def one_after(turns):
    """The number 1, computed slowly by `turns` products of matrices."""
    product = jax.lax.fori_loop(0, turns, lambda _, y: jnp.tanh(y @ y), jnp.full((400, 400), 1e-3))
    return jnp.float32(1) + 0 * product[0, 0]


@functools.cache
def turns_of_a_while():
    """Number of turns that take about a third of a second on this machine."""
    one_after(1).block_until_ready()
    start = time.perf_counter()
    one_after(40).block_until_ready()
    return max(40, int(40 * 0.33 / (time.perf_counter() - start)))


@nnx.jit
def compiled_step(module, ids, offsets, d_output):
    output, backward = module.vjp(ids, offsets)
    backward(jnp.ones_like(output) * d_output)
    return output


HOST_CALLS = CALLS | {
    "prefetch": lambda module, *batch: module.prefetch(*batch),
    "reset_cache_states": lambda module, *_: module.reset_cache_states(),
    "load_state_dict": lambda module, *_: module.load_state_dict(
        {"table_0.weight": np.ones((ROWS, 4)), "table_0.sum": np.ones(ROWS)}
    ),
}


def warmed(module):
    """The module after two compiled steps, so that no further program is compiled.

    The first step allocates the scratch area for rows that are not in the cache.
    """
    for seed in range(2):
        compiled_step(module, *batch(seed), ONE).block_until_ready()
    return module


def start_slow_step(module, seed):
    one = one_after(turns_of_a_while())
    compiled_step(module, *batch(seed), one)
    assert not one.is_ready(), "the input of the step is ready too early for this test"


def test_eager_work_after_a_compiled_step_waits_for_it():
    plain, cached = map(warmed, pair())
    for seed, (name, call) in enumerate(HOST_CALLS.items()):
        compiled_step(plain, *batch(seed), ONE)
        start_slow_step(cached, seed)
        results = []
        for module in (cached, plain):
            results.append((call(module, *batch(7)), module(*batch(20)), tables_of(module)))
        for mine, yours in zip(*map(jax.tree.leaves, results), strict=True):
            np.testing.assert_array_equal(mine, yours, err_msg=name)


def test_updates_and_counts_after_a_compiled_step_wait_for_it():
    plain, cached = map(warmed, pair(gather_uvm_cache_stats=True))
    for module in (plain, cached):
        output, backward = module.vjp(*batch(1))
        start_slow_step(module, 2)
        backward(np.ones_like(output))
    assert_same_bits(plain, cached)
    calls = cached.get_uvm_cache_stats().calls
    start_slow_step(cached, 3)
    assert cached.get_uvm_cache_stats().calls == calls + 1


# Old states, and states of other modules

TAKEN = "has lost its tables.*state_dict and load_state_dict"
WAY_OUT = (
    "state does not match its tables on the host.*Ctrl-C, an error or another thread interrupted"
    ".*load the latest state dict.*state_dict and load_state_dict"
)


def compiled(module, *batch):
    """Runs a compiled step. With its old state, the module is then as after Ctrl-C in the step."""
    compiled_step(module, *batch, ONE)


@pytest.mark.parametrize("between", ["train", "lookup", "prefetch", "uniform", "compiled"])
def test_an_nnx_state_of_an_earlier_time_is_refused_until_the_way_out_is_taken(between):
    other, module = pair()
    train(module, *batch(0))
    saved = module.state_dict()
    early = copied_state(module)
    HOST_CALLS.get(between, compiled)(module, *batch(1))
    nnx.update(module, early)
    for name, call in HOST_CALLS.items():
        if name != "load_state_dict":
            with pytest.raises(RuntimeError, match=WAY_OUT):
                call(module, *batch(7))
    for each in (module, other):
        each.load_state_dict(saved)
        train(each, *batch(3))
    assert_same_bits(module, other)


def test_a_compiled_step_refuses_a_state_of_an_earlier_time():
    _, module = pair()
    early = copied_state(module)
    compiled(module, *batch(0))
    nnx.update(module, early)
    with pytest.raises(jax.errors.JaxRuntimeError, match=WAY_OUT):
        jax.block_until_ready(compiled_step(module, *batch(1), ONE))
        jax.effects_barrier()


def test_a_state_of_another_time_than_a_lookup_and_its_update_is_refused():
    _, module = pair()
    early = copied_state(module)
    output, backward = module.vjp(*batch(0))
    between = copied_state(module)
    nnx.update(module, early)
    with pytest.raises(RuntimeError, match=WAY_OUT):
        backward(output)
    nnx.update(module, between)
    train(module, *batch(0))


def test_the_state_of_another_module_with_a_cache_is_refused():
    _, first = pair()
    _, second = pair()
    train(first, *batch(0))
    train(second, *batch(0))
    nnx.update(second, copied_state(first))
    with pytest.raises(RuntimeError, match=WAY_OUT):
        second(*batch(1))
    second.reset_cache_states(discard=True)
    second(*batch(1))


def test_a_clone_cannot_be_used_beside_its_original_but_a_deep_copy_or_a_merged_one_can():
    plain, module = pair()
    clone = nnx.clone(module)
    deep = copy.deepcopy(module)
    train(module, *batch(0))
    with pytest.raises(RuntimeError, match=TAKEN):
        clone(*batch(0))
    for seed in range(2):
        deep = nnx.merge(*nnx.split(deep))
        train(plain, *batch(seed))
        train(deep, *batch(seed))
    assert_same_bits(plain, deep)


# Threads


@pytest.mark.slow
def test_lookups_of_several_threads_read_their_own_rows_while_one_trains_others():
    plain, cached = pair()
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 200, 100), OFFSETS) for _ in range(20)]
    expected = [np.asarray(plain(*each)) for each in batches] * 6
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(cached, *each) for each in batches * 6]
        # Only one thread trains at a time.
        for number in range(10):
            cached.prefetch(np.arange(number, number + 20), np.array([0, 20]))
            cached.flush()
            for module in (plain, cached):
                train(module, np.arange(200 + number, 300 + number), OFFSETS)
        for lookup, output in zip(work, expected, strict=True):
            np.testing.assert_array_equal(lookup.result(), output)
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
"""Functions that delay Ctrl-C, see `rsembed.storage.donation.kept`."""


def is_interrupted(call, at_line):
    """Raises KeyboardInterrupt before a line of `FILES`, and returns whether the call reached it.

    Args:
      call: function without arguments.
      at_line: number of lines of `FILES` that the call executes before the interrupt.
    """
    lines_left = at_line

    def before_line(frame, event, argument):
        nonlocal lines_left
        if event == "line":
            lines_left -= 1
            if lines_left < 0:
                raise KeyboardInterrupt
        return before_line

    def enter(frame, event, argument):
        code = frame.f_code
        if code.co_filename.endswith(FILES) and code.co_name not in KEEPERS:
            return before_line
        return None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def train_late(module, *batch_of_step):
    """A step with another lookup before its update, which can move rows in the cache."""
    output, backward = module.vjp(*batch_of_step)
    module(*batch(99))
    backward(np.ones_like(output))


def look_up_prefetched(module, *batch):
    module.prefetch(*batch)
    module(*batch)


def save(module, *_):
    module.state_dict()
    module.reset_cache_states()


INTERRUPTED = {name: CALLS[name] for name in ("train", "lookup", "apply")} | {
    "prefetch": look_up_prefetched,
    "train late": train_late,
    "save": save,
}


@pytest.mark.slow_rows("lookup", "train late", "apply", "save")
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_before_any_line_leaves_the_step_done_or_not_and_a_module_that_goes_on(name):
    call = INTERRUPTED[name]
    plain, cached = pair(prefetch_pipeline=name == "prefetch")
    for seed in range(3):
        for module in (plain, cached):
            call(module, *batch(seed))
            train(module, *batch(seed + 3))
    for at_line in range(0, 10_000, 29):
        before = int(plain.step)
        call_cached = functools.partial(call, cached, *batch(at_line))
        was_interrupted = is_interrupted(call_cached, at_line)
        # The module can still be used.
        cached(*batch(at_line + 5))
        if int(cached.step) > before:
            call(plain, *batch(at_line))
        assert int(cached.step) == int(plain.step)
        if at_line % 145 == 0 or not was_interrupted:
            for module in (plain, cached):
                train(module, *batch(at_line + 1))
            assert_same_bits(plain, cached)
        if not was_interrupted:
            break
    assert at_line > 100 and not was_interrupted


@pytest.fixture
def _interrupts_raise():
    """Makes Ctrl-C raise KeyboardInterrupt. A process in the background would ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Python drops an exception in a callback of a weak reference or of the garbage collector.
@pytest.mark.slow_rows("True")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("_interrupts_raise")
@pytest.mark.parametrize("is_cached", [False, True])
def test_ctrl_c_at_any_time_of_a_loop_of_steps_loses_no_module(is_cached):
    module = pair()[is_cached]
    for seed in range(4):
        train(module, *batch(seed))
    num_interrupts = 0
    for number in range(20):
        timer = threading.Timer(0.02 + 0.003 * number, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            while time.monotonic() - start < 2.0:
                train(module, *batch(number))
        except (KeyboardInterrupt, ValueError) as error:
            # JAX reports an interrupt during its comparison of static arguments as a ValueError.
            assert "KeyboardInterrupt" in repr(error)
            num_interrupts += 1
        done = int(module.step)
        train(module, *batch(number))
        assert int(module.step) == done + 1
        assert np.isfinite(module.state_dict()["table_0.weight"]).all()
    assert num_interrupts >= 15
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
