"""What is known of the kernels on each backend, in the words that the evidence allows.

*Runs*: the numbers of this process come from them. *Compiles*: the vendor's compiler made a program. *Simulated*,
*interpreted*: the kernel's own equations were evaluated in numpy or by Pallas' interpreter. *Lowers*: JAX translated
it. Whatever was not tried is *unproven*.
"""

from __future__ import annotations

import importlib.util

from rsembed.kernels import gpu, native, sparsecore
from rsembed.kernels.devices import target_device

SPARSECORE = "lowers for v5p, v6e and TPU7x SparseCore; simulated numerics agree with the reference"
GPU = "lowers for CUDA; interpret-mode numerics agree with the reference"


def backend_evidence() -> list[tuple[str, str]]:
    """Backend and what may be said of it on this machine.

    The test suite makes the statements about simulation, interpretation and lowering; `make test-tpu` and
    `make test-gpu` the ones about compilers. Speed and numbers on a chip stay unproven until `make test-gpu`, or your
    own run, has seen that chip.
    """
    platform = target_device().platform
    reference = f"runs here ({platform})" + ("" if platform == "cpu" else "; numerics unproven there")
    reason = native.unavailable_because()
    runs = f"runs here, {native.instruction_set()}, cores: {native.num_cores()}"
    cpu = runs if reason is None else f"does not run here: {reason}"
    if sparsecore.unavailable_because() is None:
        tpu = f"opt-in here (implementation= or RSEMBED_KERNELS); {SPARSECORE}; numbers on this chip unproven"
    else:
        compiler = "make test-tpu compiles them" if _is_installed("libtpu") else "compiling unproven here: no libtpu"
        tpu = f"{SPARSECORE}; {compiler}; running on a TPU unproven"
    if gpu.unavailable_because() is None:
        card = f"opt-in here (implementation= or RSEMBED_KERNELS); {GPU}; make test-gpu checks the numbers on this card"
    else:
        has_compiler = _is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin")
        compiler = "make test-gpu compiles them" if has_compiler else "compiling unproven here: no CUDA plugin"
        card = f"{GPU}; {compiler}; running on a GPU unproven"
    return [("reference", reference), ("native", cpu), ("sparsecore", tpu), ("gpu", card)]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
