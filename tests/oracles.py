"""Expected numbers, computed by plain loops over arrays of numpy in float64."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from rsembed.kernels.contract import Call


class Entry(NamedTuple):
    """An entry of a list of ids that adds `gain * tables[table][row]` to a vector of a segment."""

    segment: int
    list: int
    number: int  # position in the list
    table: int
    row: int
    vector: int
    weight: float
    divisor: float

    @property
    def gain(self) -> float:
        return self.weight / self.divisor if self.divisor else 0.0


def bags_of(ids):
    """Positions of the entries of each bag of a list."""
    num_entries = len(np.asarray(ids.ids))
    if ids.shape is not None:
        num_bags, width = ids.shape
        return [range(bag * width, (bag + 1) * width) for bag in range(num_bags)]
    ends = np.clip(np.asarray(ids.offsets), 0, num_entries).tolist()
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def divisor_of(combiner, weights):
    """The divisor of the sum of a bag."""
    if combiner == "mean":
        return sum(weights)
    if combiner == "sqrtn":
        return sum(weight**2 for weight in weights) ** 0.5
    if combiner == "mean_by_count":
        return len(weights)
    return 1.0


def entries_of_call(call, table_rows):
    """All entries with a row, segment by segment, in the order of their lists."""
    entries = []
    for segment_number, segment in enumerate(call.segments):
        id_list = call.lists[segment.list]
        ids = np.asarray(id_list.ids).tolist()
        weights = np.ones(len(ids))
        if id_list.weights is not None:
            weights = np.asarray(id_list.weights, np.float64)
        num_rows = min(segment.num_rows, table_rows[segment.table] - segment.first_row)
        end = segment.first_bag + segment.num_bags
        for bag_number, bag in enumerate(bags_of(id_list)[segment.first_bag : end]):
            positions = [position for position in bag if 0 <= ids[position] < num_rows]
            divisor = divisor_of(segment.combiner, weights[positions].tolist())
            for position in positions:
                entry = Entry(
                    segment=segment_number,
                    list=segment.list,
                    number=position,
                    table=segment.table,
                    row=segment.first_row + ids[position],
                    vector=position if segment.combiner == "none" else bag_number,
                    weight=weights[position],
                    divisor=divisor,
                )
                entries.append(entry)
    return entries


def sizes_of_vectors(call, dims):
    """Number and length of the vectors of each segment."""
    sizes = []
    for segment in call.segments:
        count = segment.num_bags
        if segment.combiner == "none":
            count = len(np.asarray(call.lists[segment.list].ids))
        sizes.append((count, dims[segment.table]))
    return sizes


def outputs_of_vectors(call, vectors):
    """The outputs of a call, from the vectors of each segment."""
    if call.layout == "each":
        return vectors
    if call.segments[0].combiner == "none":
        longest = max(part.shape[1] for part in vectors)
        output = np.zeros((len(vectors[0]), longest))
        for part in vectors:
            output[:, : part.shape[1]] += part
        return [output]
    if call.layout == "columns":
        return [np.concatenate(vectors, axis=1)]
    return [np.concatenate([part.reshape(-1) for part in vectors])]


def vectors_of_outputs(call, dims, outputs):
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
    parts = np.split(output.reshape(-1), ends[:-1])
    return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]


def lookup(tables, call):
    """The outputs of a call."""
    tables = [np.asarray(table, np.float64) for table in tables]
    sizes = sizes_of_vectors(call, [table.shape[1] for table in tables])
    vectors = [np.zeros(size) for size in sizes]
    for entry in entries_of_call(call, [len(table) for table in tables]):
        if entry.gain:
            vectors[entry.segment][entry.vector] += entry.gain * tables[entry.table][entry.row]
    return outputs_of_vectors(call, vectors)


def pooled_lookup(table, ids, combiner):
    """Pooled rows of one list."""
    (vectors,) = lookup([table], Call.of([ids], [combiner]))
    return vectors


def row_gradients(call, table_rows, dims, d_outputs):
    """Gradients of the looked-up rows: a dictionary by row for each table."""
    gradients = [{} for _ in table_rows]
    d_vectors = vectors_of_outputs(call, dims, d_outputs)
    for entry in entries_of_call(call, table_rows):
        by_row = gradients[entry.table]
        d_vector = d_vectors[entry.segment][entry.vector]
        by_row[entry.row] = by_row.get(entry.row, 0.0) + entry.gain * d_vector
    return gradients


def weight_gradients(tables, call, d_outputs):
    """Gradients of the weights of each list. None for a list without weights."""
    tables = [np.asarray(table, np.float64) for table in tables]
    dims = [table.shape[1] for table in tables]
    entries = entries_of_call(call, [len(table) for table in tables])
    vectors = vectors_of_outputs(call, dims, lookup(tables, call))
    d_vectors = vectors_of_outputs(call, dims, d_outputs)
    gradients = []
    for id_list in call.lists:
        gradient = None
        if id_list.weights is not None:
            gradient = np.zeros(len(np.asarray(id_list.ids)))
        gradients.append(gradient)
    for entry in entries:
        if gradients[entry.list] is None or not entry.divisor:
            continue
        d_vector = d_vectors[entry.segment][entry.vector]
        slope = d_vector @ tables[entry.table][entry.row]
        pooled = d_vector @ vectors[entry.segment][entry.vector]
        combiner = call.segments[entry.segment].combiner
        if combiner == "mean":
            slope -= pooled
        if combiner == "sqrtn":
            slope -= pooled * entry.weight / entry.divisor
        gradients[entry.list][entry.number] = slope / entry.divisor
    return gradients


def dense_gradients(row_gradients):
    """Row gradients as arrays of the size of the state's arrays. Works inside `jit`."""
    gradients = {}
    for name, num_rows in row_gradients.num_rows:
        values = row_gradients.values[name]
        zeros = jnp.zeros((num_rows, values.shape[-1]))
        gradients[name] = zeros.at[row_gradients.rows[name]].add(values, mode="drop")
    return gradients


