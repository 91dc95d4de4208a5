"""Tensor-train tables in loops over digits and ranks, float64; and modules in one program for all values."""

import json
from pathlib import Path

import numpy as np
from flax import nnx

from rsembed.kernels.contract import IdList
from tests.oracles import pooled_lookup

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


def dense_row(cores, p, q, ranks, row: int) -> np.ndarray:
    """One row; `cores[t]` is any array that reshapes to `[p_t, R_{t-1}, q_t, R_t]`."""
    ends = [1, *ranks, 1]
    slices = [
        np.asarray(core, np.float64).reshape(p[t], ends[t], q[t], ends[t + 1])[digit]
        for t, (core, digit) in enumerate(zip(cores, digits_of(row, p), strict=True))
    ]
    entries = []
    for column in range(int(np.prod(q))):
        product = np.eye(1)
        for piece, digit in zip(slices, digits_of(column, q), strict=True):
            product = product @ piece[:, digit, :]
        entries.append(product[0, 0])
    return np.asarray(entries)


def dense_table(spec, cores) -> np.ndarray:
    return np.stack(
        [
            dense_row(cores, spec.tt_p_shapes, spec.tt_q_shapes, spec.tt_ranks, i)
            for i in range(spec.num_embeddings)
        ]
    )


def expanded(spec, cores) -> np.ndarray:
    """The table at once, for tests of many entries."""
    product = np.ones((1, 1, 1))
    for core, p, shape in zip(cores, spec.tt_p_shapes, spec.slice_shapes, strict=True):
        product = np.einsum(
            "acr,prqs->apcqs", product, np.asarray(core, np.float64).reshape(p, *shape)
        )
        product = product.reshape(product.shape[0] * p, -1, shape[2])
    return product[: spec.num_embeddings, :, 0]


def pooled(table, ids, offsets, weights=None, mode="sum") -> np.ndarray:
    """Bags over a dense table; ids outside it are skipped and not counted."""
    bags = IdList(np.asarray(ids), np.asarray(offsets), weights)
    return pooled_lookup(table, bags, "mean_by_count" if mode == "mean" else "sum")


def core_gradients(spec, cores, ids, bag_of, gains, d_output):
    """Row by row: the product of the slices before and behind each core, float64."""
    shapes, radix = spec.slice_shapes, spec.tt_p_shapes
    cut = [
        np.asarray(c, np.float64).reshape(p, *shape)
        for c, p, shape in zip(cores, radix, shapes, strict=True)
    ]
    gradients = [np.zeros(core.shape) for core in cut]
    for row, bag, gain in zip(ids, bag_of, gains, strict=True):
        slices = [core[digit] for core, digit in zip(cut, digits_of(int(row), radix), strict=True)]
        before, behind = [np.ones((1, 1))], [np.ones((1, 1))]
        for piece in slices:
            before.append(np.einsum("ar,rqs->aqs", before[-1], piece).reshape(-1, piece.shape[2]))
        for piece in slices[::-1]:
            behind.append(np.einsum("rqs,sb->rqb", piece, behind[-1]).reshape(piece.shape[0], -1))
        for t, digit in enumerate(digits_of(int(row), radix)):
            left, right = before[t], behind[len(slices) - 1 - t]
            d_row = gain * d_output[bag].reshape(left.shape[0], -1, right.shape[1])
            gradients[t][digit] += np.einsum("ar,aqb,sb->rqs", left, d_row, right)
    return [g.reshape(core.shape) for g, core in zip(gradients, cores, strict=True)]
