"""Questions to the devices that own the rows, in rounds of `all_to_all` that are exact at any capacity.

```
ids ──distinct──▶ entries, grouped by owner ──ask──▶ owners answer, and may change what they own
                     ▲                                        │
occurrences ◀────────┴──────────── entry_of ◀──── one reply per distinct entry
```

Blocks have a fixed size, but nothing is ever dropped: what does not fit travels in a later round, and all devices agree
on how many there are. Rounds are *row-complete*: everything that concerns one row arrives in the same round, so an
owner sees the whole gradient of a row at once, and optimizers that are not linear stay exact. The device that has most
left to send sends a full block, so every round moves forward.

All functions run inside `shard_map` over the mesh axis (or axes) named by `axis_name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped, UInt32

from rsembed.kernels import api
from rsembed.kernels.contract import NO_ROW
from rsembed.parallel.exchange import AxisName, picked, trade

Result = TypeVar("Result")


class Wanted(NamedTuple):
    """The distinct entries that this device has questions about, grouped by owner and ascending in each group.

    Attributes:
      lanes: what tells entries of one owner apart, most significant first; zeros behind the last entry.
      entry_of: the entry of every occurrence, `NO_ROW` for occurrences without an owner.
      first_of: the first occurrence of every entry, `NO_ROW` behind the last one.
      offsets: entries `offsets[d] : offsets[d + 1]` belong to device `d`.
    """

    lanes: tuple[Shaped[Array, " nnz"], ...]
    entry_of: Int[Array, " nnz"]
    first_of: Int[Array, " nnz"]
    offsets: Int[Array, " devices_plus_1"]


def distinct(owners: Int[Array, " nnz"], lanes: Sequence[Shaped[Array, " nnz"]], *, num_devices: int) -> Wanted:
    """Equal occurrences made one.

    Args:
      owners: owner of every occurrence; outside `[0, num_devices)` it asks nobody.
      lanes: integer arrays that together name an entry: a row, or the halves of a key.
      num_devices: size of the mesh axis.

    Example:
      >>> wanted = distinct(jnp.asarray([1, 0, 1, 7]), [jnp.asarray([5, 3, 5, 0])], num_devices=2)
      >>> wanted.lanes[0].tolist()[:2], wanted.offsets.tolist(), wanted.entry_of.tolist()[:3]
      ([3, 5], [0, 1, 2], [1, 0, 1])
    """
    entries, entry_of, first_of, offsets = api.distinct(owners, lanes, num_owners=num_devices)
    return Wanted(entries, entry_of, first_of, offsets)


def default_capacity(num_occurrences: int, num_devices: int) -> int:
    """Places per block that usually need one round: a quarter more than an even share of all-distinct ids."""
    return min(num_occurrences, -(-5 * num_occurrences // (4 * num_devices)) + 8)


class Question(NamedTuple):
    """What a device wants to know of the owners of some entries, or to tell them.

    Attributes:
      wanted: from `distinct`.
      payload: pytree of arrays `[nnz, ...]`, one value per distinct entry. Empty places of a block hold `NO_ROW` in
        int32 arrays and zeros in others.
      answer: `(state, arrived) -> (state, replies)`, the owner's part, called once a round. Leaves of `arrived` are
        `[devices * capacity, ...]`, grouped by asking device; `replies` is a pytree of arrays with the same leading
        axis, or None. A round in which nothing arrives must change nothing.
      state: what the owner may change, for example its table.
      capacity: places per block. Any number from 1 up gives the same result; few places save memory, many save rounds,
        and with as many as there are occurrences there is one.
    """

    wanted: Wanted
    payload: Any
    answer: Callable[[Any, Any], tuple[Any, Any]]
    state: Any
    capacity: int

    @property
    def num_occurrences(self) -> int:
        """Of entries, counted in the batch."""
        return self.wanted.entry_of.shape[0]


class Answers(NamedTuple):
    """What comes of a question.

    Attributes:
      state: as the owner's part left it.
      replies: one per distinct entry, zeros behind the last one.
      num_rounds: in which questions travelled.
    """

    state: Any
    replies: Any
    num_rounds: Int[Array, ""]


Asking: TypeAlias = Generator[Question, Answers, Result]
"""A function that yields its questions, so that those of many can be asked together."""


def together(askings: Sequence[Asking[Result]], axis_name: AxisName) -> list[Result]:
    """Results of functions that have questions; what several ask at the same time travels in one exchange."""
    results: dict[int, Result] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(askings)))
    while answers:
        questions: dict[int, Question] = {}
        for number, answer in answers.items():
            try:
                questions[number] = askings[number].send(answer)
            except StopIteration as stop:
                results[number] = stop.value
        answers = dict(zip(questions, ask(list(questions.values()), axis_name=axis_name), strict=True))
    return [results[number] for number in range(len(askings))]


def ask(questions: Sequence[Question], *, axis_name: AxisName) -> list[Answers]:
    """Sends the payload of every distinct entry to its owner and brings the replies back.

    Args:
      questions: any number, whose blocks travel beside each other.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.

    Raises: ValueError: a capacity below 1.
    """
    answers: dict[int, Answers] = {}
    for takes_rounds in (False, True):
        group = {k: q for k, q in enumerate(questions) if (q.capacity < q.num_occurrences) == takes_rounds}
        if group:
            answers |= zip(group, _ask(list(group.values()), takes_rounds, axis_name), strict=True)
    return [answers[number] for number in range(len(questions))]


class _Progress(NamedTuple):
    """Of one question: how many entries of each owner have travelled, and what has come of it."""

    cursor: Int[Array, " devices"]
    state: Any
    replies: Any


def _ask(questions: Sequence[Question], takes_rounds: bool, axis_name: AxisName) -> list[Answers]:
    def trade_all(states: Sequence[Any], places: Sequence[Array]) -> tuple[list[Any], list[Any]]:
        arrived = trade([picked(q.payload, own) for q, own in zip(questions, places, strict=True)], axis_name)
        stepped, replies = [], []
        for question, state, own, blocks in zip(questions, states, places, arrived, strict=True):
            state, reply = question.answer(state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks))
            stepped.append(state)
            replies.append(jax.tree.map(lambda x, shape=own.shape: x.reshape(*shape, *x.shape[1:]), reply))
        return stepped, trade(replies, axis_name)

    def one_round(carry: tuple[Array, list[_Progress], Array]) -> tuple[Array, list[_Progress], Array]:
        num_rounds, progress, _ = carry
        places = [_next_places(question, own.cursor) for question, own in zip(questions, progress, strict=True)]
        if takes_rounds:
            places = _before_cuts(questions, places, [own.cursor for own in progress], axis_name)
        states, replies = trade_all([own.state for own in progress], places)
        after, is_left = [], []
        for question, own, picks, state, reply in zip(questions, progress, places, states, replies, strict=True):
            cursor = own.cursor + jnp.sum(picks != NO_ROW, axis=1, dtype=jnp.int32)
            after.append(_Progress(cursor, state, _written(own.replies, picks, reply)))
            is_left.append(jnp.any(cursor < jnp.diff(question.wanted.offsets)))
        any_left = jax.lax.pmax(jnp.any(jnp.stack(is_left)), axis_name) if takes_rounds else jnp.asarray(False)
        return num_rounds + 1, after, any_left

    for question in questions:
        if question.capacity < 1 and question.num_occurrences:
            raise ValueError(f"capacity must be at least 1 place per block, got {question.capacity}.")
    cursors = [jnp.zeros(question.wanted.offsets.shape[0] - 1, jnp.int32) for question in questions]
    states = [question.state for question in questions]
    shapes = jax.eval_shape(lambda: trade_all(states, list(map(_next_places, questions, cursors)))[1])
    progress = []
    for question, cursor, shape in zip(questions, cursors, shapes, strict=True):
        zeros = functools.partial(_zeros_of_entries, question.num_occurrences)
        progress.append(_Progress(cursor, question.state, jax.tree.map(zeros, shape)))
    # A loop from the first round on: what an owner does is a large program, which is compiled once.
    in_rounds = functools.partial(jax.lax.while_loop, lambda carry: carry[2], one_round)
    run = in_rounds if takes_rounds else one_round
    num_rounds, progress, _ = run((jnp.zeros((), jnp.int32), progress, jnp.asarray(True)))
    return [Answers(own.state, own.replies, num_rounds) for own in progress]


def _zeros_of_entries(num_entries: int, reply: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros((num_entries, *reply.shape[2:]), reply.dtype)


def _written(replies: Any, places: Int[Array, "devices capacity"], news: Any) -> Any:
    olds, tree = jax.tree.flatten(replies)
    values = [x.reshape(-1, *x.shape[2:]) for x in jax.tree.leaves(news)]
    return jax.tree.unflatten(tree, api.scatter_rows(olds, places.reshape(-1), values) if olds else ())


def _next_places(question: Question, cursor: Int[Array, " devices"]) -> Int[Array, "devices capacity"]:
    """The next entries of every owner, as many as there are places, and `NO_ROW` behind the last."""
    ahead = cursor[:, None] + jnp.arange(max(question.capacity, 1), dtype=jnp.int32)[None, :]
    offsets = question.wanted.offsets
    return jnp.where(ahead < jnp.diff(offsets)[:, None], offsets[:-1, None] + ahead, NO_ROW)


def _before_cuts(
    questions: Sequence[Question],
    places: Sequence[Int[Array, "devices capacity"]],
    cursors: Sequence[Int[Array, " devices"]],
    axis_name: AxisName,
) -> list[Int[Array, "devices capacity"]]:
    """The places that every device can send in this round: those before all first entries that found no place."""
    lanes = [_ordered_lanes(question, cursor) for question, cursor in zip(questions, cursors, strict=True)]
    has_more = [
        cursor + question.capacity < jnp.diff(question.wanted.offsets)
        for question, cursor in zip(questions, cursors, strict=True)
    ]
    # A device without a cut takes no part in the minimum: the leading lane is 1 there and 0 elsewhere.
    own = jnp.where(jnp.stack(has_more), 0, 1)
    lowest = jax.lax.pmin(own, axis_name)
    takes_part, cuts = own == lowest, []
    for level in range(max(map(len, lanes))):
        behind = jnp.stack([own[min(level, len(own) - 1)][:, -1] for own in lanes])
        cuts.append(jax.lax.pmin(jnp.where(takes_part, behind, jnp.uint32(2**32 - 1)), axis_name))
        takes_part &= behind == cuts[-1]
    found = []
    for number, (own_places, own_lanes) in enumerate(zip(places, lanes, strict=True)):
        is_below, is_equal = jnp.zeros(own_places.shape, bool), jnp.ones(own_places.shape, bool)
        for lane, cut in zip(own_lanes, cuts, strict=False):
            value, bound = lane[:, :-1], cut[number][:, None]
            is_below |= is_equal & (value < bound)
            is_equal &= value == bound
        found.append(jnp.where(is_below | (lowest[number][:, None] == 1), own_places, NO_ROW))
    return found


def _ordered_lanes(
    question: Question, cursor: Int[Array, " devices"]
) -> list[UInt32[Array, "devices capacity_plus_1"]]:
    """What tells the next entries of every owner apart, and the one behind them, as words of the same order."""
    ahead = cursor[:, None] + jnp.arange(question.capacity + 1, dtype=jnp.int32)[None, :]
    entries = question.wanted.offsets[:-1, None] + ahead
    lanes = api.gather_rows(question.wanted.lanes, entries.reshape(-1))
    words = [lane if lane.dtype == jnp.uint32 else lane.astype(jnp.uint32) ^ jnp.uint32(2**31) for lane in lanes]
    return [lane.reshape(entries.shape) for lane in words]
