import importlib.metadata
import subprocess
import sys

import pytest

import rsembed as rs


def test_import_stays_light():
    program = (
        "import sys, jax, rsembed; "
        "heavy = ('flax', 'tensorly', 'tensorstore', 'matplotlib', 'pooch', 'tqdm', 'scipy'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def test_wings_and_the_version_are_attributes_of_the_package():
    program = "import rsembed as rs; print(rs.tbe.__name__, rs.plot.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rsembed.tbe", "rsembed.plot"]
    assert rs.__version__ == importlib.metadata.version("rsembed")
    assert {"tbe", "plot", "__version__", "EmbeddingCollection"} <= set(dir(rs))
    with pytest.raises(AttributeError, match="'rsembed' has no attribute 'tables'"):
        _ = rs.tables
