"""Which tables share a storage, and which parts of its arrays are theirs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from rsembed.specs import TableSpec

MOST_EMPTY = 1 / 16
"""Largest share of rows that may stay empty where tables of unequal size share storage."""


def of_near_sizes(tables: Sequence[TableSpec], *, most_rows: int, num_waiting: int = 0) -> list[list[TableSpec]]:
    """Tables in few groups, which leave few rows empty where each of a group takes the place of the largest.

    Neighbours in size join, those first that cost the fewest rows. That is the fewest groups there can be, or one or
    two more.

    Args:
      tables: the tables.
      most_rows: place for so many in a group, or for one table.
      num_waiting: keys that may wait for a row in each table; there is place for `most_rows` in a group, too.
    """
    found = sorted(Counter(table.vocabulary_size for table in tables).items())
    sizes, counts = [size for size, _ in found], [count for _, count in found]
    room = MOST_EMPTY * sum(table.vocabulary_size for table in tables)
    while len(sizes) > 1:
        costs = [
            count * (larger - size) for count, (size, larger) in zip(counts, itertools.pairwise(sizes), strict=False)
        ]
        place = min(range(len(costs)), key=costs.__getitem__)
        if costs[place] > room:
            break
        room -= costs[place]
        counts[place + 1] += counts[place]
        del sizes[place], counts[place]
    groups: dict[tuple[int, int], list[TableSpec]] = {}
    joined = Counter[int]()
    for table in tables:
        size = next(size for size in sizes if size >= table.vocabulary_size)
        most_tables = max(most_rows // max(size, num_waiting), 1)
        groups.setdefault((size, joined[size] // most_tables), []).append(table)
        joined[size] += 1
    return list(groups.values())


def parts(trees: tuple[Any, ...], sizes: Sequence[Sequence[int]]) -> list[tuple[Any, ...]]:
    """What belongs to each of several tables, whose rows follow each other in every array of several trees.

    Args:
      trees: of arrays, or of shapes.
      sizes: of each table, its rows in the arrays of each tree.
    """

    def cut(leaf: Any, first: int, size: int) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(shape=(size, *leaf.shape[1:]))
        return leaf[first : first + size]

    found, firsts = [], [0] * len(trees)
    for own in sizes:
        places = zip(trees, firsts, own, strict=True)
        found.append(tuple(jax.tree.map(lambda leaf, at=(a, n): cut(leaf, *at), tree) for tree, a, n in places))
        firsts = [first + size for first, size in zip(firsts, own, strict=True)]
    return found
