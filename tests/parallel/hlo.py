"""What a compiled program sends: sizes of its collectives, read from the text of XLA's HLO."""

import math
import re
from collections import defaultdict

_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
}
_ITEM_BYTES |= {"f64": 8, "s64": 8, "u64": 8}
_COLLECTIVE = re.compile(
    r"= (?P<result>.+?) (?P<op>all-to-all|all-gather|reduce-scatter|all-reduce)(?P<start>-start)?\("
)
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_EXPLICIT_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


def _sizes(shapes: str) -> list[int]:
    found = _SHAPE.findall(shapes)
    return [
        _ITEM_BYTES[item] * math.prod(int(size) for size in sizes.split(",") if size)
        for item, sizes in found
    ]


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
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        op, sizes, n = found["op"], _sizes(found["result"]), _group_size(line, num_devices)
        if found["start"] and op != "all-reduce":  # (operand, result): both are named
            sizes = sizes[len(sizes) // 2 :]
        result = sum(sizes)
        others = (n - 1) / n
        # From the size of the result: a gather's holds all blocks, a scatter's one of n that were sent.
        sent[op] += {
            "all-to-all": result * others,
            "all-gather": result * others,
            "reduce-scatter": result * n * others,
            "all-reduce": 2 * result * others,
        }[op]
    return dict(sent)
