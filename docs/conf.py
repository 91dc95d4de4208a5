import base64
import dataclasses
import enum
import inspect
import json
import os
import shutil
import sys
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import gallery  # noqa: E402
import launch  # noqa: E402
import reference  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx.addnodes import pending_xref  # noqa: E402
from sphinx.util.inspect import signature as signature_of, stringify_signature  # noqa: E402

project = "rsembed"
author = copyright = "The rsembed authors"
version = release = installed_version("rsembed")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# Docstrings are written in Markdown, where one backtick means code.
default_role = "literal"

# A method without a docstring does what the base class says, so it gets no entry of its own.
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
# Notebooks are stored without outputs. Read the Docs executes them in five minutes, and so does
# `make docs EXECUTE=1`. Pages that are built without executing them say how to see the outputs.
EXECUTES = bool({"RSEMBED_DOCS_EXECUTE", "READTHEDOCS"} & set(os.environ))
nb_execution_mode = "cache" if EXECUTES else "off"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
# Without keras-rs this notebook cannot run, so its page shows the stored pictures.
NOT_EXECUTED = () if find_spec("keras_rs") else ("14_keras",)
nb_execution_excludepatterns = [f"notebooks/{name}*" for name in NOT_EXECUTED]
nb_merge_streams = True
# Notebooks write progress bars to stderr.
nb_output_stderr = "remove"

# `sphinx-build -b linkcheck` builds no pages, so it cannot find pages of notebooks.
linkcheck_ignore = [r"\d\d_\w+\.html"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_title = f"rsembed {release}"


def copy_notebooks(source: Path, target: Path) -> None:
    """Copies notebooks and their modules from `source`, and writes their table of contents.

    Pictures that are attached to cells become files, because pages cannot show attachments.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, target)
    names = []
    pictures = []
    public = launch.source(source)
    for path in sorted(source.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        for cell in notebook["cells"]:
            for name, attached in cell.pop("attachments", {}).items():
                picture = f"{path.stem}-{name}"
                pictures += [
                    "```{image} " + picture,
                    f":target: {path.stem}.html",
                    ":width: 49%",
                    "```",
                ]
                (target / picture).write_bytes(base64.b64decode(attached["image/png"]))
                cell["source"] = "".join(cell["source"]).replace(f"attachment:{name}", picture)
        notes = []
        if public:
            notes.append(launch.links(*public, path.stem))
        if not EXECUTES or path.stem in NOT_EXECUTED:
            notes.append(launch.note_on_outputs(path.stem))
        if notes:
            note = {
                "cell_type": "markdown",
                "id": "run-it",
                "metadata": {},
                "source": "\n\n".join(notes),
            }
            notebook["cells"].insert(1, note)
        (target / path.name).write_text(json.dumps(notebook))
        names.append(path.stem)
    contents = [
        "",
        "## The pictures",
        "",
        *pictures,
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *names,
        "```",
        "",
    ]
    (target / "index.md").write_text((source / "README.md").read_text() + "\n".join(contents))


def draw_gallery(app, page, source):
    """Runs the programs of the gallery, and puts their pictures into the page."""
    if page == "gallery":
        source[0] = gallery.with_pictures(source[0], HERE / "gallery")


def as_napoleon_reads_it(app, kind, name, value, options, lines):
    text = reference.restructured("\n".join(lines))
    if kind == "class" and dataclasses.is_dataclass(value):
        text = reference.with_all_arguments(value, text)
    lines[:] = text.split("\n")


def as_told_where_defined(app, kind, name, value, options, lines):
    """Gives a constant its docstring. Autodoc finds only that of its type if it was imported."""
    if kind == "data" and inspect.getdoc(value) == inspect.getdoc(type(value)):
        lines[:] = reference.restructured(reference.told_of_constant(name)).split("\n")


def constructor(app, kind, name, value, options, signature, returns):
    """Signature of a class, if Sphinx itself cannot show the arguments or their defaults.

    The metaclass of Flax modules has no named arguments, so those of `__init__` are shown. Defaults
    that a dataclass makes by a factory are shown as the value that the factory returns.
    """
    if signature and "<factory>" in signature and dataclasses.is_dataclass(value):
        return reference.with_defaults(value, signature), returns
    if kind == "class" and signature == "(*args: Any, **kwargs: Any)":
        shown = signature_of(value.__init__, bound_method=True)
        text = stringify_signature(shown, unqualified_typehints=True, show_return_annotation=False)
        return text, None
    return None


def skips(app, kind, name, value, skip, options):
    """Whether a member gets no entry, or None if autodoc decides.

    Members of enumerations have entries. Fields of named tuples without a docstring have none.
    """
    if isinstance(value, enum.Enum):
        return False
    if (inspect.getdoc(value) or "").startswith("Alias for field number"):
        return True
    return None


def link_names(app, doctree):
    """Links code in texts to the entries of the public objects that it names."""
    for code in list(doctree.findall(nodes.literal)):
        target = reference.target(code.astext())
        if target and isinstance(code.parent, nodes.paragraph | nodes.strong | nodes.emphasis):
            link = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=app.env.docname
            )
            code.replace_self(link)
            link += code


def link_to_where_described(app, env, node, content):
    """Links a member without an entry to its entry in a base class, or to its class."""
    if node.get("refdomain") != "py":
        return None
    python = env.get_domain("py")
    for name in reference.where_described(node["reftarget"]):
        if name in python.objects:
            return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
    return None


def setup(app):
    def write_pages(_):
        copy_notebooks(HERE.parent / "notebooks", HERE / "notebooks")
        reference.write(HERE / "api")

    app.connect("builder-inited", write_pages)
    app.connect("source-read", draw_gallery)
    # Napoleon has the priority 500.
    app.connect("autodoc-process-docstring", as_napoleon_reads_it, priority=400)
    app.connect("autodoc-process-docstring", as_told_where_defined, priority=600)
    app.connect("autodoc-process-signature", constructor)
    app.connect("autodoc-skip-member", skips)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", link_to_where_described)
