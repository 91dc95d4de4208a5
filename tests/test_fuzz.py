"""The fuzzer finds planted faults and prints how to repeat them. `make fuzz` finds real ones."""

import importlib
import re
import subprocess

import hypothesis
import jax
import numpy as np
import pytest

from rsembed.checkpoint import arrays
from rsembed.kernels import native
from tools.fuzz import (
    __main__ as fuzz,
    collection,
    direct_calls,
    files,
    machines,
    native_calls,
    properties,
    sanitizers,
    valid_calls,
)

pytestmark = pytest.mark.slow
NEEDS_NATIVE = pytest.mark.skipif(
    native.unavailable_because() is not None, reason="needs the native kernels"
)

PLANTED = """
#include <thread>
static int shared[8];
extern "C" int out_of_bounds(int place) {
  volatile int* const four = new int[4]();
  const int found = four[place];
  delete[] four;
  return found;
}
extern "C" int race(int place) {
  std::thread other([place] { shared[place] = 1; });
  shared[4] = 2;
  other.join();
  return shared[4];
}
"""
ROUNDS = """
import ctypes, pathlib
def run(seed):
    getattr(ctypes.CDLL(str(pathlib.Path(__file__).with_name("planted.so"))), "{fault}")(seed)
    return 3
"""


@pytest.mark.skipif(sanitizers.missing() is not None, reason=f"{sanitizers.missing()}")
@pytest.mark.parametrize(
    ("sanitizer", "fault", "report"),
    [("address", "out_of_bounds", "overflow|insufficient space"), ("thread", "race", "data race")],
)
def test_a_forbidden_access_is_reported_with_the_round_that_made_it(
    tmp_path, monkeypatch, sanitizer, fault, report
):
    (tmp_path / "planted.cc").write_text(PLANTED)
    (tmp_path / "planted_rounds.py").write_text(ROUNDS.format(fault=fault))
    flags = f"{sanitizers.COMMON_FLAGS} {sanitizers.FLAGS[sanitizer]} -shared -fPIC -pthread"
    command = f"g++ {flags} planted.cc -o planted.so"
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    monkeypatch.setattr(sanitizers, "build", lambda _: tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = fuzz.explore(
        "planted", fuzz.Target("planted_rounds:run", sanitizer), seed=2, seconds=60
    )
    assert re.search(report, outcome.output)
    # Two rounds of three cases passed.
    assert outcome.cases == 6
    assert (
        outcome.verdict
        == "FAILS; again: python -m tools.fuzz --minutes 0 --target planted --seed 4"
    )


@NEEDS_NATIVE
def test_a_kernel_that_is_wrong_by_one_is_found(monkeypatch):
    kind, right = valid_calls.CALLS.index(valid_calls.count_uses), native.count_uses
    native_calls.valid_call(kind)
    monkeypatch.setattr(
        native, "count_uses", lambda *args, **options: [x + 1 for x in right(*args, **options)]
    )
    with pytest.raises(AssertionError):
        native_calls.valid_call(kind)


@NEEDS_NATIVE
def test_a_driver_in_the_place_of_xla_gets_arrays_from_every_valid_call(monkeypatch):
    # `__init__` would load the driver's library.
    driver = object.__new__(direct_calls.Driver)
    driver.before = lambda call: None
    driver.made = lambda call: [np.zeros(*result) for result in call.results]
    monkeypatch.setattr(jax.ffi, "ffi_call", driver.ffi_call)
    for make in valid_calls.CALLS:
        for seed in range(4):
            call = make(np.random.default_rng(seed), np.random.default_rng(seed))
            call.native(*call.arguments)


IN_PYTHON = [name for name, target in fuzz.TARGETS.items() if target.sanitizer is None]


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_few_short_lives_of_each_target_hold_what_they_should(monkeypatch, name):
    def short(machine, seed, **_):
        # Hypothesis draws only zeros for the first example.
        return machines.live(machine, seed, max_examples=5, stateful_step_count=6)

    path, _, function = fuzz.TARGETS[name].function.partition(":")
    module, on_one_device = importlib.import_module(path), collection.model_on
    monkeypatch.setattr(module, "live", short, raising=False)
    monkeypatch.setattr(collection, "model_on", lambda *_: on_one_device(0, "row"))
    monkeypatch.setattr(
        properties, "SETTINGS", hypothesis.settings(properties.SETTINGS, max_examples=3)
    )
    assert getattr(module, function)(0) >= 1


def test_a_checkpoint_with_one_wrong_row_is_found(monkeypatch):
    assert machines.live(files.Files, 0, max_examples=4) > 20
    right = arrays._rows

    def rolled(array, chunk):
        return np.roll(right(array, chunk), 1, axis=0)

    monkeypatch.setattr(arrays, "_rows", rolled)
    with pytest.raises(AssertionError):
        machines.live(files.Files, 0, phases=[hypothesis.Phase.generate])
