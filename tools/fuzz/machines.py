"""Random lives of a hypothesis state machine, counted."""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


class Machine(RuleBasedStateMachine):
    """Counts the steps of all lives."""

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
    """Some lives of a machine, all from one seed, and the number of steps that they took.

    Args:
      machine: whose.
      seed: of what it draws.
      changes: of the settings.
    """
    before = machine.num_steps
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine), settings=hypothesis.settings(SETTINGS, **changes)
    )
    return machine.num_steps - before
