"""Which implementation serves a call: the first one that can.

An implementation is a module with the functions of `reference.py`. It says why it cannot run on this machine through
`unavailable_because()`, and why it cannot serve one call by raising `NotImplementedError(reason)`. Those of
accelerators serve only where the computation is for one (see `devices.target_device`), and only those who ask for them:
no chip has run them yet.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from rsembed.kernels import gpu, native, reference, sparsecore

IMPLEMENTATIONS: tuple[ModuleType, ...] = (sparsecore, gpu, native, reference)
"""In order of preference."""

OPT_IN = (sparsecore.NAME, gpu.NAME)
"""Those that are never chosen by themselves: `implementation=` names one, or `RSEMBED_KERNELS`, separated by commas."""


def implementation_states() -> list[tuple[str, str]]:
    """Every implementation by name, with "live" or the reason why it is not."""
    return [(module.NAME, _not_chosen_because(module) or "live") for module in IMPLEMENTATIONS]


def _not_chosen_because(module: Any) -> str | None:
    """Why an implementation is passed over by callers who name none; read when a call is traced."""
    wanted = [name.strip() for name in os.environ.get("RSEMBED_KERNELS", "").split(",") if name.strip()]
    if unknown := set(wanted) - set(OPT_IN):
        raise ValueError(f"RSEMBED_KERNELS names {', '.join(sorted(unknown))}; it knows {', '.join(OPT_IN)}.")
    reason = module.unavailable_because()
    if reason is None and module.NAME in OPT_IN and module.NAME not in wanted:
        return (
            f"opt-in, because no chip has run these kernels yet: pass implementation={module.NAME!r} or set "
            f"RSEMBED_KERNELS={module.NAME}"
        )
    return reason


def check_implementation(implementation: str | None) -> None:
    """Raises: ValueError: the name is unknown. NotImplementedError: that one cannot run here."""
    if implementation is None:
        return
    known = {module.NAME: module for module in IMPLEMENTATIONS}
    if implementation not in known:
        raise ValueError(f"unknown implementation {implementation!r}; choose one of {', '.join(known)}, or None.")
    reason = known[implementation].unavailable_because()
    if reason is not None:
        raise NotImplementedError(f"implementation {implementation!r} cannot run here: {reason}")


def dispatch(function: str, implementation: str | None, *args: Any) -> Any:
    """What the first implementation says that can serve the call, or the one that is named.

    Raises: as `check_implementation`; NotImplementedError: none can, and why.
    """
    check_implementation(implementation)
    reasons = []
    for module in IMPLEMENTATIONS:
        if implementation not in (None, module.NAME):
            continue
        reason = None if implementation else _not_chosen_because(module)
        if reason is None:
            try:
                return getattr(module, function)(*args)
            except NotImplementedError as error:
                reason = str(error)
        reasons.append(f"{module.NAME}: {reason}")
    raise NotImplementedError(f"no implementation can serve {function}: " + "; ".join(reasons))
