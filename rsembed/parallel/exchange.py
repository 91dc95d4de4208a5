"""Requests to the devices that own rows, in rounds of `all_to_all` that are exact at any capacity.

```
ids ──distinct──▶ entries, grouped by owner ──ask──▶ owners answer, and may change their state
                     ▲                                        │
occurrences ◀────────┴──────────── entry_of ◀──── one reply per distinct entry
```

Blocks have a fixed capacity. Entries that do not fit are sent in a later round, so nothing is
dropped, and all devices agree on the number of rounds. Rounds are *row-complete*: all requests
for a row, from all devices, arrive in the same round. An owner therefore sees the whole gradient
of a row at once, and nonlinear optimizers stay exact. The device with the most entries left
always sends a full block, so every round makes progress.

All functions run inside `shard_map` over the mesh axis (or axes) `axis_name`.
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


def trade(
    parcels: Sequence[PyTree],
    axis_name: AxisName,
    entries: Sequence[Array] | None = None,
) -> list[PyTree]:
    """Exchanges blocks: block `i` of every parcel goes to device `i`, and a block from `i` returns.

    Args:
      parcels: pytrees of arrays. The parcels may have different capacities (entries per block).
        Arrays of equal row shape and dtype share one `all_to_all`, and so do all lanes (arrays with
        one 32-bit word per entry), because each collective has a fixed cost.
      axis_name: mesh axis, or several axes. The product of the axis sizes is the number of devices.
      entries: for each parcel, the indices `[devices, capacity]` of the entries to send. The
        arrays of the parcel are `[nnz, ...]`, and indices outside `[0, nnz)` are padding. None: the
        arrays are blocks `[devices, capacity, ...]` already.

    Returns: the pytrees with arrays `[devices, capacity, ...]`. Padding is `NO_ROW` in int32
      arrays, so that owners ignore it, and zero in other arrays.
    """
    leaves, tree = jax.tree.flatten(list(parcels))
    # Entries to pick from each leaf, or None if the leaf consists of blocks already.
    picks: list[Array | None] = [None] * len(leaves)
    if entries is not None:
        picks = []
        for parcel, picked in zip(parcels, entries, strict=True):
            picks += [picked] * len(jax.tree.leaves(parcel))

    groups: dict[Any, _Group] = {}
    for number, (leaf, pick) in enumerate(zip(leaves, picks, strict=True)):
        array = leaf
        if leaf.dtype == jnp.bool_:
            array = leaf.astype(jnp.uint32)
        if pick is None:
            block_shape = array.shape[:2]
            row_shape = array.shape[2:]
        else:
            block_shape = pick.shape[:2]
            row_shape = array.shape[1:]
        kind = (word_dtype(array.dtype, is_lane=not row_shape), row_shape)
        group = groups.setdefault(kind, _Group([], [], [], []))
        group.numbers.append(number)
        group.arrays.append(array)
        group.picks.append(pick)
        group.blocks.append(jax.ShapeDtypeStruct((*block_shape, *row_shape), array.dtype))

    received: dict[int, Array] = {}
    for group in groups.values():
        packed = api.pack_blocks(group.arrays, group.picks)
        packed = jax.lax.all_to_all(packed, axis_name, split_axis=0, concat_axis=0, tiled=True)
        received |= zip(group.numbers, api.unpack_blocks(packed, group.blocks), strict=True)

    results = []
    for number, leaf in enumerate(leaves):
        blocks = received[number]
        if leaf.dtype == jnp.bool_:
            blocks = blocks != 0
        results.append(blocks)
    traded: list[PyTree] = jax.tree.unflatten(tree, results)
    return traded


class _Group(NamedTuple):
    """Arrays of equal row shape and word dtype, which share one `all_to_all`.

    Attributes:
      numbers: positions of the arrays among all leaves.
      arrays: arrays to exchange.
      picks: the entries to send from each array; None for arrays that are blocks already.
      blocks: shape and dtype of the blocks of each array.
    """

    numbers: list[int]
    arrays: list[Array]
    picks: list[Array | None]
    blocks: list[jax.ShapeDtypeStruct]


Result = TypeVar("Result")


class Wanted(NamedTuple):
    """Distinct entries that this device requests, grouped by owner and sorted within each group.

    Attributes:
      lanes: integers that identify an entry of an owner, most significant first. Padding is zero.
      entry_of: index of the entry of each occurrence, `NO_ROW` for occurrences without an owner.
      first_of: index of the first occurrence of each entry. Padding is `NO_ROW`.
      offsets: device `d` owns the entries `offsets[d] : offsets[d + 1]`. Entries after the last
        offset are padding.
      counts: number of occurrences of each entry. Padding is 0.
    """

    lanes: tuple[Shaped[Array, " nnz"], ...]
    entry_of: Int[Array, " nnz"]
    first_of: Int[Array, " nnz"]
    offsets: Int[Array, " devices_plus_1"]
    counts: Int[Array, " nnz"]


def distinct(
    owners: Int[Array, " nnz"],
    lanes: Sequence[Shaped[Array, " nnz"]],
    *,
    num_devices: int,
) -> Wanted:
    """Distinct entries of a batch, grouped by the device that owns them.

    Args:
      owners: owner of each occurrence. Values outside `[0, num_devices)` are padding.
      lanes: integer arrays that together identify an entry: a row index, or the halves of a key.
      num_devices: size of the mesh axis.

    Example:
      >>> wanted = distinct(jnp.asarray([1, 0, 1, 7]), [jnp.asarray([5, 3, 5, 0])], num_devices=2)
      >>> wanted.lanes[0].tolist()[:2], wanted.offsets.tolist(), wanted.entry_of.tolist()[:3]
      ([3, 5], [0, 1, 2], [1, 0, 1])
    """
    return Wanted(*api.distinct(owners, lanes, num_owners=num_devices))


def default_capacity(num_occurrences: int, num_devices: int) -> int:
    """Default capacity of a block: 5/8 of an even share of the occurrences, plus 8.

    Less than half of skewed ids are distinct, so one round is enough for them. If all ids are
    distinct, there are two rounds, which together send the bytes of one round of twice the
    capacity. The additional 8 entries matter for small batches.
    """
    share = -(-5 * num_occurrences // (8 * num_devices))
    return min(num_occurrences, share + 8)


class Question(NamedTuple):
    """Request of a device to the owners of some entries: to read rows, or to change them.

    Attributes:
      wanted: result of `distinct`.
      payload: pytree of arrays `[nnz, ...]` to send, one value per distinct entry.
      answer: the owner's function `(state, arrived) -> (state, replies)`, called once per round.
        Leaves of `arrived` are `[devices * capacity, ...]`, grouped by sender, with padding
        `NO_ROW` in int32 arrays and zero in others. `replies` is a pytree of arrays with the same
        leading axis, or None. If nothing but padding arrives, the state must not change.
      state: state that `answer` may change, for example the owner's part of a table.
      capacity: largest number of entries that a round sends to one owner, from 1. A small
        capacity saves memory, a large one saves rounds. If `capacity` is the number of occurrences,
        one round is enough. The result does not depend on the capacity if `answer` does not depend
        on the order of entries.
      reply: pytree of `jax.ShapeDtypeStruct` for the reply to one entry. None: no replies.
    """

    wanted: Wanted
    payload: PyTree
    answer: Callable[[Any, Any], tuple[PyTree, PyTree]]
    state: PyTree
    capacity: int
    reply: PyTree = None

    @property
    def num_occurrences(self) -> int:
        """Number of occurrences in the batch, which is the length of all entry arrays."""
        return self.wanted.entry_of.shape[0]

    def no_replies(self) -> PyTree:
        """Zeros with the shapes and dtypes of the replies, one per entry."""

        # The shapes come from `reply`, because tracing `answer` for them took a third of all
        # tracing.
        def zeros(reply: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros((self.num_occurrences, *reply.shape), reply.dtype)

        return jax.tree.map(zeros, self.reply)


class Answers(NamedTuple):
    """Results of a `Question`, after all exchange rounds.

    Attributes:
      state: state of the owner after all rounds.
      replies: one reply per distinct entry. Padding is zero.
      num_rounds: number of rounds.
    """

    state: PyTree
    replies: Any
    num_rounds: Int[Array, ""]


Asking: TypeAlias = Generator[Question, Answers, Result]
"""A generator that yields `Question`s, receives their `Answers`, and returns a result."""
Asked: TypeAlias = Asking[Result] | Result
"""Either a plain result, or a generator that yields questions and returns one."""


def together(askings: Sequence[Asked[Result]], axis_name: AxisName) -> list[Result]:
    """Results of several generators. Questions that they yield at the same time share one exchange.

    Args:
      askings: generators, or plain results, which are returned as they are.
      axis_name: mesh axis, or several axes.
    """
    results: list[Any] = list(askings)
    answers: dict[int, Any] = {}
    for number, asking in enumerate(askings):
        if isinstance(asking, Generator):
            answers[number] = None
    while answers:
        questions: dict[int, Question] = {}
        for number, answer in answers.items():
            try:
                questions[number] = askings[number].send(answer)  # type: ignore[union-attr]
            except StopIteration as stop:
                results[number] = stop.value
        replies = ask(list(questions.values()), axis_name=axis_name)
        answers = dict(zip(questions, replies, strict=True))
    return results


def ask(questions: Sequence[Question], *, axis_name: AxisName) -> list[Answers]:
    """Sends the payload of every distinct entry to its owner, and returns the replies.

    Args:
      questions: any number of questions. The blocks of all questions share the collectives.
      axis_name: mesh axis, or several axes. The product of the axis sizes is the number of devices.
    """
    with_one_round = []
    with_rounds = []
    for number, question in enumerate(questions):
        if question.capacity < question.num_occurrences:
            with_rounds.append(number)
        else:
            with_one_round.append(number)
    answers: dict[int, Answers] = {}
    for numbers, takes_rounds in ((with_one_round, False), (with_rounds, True)):
        if numbers:
            asked = [questions[number] for number in numbers]
            answers |= zip(numbers, _ask(asked, takes_rounds, axis_name), strict=True)
    return [answers[number] for number in range(len(questions))]


class _Progress(NamedTuple):
    """Carry of the loop over exchange rounds. Lists have one entry per question.

    Attributes:
      num_rounds: number of rounds so far.
      cursors: number of entries that were sent to each owner.
      states: states of the owners.
      replies: replies to the entries that were sent.
      are_left: whether any device has entries left.
    """

    num_rounds: Array
    cursors: list[Array]
    states: list[PyTree]
    replies: list[PyTree]
    are_left: Array


def _ask(questions: Sequence[Question], takes_rounds: bool, axis_name: AxisName) -> list[Answers]:
    """Answers to questions. Either all fit into one round, or all may need several rounds."""

    def run_round(progress: _Progress) -> _Progress:
        queues = []
        for question, cursor in zip(questions, progress.cursors, strict=True):
            wanted = question.wanted
            capacity = max(question.capacity, 1)
            queues.append(Queue(wanted.offsets, cursor, wanted.lanes, capacity))
        fit, cuts = _cuts(queues, takes_rounds, axis_name)
        entries, cursors, are_left = api.round_places(queues, fit, cuts)
        states, news = _answer_all(questions, progress.states, entries, axis_name)
        replies = []
        for old, written, new in zip(progress.replies, entries, news, strict=True):
            replies.append(_with_rows(old, written, new))
        any_left = jnp.asarray(False)
        if takes_rounds:
            any_left = jax.lax.pmax(are_left, axis_name)
        return _Progress(progress.num_rounds + 1, list(cursors), states, replies, any_left)

    cursors = []
    for question in questions:
        num_devices = question.wanted.offsets.shape[0] - 1
        cursors.append(jnp.zeros(num_devices, jnp.int32))
    states = [question.state for question in questions]
    replies = [question.no_replies() for question in questions]
    # A `shard_map` that checks varying axes needs equal varying axes before and after the loop. All
    # arrays vary like `offsets` after the first round.
    leaves, tree = jax.tree.flatten((cursors, states, replies))
    *leaves, _ = vary_alike([*leaves, questions[0].wanted.offsets])
    cursors, states, replies = jax.tree.unflatten(tree, leaves)
    start = _Progress(jnp.zeros((), jnp.int32), cursors, states, replies, jnp.asarray(True))
    run = run_round
    if takes_rounds:
        # Even the first round is inside the loop, so that the large program of the owners is
        # compiled once.
        run = functools.partial(jax.lax.while_loop, lambda progress: progress.are_left, run_round)
    end = run(start)
    answers = []
    for state, reply in zip(end.states, end.replies, strict=True):
        answers.append(Answers(state, reply, end.num_rounds))
    return answers


def _answer_all(
    questions: Sequence[Question],
    states: Sequence[PyTree],
    entries: Sequence[Int[Array, "devices _"]],
    axis_name: AxisName,
) -> tuple[list[PyTree], list[PyTree]]:
    """One round: sends some entries, lets the owners answer, and returns new states and replies."""
    payloads = [question.payload for question in questions]
    arrived = trade(payloads, axis_name, entries)
    new_states = []
    replies = []
    for question, state, sent, blocks in zip(questions, states, entries, arrived, strict=True):
        new_state, reply = question.answer(state, jax.tree.map(_to_list, blocks))
        new_states.append(new_state)
        replies.append(jax.tree.map(functools.partial(_to_blocks, shape=sent.shape), reply))
    return new_states, trade(replies, axis_name)


def _to_list(blocks: Array) -> Array:
    return blocks.reshape(-1, *blocks.shape[2:])


def _to_blocks(array: Array, shape: tuple[int, ...]) -> Array:
    return array.reshape(*shape, *array.shape[1:])


def _with_rows(replies: PyTree, entries: Int[Array, "devices capacity"], news: PyTree) -> PyTree:
    """`replies` with the rows `entries` replaced by `news`."""
    arrays, tree = jax.tree.flatten(replies)
    if not arrays:
        return replies
    values = [_to_list(blocks) for blocks in jax.tree.leaves(news)]
    return jax.tree.unflatten(tree, api.scatter_rows(arrays, entries.reshape(-1), values))


def _cuts(
    queues: Sequence[Queue],
    takes_rounds: bool,
    axis_name: AxisName,
) -> tuple[Int[Array, "queues devices"], UInt32[Array, "levels queues devices"]]:
    """Per owner, whether all entries fit in this round, and the first entry that does not fit.

    Returns: 1 if the entries of all devices fit, else 0; and if not, the words of the smallest
      entry that does not fit on some device. Only smaller entries are sent.
    """
    if not takes_rounds:
        size = (len(queues), queues[0].cursor.shape[0])
        return jnp.ones(size, jnp.int32), jnp.zeros((1, *size), jnp.uint32)
    fit, first_left = api.block_ends(queues)
    lowest = jax.lax.pmin(fit, axis_name)
    # A device where all entries fit takes no part in the minimum, unless all fit on every device.
    takes_part = fit == lowest
    cuts: list[Array] = []
    for words in first_left:
        words_or_max = jnp.where(takes_part, words, jnp.uint32(2**32 - 1))
        cuts.append(jax.lax.pmin(words_or_max, axis_name))
        takes_part &= words == cuts[-1]
    return lowest, jnp.stack(cuts)
