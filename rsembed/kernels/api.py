"""Kernel functions for the rest of the library, which run on the best implementation.

Every call runs on the first implementation that can handle it.

An implementation is a module that defines some of the functions in `MEANINGS`. If a module does not
define a function, the plain JAX function in `MEANINGS` runs instead. `unavailable_because()` of a
module returns the reason why its kernels cannot run here, or None. A kernel raises
`NotImplementedError(reason)` if it cannot handle a call. Implementations for an accelerator handle
only computations for that accelerator (see `devices.target_device`).
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
    int32_range,
    is_between,
)
from rsembed.kernels.devices import granted_cores, target_device, warn_of_slow_cpu
from rsembed.optimizers.base import Slots
from rsembed.specs import QuantizationConfig

Params = ParamSpec("Params")
Result = TypeVar("Result")

IMPLEMENTATIONS: tuple[ModuleType, ...] = (native, sparsecore, gpu, reference)
"""All implementations, in order of preference."""

MEANINGS = vars(ids) | vars(keyed) | vars(reference)
"""Plain JAX function of every kernel, by name.

The plain JAX function of a kernel defines the results of the kernel, and runs if an implementation
does not define the kernel.
"""

OPT_IN = (sparsecore.NAME,)
"""Implementations that run only if `implementation=` or `RSEMBED_KERNELS` names them.

`RSEMBED_KERNELS` is an environment variable with names separated by commas.
"""

_default: ContextVar[str | None] = ContextVar("default implementation", default=None)


@contextmanager
def by_default(implementation: str | None) -> Iterator[None]:
    """Context in which `implementation` handles calls that name no implementation.

    None: `dispatch` chooses the implementation of each call.
    """
    token = _default.set(implementation)
    try:
        yield
    finally:
        _default.reset(token)


def default_implementation() -> str | None:
    """Name of the implementation set by `by_default`, or None outside such a context."""
    return _default.get()


def implementation_states() -> list[tuple[str, str]]:
    """Name of every implementation, with "live" or the reason why it does not run."""
    live = _choices(IMPLEMENTATIONS, None, os.environ.get("RSEMBED_KERNELS", ""))
    states = []
    for module in IMPLEMENTATIONS:
        state = module.unavailable_because()
        if state is None and module in live:
            state = "live"
        elif state is None:
            state = (
                "opt-in, because no chip has run these kernels yet: "
                f"pass implementation={module.NAME!r} or set RSEMBED_KERNELS={module.NAME}"
            )
        states.append((module.NAME, state))
    return states


@functools.cache  # Cached, because every eager call needs the list of implementations.
def _choices(
    implementations: tuple[Any, ...],
    implementation: str | None,
    opted_in: str,
) -> list[Any]:
    """Implementations to try for a call, in order of preference.

    Args:
      implementations: all implementations, in order of preference.
      implementation: name of the only implementation to try. None: all implementations, except
        opt-in implementations that `opted_in` does not name.
      opted_in: value of `RSEMBED_KERNELS`.

    Raises: ValueError: a name is unknown.
    """
    wanted = {name.strip() for name in opted_in.split(",") if name.strip()}
    unknown = wanted - set(OPT_IN)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ValueError(f"RSEMBED_KERNELS names {names}; it knows {', '.join(OPT_IN)}.")
    known = {module.NAME: module for module in implementations}
    if implementation is None:
        passed_over = set(OPT_IN) - wanted
        return [module for name, module in known.items() if name not in passed_over]
    if implementation not in known:
        names = ", ".join(known)
        raise ValueError(
            f"unknown implementation {implementation!r}; choose one of {names}, or None.",
        )
    return [known[implementation]]


def check_implementation(implementation: str | None) -> None:
    """Checks that `implementation` is None or the name of an implementation that can run here.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the implementation cannot run here.
    """
    if implementation is not None:
        (module,) = _choices(IMPLEMENTATIONS, implementation, "")
        reason = module.unavailable_because()
        if reason is not None:
            raise NotImplementedError(
                f"implementation {implementation!r} cannot run here: {reason}",
            )


def dispatch(
    function: str,
    *args: PyTree,
    implementation: str | None = None,
    **kwargs: object,
) -> PyTree:
    """Result of a call, computed by the first implementation that can handle the call.

    Args:
      function: name of a function in `MEANINGS`.
      *args: arguments of the function.
      implementation: name of the only implementation to try. None: `default_implementation()`.
      **kwargs: keyword arguments of the function.

    Raises:
      ValueError: the implementation's name is unknown.
      NotImplementedError: no implementation can handle the call. The error message says why each
        implementation cannot handle the call.
    """
    reasons = []
    meaning = MEANINGS[function]
    implementation = implementation or default_implementation()
    opted_in = os.environ.get("RSEMBED_KERNELS", "")
    for module in _choices(IMPLEMENTATIONS, implementation, opted_in):
        reason = module.unavailable_because()
        if reason is None:
            kernel = getattr(module, function, meaning)
            is_gpu_kernel = module is gpu and kernel is not meaning
            try:
                if not is_gpu_kernel or target_device().platform != "gpu":
                    return kernel(*args, **kwargs)
                # Even on a machine with a GPU, JAX can compile a kernel call for the CPU. The
                # platform is known only at compile time, so `platform_dependent` chooses the kernel
                # at compile time.
                serve = partial(kernel, *args, **kwargs)
                default = partial(meaning, *args, **kwargs)
                return jax.lax.platform_dependent(cuda=serve, default=default)
            except NotImplementedError as error:
                reason = str(error)
        elif module is native and implementation is None and target_device().platform == "cpu":
            warn_of_slow_cpu(reason)
        reasons.append(f"{module.NAME}: {reason}")
    check_implementation(implementation)
    raise NotImplementedError(f"no implementation can serve {function}: " + "; ".join(reasons))


def served(meaning: Callable[Params, Result]) -> Callable[Params, Result]:
    """Function that calls `dispatch` for the kernel that has the same name as `meaning`.

    The function takes the arguments of `meaning` and the keyword `implementation`.
    """
    call = partial(dispatch, meaning.__name__)
    documented = functools.wraps(meaning)(call)
    return cast(Callable[Params, Result], documented)


def _differentiable(
    function: str,
    pull: Callable[..., PyTree],
) -> Callable[..., PyTree]:
    """Differentiable function `(implementation, *arguments) -> result` that calls `dispatch`.

    Args:
      function: name of a function in `MEANINGS`.
      pull: function `(implementation, arguments, d_result) -> gradients of the arguments`.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(implementation: str | None, *arguments: PyTree) -> PyTree:
        return dispatch(function, *arguments, implementation=implementation)

    def forward(
        implementation: str | None,
        *arguments: PyTree,
    ) -> tuple[PyTree, PyTree]:
        return call(implementation, *arguments), arguments

    call.defvjp(forward, pull)
    return call


