"""Kernels as the rest of the library calls them, computed by the first implementation that can; see `reference.py`.

An implementation is a module with functions named as in `MEANINGS`; what it lacks, it takes from there. It says why it
cannot run on this machine through `unavailable_because()`, and why it cannot serve one call by raising
`NotImplementedError(reason)`. Those of accelerators serve only where the computation is for one (see
`devices.target_device`).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from rsembed.checks import check_type
from rsembed.kernels import gpu, ids, keyed, native, reference, sparsecore
from rsembed.kernels.contract import (
    NO_ROW,
    Call,
    CallGradients,
    IdList,
    KeyOrKeys,
    Outputs,
    Step,
    Table,
)
from rsembed.kernels.devices import target_device, warn_of_slow_cpu
from rsembed.optimizers.base import Slots
from rsembed.specs import QuantizationConfig

Params = ParamSpec("Params")
Result = TypeVar("Result")

IMPLEMENTATIONS: tuple[ModuleType, ...] = (native, sparsecore, gpu, reference)
"""All implementations, in order of preference."""

MEANINGS = vars(ids) | vars(keyed) | vars(reference)
"""Every function in plain JAX, by name: what it means, and what implementations without one of their own compute."""

OPT_IN = (sparsecore.NAME,)
"""Implementations that run only when named, by `implementation=` or in `RSEMBED_KERNELS`, separated by commas."""


_default: ContextVar[str | None] = ContextVar("default implementation", default=None)


@contextmanager
def by_default(implementation: str | None) -> Iterator[None]:
    """Within it, calls that name no implementation take this one; None leaves them the fastest."""
    token = _default.set(implementation)
    try:
        yield
    finally:
        _default.reset(token)


def default_implementation() -> str | None:
    """Name of the implementation that calls take which name none; None is the fastest."""
    return _default.get()


def implementation_states() -> list[tuple[str, str]]:
    """Every implementation by name, with "live" or the reason why it is not."""
    opt_in = "opt-in, because no chip has run these kernels yet: pass implementation={0!r} or set RSEMBED_KERNELS={0}"
    asked = _choices(IMPLEMENTATIONS, None, os.environ.get("RSEMBED_KERNELS", ""))
    return [
        (m.NAME, m.unavailable_because() or ("live" if m in asked else opt_in.format(m.NAME))) for m in IMPLEMENTATIONS
    ]


@functools.cache  # asked in every eager call
def _choices(implementations: tuple[PyTree, ...], implementation: str | None, opted_in: str) -> list[PyTree]:
    """Implementations to try for a call: the named one, or all that need no opt-in or are in `RSEMBED_KERNELS`."""
    wanted = {name.strip() for name in opted_in.split(",") if name.strip()}
    if unknown := wanted - set(OPT_IN):
        raise ValueError(f"RSEMBED_KERNELS names {', '.join(sorted(unknown))}; it knows {', '.join(OPT_IN)}.")
    known = {module.NAME: module for module in implementations}
    if implementation not in (None, *known):
        raise ValueError(f"unknown implementation {implementation!r}; choose one of {', '.join(known)}, or None.")
    passed_over = set(OPT_IN) - wanted
    return [known[implementation]] if implementation else [m for m in implementations if m.NAME not in passed_over]


def check_implementation(implementation: str | None) -> None:
    """Raises: ValueError: the name is unknown. NotImplementedError: that implementation cannot run here."""
    if implementation is not None:
        (named,) = _choices(IMPLEMENTATIONS, implementation, "")
        if (reason := named.unavailable_because()) is not None:
            raise NotImplementedError(f"implementation {implementation!r} cannot run here: {reason}")


def dispatch(function: str, *args: PyTree, implementation: str | None = None, **kwargs: Any) -> PyTree:
    """Result of a call by the first implementation that can serve it, or by the one that is named.

    Raises: as `check_implementation`; NotImplementedError: none can, and why.
    """
    reasons, meaning = [], MEANINGS[function]
    implementation = implementation or default_implementation()
    for module in _choices(IMPLEMENTATIONS, implementation, os.environ.get("RSEMBED_KERNELS", "")):
        if (reason := module.unavailable_because()) is None:
            kernel = getattr(module, function, meaning)
            try:
                if module is not gpu or kernel is meaning or target_device().platform != "gpu":
                    return kernel(*args, **kwargs)
                # Arrays may be on the CPU beside a GPU, which is known only when a program is compiled for them.
                serve, default = (partial(own, *args, **kwargs) for own in (kernel, meaning))
                return jax.lax.platform_dependent(cuda=serve, default=default)
            except NotImplementedError as error:
                reason = str(error)
        elif module is native and implementation is None:
            warn_of_slow_cpu()
        reasons.append(f"{module.NAME}: {reason}")
    check_implementation(implementation)
    raise NotImplementedError(f"no implementation can serve {function}: " + "; ".join(reasons))


def served(meaning: Callable[Params, Result]) -> Callable[Params, Result]:
    """`dispatch` of a function of `MEANINGS`, which takes the keyword `implementation` beside its own arguments."""
    call = functools.wraps(meaning)(partial(dispatch, meaning.__name__))
    return cast(Callable[Params, Result], call)


def _differentiable(function: str, pull: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`dispatch` of a function, with `pull(implementation, arguments, d_result)` for the gradients of its arguments."""

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(implementation: str | None, *arguments: PyTree) -> PyTree:
        return dispatch(function, *arguments, implementation=implementation)

    call.defvjp(lambda implementation, *arguments: (call(implementation, *arguments), arguments), pull)
    return call


