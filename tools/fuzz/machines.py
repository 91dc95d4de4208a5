"""Runs state machines of hypothesis, and counts their steps."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


class Machine(RuleBasedStateMachine):
    """A state machine that counts the steps of all runs."""

    num_steps = 0

    def check_invariants(self, *args: Any, **options: Any) -> None:
        type(self).num_steps += 1
        super().check_invariants(*args, **options)


SETTINGS = hypothesis.settings(
    max_examples=12,
    stateful_step_count=30,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)


def live(machine: type[Machine], seed: int, **changes: Any) -> int:
    """Runs a state machine several times, and returns the number of steps of all runs.

    Args:
      machine: class of the state machine.
      seed: seed of all random numbers.
      changes: settings of hypothesis that differ from `SETTINGS`.
    """
    before = machine.num_steps
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine), settings=hypothesis.settings(SETTINGS, **changes)
    )
    return machine.num_steps - before
