"""Tensor-train tables in numpy, float64, and modules in one program for all values."""

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
    """Outputs, and what `backward` returns: gradients, or none after a fused step."""
    output, backward = emb.vjp(*batch)
    return output, backward(d_output)


def worked_cores(inputs, spec):
    """The cores of a worked case."""
    return [
        np.asarray(core, np.float32).reshape(s)
        for core, s in zip(inputs["cores"], spec.core_shapes, strict=True)
    ]


def dense_table(spec, cores, xp=np):
    """The table at once, in numpy float64 or in float32 of `jax.numpy`."""
    product = xp.ones((1, 1, 1))
    for core, p, shape in zip(cores, spec.tt_p_shapes, spec.slice_shapes, strict=True):
        slices = xp.asarray(core, float).reshape(p, *shape)
        product = xp.einsum("acr,prqs->apcqs", product, slices)
        product = product.reshape(product.shape[0] * p, -1, shape[2])
    return product[: spec.num_embeddings, :, 0]


def call_of(ids, offsets, weights=None, mode="sum") -> Call:
    """Bags over a dense table; ids outside it are skipped and not counted."""
    bags = IdList(np.asarray(ids), np.asarray(offsets), weights)
    return Call.of([bags], ["mean_by_count" if mode == "mean" else "sum"])


def pooled(table, *batch) -> np.ndarray:
    """What a batch as for `call_of` reads."""
    (vectors,) = lookup([table], call_of(*batch))
    return vectors


def core_gradients(spec, cores, call, d_output):
    """What the gradients of the rows of the dense table come back as."""
    (d_rows,) = row_gradients(call, [spec.num_embeddings], [spec.embedding_dim], [d_output])
    d_table = np.zeros((spec.num_embeddings, spec.embedding_dim), np.float32)
    for row, d_row in d_rows.items():
        d_table[row] = d_row
    _, pull = jax.vjp(lambda cores: dense_table(spec, cores, jnp), tuple(cores))
    return pull(d_table)[0]