row_gradients, weight_gradients = served(reference.row_gradients), served(reference.weight_gradients)
squared_norm, allocate = served(reference.squared_norm), served(reference.allocate)
gather_rows, scatter_rows = served(reference.gather_rows), served(reference.scatter_rows)
rows_of_ids, count_ids = served(ids.rows_of_ids), served(ids.count_ids)
rows_by_bag, entries_by_sample = served(ids.rows_by_bag), served(ids.entries_by_sample)
distinct, unique_keys, row_bits = served(keyed.distinct), served(keyed.unique_keys), served(reference.row_bits)
find_keys, insert_keys = served(keyed.find_keys), served(keyed.insert_keys)
take_rows, count_uses, compact = served(keyed.take_rows), served(keyed.count_uses), served(keyed.compact)
pack_blocks, unpack_blocks = served(ids.pack_blocks), served(ids.unpack_blocks)
block_ends, round_places = served(ids.block_ends), served(ids.round_places)


def lookup(
    tables: Sequence[Float[Array, "_ _"]],
    call: Call,
    *,
    quantization: QuantizationConfig | None = None,
    implementation: str | None = None,
) -> Outputs:
    """Pooled rows of every segment, float32, laid out as the call says; see `reference.lookup` for the meaning.

    Differentiable in the tables and the weights (dense gradients); training uses `row_gradients` or `update` instead.
    """
    if quantization is None:
        return _lookup(implementation, tuple(tables), call)
    (table,) = tables
    # Quantization acts on single rows, before they are combined.
    rows = jnp.concatenate([reference.rows_of_list(call, k, 0, table.shape[0]) for k in range(len(call.lists))])
    (vectors,) = _lookup(implementation, (table,), Call.of([IdList.single(rows)], ["sum"]))
    is_valid = (rows >= 0) & (rows < table.shape[0])
    entries = jnp.where(is_valid, jnp.arange(rows.shape[0], dtype=jnp.int32), NO_ROW)
    return _lookup(implementation, (quantization.quantize(vectors),), call.with_ids(entries))


def _pull_lookup(implementation: str | None, arguments: PyTree, d_outputs: Outputs) -> PyTree:
    tables, call = arguments
    dims = tuple(table.shape[1] for table in tables)
    d_tables = []
    for number, table in enumerate(tables):
        gradients = CallGradients(call, tuple(d_outputs), dims, number)
        rows, values = dispatch("row_gradients", table.shape[0], gradients, implementation=implementation)
        d_tables.append(jnp.zeros_like(table).at[rows].add(values.astype(table.dtype), mode="drop"))
    d_weights: Sequence[Array | None] = [None] * len(call.lists)
    if any(own.weights is not None for own in call.lists):
        d_weights = dispatch("weight_gradients", tables, call, d_outputs, implementation=implementation)
    d_lists = []
    for id_list, own in zip(call.lists, d_weights, strict=True):
        integers = {"ids": _no_gradient(id_list.ids), "offsets": _no_gradient(id_list.offsets)}
        d_lists.append(dataclasses.replace(id_list, weights=own, **integers))
    return tuple(d_tables), dataclasses.replace(call, lists=tuple(d_lists))


def _no_gradient(integers: Any) -> PyTree:
    return None if integers is None else np.zeros(integers.shape, jax.dtypes.float0)


_lookup = _differentiable("lookup", _pull_lookup)