row_gradients = served(reference.row_gradients)
weight_gradients = served(reference.weight_gradients)
allocate = served(reference.allocate)
gather_rows = served(reference.gather_rows)
scatter_rows = served(reference.scatter_rows)
scatter_into = served(reference.scatter_into)
rows_of_ids = served(ids.rows_of_ids)
count_ids = served(ids.count_ids)
entries_by_sample = served(ids.entries_by_sample)
distinct = served(keyed.distinct)
unique_keys = served(keyed.unique_keys)
row_bits = served(reference.row_bits)
find_keys = served(keyed.find_keys)
insert_keys = served(keyed.insert_keys)
take_rows = served(keyed.take_rows)
count_uses = served(keyed.count_uses)
compact = served(keyed.compact)
pack_blocks = served(ids.pack_blocks)
unpack_blocks = served(ids.unpack_blocks)
block_ends = served(ids.block_ends)
round_places = served(ids.round_places)


def lookup(
    tables: Sequence[Float[Array, "_ _"]],
    call: Call,
    *,
    quantization: QuantizationConfig | None = None,
    implementation: str | None = None,
) -> Outputs:
    """Pooled rows of every segment, float32, in the call's layout. See `reference.lookup`.

    The result is differentiable in the tables and the weights. The gradient of a table is dense, so
    training uses `row_gradients` or `update` instead.

    Args:
      tables: tables that the call's segments read.
      call: lists of ids and the segments that read them.
      quantization: function that is applied to every row before pooling. With `quantization`,
        `tables` must hold only one table. None means no quantization.
      implementation: name of the only implementation to try. None: all implementations, in
        order of preference.
    """
    if quantization is None:
        return _lookup(implementation, tuple(tables), call)
    (table,) = tables
    # `lookup` looks up every row by itself, because `quantize` takes single rows, not pooled rows.
    # A second lookup pools the quantized rows.
    row_lists = []
    num_rows = table.shape[0]
    for number in range(len(call.lists)):
        list_rows = reference.rows_of_list(call, number, 0, num_rows)
        row_lists.append(list_rows)
    rows = jnp.concatenate(row_lists)
    single_rows = Call.of([IdList.single(rows)], ["sum"])
    (vectors,) = _lookup(implementation, (table,), single_rows)
    is_valid = is_between(rows, 0, num_rows)
    positions = int32_range(rows.shape[0])
    entries = jnp.where(is_valid, positions, NO_ROW)
    quantized = quantization.quantize(vectors)
    return _lookup(implementation, (quantized,), call.with_ids(entries))


