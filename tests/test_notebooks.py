"""Stored notebooks have the form that their README describes. `make test` also runs them."""

import ast
import base64
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MOST_LINES, MOST_FIGURES, MOST_BYTES = 40, 4, 60_000
pytestmark = pytest.mark.skipif(not PATHS, reason="notebooks come with a checkout")


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=4)


def pictures(bundles):
    decoded = []
    for bundle in bundles:
        for mime, data in bundle.items():
            if mime.startswith("image/") and mime != "image/svg+xml":
                decoded.append(base64.b64decode(data))
    return decoded


def test_no_cell_is_longer_than_a_screen(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= MOST_LINES, cell.source


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def folded_lines(source):
    """Parts of a program that do several things in one line.

    These are assignments of a tuple to a tuple, comprehensions with several loops, conditional
    expressions as arguments of calls, and `:=`.
    """
    folded = []
    for node in ast.walk(ast.parse(source)):
        parts = list(ast.walk(node))[1:]
        does_more = isinstance(node, ast.NamedExpr)
        if isinstance(node, ast.Assign):
            does_more = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        elif isinstance(node, COMPREHENSIONS):
            is_nested = any(isinstance(part, COMPREHENSIONS) for part in parts)
            does_more = is_nested or len(node.generators) > 1
        elif isinstance(node, ast.Call):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            does_more = any(isinstance(argument, ast.IfExp) for argument in arguments)
        if does_more:
            folded.append(ast.unparse(node))
    return folded


def test_a_statement_of_a_notebook_does_one_thing(notebook):
    folded = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            folded += folded_lines(cell.source)
    assert folded == [], "give each value a name and a line"


@pytest.mark.parametrize(
    "line",
    [
        "losses, generator = [], make(0)",
        "rows = [[x for x in row] for row in table]",
        "keys = [key for row in table for key in row]",
        "plot(losses, label='one' if count == 1 else 'many')",
        "print(total := 3)",
    ],
)
def test_a_folded_line_is_noticed(line):
    assert folded_lines(line)


def test_outputs_are_stored_where_they_are_meant_to_be(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.outputs:
            assert "keep_output" in cell.metadata.get("tags", []), cell.source


def test_the_first_cell_shows_the_answer_and_stored_pictures_are_few_and_small(notebook):
    first = notebook.cells[0]
    assert "attachment:answer.png" in first.source
    answer = pictures(first.attachments.values())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    kept = pictures(output.get("data", {}) for output in outputs)
    assert len(answer) == 1 and len(kept) <= MOST_FIGURES
    for picture in answer + kept:
        assert picture.startswith(b"\x89PNG") and len(picture) <= MOST_BYTES


def test_the_readme_names_every_notebook():
    text = (FOLDER / "README.md").read_text()
    assert [path.name for path in PATHS if f"({path.name})" not in text] == []


REAL_DATA = os.environ.get("RSEMBED_DATA")


@pytest.mark.skipif(
    not REAL_DATA, reason="RSEMBED_DATA is not set: notebooks 01, 12 and 13 read no real data"
)
@pytest.mark.parametrize("name", ["01_shakespeare", "12_movielens", "13_sparsecore_tutorial"])
def test_the_claims_of_a_notebook_hold_on_real_data(name, tmp_path):
    command = [sys.executable, "-m", "rsembed", "run", name, "--output", str(tmp_path)]
    # Other tests compile with the fewest optimizations. A notebook on real data has all of them.
    environment = os.environ | {"RSEMBED_DATA": REAL_DATA, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "generated" not in finished.stdout.partition("\n")[2][:400], finished.stdout