def apply_rows(
    table: Table,
    slots: Slots,
    rows: Int[Array, " capacity"],
    gradients: Float[Array, "capacity dim"],
    step: Step,
    *,
    implementation: str | None = None,
) -> tuple[Table, Slots]:
    """One optimizer step of distinct rows, in place when the arrays are donated."""
    if step.rule.moves_all_rows:  # one pass over whole arrays, entry by entry: no kernel could be faster than XLA
        return reference.apply_rows(table, slots, rows, gradients, step)
    stepped: tuple[Table, Slots] = dispatch(
        "apply_rows", table, slots, rows, gradients, step, implementation=implementation
    )
    return stepped


def update(
    table: Table, slots: Slots, gradients: CallGradients, step: Step, *, implementation: str | None = None
) -> tuple[Table, Slots]:
    """Row gradients and one optimizer step per row in one call, in place when the arrays are donated."""
    if step.rule.moves_all_rows:
        rows, sums = dispatch("row_gradients", table.shape[0], gradients, implementation=implementation)
        return reference.apply_rows(table, slots, rows, sums, step)
    stepped: tuple[Table, Slots] = dispatch("update", table, slots, gradients, step, implementation=implementation)
    return stepped


def pairwise_interaction(
    vectors: Float[Array, "batch n dim"], *, implementation: str | None = None
) -> Float[Array, "batch pairs"]:
    """Dot products of the vectors of every sample, in the order of `numpy.triu_indices(n, 1)`, float32.

    This is how DLRM lets its features meet. Differentiable once. On CPUs one native call serves all samples; XLA runs a
    small product for each of them, which takes several times as long as the tables of a model of 26 features.

    Args:
      vectors: one vector per feature, such as `jnp.stack([dense, *activations.values()], axis=1)`.
      implementation: name of a kernel implementation to insist on; None takes the fastest that can serve.

    Raises: TypeError or ValueError: `vectors` is no array of numbers, or has not three axes.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.

    Example:
      >>> import jax.numpy as jnp, rsembed as rs
      >>> rs.pairwise_interaction(jnp.asarray([[[1.0, 0.0], [2.0, 3.0], [0.0, 4.0]]])).tolist()
      [[2.0, 0.0, 12.0]]
    """
    check_type(vectors, Float[Array, "batch n dim"], "pairwise_interaction: vectors")
    products: Array = _pair_products(implementation, jnp.asarray(vectors, jnp.float32))
    return products


_pair_products = _differentiable(
    "pair_products", lambda chosen, arguments, d: (dispatch("pull_pairs", *arguments, d, implementation=chosen),)
)


def stochastic_rounding(key: KeyOrKeys) -> reference.Rounding:
    """Rounding up or down with probabilities that keep the mean; see `reference.round_stochastically`."""
    return jax.tree_util.Partial(reference.round_stochastically, key=key)


SPARSECORE = "lowers for v5p, v6e and TPU7x SparseCore; simulated numerics agree with the reference"
GPU = "ran on an H100 (docs/accelerators.md); interpret-mode numerics agree with the reference"
"""Evidence for the kernels of each backend.

*Runs*: the numbers of this process come from them. *Compiles*: the vendor's compiler made a program. *Simulated*,
*interpreted*: the kernel's own equations were evaluated in numpy or by Pallas' interpreter. *Lowers*: JAX translated
it. Whatever was not tried is *unproven*.
"""


def backend_evidence() -> list[tuple[str, str]]:
    """Each backend, and what is known about it on this machine.

    The test suite makes the statements about simulation, interpretation and lowering; `make test-tpu` and
    `make test-gpu` the ones about compilers. Speed and numbers on a chip stay unproven until `make test-gpu`, or your
    own run, has seen that chip.
    """
    platform = target_device().platform
    reference = f"runs here ({platform})" + ("; numerics unproven there" if platform == "tpu" else "")
    reason = native.unavailable_because()
    runs = f"runs here, {native.instruction_set()}, cores: {native.num_cores()}"
    cpu = runs if reason is None else f"does not run here: {reason}"
    if sparsecore.unavailable_because() is None:
        tpu = f"opt-in here (implementation= or RSEMBED_KERNELS); {SPARSECORE}; numbers on this chip unproven"
    else:
        compiler = "make test-tpu compiles them" if _is_installed("libtpu") else "compiling unproven here: no libtpu"
        tpu = f"{SPARSECORE}; {compiler}; running on a TPU unproven"
    if gpu.unavailable_because() is None:
        card = f"runs here; {GPU}; make test-gpu checks the numbers on this card"
    else:
        has_compiler = _is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin")
        compiler = "make test-gpu compiles them" if has_compiler else "compiling unproven here: no CUDA plugin"
        card = f"{GPU}; {compiler}"
    return [("reference", reference), ("native", cpu), ("sparsecore", tpu), ("gpu", card)]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
