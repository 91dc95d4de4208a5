"""Sends requests to the devices that own rows, in rounds of `all_to_all` with fixed block sizes.

```
ids ──distinct──▶ entries, grouped by owner ──ask──▶ owners answer, and may change their state
                     ▲                                        │
occurrences ◀────────┴──────────── entry_of ◀──── one reply per distinct entry
```

In each round, a device sends one block of entries to every owner. All blocks have space for the
same number of entries, the capacity. Entries that do not fit into a block are sent in a later
round, so no entry is dropped, and all devices run the same number of rounds. Rounds are
*row-complete*: all requests for a row, from all devices, arrive in the same round. In a
row-complete round, an owner sees the whole gradient of a row at once, so nonlinear optimizers are
exact. In every round, at least one device sends a full block or all its remaining entries, so the
number of rounds is finite.

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
    """Sends block `i` of every array to device `i`, and receives one block from each device.

    Args:
      parcels: pytrees of arrays to send. The arrays contain numbers, not bools. The capacity
        (number of entries per block) may differ between the pytrees. Arrays with the same row shape
        and dtype share one `all_to_all`, and so do all lanes (arrays with one 32-bit word per
        entry), because each collective has a fixed cost.
      axis_name: name or names of the mesh axes to exchange over. The product of the axis sizes is
        the number of devices.
      entries: for each pytree in `parcels`, an array `[devices, capacity]` with the indices of the
        entries to send. With `entries`, the arrays in `parcels` have shape `[nnz, ...]`, and
        indices outside `[0, nnz)` are padding. None, the default: the arrays in `parcels` already
        have shape `[devices, capacity, ...]`.

    Returns: the received arrays, with shape `[devices, capacity, ...]`, in pytrees with the same
      structure as `parcels`. Padding is `NO_ROW` in int32 arrays, so that owners ignore padding,
      and zero in other arrays.
    """
    arrays, tree = jax.tree.flatten(list(parcels))
    # For each array, the indices of the entries to send. None: the array already has shape
    # `[devices, capacity, ...]`.
    picks: list[Array | None] = [None] * len(arrays)
    if entries is not None:
        picks = []
        for parcel, picked in zip(parcels, entries, strict=True):
            picks += [picked] * len(jax.tree.leaves(parcel))

    blocks = []
    groups: dict[Any, list[int]] = {}
    for number, (array, pick) in enumerate(zip(arrays, picks, strict=True)):
        if pick is None:
            block_shape = array.shape[:2]
            row_shape = array.shape[2:]
        else:
            block_shape = pick.shape[:2]
            row_shape = array.shape[1:]
        blocks.append(jax.ShapeDtypeStruct((*block_shape, *row_shape), array.dtype))
        kind = (word_dtype(array.dtype, is_lane=not row_shape), row_shape)
        groups.setdefault(kind, []).append(number)

    received: dict[int, Array] = {}
    for numbers in groups.values():
        packed = api.pack_blocks([arrays[k] for k in numbers], [picks[k] for k in numbers])
        packed = jax.lax.all_to_all(packed, axis_name, split_axis=0, concat_axis=0, tiled=True)
        unpacked = api.unpack_blocks(packed, [blocks[k] for k in numbers])
        received |= zip(numbers, unpacked, strict=True)
    traded: list[PyTree] = jax.tree.unflatten(tree, [received[k] for k in range(len(arrays))])
    return traded


Result = TypeVar("Result")


class Wanted(NamedTuple):
    """Distinct rows or keys ("entries") that this device requests, sorted by owner and `lanes`.

    Attributes:
      lanes: integer arrays that together identify each entry, most significant first. Padding is
        zero.
      entry_of: for each id in the batch, the index of its entry. `NO_ROW` for ids without an owner.
      first_of: for each entry, the index of its first occurrence in the batch. Padding is `NO_ROW`.
      offsets: device `d` owns the entries `offsets[d] : offsets[d + 1]`. Entries from `offsets[-1]`
        on are padding.
      counts: number of occurrences of each entry in the batch. Padding is 0.
    """

    lanes: tuple[Shaped[Array, " nnz"], ...]
    entry_of: Int[Array, " nnz"]
    first_of: Int[Array, " nnz"]
    offsets: Int[Array, " devices_plus_1"]
    counts: Int[Array, " nnz"]

    @property
    def num_ids(self) -> int:
        """Number of ids in the batch. All arrays of entries are padded to this length."""
        return self.entry_of.shape[0]


def distinct(
    owners: Int[Array, " nnz"],
    lanes: Sequence[Shaped[Array, " nnz"]],
    *,
    num_devices: int,
) -> Wanted:
    """Distinct entries of a batch, grouped by the device that owns them.

    Args:
      owners: index of the device that owns each id. Values outside `[0, num_devices)` are padding.
      lanes: integer arrays that together identify an entry: a row number, or the words of a key.
      num_devices: number of devices that own entries.

    Example:
      >>> wanted = distinct(jnp.asarray([1, 0, 1, 7]), [jnp.asarray([5, 3, 5, 0])], num_devices=2)
      >>> wanted.lanes[0].tolist()[:2], wanted.offsets.tolist(), wanted.entry_of.tolist()[:3]
      ([3, 5], [0, 1, 2], [1, 0, 1])
    """
    return Wanted(*api.distinct(owners, lanes, num_owners=num_devices))


def default_capacity(num_occurrences: int, num_devices: int) -> int:
    """Default number of entries per block: `5/8 * num_occurrences / num_devices + 8`.

    If the distribution of ids is skewed, usually less than half of the ids in a batch are distinct,
    and the default capacity is enough for one exchange round. If all ids are distinct and spread
    evenly over the devices, the default capacity leads to two rounds, which send as many bytes as
    one round with twice the capacity. In large batches, the constant 8 has almost no effect. The
    default capacity is at most `num_occurrences`.
    """
    share = -(-5 * num_occurrences // (8 * num_devices))
    return min(num_occurrences, share + 8)


class Question(NamedTuple):
    """Request to read or change rows, sent to the devices that own the rows ("owners").

    Attributes:
      wanted: the requested entries, which the function `distinct` returned.
      payload: pytree of arrays `[nnz, ...]` to send, one value per distinct entry.
      answer: function `(state, arrived) -> (state, replies)` that an owner calls once per round.
        `arrived` has the structure of `payload`. The arrays `[devices * capacity, ...]` in
        `arrived` contain the received entries, grouped by sender. Padding is `NO_ROW` in int32
        arrays and zero in other arrays. `replies` is a pytree of arrays with one reply per arrived
        entry, or None. If all arrived entries are padding, `answer` must return `state` unchanged.
      state: state that `answer` may change, for example the owner's part of a table.
      capacity: maximum number of entries that a device sends to one owner in a round, at least 1. A
        small capacity saves memory, and a large capacity saves rounds. If the capacity is the
        number of ids in the batch, one round is enough. The capacity does not change the results if
        `answer` gives the same result for any order of the entries.
      reply: pytree of `jax.ShapeDtypeStruct` for the reply to one entry. None, the default:
        `answer` returns None as `replies`.
    """

    wanted: Wanted
    payload: PyTree
    answer: Callable[[Any, Any], tuple[PyTree, PyTree]]
    state: PyTree
    capacity: int
    reply: PyTree = None

    def no_replies(self) -> PyTree:
        """Replies that are all zero, one for each entry."""

        # The field `reply` saves a call of `jax.eval_shape(answer)`, which would take a third of
        # the total tracing time.
        def zeros(reply: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros((self.wanted.num_ids, *reply.shape), reply.dtype)

        return jax.tree.map(zeros, self.reply)


class Answers(NamedTuple):
    """Results of a `Question`, after all exchange rounds.

    Attributes:
      state: `Question.state` on this device after all rounds.
      replies: replies to this device's requests, one per distinct entry. Padding is zero.
      num_rounds: number of exchange rounds.
    """

    state: PyTree
    replies: Any
    num_rounds: Int[Array, ""]


Asking: TypeAlias = Generator[Question, Answers, Result]
"""A generator that yields `Question`s, receives their `Answers`, and returns a result."""
Asked: TypeAlias = Asking[Result] | Result
"""Either a generator that yields `Question`s and returns a result, or the result itself."""


def together(askings: Sequence[Asked[Result]], axis_name: AxisName) -> list[Result]:
    """Runs several generators that yield `Question`s, and returns the result of each generator.

    One call of `ask` answers the first `Question` of every generator, the next call answers the
    second `Question` of every generator, and so on.

    Args:
      askings: list of generators. An item that is not a generator is already a result, and is
        returned unchanged.
      axis_name: name or names of the mesh axes to exchange over.
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
    """Sends each `Question` to the owners of its rows, and returns its `Answers`.

    Args:
      questions: list of requests. One `all_to_all` can send the blocks of several requests.
      axis_name: name or names of the mesh axes to exchange over. The product of the axis sizes is
        the number of devices.
    """
    with_one_round = []
    with_rounds = []
    for number, question in enumerate(questions):
        if question.capacity < question.wanted.num_ids:
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
    """Carry of the loop over exchange rounds, in which every list has one item per `Question`.

    Attributes:
      num_rounds: number of rounds that have been run.
      cursors: number of entries that this device has sent to each owner.
      states: current value of `Question.state`, which `answer` may change in every round.
      replies: reply to each distinct entry. The replies to entries that have not been sent are
        zero.
      are_left: whether any device still has entries to send.
    """

    num_rounds: Array
    cursors: list[Array]
    states: list[PyTree]
    replies: list[PyTree]
    are_left: Array


