import importlib.metadata
import inspect
import subprocess
import sys

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


def test_the_front_door_is_small():
    names = []
    for room in (rs, rs.optimizers, rs.datasets, rs.plot, rs.checkpoint, rs.fdo):
        for name in dir(room):
            if name[0] != "_" and not inspect.ismodule(getattr(room, name)):
                names.append(name)
    assert len(names) <= 79, (
        f"there are {len(names)} public names: raise the limit here if most users need the new name, or "
        "leave the name in its module"
    )
