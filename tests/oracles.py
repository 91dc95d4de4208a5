"""What the numbers should be, in loops over numpy float64 that nobody has to believe twice."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from rsembed.kernels.contract import Call


class Entry(NamedTuple):
    """An entry of a call that contributes: it adds `gain * tables[table][row]` to a vector of a segment."""

    segment: int
    list: int
    number: int  # in its list
    table: int
    row: int
    vector: int
    weight: float
    divisor: float

    @property
    def gain(self) -> float:
        return self.weight / self.divisor if self.divisor else 0.0


def bags_of(ids):
    """Numbers of the entries of each bag of a list."""
    num_entries = len(np.asarray(ids.ids))
    if ids.shape is not None:
        num_bags, width = ids.shape
        return [range(bag * width, (bag + 1) * width) for bag in range(num_bags)]
    ends = np.clip(np.asarray(ids.offsets), 0, num_entries).tolist()
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def divisor_of(combiner, weights):
    """What the sum of a bag is divided by."""
    if combiner == "mean":
        return sum(weights)
    if combiner == "sqrtn":
        return sum(weight**2 for weight in weights) ** 0.5
    if combiner == "mean_by_count":
        return len(weights)
    return 1.0


def entries_of_call(call, table_rows):
    """Every entry that contributes, segment by segment and in its order there."""
    found = []
    for number, segment in enumerate(call.segments):
        own = call.lists[segment.list]
        ids = np.asarray(own.ids).tolist()
        weights = np.ones(len(ids)) if own.weights is None else np.asarray(own.weights, np.float64)
        num_rows = min(segment.num_rows, table_rows[segment.table] - segment.first_row)
        last_bag = segment.first_bag + segment.num_bags
        for place, bag in enumerate(bags_of(own)[segment.first_bag : last_bag]):
            entries = [entry for entry in bag if 0 <= ids[entry] < num_rows]
            divisor = divisor_of(segment.combiner, weights[entries].tolist())
            for entry in entries:
                vector = entry if segment.combiner == "none" else place
                row = segment.first_row + ids[entry]
                about = (number, segment.list, entry, segment.table, row, vector)
                found.append(Entry(*about, weights[entry], divisor))
    return found


def sizes_of_vectors(call, dims):
    """Number and length of the vectors of each segment."""
    sizes = []
    for segment in call.segments:
        count = segment.num_bags
        if segment.combiner == "none":
            count = len(np.asarray(call.lists[segment.list].ids))
        sizes.append((count, dims[segment.table]))
    return sizes


def laid_out(call, vectors):
    """The outputs of a call that consist of these vectors of its segments."""
    if call.layout == "each":
        return vectors
    if call.segments[0].combiner == "none":
        longest = max(own.shape[1] for own in vectors)
        output = np.zeros((len(vectors[0]), longest))
        for own in vectors:
            output[:, : own.shape[1]] += own
        return [output]
    if call.layout == "columns":
        return [np.concatenate(vectors, axis=1)]
    return [np.concatenate([own.reshape(-1) for own in vectors])]


def taken_apart(call, dims, outputs):
    """The vectors of each segment, from the outputs of a call."""
    outputs = [np.asarray(output, np.float64) for output in outputs]
    sizes = sizes_of_vectors(call, dims)
    if call.layout == "each":
        return [output.reshape(size) for output, size in zip(outputs, sizes, strict=True)]
    (output,) = outputs
    num_vectors, _ = sizes[0]
    widths = [dim for _, dim in sizes]
    if call.segments[0].combiner == "none":
        output = output.reshape(num_vectors, max(widths))
        return [output[:, :dim] for dim in widths]
    if call.layout == "columns":
        output = output.reshape(num_vectors, sum(widths))
        return np.split(output, np.cumsum(widths)[:-1], axis=1)
    ends = np.cumsum([count * dim for count, dim in sizes])
    flat = np.split(output.reshape(-1), ends[:-1])
    return [own.reshape(size) for own, size in zip(flat, sizes, strict=True)]


def lookup(tables, call):
    """The outputs of a call."""
    tables = [np.asarray(table, np.float64) for table in tables]
    sizes = sizes_of_vectors(call, [table.shape[1] for table in tables])
    vectors = [np.zeros(size) for size in sizes]
    for entry in entries_of_call(call, [len(table) for table in tables]):
        if entry.gain:
            vectors[entry.segment][entry.vector] += entry.gain * tables[entry.table][entry.row]
    return laid_out(call, vectors)


def pooled_lookup(table, ids, combiner):
    """Pooled rows of one list."""
    (vectors,) = lookup([table], Call.of([ids], [combiner]))
    return vectors


def row_gradients(call, table_rows, dims, d_outputs):
    """Of every table, the gradient of every row that was looked up, by row."""
    gradients = [{} for _ in table_rows]
    d_vectors = taken_apart(call, dims, d_outputs)
    for entry in entries_of_call(call, table_rows):
        of_table = gradients[entry.table]
        d_vector = d_vectors[entry.segment][entry.vector]
        of_table[entry.row] = of_table.get(entry.row, 0.0) + entry.gain * d_vector
    return gradients


def weight_gradients(tables, call, d_outputs):
    """The gradients of the weights of each list, None for lists without."""
    tables = [np.asarray(table, np.float64) for table in tables]
    dims = [table.shape[1] for table in tables]
    entries = entries_of_call(call, [len(table) for table in tables])
    vectors = taken_apart(call, dims, lookup(tables, call))
    d_vectors = taken_apart(call, dims, d_outputs)
    found = [
        None if ids.weights is None else np.zeros(len(np.asarray(ids.ids))) for ids in call.lists
    ]
    for entry in entries:
        if found[entry.list] is None or not entry.divisor:
            continue
        d_vector = d_vectors[entry.segment][entry.vector]
        slope = d_vector @ tables[entry.table][entry.row]
        pooled = d_vector @ vectors[entry.segment][entry.vector]
        combiner = call.segments[entry.segment].combiner
        if combiner == "mean":
            slope -= pooled
        if combiner == "sqrtn":
            slope -= pooled * entry.weight / entry.divisor
        found[entry.list][entry.number] = slope / entry.divisor
    return found


def dense_gradients(row_gradients):
    """Row gradients as large as the tables, in the order of the state's arrays; inside `jit`, too."""
    found = {}
    for name, num_rows in row_gradients.num_rows:
        values = row_gradients.values[name]
        dense = jnp.zeros((num_rows, values.shape[-1]))
        found[name] = dense.at[row_gradients.rows[name]].add(values, mode="drop")
    return found


