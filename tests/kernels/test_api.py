import os

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


def pooled(name=None):
    """Sum of two rows of ones, computed by the named implementation or the default one."""
    call = Call.of([IdList(jnp.asarray([1, 2]), jnp.asarray([0, 2]))], ["sum"])
    ((vector,),) = api.lookup((jnp.ones((3, 1)),), call, implementation=name)
    return vector


def test_the_first_implementation_that_can_serve_is_taken(monkeypatch):
    broken = implementation("broken", reason="no compiler")
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (broken, implementation("able"), reference))
    assert pooled() == 42.0
    assert pooled("reference") == 2.0
    assert api.implementation_states() == [
        ("broken", "no compiler"),
        ("able", "live"),
        ("reference", "live"),
    ]


def test_when_none_can_serve_one_error_lists_every_reason(monkeypatch):
    first = implementation("first", reason="no compiler")
    second = implementation("second", refusal="odd dtype")
    monkeypatch.setattr(api, "IMPLEMENTATIONS", (first, second))
    every_reason = "no implementation can serve lookup: first: no compiler; second: odd dtype"
    with pytest.raises(NotImplementedError, match=every_reason):
        pooled()
    cannot_run = "implementation 'first' cannot run here: no compiler"
    with pytest.raises(NotImplementedError, match=cannot_run):
        pooled("first")
    is_unknown = "unknown implementation 'third'; choose one of first, second"
    with pytest.raises(ValueError, match=is_unknown):
        pooled("third")


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
    assert child.stderr.count("Warning") == 1
    for words in (
        "RuntimeWarning: rsembed computes without its",
        "/nowhere/kernels.so, which is no file",
        "rsembed doctor",
        "RSEMBED_REQUIRE_NATIVE=1",
    ):
        assert words in child.stderr
