"""Tensor-train tables in numpy, float64, and modules in one program for all values."""

import functools
import json
from pathlib import Path

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


def worked_cores(given, spec):
    """The cores of a worked case."""
    return [
        np.asarray(core, np.float32).reshape(s)
        for core, s in zip(given["cores"], spec.core_shapes, strict=True)
    ]


def digits_of(number: int, radix) -> list[int]:
    digits = []
    for factor in reversed(radix):
        digits.append(number % factor)
        number //= factor
    return digits[::-1]


def dense_table(spec, cores) -> np.ndarray:
    """The table at once, float64."""
    product = np.ones((1, 1, 1))
    for core, p, shape in zip(cores, spec.tt_p_shapes, spec.slice_shapes, strict=True):
        core = np.asarray(core, np.float64).reshape(p, *shape)
        product = np.einsum("acr,prqs->apcqs", product, core)
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


def joined(one, other) -> np.ndarray:
    """The product of two slices `[R, q, S]`, with the columns of both."""
    return np.einsum("aqr,rps->aqps", one, other).reshape(len(one), -1, other.shape[2])


def core_gradients(spec, cores, call, d_output) -> list[np.ndarray]:
    """Row by row: the product of the slices before and behind each core, float64."""
    (d_rows,) = row_gradients(call, [spec.num_embeddings], [spec.embedding_dim], [d_output])
    shapes = [(p, *shape) for p, shape in zip(spec.tt_p_shapes, spec.slice_shapes, strict=True)]
    cut = [np.asarray(c, np.float64).reshape(s) for c, s in zip(cores, shapes, strict=True)]
    gradients = [np.zeros(shape) for shape in shapes]
    for row, d_row in d_rows.items():
        digits = digits_of(row, spec.tt_p_shapes)
        slices = [core[digit] for core, digit in zip(cut, digits, strict=True)]
        for t, digit in enumerate(digits):
            first, last = np.ones((1, 1, 1)), np.eye(slices[t].shape[2])[:, None]
            (before,) = functools.reduce(joined, slices[:t], first)
            behind = functools.reduce(joined, slices[t + 1 :], last)[..., 0]
            d_slices = d_row.reshape(len(before), -1, behind.shape[1])
            gradients[t][digit] += np.einsum("ar,aqb,sb->rqs", before, d_slices, behind)
    return [g.reshape(core.shape) for g, core in zip(gradients, cores, strict=True)]