def hash_of_key(key):
    """Murmur's finaliser of 64 bits as 32, in Python integers that never overflow."""
    h = (key & 0xFFFFFFFF) ^ ((key >> 32) * 0x9E3779B1 & 0xFFFFFFFF)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ (h >> 16)


# One step of one row, in place. Arguments: the row, its slots, its gradient, then what the rule is made of.


def sgd_step(row, slots, gradient, *, learning_rate):
    row -= learning_rate * gradient


def adagrad_step(row, slots, gradient, *, learning_rate):
    slots[0][:] += gradient**2
    moves = slots[0] > 0
    row[moves] -= learning_rate * gradient[moves] / slots[0][moves] ** 0.5


def rowwise_adagrad_step(row, slots, gradient, *, learning_rate, epsilon):
    slots[0][0] += np.mean(gradient**2)
    row -= learning_rate * gradient / (slots[0][0] ** 0.5 + epsilon)


def adam_step(row, slots, gradient, *, learning_rate, step, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
    slots[0][:] = beta_1 * slots[0] + (1 - beta_1) * gradient
    slots[1][:] = beta_2 * slots[1] + (1 - beta_2) * gradient**2
    momentum = slots[0] / (1 - beta_1 ** (step + 1))
    velocity = slots[1] / (1 - beta_2 ** (step + 1))
    row -= learning_rate * momentum / (velocity**0.5 + epsilon)


def stepped_table(table, slots, gradients, step_row, /, **made_of):
    """Table and slots after one `step_row` of every row in `gradients`."""
    table = np.array(table, np.float64)
    slots = [np.array(slot, np.float64) for slot in slots]
    for row, gradient in gradients.items():
        step_row(table[row], [slot[row, ...] for slot in slots], gradient, **made_of)
    return table, slots