def _ask(questions: Sequence[Question], takes_rounds: bool, axis_name: AxisName) -> list[Answers]:
    """Runs exchange rounds until every `Question` is answered, and returns all `Answers`.

    Args:
      questions: list of requests. With a small capacity, a request may need several rounds.
      takes_rounds: whether any request may need several rounds. False: the function runs one round.
      axis_name: name or names of the mesh axes to exchange over.
    """

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
    # With `check_vma`, the carry of a loop must vary over the same mesh axes before and after a
    # round. After a round, all arrays of the carry vary over the same mesh axes as `offsets`.
    leaves, tree = jax.tree.flatten((cursors, states, replies))
    *leaves, _ = vary_alike([*leaves, questions[0].wanted.offsets])
    cursors, states, replies = jax.tree.unflatten(tree, leaves)
    start = _Progress(jnp.zeros((), jnp.int32), cursors, states, replies, jnp.asarray(True))
    run = run_round
    if takes_rounds:
        # The first exchange round runs inside the loop, because XLA would compile `answer` twice if
        # the first round ran outside the loop.
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
    """Runs one round: sends entries, calls `answer` on the owners, and sends the replies back.

    Args:
      questions: the requests of this device.
      states: for each request, the current value of `Question.state`.
      entries: for each request, the indices of the entries to send in this round.
      axis_name: name or names of the mesh axes to exchange over.

    Returns: for each request, the new state, and the replies to the entries that were sent.
    """
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
    """Returns `replies` after writing `news`, the replies of one round, to the rows `entries`."""
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
    """For each owner, the entry at which all devices end the current round.

    If the remaining entries of any device do not fit in a round, every device sends only the
    entries that are smaller than the entry at which the round ends. With one end for all devices,
    all requests for a row arrive in the same round.

    Returns: two integer arrays `fit` and `cuts`, with values for every request and owner. `fit` is
      1 if every device can send all its remaining entries in this round, else 0. If `fit` is 0,
      `cuts` contains the 32-bit words of the entry that ends the round. Each device finds its first
      entry that does not fit in the round, and the smallest of these entries ends the round.
    """
    if not takes_rounds:
        size = (len(queues), queues[0].cursor.shape[0])
        return jnp.ones(size, jnp.int32), jnp.zeros((1, *size), jnp.uint32)
    fit, first_left = api.block_ends(queues)
    lowest = jax.lax.pmin(fit, axis_name)
    # `cuts` is a minimum over devices. If `lowest` is 0, the minimum is taken only over devices
    # with entries that do not fit.
    takes_part = fit == lowest
    cuts: list[Array] = []
    for words in first_left:
        words_or_max = jnp.where(takes_part, words, jnp.uint32(2**32 - 1))
        cuts.append(jax.lax.pmin(words_or_max, axis_name))
        takes_part &= words == cuts[-1]
    return lowest, jnp.stack(cuts)
