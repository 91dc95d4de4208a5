"""Worked cases of who gets which row of a table of keys; the contract of homes holds what rows are worth."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rsembed import sok
from rsembed.keys import join_keys

CASES = json.loads((Path(__file__).parent.parent / "data" / "sok_cases.json").read_text())


def places_of(variable, num_shards):
    """Shard and row of every key."""
    known = variable.get_value().tables["t"].keys
    keys = join_keys(np.asarray(known.high), np.asarray(known.low)).tolist()
    used, capacity = np.asarray(known.last_step) >= 0, len(keys) // num_shards
    return {key: [row // capacity, row % capacity] for row, key in enumerate(keys) if used[row]}


@pytest.mark.parametrize("case", CASES["dynamic_insert"], ids=lambda case: case["name"])
def test_worked_cases_of_insertion(case):
    num_shards, width = case["num_shards"], max(map(len, case["batches"]))
    context = sok.Init(mesh=Mesh(np.asarray(jax.devices()[:num_shards]), ("shard",)))
    variable = sok.embedding_variable("t", 2, rows_per_device=case["capacity"], context=context)
    for number, (keys, expected) in enumerate(zip(case["batches"], case["expected"]["steps"], strict=True)):
        padded = np.full((num_shards, width), -1)
        padded[0, : len(keys)] = keys  # the first sample, in the order of the case
        if number in case.get("eval_batches", []):
            sok.group_embedding_lookup_sparse([variable], [padded], ["sum"])
        else:
            outputs, backward = sok.group_embedding_lookup_vjp([variable], [padded], ["sum"])
            backward(outputs)
        places, counts = places_of(variable, num_shards), variable.counts()
        assert [places.get(key, [key % num_shards, -1]) for key in keys] == expected["slots"]
        assert counts["rows"].tolist() == expected["sizes"]
        assert counts["failed"].sum() == len(expected["failed"])
    for shard, expected in enumerate(case["expected"].get("final", [])):
        assert {str(key): row for key, (own, row) in places.items() if own == shard} == expected
