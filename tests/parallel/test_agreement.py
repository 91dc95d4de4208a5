"""Processes compare what they bring through a service; here they are threads, and the service is a dict.

Real processes do so in tests/sok/test_processes.py.
"""

import threading

import jax
import numpy as np
import pytest

from rsembed.parallel import agreement
from rsembed.parallel.agreement import Agreement
from tests.world import mesh_of

OWN = np.arange(3)
own_process = threading.local()


class Service:
    """What every process sees of the runtime's key-value store."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

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
            self.values = {
                key: value for key, value in self.values.items() if not key.startswith(f"{folder}/")
            }


@pytest.fixture
def service(monkeypatch):
    service, rounds = Service(), threading.local()
    monkeypatch.setattr(agreement, "service_of_processes", lambda: service)
    monkeypatch.setattr(agreement, "processes_of", lambda mesh: (1, 2, 4))
    monkeypatch.setattr(jax, "process_index", lambda: own_process.number)

    class Rounds:  # each process counts for itself
        def __getitem__(self, processes):
            rounds.count = getattr(rounds, "count", -1)
            return self

        def items(self):
            return [((1, 2, 4), self[1, 2, 4])]

        def __next__(self):
            rounds.count += 1
            return rounds.count

    monkeypatch.setattr(agreement, "_rounds", Rounds())
    return service


MESH = mesh_of(1)


def run(work, processes=(1, 2, 4)):
    """What `work(process)` returns or raises in every process."""
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


def test_all_processes_get_the_largest_width_round_after_round(service):
    def work(process):
        widths = []
        for number in range(5):
            with Agreement(MESH, "the batch", OWN) as agreed:
                agreed.bring("f", "4 samples", width=process * (-1) ** number + 10)
            widths.append(agreed.width("f"))
        return widths

    assert run(work) == {process: [14, 9, 14, 9, 14] for process in (1, 2, 4)}
    assert len(service.values) <= 2 * 4  # what all have read is forgotten


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {1: "4 samples", 2: "4 samples", 4: "5 samples"},
            "f: process 4 brings 5 samples, process 1 4 samples",
        ),
        (
            {1: "4 samples", 2: None, 4: "4 samples"},
            "process 2 brings the batch with nothing, process 1 the batch with f",
        ),
    ],
)
def test_what_differs_is_refused_by_all_and_names_the_process(service, shapes, message):
    def work(process):
        with Agreement(MESH, "the batch", OWN) as agreed:
            if shapes[process] is not None:
                agreed.bring("f", shapes[process])

    for error in run(work).values():
        assert isinstance(error, ValueError) and message in str(error)


def test_an_error_of_one_process_is_raised_there_and_quoted_by_the_others(service):
    def work(process):
        with Agreement(MESH, "the batch", OWN) as agreed:
            if process == 2:
                raise KeyError("no such feature")
            agreed.bring("f", "4 samples")

    results = run(work)
    assert isinstance(results[2], KeyError)
    for process in (1, 4):
        assert (
            "the batch: process 2 refused what it was given (KeyError: 'no such feature')"
            in str(results[process])
        )


@pytest.mark.parametrize("shortest", [1, 4])
def test_a_process_with_fewer_batches_is_named_by_those_that_wait_for_it(service, shortest):
    def work(process):
        for _ in range(2 if process == shortest else 3):
            with Agreement(MESH, "the batch", OWN) as agreed:
                agreed.bring("f", "4 samples")
        agreement.say_goodbye()

    results = run(work)
    assert results.pop(shortest) is None
    for error in results.values():
        assert isinstance(error, ValueError) and f"process {shortest} had no more batches" in str(
            error
        )


def test_the_first_process_leaves_a_refused_round_after_all_have_read_why(service):
    def work(process):
        try:
            with Agreement(MESH, "the batch", OWN) as agreed:
                agreed.bring("f", f"{process} samples")
        finally:
            if process == 1:
                assert {f"{GROUP}/0/{other}/read" for other in (2, 4)} <= service.values.keys()

    assert all(isinstance(error, ValueError) for error in run(work).values())


GROUP = "rsembed/agreement/1-2-4"


def test_a_process_that_does_not_come_is_named_after_the_time_limit(service, monkeypatch):
    monkeypatch.setattr(agreement, "TIMEOUT_SECONDS", 0.2)

    def work(process):
        with Agreement(MESH, "the batch", OWN) as agreed:
            agreed.bring("f", "4 samples")

    results = run(work, processes=(1, 4))
    assert "the batch: process 2 did not say what it brings within 0.2 s" in str(results[1])
    assert "process 1, or one that it waits for, did not say" in str(results[4])


def test_nothing_is_exchanged_alone_or_inside_jit(service):
    def inside(ids):
        with Agreement(MESH, "the batch", ids) as agreed:
            agreed.bring("f", "4 samples", width=3)
        return agreed.width("f")

    own_process.number = 1
    assert jax.jit(inside)(OWN) == 3
    with Agreement(None, "the batch", OWN) as agreed:
        agreed.bring("f", "4 samples", width=3)
    assert agreed.width("f") == 3 and not service.values
