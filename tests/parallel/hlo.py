"""Counts the bytes that a compiled program sends, from the collectives in its HLO text."""

import math
import re
from collections import defaultdict

_COLLECTIVE = re.compile(
    r"= (?P<result>.+?) (?P<op>all-to-all|all-gather|reduce-scatter|all-reduce)(?P<start>-start)?\("
)
_SHAPE = re.compile(r"\b[a-z]+(\d*)\[([\d,]*)\]")
_EXPLICIT_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


def _sizes(shapes: str) -> list[int]:
    """Bytes of each array in a text with shapes, such as `f32[64,8]`.

    The name of a dtype ends with its number of bits, except `pred`, which has 8.
    """
    collectives = []
    for bits, lengths in _SHAPE.findall(shapes):
        lengths = [int(length) for length in lengths.split(",") if length]
        collectives.append(int(bits or 8) // 8 * math.prod(lengths))
    return collectives


def _group_size(line: str, num_devices: int) -> int:
    if explicit := _EXPLICIT_GROUP.search(line):
        return len(explicit[1].split(","))
    iota = _IOTA_GROUPS.search(line)
    return int(iota[2]) if iota else num_devices


def collective_bytes(compiled_text: str, num_devices: int) -> dict[str, float]:
    """Bytes that a device sends to others, by operation. An instruction in a loop counts once.

    Args:
      compiled_text: `jax.jit(f).lower(...).compile().as_text()`.
      num_devices: number of all devices, which is the group size of collectives without groups.
    """
    sent: dict[str, float] = defaultdict(float)
    for line in compiled_text.splitlines():
        match = _COLLECTIVE.search(line)
        if not match:
            continue
        op = match["op"]
        sizes = _sizes(match["result"])
        n = _group_size(line, num_devices)
        # Except for all-reduce, the result of a start is a pair of operands and results.
        if match["start"] and op != "all-reduce":
            sizes = sizes[len(sizes) // 2 :]
        # `sizes` are those of results. The result of a gather has all blocks, that of a scatter one
        # of the n blocks that were sent.
        factor = {"reduce-scatter": n, "all-reduce": 2}.get(op, 1)
        sent[op] += factor * sum(sizes) * (n - 1) / n
    return dict(sent)
