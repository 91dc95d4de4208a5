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
default_role = "literal"  # docstrings are written in Markdown, where one backtick means code

autodoc_inherit_docstrings = (
    False  # an overriding method without a docstring has nothing new to say
)
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
# Notebooks are stored without what they print. A host of the pages executes them, in five minutes, as `make docs
# EXECUTE=1` does here. Pages that are built without executing them say how to see the outputs.
EXECUTES = bool({"RSEMBED_DOCS_EXECUTE", "READTHEDOCS"} & set(os.environ))
nb_execution_mode = "cache" if EXECUTES else "off"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
# Without keras-rs this notebook cannot run, so its page shows the stored pictures.
NOT_EXECUTED = () if find_spec("keras_rs") else ("14_keras",)
nb_execution_excludepatterns = [f"notebooks/{name}*" for name in NOT_EXECUTED]
nb_merge_streams = True
nb_output_stderr = "remove"  # bars of progress

# `sphinx-build -b linkcheck` reads sources. Pictures of notebooks link to pages, which are not there.
linkcheck_ignore = [r"\d\d_\w+\.html"]

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
    names, pictures, public = [], [], launch.source(source)
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
    is_record = kind == "class" and dataclasses.is_dataclass(value)
    lines[:] = (reference.with_all_arguments(value, text) if is_record else text).split("\n")


def as_told_where_defined(app, kind, name, value, options, lines):
    """Of a constant that a module passes on, autodoc finds no more than the docstring of its type."""
    if kind == "data" and inspect.getdoc(value) == inspect.getdoc(type(value)):
        lines[:] = reference.restructured(reference.told_of_constant(name)).split("\n")


def constructor(app, kind, name, value, options, signature, returns):
    """The signature of a class where Sphinx cannot show its arguments or their defaults.

    Flax makes modules by a metaclass, and its call has no named arguments. Defaults that a dataclass makes by a
    factory are shown as the value that the factory returns.
    """
    if signature and "<factory>" in signature and dataclasses.is_dataclass(value):
        return reference.with_defaults(value, signature), returns
    if kind == "class" and signature == "(*args: Any, **kwargs: Any)":
        shown = signature_of(value.__init__, bound_method=True)
        return stringify_signature(
            shown, unqualified_typehints=True, show_return_annotation=False
        ), None
    return None


def skips(app, kind, name, value, skip, options):
    """Shows members of enumerations, and leaves out what named tuples say of their fields by themselves."""
    if isinstance(value, enum.Enum):
        return False
    return True if (inspect.getdoc(value) or "").startswith("Alias for field number") else None


def link_names(app, doctree):
    """Code in a text that is the name of a public object leads to its entry."""
    for code in list(doctree.findall(nodes.literal)):
        target = reference.target(code.astext())
        if target and isinstance(code.parent, nodes.paragraph | nodes.strong | nodes.emphasis):
            link = pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refdoc=app.env.docname
            )
            code.replace_self(link)
            link += code


def link_to_where_described(app, env, node, content):
    """A member without an entry of its own leads to that of a base class, or to its class."""
    python = env.get_domain("py")
    for name in (
        reference.where_described(node["reftarget"]) if node.get("refdomain") == "py" else ()
    ):
        if name in python.objects:
            return python.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, content)
    return None


def setup(app):
    def write_pages(_):
        copy_notebooks(HERE.parent / "notebooks", HERE / "notebooks")
        reference.write(HERE / "api")

    app.connect("builder-inited", write_pages)
    app.connect("source-read", draw_gallery)
    app.connect("autodoc-process-docstring", as_napoleon_reads_it, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", as_told_where_defined, priority=600)  # behind it
    app.connect("autodoc-process-signature", constructor)
    app.connect("autodoc-skip-member", skips)
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", link_to_where_described)