def _pull_lookup(
    implementation: str | None,
    operands: tuple[tuple[Float[Array, "_ _"], ...], Call],
    d_outputs: Outputs,
) -> tuple[tuple[Float[Array, "_ _"], ...], Call]:
    tables, call = operands
    dims = tuple(table.shape[1] for table in tables)
    d_tables = []
    for number, table in enumerate(tables):
        gradients = CallGradients(call, tuple(d_outputs), dims, number)
        num_rows = table.shape[0]
        rows, values = dispatch("row_gradients", num_rows, gradients, implementation=implementation)
        d_table = jnp.zeros_like(table)
        d_table = d_table.at[rows].add(values.astype(table.dtype), mode="drop")
        d_tables.append(d_table)
    d_weights: Sequence[Array | None] = [None] * len(call.lists)
    if any(ids.weights is not None for ids in call.lists):
        arguments = (tables, call, d_outputs)
        d_weights = dispatch("weight_gradients", *arguments, implementation=implementation)
    d_lists = []
    for id_list, weights in zip(call.lists, d_weights, strict=True):
        no_gradients = jax.tree.map(_no_gradient, id_list)
        d_lists.append(dataclasses.replace(no_gradients, weights=weights))
    return tuple(d_tables), dataclasses.replace(call, lists=tuple(d_lists))


def _no_gradient(integers: Array) -> np.ndarray:
    """Gradient of an integer array: zeros of the dtype that JAX expects."""
    return np.zeros(integers.shape, jax.dtypes.float0)


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
    """Applies one optimizer step to distinct `rows`, and returns the new table and slots.

    Row numbers outside the table are padding. Table and slots are updated in place if they are
    donated.
    """
    if step.rule.moves_all_rows:
        # An optimizer with `moves_all_rows` updates the whole table and all slots elementwise. For
        # elementwise code, XLA is as fast as any kernel.
        return reference.apply_rows(table, slots, rows, gradients, step)
    stepped: tuple[Table, Slots] = dispatch(
        "apply_rows",
        table,
        slots,
        rows,
        gradients,
        step,
        implementation=implementation,
    )
    return stepped


def update(
    table: Table,
    slots: Slots,
    gradients: CallGradients,
    step: Step,
    *,
    implementation: str | None = None,
) -> tuple[Table, Slots]:
    """Applies one optimizer step to each row with a gradient. Returns the new table and slots.

    Gradients of equal rows are summed before the step. Table and slots are updated in place if they
    are donated.
    """
    if step.rule.moves_all_rows:
        num_rows = table.shape[0]
        rows, sums = dispatch("row_gradients", num_rows, gradients, implementation=implementation)
        return apply_rows(table, slots, rows, sums, step)
    stepped: tuple[Table, Slots] = dispatch(
        "update",
        table,
        slots,
        gradients,
        step,
        implementation=implementation,
    )
    return stepped


