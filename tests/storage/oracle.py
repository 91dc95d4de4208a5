"""Expected rows and lookups of tables of each storage, by loops in numpy and in float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import rsembed as rs
from tests.oracles import divisor_of

StepRow = Callable[..., None]


@dataclasses.dataclass(frozen=True)
class SideBySide(rs.OptimizerSpec):
    """Several rules in one table: rule `k` of `n` steps the columns `k, k + n, k + 2n, ...`.

    Each rule gets the rows, gradients and slots of its columns as if they were a table. The program
    compiles as fast as that of a single rule. If a table is split by column into multiples of `n`
    columns, each part has all rules.
    """

    rules: tuple[rs.OptimizerSpec, ...] = ()
    needs_step = True

    @property
    def is_row_wise(self):
        return any(rule.is_row_wise for rule in self.rules)

    def slot_variables_count(self):
        return sum(rule.slot_variables_count() for rule in self.rules)

    def get_hyperparameters(self, step=None):
        return tuple(value for rule in self.rules for value in rule.get_hyperparameters(step))

    def columns(self, array):
        return [array[:, k :: len(self.rules)] for k in range(len(self.rules))]

    def init_slots(self, rows):
        return tuple(
            slot for rule, columns in self._rules_and(rows) for slot in rule.init_slots(columns)
        )

    def step_rows(self, rows, slots, gradients, hyper):
        slots, hyper, stepped, kept = iter(slots), iter(hyper), rows, []
        for k, (rule, columns) in enumerate(self._rules_and(rows)):
            own_slots = tuple(next(slots) for _ in range(rule.slot_variables_count()))
            own_hyper = tuple(next(hyper) for _ in rule.get_hyperparameters(0))
            new, new_slots = rule.step_rows(
                columns, own_slots, self.columns(gradients)[k], own_hyper
            )
            stepped = stepped.at[:, k :: len(self.rules)].set(new)
            kept += new_slots
        return stepped, tuple(kept)

    def _rules_and(self, rows):
        return zip(self.rules, self.columns(rows), strict=True)

    def short_name(self):
        return "side_by_side"


class Steps(NamedTuple):
    """The rules of a table, and their formulas `formula(rule, row, slots, gradient, number)`."""

    rules: tuple[rs.OptimizerSpec, ...]
    formulas: tuple[StepRow, ...]

    @property
    def moves_all_rows(self):
        return any(rule.moves_all_rows for rule in self.rules)

    def fresh_slots(self, dim):
        """Initial slots of one row, by rule."""
        return [
            [slot.copy() for slot in slots_of_rule]
            for slots_of_rule in initial_slots(self.rules, dim)
        ]

    def step(self, row, slots, gradient, number):
        """Steps one row and its slots in place."""
        for k, (rule, formula) in enumerate(zip(self.rules, self.formulas, strict=True)):
            formula(
                rule, row[k :: len(self.rules)], slots[k], gradient[k :: len(self.rules)], number
            )


@functools.cache
def initial_slots(rules: tuple[rs.OptimizerSpec, ...], dim: int) -> list[list[np.ndarray]]:
    """Initial slots of a row of zeros with `dim` columns, which the rules share. By rule."""
    rows = [jnp.zeros((1, len(range(k, dim, len(rules))))) for k in range(len(rules))]
    slots = [rule.init_slots(row) for rule, row in zip(rules, rows, strict=True)]
    return [
        [np.array(slot, np.float64).reshape(-1) for slot in slots_of_rule]
        for slots_of_rule in slots
    ]


class Read(NamedTuple):
    """Ids `[samples, ids]`, padded with -1, and their weights or None."""

    ids: np.ndarray
    weights: np.ndarray | None


class Entry(NamedTuple):
    """An id of a batch, the index of the output that it adds to, and its factor."""

    id: int
    output: int
    gain: float


def entries_of(read: Read, combiner: str, counts: Callable[[int], bool]) -> list[Entry]:
    """The entries of a feature, without ids for which `counts` is false."""
    weights = np.ones(read.ids.shape)
    if read.weights is not None:
        weights = np.float64(read.weights)
    entries = []
    for sample, ids in enumerate(read.ids.tolist()):
        counted = [place for place, key in enumerate(ids) if counts(key)]
        divisor = divisor_of(combiner, [weights[sample, place] for place in counted])
        for place in counted:
            output = sample * len(ids) + place if combiner == "none" else sample
            gain = weights[sample, place] / divisor if divisor else 0.0
            entries.append(Entry(ids[place], output, gain))
    return entries


class Table:
    """Rows and slots by id. Subclasses define which ids have a row."""

    def __init__(self, dim: int, combiner: str, steps: Steps):
        self.dim, self.combiner, self.steps, self.number = dim, combiner, steps, 0
        self.rows: dict[int, tuple[np.ndarray, list[list[np.ndarray]]]] = {}

    def counts(self, key: int) -> bool:
        """Whether an id counts in a bag. An id without a row adds zeros, but counts in divisors."""
        return key in self.rows

    def vector(self, key: int) -> np.ndarray:
        return self.rows[key][0] if key in self.rows else np.zeros(self.dim)

    def find(self, keys: Sequence[int]) -> None:
        """Gives rows to new ids of a training batch, in the order of the batch."""

    def lookup(self, reads: Mapping[str, Read]) -> dict[str, np.ndarray]:
        outputs = {}
        for name, read in reads.items():
            shape = read.ids.shape if self.combiner == "none" else read.ids.shape[:1]
            pooled = np.zeros((math.prod(shape), self.dim))
            for entry in entries_of(read, self.combiner, self.counts):
                pooled[entry.output] += entry.gain * self.vector(entry.id)
            outputs[name] = pooled.reshape(*shape, self.dim)
        return outputs

    def lookup_ahead(self, reads: Mapping[str, Read]) -> dict[str, np.ndarray]:
        """Result of a lookup in training, in which new ids already have rows."""
        ahead = copy.deepcopy(self)
        ahead.find(self._keys(reads))
        return ahead.lookup(reads)

    def update(self, reads: Mapping[str, Read], d_outputs: Mapping[str, np.ndarray]) -> None:
        keys = self._keys(reads)
        gradients: dict[int, np.ndarray] = {}
        for name, read in reads.items():
            d_output = np.float64(d_outputs[name]).reshape(-1, self.dim)
            for entry in entries_of(read, self.combiner, self.counts):
                gradients[entry.id] = (
                    gradients.get(entry.id, 0.0) + entry.gain * d_output[entry.output]
                )
        self.find(keys)
        self.step(gradients)
        self.number += 1

    def step(self, gradients: Mapping[int, np.ndarray]) -> None:
        if self.steps.moves_all_rows:
            gradients = dict.fromkeys(self.rows, np.zeros(self.dim)) | dict(gradients)
        for key, gradient in gradients.items():
            if key in self.rows:
                self.steps.step(*self.rows[key], gradient, self.number)

    def _keys(self, reads: Mapping[str, Read]) -> list[int]:
        return [
            e.id for read in reads.values() for e in entries_of(read, self.combiner, self.counts)
        ]


class DenseTable(Table):
    """A table with a row for each id below the number of rows."""

    def __init__(self, values: np.ndarray, combiner: str, steps: Steps):
        super().__init__(values.shape[1], combiner, steps)
        self.rows = {
            k: (np.array(row, np.float64), steps.fresh_slots(self.dim))
            for k, row in enumerate(values)
        }


class KeyedTable(Table):
    """A keyed table. A key gets a row when it is admitted.

    A key is admitted as soon as it has occurred more than `admission_count` times. With
    `admission_probability`, each occurrence admits the key with this probability instead.

    Args:
      initial: initial row of each key.
      admission_probability: probability of each occurrence to admit a key without a row.
      draw: function of step and key that returns a random number in [0, 1). The key is admitted if
        the number is not smaller than the probability that no occurrence admits it.
      capacity: number of rows of each shard. None: unlimited.
      eviction: "lru" or "lfu". Keys with the lowest scores are evicted first, and of keys with
        equal scores the lowest keys.
      num_shards: number of shards. Shard `k % num_shards` has key `k`.
    """

    admission_count = 0
    admission_probability = 1.0
    draw: Callable[[int, int], float]
    capacity: int | None = None
    eviction = "lru"
    num_shards = 1

    def __init__(
        self, initial: Mapping[int, np.ndarray], combiner: str, steps: Steps, **policy: Any
    ):
        super().__init__(len(next(iter(initial.values()))), combiner, steps)
        self.initial = initial
        vars(self).update(policy)
        self.last_step: dict[int, int] = {}
        self.occurrences: dict[int, int] = {}
        # Last step and number of occurrences of keys that wait for admission.
        self.waiting: dict[int, tuple[int, int]] = {}
        self.num_inserted = self.num_evicted = 0

    def counts(self, key: int) -> bool:
        return key != -1

    def find(self, keys: Sequence[int]) -> None:
        for key in dict.fromkeys(keys):
            if key in self.rows:
                self.last_step[key] = self.number
                self.occurrences[key] += keys.count(key)
        new = []
        for key in dict.fromkeys(keys):
            if key not in self.rows:
                _, count = self.waiting.get(key, (0, 0))
                self.waiting[key] = self.number, count + keys.count(key)
                if self.is_admitted(key):
                    new.append(key)
                elif self.admission_probability < 1:
                    del self.waiting[key]
        self._make_room(new)
        for key in new:
            self.rows[key] = (
                np.array(self.initial[key], np.float64),
                self.steps.fresh_slots(self.dim),
            )
            self.last_step[key] = self.number
            _, self.occurrences[key] = self.waiting.pop(key)
            self.num_inserted += 1

    def is_admitted(self, key: int) -> bool:
        _, count = self.waiting[key]
        if self.admission_probability < 1:
            return self.draw(self.number, key) >= (1 - self.admission_probability) ** count
        return count > self.admission_count

    def score(self, key: int) -> float:
        """Score of a key. Keys with low scores are evicted first."""
        return {"lru": self.last_step, "lfu": self.occurrences}[self.eviction][key]

    def _make_room(self, new: Sequence[int]) -> None:
        if self.capacity is None:
            return
        for shard in range(self.num_shards):
            keys_of_shard = [key for key in self.rows if key % self.num_shards == shard]
            wanted = [key for key in new if key % self.num_shards == shard]
            num_gone = max(len(keys_of_shard) + len(wanted) - self.capacity, 0)
            unused = [key for key in keys_of_shard if self.last_step[key] < self.number]
            worst = sorted(unused, key=lambda key: (self.score(key), key))
            assert num_gone <= len(worst), "the batch has more keys than the shard has rows"
            for key in worst[:num_gone]:
                del self.rows[key], self.last_step[key], self.occurrences[key]
                self.num_evicted += 1


class TrainTable(Table):
    """A product of two cores. Each step updates all slices of the cores."""

    def __init__(
        self,
        cores: Sequence[np.ndarray],
        rows: int,
        q_shapes: tuple[int, int],
        combiner: str,
        steps: Steps,
    ):
        super().__init__(q_shapes[0] * q_shapes[1], combiner, steps)
        self.cores = [np.array(core, np.float64) for core in cores]
        self.q_shapes, self.num_rows = q_shapes, rows
        self.slots = [[steps.fresh_slots(core.shape[1]) for _ in core] for core in self.cores]
        self._expand()

    def _slices(self) -> tuple[np.ndarray, np.ndarray]:
        first, second = self.cores
        return first.reshape(len(first), self.q_shapes[0], -1), second.reshape(
            len(second), -1, self.q_shapes[1]
        )

    def _expand(self) -> None:
        whole = np.einsum("aqr,brs->abqs", *self._slices()).reshape(-1, self.dim)[: self.num_rows]
        self.rows = {k: (row, []) for k, row in enumerate(whole)}

    def step(self, gradients: Mapping[int, np.ndarray]) -> None:
        first, second = self._slices()
        whole = np.zeros((len(first) * len(second), self.dim))
        for key, gradient in gradients.items():
            whole[key] = gradient
        whole = whole.reshape(len(first), len(second), *self.q_shapes)
        d_cores = (
            np.einsum("abqs,brs->aqr", whole, second),
            np.einsum("abqs,aqr->brs", whole, first),
        )
        for core, slots, d_core in zip(self.cores, self.slots, d_cores, strict=True):
            for i in range(len(core)):
                self.steps.step(core[i], slots[i], d_core[i].reshape(-1), self.number)
        self._expand()
