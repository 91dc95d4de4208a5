"""Requests to the devices that own rows, sent in rounds of `all_to_all`; exact at any capacity.

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
from jaxtyping import Array, Int, PyTree, Shaped, UInt32

from rsembed.kernels import api
from rsembed.kernels.devices import vary_alike
from rsembed.kernels.ids import Queue, word_dtype

AxisName = str | tuple[str, ...]


def trade(parcels: Sequence[PyTree], axis_name: AxisName, entries: Sequence[Array] | None = None) -> list[PyTree]:
    """Exchanges blocks: block `i` of every parcel goes to device `i`, and is replaced by the one from there.

    Args:
      parcels: pytrees of arrays, each with a capacity of its own. Arrays of one kind travel together, and all lanes of
        32 bits are of one kind: programs and networks pay for every exchange by itself.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.
      entries: for each parcel which of its entries, `[nnz, ...]`, are in the places `[devices, capacity]` of its
        blocks; a place outside `[0, nnz)` is empty. None where parcels are blocks `[devices, capacity, ...]` already.

    Returns: the same pytrees of arrays `[devices, capacity, ...]`. Places that the sender left empty hold `NO_ROW` in
      int32 arrays, so that owners ignore them, and zeros in others.
    """
    leaves, tree = jax.tree.flatten(list(parcels))
    arrays = [leaf.astype(jnp.uint32) if leaf.dtype == jnp.bool_ else leaf for leaf in leaves]
    rows: list[PyTree] = [None] * len(leaves)
    if entries is not None:
        rows = [own for parcel, own in zip(parcels, entries, strict=True) for _ in jax.tree.leaves(parcel)]
    found: dict[int, Array] = {}
    kinds: dict[Any, list[int]] = {}
    for number, (array, own) in enumerate(zip(arrays, rows, strict=True)):
        row = array.shape[1:] if own is not None else array.shape[2:]
        kinds.setdefault((word_dtype(array.dtype, is_lane=not row), row), []).append(number)
    for (_, row), numbers in kinds.items():
        alike, picked = ([own[number] for number in numbers] for own in (arrays, rows))
        arrived = jax.lax.all_to_all(api.pack_blocks(alike, picked), axis_name, split_axis=0, concat_axis=0, tiled=True)
        shapes = [
            jax.ShapeDtypeStruct((*(array if own is None else own).shape[:2], *row), array.dtype)
            for array, own in zip(alike, picked, strict=True)
        ]
        found |= zip(numbers, api.unpack_blocks(arrived, shapes), strict=True)
    blocks = [found[n] != 0 if leaf.dtype == jnp.bool_ else found[n] for n, leaf in enumerate(leaves)]
    parts: list[PyTree] = jax.tree.unflatten(tree, blocks)
    return parts


Result = TypeVar("Result")


class Wanted(NamedTuple):
    """The distinct entries that this device has questions about, grouped by owner and ascending in each group.

    Attributes:
      lanes: integers that distinguish entries of one owner, most significant first; zeros behind the last entry.
      entry_of: the entry of every occurrence, `NO_ROW` for occurrences without an owner.
      first_of: the first occurrence of every entry, `NO_ROW` behind the last one.
      offsets: entries `offsets[d] : offsets[d + 1]` belong to device `d`.
      counts: how often every entry occurs, 0 behind the last one.
    """

    lanes: tuple[Shaped[Array, " nnz"], ...]
    entry_of: Int[Array, " nnz"]
    first_of: Int[Array, " nnz"]
    offsets: Int[Array, " devices_plus_1"]
    counts: Int[Array, " nnz"]


def distinct(owners: Int[Array, " nnz"], lanes: Sequence[Shaped[Array, " nnz"]], *, num_devices: int) -> Wanted:
    """Distinct entries of a batch, grouped by the device that owns them.

    Args:
      owners: owner of every occurrence; outside `[0, num_devices)` it asks nobody.
      lanes: integer arrays that together name an entry: a row, or the halves of a key.
      num_devices: size of the mesh axis.

    Example:
      >>> wanted = distinct(jnp.asarray([1, 0, 1, 7]), [jnp.asarray([5, 3, 5, 0])], num_devices=2)
      >>> wanted.lanes[0].tolist()[:2], wanted.offsets.tolist(), wanted.entry_of.tolist()[:3]
      ([3, 5], [0, 1, 2], [1, 0, 1])
    """
    return Wanted(*api.distinct(owners, lanes, num_owners=num_devices))


def default_capacity(num_occurrences: int, num_devices: int) -> int:
    """Places per block: five eighths of an even share of the occurrences, and a few for small batches.

    Skewed ids are less than half distinct, so that they travel in one round; all-distinct ones take two, which send as
    many bytes as one of twice the size would.
    """
    return min(num_occurrences, -(-5 * num_occurrences // (8 * num_devices)) + 8)


class Question(NamedTuple):
    """A question of a device to the owners of some entries, or news for them.

    Attributes:
      wanted: result of `distinct`.
      payload: pytree of arrays `[nnz, ...]`, one value per distinct entry. Empty places of a block hold `NO_ROW` in
        int32 arrays and zeros in others.
      answer: `(state, arrived) -> (state, replies)`, the owner's part, called once a round. Leaves of `arrived` are
        `[devices * capacity, ...]`, grouped by asking device; `replies` is a pytree of arrays with the same leading
        axis, or None. A round in which nothing arrives must change nothing.
      state: what the owner may change, for example its table.
      capacity: places per block. Few save memory, many save rounds, and with as many as there are occurrences there is
        one. Any number from 1 up gives the same result, if the order of entries does not matter to `answer`.
      reply: form of the reply to one entry, a pytree of `jax.ShapeDtypeStruct`; None if `answer` replies nothing.
    """

    wanted: Wanted
    payload: PyTree
    answer: Callable[[Any, Any], tuple[PyTree, PyTree]]
    state: PyTree
    capacity: int
    reply: PyTree = None

    @property
    def num_occurrences(self) -> int:
        """Number of entries, as many as there are occurrences in the batch."""
        return self.wanted.entry_of.shape[0]

    def no_replies(self) -> PyTree:
        """Zeros in the form of the replies, one per entry."""
        # To find the shapes by tracing `answer`, as large as a storage's step, took a third of all tracing.
        return jax.tree.map(lambda own: jnp.zeros((self.num_occurrences, *own.shape), own.dtype), self.reply)


class Answers(NamedTuple):
    """Answers to a question.

    Attributes:
      state: as the owner's part left it.
      replies: one per distinct entry, zeros behind the last one.
      num_rounds: number of rounds in which questions travelled.
    """

    state: PyTree
    replies: Any
    num_rounds: Int[Array, ""]


Asking: TypeAlias = Generator[Question, Answers, Result]
"""A function that yields its questions, so that those of many can be asked together."""
Asked: TypeAlias = Asking[Result] | Result
"""Result of a function that may have questions, or such a function."""


def together(askings: Sequence[Asked[Result]], axis_name: AxisName) -> list[Result]:
    """Results of functions that may yield questions; those yielded at the same time share one exchange."""
    results: list[Any] = list(askings)
    answers: dict[int, Any] = {number: None for number, own in enumerate(askings) if isinstance(own, Generator)}
    while answers:
        questions: dict[int, Question] = {}
        for number, answer in answers.items():
            try:
                questions[number] = askings[number].send(answer)  # type: ignore[union-attr]
            except StopIteration as stop:
                results[number] = stop.value
        answers = dict(zip(questions, ask(list(questions.values()), axis_name=axis_name), strict=True))
    return results


def ask(questions: Sequence[Question], *, axis_name: AxisName) -> list[Answers]:
    """Sends the payload of every distinct entry to its owner and brings the replies back.

    Args:
      questions: any number, whose blocks travel beside each other.
      axis_name: the mesh axis, or axes whose sizes multiply to the number of devices.
    """
    answers: dict[int, Answers] = {}
    for takes_rounds in (False, True):
        group = {k: q for k, q in enumerate(questions) if (q.capacity < q.num_occurrences) == takes_rounds}
        if group:
            answers |= zip(group, _ask(list(group.values()), takes_rounds, axis_name), strict=True)
    return [answers[number] for number in range(len(questions))]


_Progress = tuple[Array, list[Array], list[PyTree], list[PyTree], Array]
"""Number of rounds; by question, entries of each owner that have travelled, state and replies; whether any are left."""


def _ask(questions: Sequence[Question], takes_rounds: bool, axis_name: AxisName) -> list[Answers]:
    def trade_all(states: Sequence[PyTree], places: Sequence[Array]) -> tuple[list[PyTree], list[PyTree]]:
        arrived = trade([question.payload for question in questions], axis_name, places)
        stepped, replies = [], []
        for question, state, own, blocks in zip(questions, states, places, arrived, strict=True):
            state, reply = question.answer(state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), blocks))
            stepped.append(state)
            replies.append(jax.tree.map(lambda x, shape=own.shape: x.reshape(*shape, *x.shape[1:]), reply))
        return stepped, trade(replies, axis_name)

    def one_round(carry: _Progress) -> _Progress:
        num_rounds, cursors, states, replies, _ = carry
        queues = [
            Queue(question.wanted.offsets, cursor, question.wanted.lanes, max(question.capacity, 1))
            for question, cursor in zip(questions, cursors, strict=True)
        ]
        places, after, are_left = api.round_places(queues, *_cuts(queues, takes_rounds, axis_name))
        states, news = trade_all(states, places)
        replies = [_written(*own) for own in zip(replies, places, news, strict=True)]
        any_left = jax.lax.pmax(are_left, axis_name) if takes_rounds else jnp.asarray(False)
        return num_rounds + 1, list(after), states, replies, any_left

    cursors = [jnp.zeros(question.wanted.offsets.shape[0] - 1, jnp.int32) for question in questions]
    own = cursors, [question.state for question in questions], [question.no_replies() for question in questions]
    # Inside a `shard_map` that checks it, what a loop carries varies from its beginning as it does at its end.
    leaves, tree = jax.tree.flatten(own)
    own = jax.tree.unflatten(tree, vary_alike([*leaves, questions[0].wanted.offsets])[:-1])
    # A loop from the first round on: what an owner does is a large program, which is compiled once.
    in_rounds = functools.partial(jax.lax.while_loop, lambda carry: carry[-1], one_round)
    run = in_rounds if takes_rounds else one_round
    num_rounds, _, states, replies, _ = run((jnp.zeros((), jnp.int32), *own, jnp.asarray(True)))
    return [Answers(*own, num_rounds) for own in zip(states, replies, strict=True)]


def _written(replies: Any, places: Int[Array, "devices capacity"], news: Any) -> PyTree:
    olds, tree = jax.tree.flatten(replies)
    values = [x.reshape(-1, *x.shape[2:]) for x in jax.tree.leaves(news)]
    return jax.tree.unflatten(tree, api.scatter_rows(olds, places.reshape(-1), values) if olds else ())


def _cuts(
    queues: Sequence[Queue], takes_rounds: bool, axis_name: AxisName
) -> tuple[Int[Array, "queues devices"], UInt32[Array, "levels queues devices"]]:
    """Where no device has more than places, and elsewhere the first entries of all that found none."""
    if not takes_rounds:
        size = len(queues), queues[0].cursor.shape[0]
        return jnp.ones(size, jnp.int32), jnp.zeros((1, *size), jnp.uint32)
    fit, behind = api.block_ends(queues)
    # A device without a cut takes no part in the minimum: it has 1 where others have 0.
    lowest = jax.lax.pmin(fit, axis_name)
    takes_part, cuts = fit == lowest, []
    for words in behind:
        cuts.append(jax.lax.pmin(jnp.where(takes_part, words, jnp.uint32(2**32 - 1)), axis_name))
        takes_part &= words == cuts[-1]
    return lowest, jnp.stack(cuts)
