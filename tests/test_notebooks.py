"""What the README of the notebooks promises of the stored files; that they run is tested by running them."""

import base64
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
    return [
        base64.b64decode(data)
        for bundle in bundles
        for mime, data in bundle.items()
        if mime.startswith("image/") and mime != "image/svg+xml"
    ]


def test_no_cell_is_longer_than_a_screen(notebook):
    lengths = {
        k: len(cell.source.splitlines())
        for k, cell in enumerate(notebook.cells)
        if cell.cell_type == "code"
    }
    assert {k: length for k, length in lengths.items() if length > MOST_LINES} == {}


def test_outputs_are_stored_where_they_are_meant_to_be(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.outputs:
            assert "keep_output" in cell.metadata.get("tags", []), cell.source


def test_the_first_cell_shows_the_answer_and_stored_pictures_are_few_and_small(notebook):
    first, *_ = notebook.cells
    assert "attachment:answer.png" in first.source
    answer = pictures(first.attachments.values())
    kept = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert len(answer) == 1 and len(pictures(kept)) <= MOST_FIGURES
    assert all(picture.startswith(b"\x89PNG") for picture in answer + pictures(kept))
    assert max(map(len, answer + pictures(kept))) <= MOST_BYTES


def test_the_readme_names_every_notebook():
    text = (FOLDER / "README.md").read_text()
    assert [path.name for path in PATHS if f"({path.name})" not in text] == []
