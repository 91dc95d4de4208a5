import inspect
import os
import re

import jax.numpy as jnp
import pytest

from rsembed.kernels import api, reference
from rsembed.kernels.contract import Call, IdList
from tests.kernels.cases import run_python


def implementation(name, reason=None, refusal=None):
    def lookup(*_):
        if refusal:
            raise NotImplementedError(refusal)
        return (jnp.full((1, 1), 42.0),)

    return type(name, (), {"NAME": name, "unavailable_because": lambda: reason, "lookup": lookup})


TABLE = jnp.ones((3, 1))
CALLS = sorted(
    set(
        re.findall(
            r'(?:\bdispatch\("|_differentiable\("|served\(\w+\.)(\w+)', inspect.getsource(api)
        )
    )
)
CALL = Call.of([IdList(jnp.asarray([1, 2]), jnp.asarray([0, 2]))], ["sum"])


def test_every_call_has_a_meaning():
    assert len(CALLS) > 15 and not [call for call in CALLS if not callable(api.MEANINGS.get(call))]


def test_the_first_implementation_that_can_serve_is_taken(monkeypatch):
    able = implementation("able")
    monkeypatch.setattr(
        api, "IMPLEMENTATIONS", (implementation("broken", reason="no compiler"), able, reference)
    )
    assert float(api.lookup((TABLE,), CALL)[0][0, 0]) == 42.0
    assert float(api.lookup((TABLE,), CALL, implementation="reference")[0][0, 0]) == 2.0
    assert api.implementation_states() == [
        ("broken", "no compiler"),
        ("able", "live"),
        ("reference", "live"),
    ]


def test_when_none_can_serve_one_error_lists_every_reason(monkeypatch):
    first, second = (
        implementation("first", reason="no compiler"),
        implementation("second", refusal="odd dtype"),
    )
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (first, second))
    with pytest.raises(
        NotImplementedError,
        match="no implementation can serve lookup: first: no compiler; second: odd dtype",
    ):
        api.lookup((TABLE,), CALL)
    with pytest.raises(
        NotImplementedError, match="implementation 'first' cannot run here: no compiler"
    ):
        api.lookup((TABLE,), CALL, implementation="first")
    with pytest.raises(
        ValueError, match="unknown implementation 'third'; choose one of first, second"
    ):
        api.lookup((TABLE,), CALL, implementation="third")


@pytest.mark.parametrize("name", ["reference", None])
def test_rows_by_bag_groups_stably_and_puts_strays_last(name):
    bags = jnp.asarray([2, 0, -1, 2, 7, 0, 1], jnp.int32)
    offsets, order = api.rows_by_bag(bags, 4, implementation=name)
    assert offsets.tolist() == [0, 2, 3, 5, 5]
    assert order[:5].tolist() == [1, 5, 6, 0, 3]
    assert sorted(order[5:].tolist()) == [2, 4]


_LOOKUPS = """
import warnings
import numpy as np, jax, rsembed as rs

pairs = np.ones((1, 2, 4), np.float32)
warnings.simplefilter("error")
rs.pairwise_interaction(pairs, implementation="reference")
warnings.simplefilter("always")
table = rs.TableSpec("t", 8, 4, combiner="sum", optimizer=rs.optimizers.SGD(0.1))
collection = rs.EmbeddingCollection(rs.FeatureSpec("f", table))
state = collection.init(jax.random.key(0))
batch = collection.prepare({"f": np.array([[1, 2]])})
for _ in range(2):
    collection.lookup(state, batch)
    jax.jit(collection.lookup)(state, batch)
rs.pairwise_interaction(pairs)
"""


def test_a_cpu_without_native_kernels_is_told_once_with_the_way_out_unless_it_chose_the_reference():
    missing = os.environ | {"JAX_PLATFORMS": "cpu", "RSEMBED_NATIVE_LIBRARY": "/nowhere/kernels.so"}
    child = run_python("-c", _LOOKUPS, environment=missing)
    assert child.returncode == 0, child.stderr
    assert (
        child.stderr.count("Warning")
        == child.stderr.count("RuntimeWarning: rsembed computes without its")
        == 1
    )
    for words in (
        "/nowhere/kernels.so, which is no file",
        "rsembed doctor",
        "RSEMBED_REQUIRE_NATIVE=1",
    ):
        assert words in child.stderr