def pairwise_interaction(
    vectors: Float[Array, "batch n dim"],
    *,
    implementation: str | None = None,
) -> Float[Array, "batch pairs"]:
    """Dot products of all pairs of a sample's vectors, float32: the feature interaction of DLRM.

    The pairs are in the order of `numpy.triu_indices(n, 1)`. The result has a gradient, but second
    derivatives are not supported. On CPUs, one native call handles all samples. XLA would run a
    small matrix product for each sample, which takes several times as long as the table lookups of
    a model with 26 features.

    Args:
      vectors: vectors of every sample, one per feature. For example
        `jnp.stack([dense, *activations.values()], axis=1)`.
      implementation: name of the only kernel implementation to try. None, the default: all
        implementations, in order of preference.

    Raises: TypeError or ValueError: `vectors` is not an array of numbers, or does not have three
      axes.

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and
      Recommendation Systems", 2019.

    Example:
      >>> import jax.numpy as jnp, rsembed as rs
      >>> rs.pairwise_interaction(jnp.asarray([[[1.0, 0.0], [2.0, 3.0], [0.0, 4.0]]])).tolist()
      [[2.0, 0.0, 12.0]]
    """
    check_type(vectors, Float[Array, "batch n dim"], "pairwise_interaction: vectors")
    products: Array = _pair_products(implementation, jnp.asarray(vectors, jnp.float32))
    return products


def _pull_pair_products(
    implementation: str | None,
    arguments: tuple[Array, ...],
    d_products: Array,
) -> tuple[Array]:
    operands = (*arguments, d_products)
    d_vectors = dispatch("pull_pairs", *operands, implementation=implementation)
    return (d_vectors,)


_pair_products = _differentiable("pair_products", _pull_pair_products)


def stochastic_rounding(key: KeyOrKeys) -> reference.Rounding:
    """Function that rounds values up or down at random, unbiased. See `round_stochastically`."""
    return jax.tree_util.Partial(reference.round_stochastically, key=key)


SPARSECORE = "lowers for v5p, v6e and TPU7x SparseCore; simulated numerics agree with the reference"
GPU = "ran on an H100 (docs/accelerators.md); interpret-mode numerics agree with the reference"
"""How the SparseCore and GPU kernels were tested, in terms that `backend_evidence` defines."""


def backend_evidence() -> list[tuple[str, str]]:
    """Name of each backend, and a text that says where its kernels run and how they were tested.

    *Runs*: this process computes its results with the kernels of the backend. *Compiles*: the
    vendor's compiler translated the kernels to machine code. *Simulated*, *interpreted*: a
    simulator in NumPy, or the interpreter of Pallas, computed the results of the kernels. *Lowers*:
    JAX translated the kernels for the chip. *Unproven*: this property of the kernels has not been
    tested.

    The test suite checks the claims *simulated*, *interpreted* and *lowers*. `make test-tpu` and
    `make test-gpu` check the claim *compiles*. The speed and the numerical results of kernels on a
    chip are proven only by running `make test-gpu` or your model on that chip.
    """
    platform = target_device().platform
    on_xla = f"runs here ({platform})"
    if platform == "tpu":
        on_xla += "; numerics unproven there"
    reason = native.unavailable_because()
    if reason is None:
        on_cpu = f"runs here, {native.instruction_set()}, cores: {granted_cores()}"
    else:
        on_cpu = f"does not run here: {reason}"
    if sparsecore.unavailable_because() is None:
        opt_in = "opt-in here (implementation= or RSEMBED_KERNELS)"
        on_tpu = f"{opt_in}; {SPARSECORE}; numbers on this chip unproven"
    else:
        compiler = "compiling unproven here: no libtpu"
        if _is_installed("libtpu"):
            compiler = "make test-tpu compiles them"
        on_tpu = f"{SPARSECORE}; {compiler}; running on a TPU unproven"
    if gpu.unavailable_because() is None:
        on_gpu = f"runs here; {GPU}; make test-gpu checks the numbers on this card"
    else:
        compiler = "compiling unproven here: no CUDA plugin"
        if _is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin"):
            compiler = "make test-gpu compiles them"
        on_gpu = f"{GPU}; {compiler}"
    return [
        ("reference", on_xla),
        ("native", on_cpu),
        ("sparsecore", on_tpu),
        ("gpu", on_gpu),
    ]


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
