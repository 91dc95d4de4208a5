import base64
import json
import shutil
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import reference  # noqa: E402

project = "rsembed"
author = copyright = "The rsembed authors"
version = release = installed_version("rsembed")

extensions = ["myst_nb"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# Notebooks are executed by the tests; the pages show them as they are stored.
nb_execution_mode = "off"

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"rsembed {release}"


def copy_notebooks(source: Path, target: Path) -> None:
    """Notebooks, their table and modules; pictures attached to a cell become files, which is what pages can show."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, target)
    names, pictures = [], []
    for path in sorted(source.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            for name, attached in cell.pop("attachments", {}).items():
                picture = f"{path.stem}-{name}"
                pictures += ["```{image} " + picture, f":target: {path.stem}.html", ":width: 49%", "```"]
                (target / picture).write_bytes(base64.b64decode(attached["image/png"]))
                cell["source"] = "".join(cell["source"]).replace(f"attachment:{name}", picture)
        (target / path.name).write_text(json.dumps(notebook))
        names.append(path.stem)
    contents = ["", "## The pictures", "", *pictures, "", "```{toctree}", ":hidden:", "", *names, "```", ""]
    (target / "index.md").write_text((source / "README.md").read_text() + "\n".join(contents))


def setup(app):
    def write_pages(_):
        copy_notebooks(HERE.parent / "notebooks", HERE / "notebooks")
        reference.write(HERE / "api")

    app.connect("builder-inited", write_pages)
