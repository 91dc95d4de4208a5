import importlib.metadata
import inspect
import re
import subprocess
import sys

import pytest

import rsembed as rs

HEAVY = (
    *("flax", "optax", "tensorly", "tensorstore", "matplotlib", "pooch", "tqdm", "scipy"),
    "jax.experimental.pallas.tpu_sc",
)
PROGRAM = f"""
import sys, jax, rsembed as rs
print(*[module for module in {HEAVY} if module in sys.modules])
print(rs.tbe.__name__, rs.plot.__name__)
"""


def test_an_import_stays_light_and_wings_come_when_they_are_asked_for():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["", "rsembed.tbe rsembed.plot"]


def test_wings_and_the_version_are_attributes_of_the_package():
    assert rs.__version__ == importlib.metadata.version("rsembed")
    assert {"tbe", "plot", "optimizers", "__version__", "EmbeddingCollection"} <= set(dir(rs))
    assert not {"importlib", "bags", "checks", "stacking"} & set(dir(rs))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("AdamOptimizerSpec", "; use rsembed.optimizers.Adam"),
        ("RowWiseAdagrad", "; use rsembed.optimizers.RowWiseAdagrad"),
        ("CowClipDefinition", "; use rsembed.optimizers.regularization.CowClipDefinition"),
        ("TableSpecs", " (did you mean 'TableSpec'?)"),
        ("nothing", ""),
    ],
)
def test_a_name_that_is_elsewhere_is_told_with_its_place(name, hint):
    message = f"module 'rsembed' has no attribute {name!r}{hint}"
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        getattr(rs, name)


def test_the_room_of_rules_knows_the_names_of_other_systems_too():
    message = "module 'rsembed.optimizers' has no attribute 'AdamOptimizerSpec'; use rsembed.optimizers.Adam"
    with pytest.raises(AttributeError, match=f"^{re.escape(message)}$"):
        rs.optimizers.AdamOptimizerSpec  # noqa: B018


def test_the_front_door_is_small():
    rooms = [
        rs,
        *(getattr(rs, name) for name in ("optimizers", "datasets", "plot", "checkpoint", "fdo")),
    ]
    names = [
        name
        for room in rooms
        for name in dir(room)
        if name[0] != "_" and not inspect.ismodule(getattr(room, name))
    ]
    assert len(names) <= 79, (
        f"there are {len(names)} public names. If the new one is needed by most users, raise the number here; if "
        "not, leave it in its room's module."
    )
