"""Rules for the whole code: which modules may import which others, and how long a file may be."""

import ast
import re
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room is a module or package of rsembed. It may import only rooms that are above it in the table
# of docs/architecture.md, which gives the reasons.
TABLE = (ROOT / "docs" / "architecture.md").read_text().split("| room |")[1].split("\n\n")[0]
ROOMS = [*re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE), "__main__"]
WINGS = {"sparsecore", "tbe", "tt", "sok"}
LEAVES = {"plot", "datasets", "__main__"}
# This room may import the leaf `plot`, because a report can draw itself.
DRAWS = "fdo"
MAX_LINES = 900


def room_of(file, package):
    """The room of a file: `kernels/api.py` is in the room `kernels`."""
    return Path(file.relative_to(package).parts[0]).stem


def imported_names(file, package):
    """Line number and dotted name of each import of the package or of a part of it.

    The names do not begin with `rsembed`. The name of the package itself is "".
    """
    parent = ".".join(["rsembed", *file.relative_to(package).parts[:-1]])
    for node in ast.walk(ast.parse(file.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), parent)
            modules = [module]
            if module == "rsembed":
                # `from rsembed import kernels` imports a room.
                # `from rsembed import TableSpec` imports from the package itself.
                rooms = [alias.name if alias.name in ROOMS else "" for alias in node.names]
                modules = [f"rsembed.{room}" for room in rooms]
        for module in modules:
            if module.split(".")[0] == "rsembed":
                yield node.lineno, module.removeprefix("rsembed").removeprefix(".")


def violation(room, target):
    """The reason why `room` may not import `target`, or None if it may."""
    if target == room:
        return None
    if target == "":
        return "imports the package itself; import the room instead"
    if target not in ROOMS:
        return f"imports {target}, which is not in the list of rooms"
    if (room, target) == (DRAWS, "plot"):
        return None
    if target in LEAVES:
        return f"imports the leaf {target}"
    if {room, target} <= WINGS:
        return f"imports the wing {target}"
    if ROOMS.index(target) > ROOMS.index(room):
        return f"imports {target}, which lies below it"
    return None


def violations(package):
    lines = []
    for file in sorted(package.rglob("*.py")):
        room, where = room_of(file, package), file.relative_to(package)
        if room == "__init__":
            continue
        if room not in ROOMS:
            lines.append(f"{where}: the room {room} is not in the list of rooms")
            continue
        for line, name in imported_names(file, package):
            if why := violation(room, name.split(".")[0]):
                lines.append(f"{where}:{line} {why}")
    return lines


def test_rooms_import_only_from_rooms_above():
    assert violations(ROOT / "rsembed") == []
    assert len(ROOMS) > 30


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("bags.py", "from rsembed.collection import EmbeddingCollection", "lies below"),
        ("bags.py", "from rsembed import collection", "lies below"),
        ("bags.py", "def f():\n    import rsembed.kernels.api", "lies below"),
        ("bags.py", "from . import kernels", "lies below"),
        ("kernels/api.py", "from ..collection import x", "lies below"),
        ("kernels/api.py", "from .. import sok", "lies below"),
        ("tt/cores.py", "from rsembed.tbe import x", "the wing tbe"),
        ("tbe/module.py", "from ..tt.cores import x", "the wing tt"),
        ("checkpoint/files.py", "from rsembed.plot import x", "the leaf plot"),
        ("fdo/report.py", "from rsembed import datasets", "the leaf datasets"),
        ("__main__.py", "from rsembed import datasets", "the leaf datasets"),
        ("collection.py", "import rsembed as rs", "the package itself"),
        ("collection.py", "from rsembed import TableSpec", "the package itself"),
        ("collection.py", "from rsembed.utils import x", "not in the list"),
        ("utils.py", "", "not in the list"),
        ("collection.py", "from rsembed.kernels import api\nfrom rsembed import specs, bags", ""),
        ("kernels/api.py", "from . import native\nfrom .gpu import x\nfrom .. import specs", ""),
        ("sok/layers.py", "from rsembed.fdo import x", ""),
        ("fdo/report.py", "def plot():\n    from rsembed import plot", ""),
        ("__init__.py", "from rsembed.plot import x\nfrom rsembed import datasets", ""),
    ],
)
def test_a_planted_violation_is_found_and_no_other(tmp_path, file, code, reason):
    planted = tmp_path / file
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(code + "\n")
    assert [reason in line for line in violations(tmp_path)] == [True] * bool(reason)


def test_the_short_check_names_tests_that_exist_and_asks_every_room_with_a_folder():
    chosen = (ROOT / "tests" / "check.txt").read_text().splitlines()
    missing, asked = [], set()
    for line in chosen:
        file, _, name = line.partition("::")
        function = name.partition("[")[0].rpartition(".")[2]
        source = ROOT / file
        if not source.exists() or not re.search(rf"(def|class) {function}\b", source.read_text()):
            missing.append(line)
        asked |= {source.parent.name, source.stem.removeprefix("test_")}
    assert missing == [], "tests/check.txt names tests that were renamed or removed"
    assert len(chosen) == len(set(chosen))
    with_a_folder = {folder.name for folder in (ROOT / "tests").iterdir()} & set(ROOMS)
    assert with_a_folder <= asked, "`make check` has no test of a room"


def test_files_are_short_enough_to_read_in_one_sitting():
    files = [*(ROOT / "rsembed").rglob("*"), *(ROOT / "tests").rglob("*.py")]
    sources = [file for file in files if file.suffix in {".py", ".cc", ".h"}]
    lengths = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in sources}
    too_long = {name: length for name, length in lengths.items() if length > MAX_LINES}
    assert too_long == {}, f"split files that have more than {MAX_LINES} lines"
