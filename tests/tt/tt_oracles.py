"""Tensor trains expanded in numpy float64, and compiled calls of modules."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from rsembed.kernels.contract import Call, IdList
from tests.oracles import lookup, row_gradients

CASES = json.loads((Path(__file__).parents[1] / "data" / "tt_cases.json").read_text())["cases"]


@nnx.jit
def looked_up(emb, *batch):
    return emb(*batch)


@nnx.jit
def step(emb, d_output, *batch):
    """Output of a lookup, and the result of its backward function, None after a fused step."""
    output, backward = emb.vjp(*batch)
    return output, backward(d_output)


def worked_cores(inputs, spec):
    """Cores of a worked case."""
    return [
        np.asarray(core, np.float32).reshape(s)
        for core, s in zip(inputs["cores"], spec.core_shapes, strict=True)
    ]


def dense_table(spec, cores, xp=np):
    """The expanded table, in numpy float64, or in float32 with `xp=jax.numpy`."""
    product = xp.ones((1, 1, 1))
    for core, p, shape in zip(cores, spec.tt_p_shapes, spec.slice_shapes, strict=True):
        slices = xp.asarray(core, float).reshape(p, *shape)
        product = xp.einsum("acr,prqs->apcqs", product, slices)
        product = product.reshape(product.shape[0] * p, -1, shape[2])
    return product[: spec.num_embeddings, :, 0]


def call_of(ids, offsets, weights=None, mode="sum") -> Call:
    """A lookup of bags in a dense table. Ids out of range are skipped and not counted."""
    bags = IdList(np.asarray(ids), np.asarray(offsets), weights)
    return Call.of([bags], ["mean_by_count" if mode == "mean" else "sum"])


def pooled(table, *batch) -> np.ndarray:
    """Output of a batch, with arguments as in `call_of`."""
    (vectors,) = lookup([table], call_of(*batch))
    return vectors


def core_gradients(spec, cores, call, d_output):
    """Gradients of the cores, from the gradients of the expanded table's rows."""
    (d_rows,) = row_gradients(call, [spec.num_embeddings], [spec.embedding_dim], [d_output])
    d_table = np.zeros((spec.num_embeddings, spec.embedding_dim), np.float32)
    for row, d_row in d_rows.items():
        d_table[row] = d_row
    return _gradients_of_expansion(spec, tuple(cores), d_table)


@functools.partial(jax.jit, static_argnums=0)
def _gradients_of_expansion(spec, cores, d_table):
    _, pull = jax.vjp(lambda cores: dense_table(spec, cores, jnp), cores)
    return pull(d_table)[0]
