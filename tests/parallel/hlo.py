"""What a compiled program sends: sizes of its collectives, read from the text of XLA's HLO."""

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
    """Bytes of every array; the name of a dtype ends with its bits, but for `pred`, which takes a byte."""
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
    """Bytes that a device sends to others, by operation; every instruction counts once, also inside a loop.

    Args:
      compiled_text: `jax.jit(f).lower(...).compile().as_text()`.
      num_devices: group size of collectives that span all devices.
    """
    sent: dict[str, float] = defaultdict(float)
    for line in compiled_text.splitlines():
        match = _COLLECTIVE.search(line)
        if not match:
            continue
        op = match["op"]
        sizes = _sizes(match["result"])
        n = _group_size(line, num_devices)
        if match["start"] and op != "all-reduce":  # (operand, result): both are named
            sizes = sizes[len(sizes) // 2 :]
        # From the size of the result: a gather's holds all blocks, a scatter's one of n that were sent.
        factor = {"reduce-scatter": n, "all-reduce": 2}.get(op, 1)
        sent[op] += factor * sum(sizes) * (n - 1) / n
    return dict(sent)