def hash_of_key(key):
    """Hash of 32 bits of a 64-bit key: both halves mixed, then the finaliser of MurmurHash3."""
    value = (key & 0xFFFFFFFF) ^ ((key >> 32) * 0x9E3779B1 & 0xFFFFFFFF)
    value = (value ^ (value >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ (value >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ (value >> 16)


# Steps of one row, in place. The arguments are the row, its slots and its gradient, and the
# hyperparameters of the rule.


def sgd_step(row, slots, gradient, *, learning_rate):
    row -= learning_rate * gradient


def adagrad_step(row, slots, gradient, *, learning_rate):
    slots[0][:] += gradient**2
    moves = slots[0] > 0
    row[moves] -= learning_rate * gradient[moves] / slots[0][moves] ** 0.5


def adam_step(row, slots, gradient, *, learning_rate, step, beta_1=0.9, beta_2=0.999, epsilon=1e-8):
    slots[0][:] = beta_1 * slots[0] + (1 - beta_1) * gradient
    slots[1][:] = beta_2 * slots[1] + (1 - beta_2) * gradient**2
    momentum = slots[0] / (1 - beta_1 ** (step + 1))
    velocity = slots[1] / (1 - beta_2 ** (step + 1))
    row -= learning_rate * momentum / (velocity**0.5 + epsilon)


def stepped_table(table, slots, gradients, step_row, /, **hyperparameters):
    """Table and slots after one `step_row` for each row in `gradients`."""
    table = np.array(table, np.float64)
    slots = [np.array(slot, np.float64) for slot in slots]
    for row, gradient in gradients.items():
        step_row(table[row], [slot[row, ...] for slot in slots], gradient, **hyperparameters)
    return table, slots
