"""What the numbers should be, in loops over numpy float64 that nobody has to believe twice."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def bag_gains(segment, num_rows: int) -> list[tuple[int, int, float]]:
    """`(row, output, gain)` of every entry that contributes, in order."""
    rows = np.asarray(segment.rows).tolist()
    weights = [1.0] * len(rows) if segment.weights is None else np.asarray(segment.weights, np.float64).tolist()
    if segment.offsets is None:
        return [(row, k, weights[k]) for k, row in enumerate(rows) if 0 <= row < num_rows]
    offsets = np.asarray(segment.offsets).tolist()
    found = []
    for bag in range(len(offsets) - 1):
        entries = [k for k in range(offsets[bag], offsets[bag + 1]) if 0 <= rows[k] < num_rows]
        divisor = 1.0
        if segment.combiner == "mean":
            divisor = sum(weights[k] for k in entries)
        if segment.combiner == "sqrtn":
            divisor = sum(weights[k] ** 2 for k in entries) ** 0.5
        found += [(rows[k], bag, weights[k] / divisor if divisor else 0.0) for k in entries]
    return found


def pooled_lookup(table: np.ndarray, segment) -> np.ndarray:
    """Pooled rows of one segment, `[num_outputs, dim]`."""
    table = np.asarray(table, np.float64)
    pooled = np.zeros((segment.num_outputs, table.shape[1]))
    for row, output, gain in bag_gains(segment, table.shape[0]):
        if gain:
            pooled[output] += gain * table[row]
    return pooled


def combined_row_gradients(num_rows: int, segments, d_outputs) -> dict[int, np.ndarray]:
    """Gradient of every row that was looked up, by row."""
    gradients: dict[int, np.ndarray] = {}
    for segment, d_output in zip(segments, d_outputs, strict=True):
        d_output = np.asarray(d_output, np.float64)
        for row, output, gain in bag_gains(segment, num_rows):
            gradients[row] = gradients.get(row, 0.0) + gain * d_output[output]
    return gradients


# One step of one row, in place. Arguments: the row, its slots, its gradient, then what the rule is made of.


def dense_gradients(row_gradients) -> dict:
    """Row gradients as large as the tables, in the order of the state's arrays; inside `jit`, too."""
    found = {}
    for name, num_rows in row_gradients.num_rows:
        values = row_gradients.values[name]
        dense = jnp.zeros((num_rows, values.shape[-1]))
        found[name] = dense.at[row_gradients.rows[name]].add(values, mode="drop")
    return found


def sgd_step(row, slots, gradient, *, learning_rate):
    row -= learning_rate * gradient


def adagrad_step(row, slots, gradient, *, learning_rate):
    for k in range(len(row)):
        slots[0][k] += gradient[k] ** 2
        if slots[0][k] > 0:
            row[k] -= learning_rate * gradient[k] / slots[0][k] ** 0.5


def rowwise_adagrad_step(row, slots, gradient, *, learning_rate, epsilon):
    slots[0][0] += sum(g**2 for g in gradient) / len(gradient)
    row -= learning_rate * gradient / (slots[0][0] ** 0.5 + epsilon)


def adam_step(row, slots, gradient, *, learning_rate, beta_1, beta_2, epsilon, step):
    for k, g in enumerate(gradient):
        slots[0][k] = beta_1 * slots[0][k] + (1 - beta_1) * g
        slots[1][k] = beta_2 * slots[1][k] + (1 - beta_2) * g**2
        corrected_momentum = slots[0][k] / (1 - beta_1 ** (step + 1))
        corrected_velocity = slots[1][k] / (1 - beta_2 ** (step + 1))
        row[k] -= learning_rate * corrected_momentum / (corrected_velocity**0.5 + epsilon)


def stepped_table(table, slots, gradients: dict[int, np.ndarray], step_row, /, **made_of):
    """Table and slots after one `step_row` of every row in `gradients`."""
    table = np.array(table, np.float64)
    slots = [np.array(slot, np.float64) for slot in slots]
    for row, gradient in gradients.items():
        step_row(table[row], [slot[row, ...] for slot in slots], gradient, **made_of)
    return table, slots
