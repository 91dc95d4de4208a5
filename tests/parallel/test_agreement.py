"""Tests of agreements, with threads for processes and a dictionary for their key-value store.

tests/sok/test_processes.py has real processes.
"""

import collections
import itertools
import threading

import jax
import numpy as np
import pytest

from rsembed.parallel import agreement
from rsembed.parallel.agreement import Agreement
from tests.world import mesh_of

OWN = np.arange(3)
MESH = mesh_of(1)
PROCESSES = (1, 2, 4)
own_process = threading.local()


class Service:
    """A dictionary with the methods of the runtime's key-value store."""

    def __init__(self):
        self.values = {}
        self.changed = threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]

    def key_value_delete(self, folder):
        with self.changed:
            for key in [key for key in self.values if key.startswith(f"{folder}/")]:
                del self.values[key]


class Rounds:
    """Counters of rounds, one for each process."""

    def __init__(self):
        self.of_process = collections.defaultdict(itertools.count)

    def __getitem__(self, processes):
        return self.of_process[own_process.number]

    def items(self):
        return [(PROCESSES, self[PROCESSES])]


@pytest.fixture
def service(monkeypatch):
    service = Service()
    monkeypatch.setattr(agreement, "service_of_processes", lambda: service)
    monkeypatch.setattr(agreement, "processes_of", lambda mesh: PROCESSES)
    monkeypatch.setattr(agreement, "_rounds", Rounds())
    monkeypatch.setattr(jax, "process_index", lambda: own_process.number)
    return service


def run(work, processes=PROCESSES):
    """Runs `work(process)` in a thread for each process. Returns results or errors by process."""
    results = {}

    def one(number):
        own_process.number = number
        try:
            results[number] = work(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=one, args=(process,), daemon=True) for process in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def bring(shape="4 samples", mesh=MESH, width=0):
    """Brings feature f to an agreement, unless `shape` is None. Returns the largest width of f."""
    with Agreement(mesh, "the batch", OWN) as agreed:
        if shape is not None:
            agreed.bring("f", shape, width=width)
    return agreed.width("f")


def test_all_processes_get_the_largest_width_round_after_round(service):
    def work(process):
        return [bring(width=10 + sign * process) for sign in (1, -1, 1, -1, 1)]

    assert run(work) == {process: [14, 9, 14, 9, 14] for process in PROCESSES}
    # Values that all processes have read are deleted.
    assert len(service.values) <= 2 * 4


@pytest.mark.parametrize(
    ("process", "shape", "message"),
    [
        (4, "5 samples", "f: process 4 brings 5 samples, process 1 4 samples"),
        (2, None, "process 2 brings the batch with nothing, process 1 the batch with f"),
    ],
)
def test_what_differs_is_refused_by_all_and_names_the_process(service, process, shape, message):
    shapes = dict.fromkeys(PROCESSES, "4 samples") | {process: shape}
    results = run(lambda process: bring(shapes[process]))
    assert results.keys() == set(PROCESSES)
    for error in results.values():
        assert isinstance(error, ValueError)
        assert message in str(error)


def test_an_error_of_one_process_is_raised_there_and_quoted_by_the_others(service):
    def work(process):
        with Agreement(MESH, "the batch", OWN):
            if process == 2:
                raise KeyError("no such feature")

    results = run(work)
    assert isinstance(results[2], KeyError)
    message = "the batch: process 2 refused what it was given (KeyError: 'no such feature')"
    assert message in str(results[1])
    assert message in str(results[4])


@pytest.mark.parametrize("shortest", [1, 4])
def test_a_process_with_fewer_batches_is_named_by_those_that_wait_for_it(service, shortest):
    def work(process):
        for _ in range(2 if process == shortest else 3):
            bring()
        agreement.say_goodbye()

    results = run(work)
    assert results.pop(shortest) is None
    for error in results.values():
        assert isinstance(error, ValueError)
        assert f"process {shortest} had no more batches" in str(error)


def test_the_first_process_leaves_a_refused_round_after_all_have_read_why(service):
    def work(process):
        with pytest.raises(ValueError):
            bring(f"{process} samples")
        return sorted(service.values)

    receipts = [f"rsembed/agreement/1-2-4/0/{other}/read" for other in (2, 4)]
    assert set(receipts) <= set(run(work)[1])


def test_a_process_that_does_not_come_is_named_after_the_time_limit(service, monkeypatch):
    monkeypatch.setattr(agreement, "TIMEOUT_SECONDS", 0.2)
    results = run(lambda process: bring(), processes=(1, 4))
    assert "the batch: process 2 did not say what it brings within 0.2 s" in str(results[1])
    assert "process 1, or one that it waits for, did not say" in str(results[4])


def test_nothing_is_exchanged_alone_or_inside_jit(service):
    def inside(ids):
        with Agreement(MESH, "the batch", ids) as agreed:
            agreed.bring("f", "4 samples", width=3)
        return agreed.width("f")

    own_process.number = 1
    assert jax.jit(inside)(OWN) == 3
    assert bring(mesh=None, width=3) == 3
    assert not service.values
