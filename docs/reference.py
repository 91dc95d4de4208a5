"""Writes the API reference: one page per room, with signatures as they stand in the source, and docstrings.

Nothing is imported from the library. Names are followed through the `from x import y as y` lines that make them public.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Rooms whose pages hold more than the names of their package. A new package needs no line here.
TITLES = {
    "rsembed": "The core",
    "nnx": "Layers of Flax NNX",
    "linen": "Layers of Flax Linen",
    "optimizers": "Optimizers",
    "kernels": "Kernels",
    "parallel": "Devices",
    "homes": "Where rows are kept",
    "caching": "Caches",
    "fdo": "Statistics and limits",
    "checkpoint": "Checkpoints",
    "sparsecore": "The SparseCore wing",
    "tbe": "The TBE wing",
    "tt": "The tensor-train wing",
    "sok": "The SOK wing",
    "plot": "Pictures",
    "datasets": "Data",
}
PUBLISHED_MODULES = {
    "kernels": ["api"],
    "sparsecore": [
        "embedding", "embedding_spec", "table_stacking", "utils", "linen.embed", "linen.embed_optimizer", "nnx.embed",
        "pipelining", "prefetch",
    ],
    "tbe": ["functional", "quantized_rows"],
    "sok": ["optimizers"],
}  # fmt: skip
LISTS = {"Args": "Arguments", "Attributes": "Attributes", "Raises": "Raises"}
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Source|Example):\s*(.*)")
Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


class Found(NamedTuple):
    """Where a public name is defined; `text` documents a constant."""

    source: str
    node: Definition
    text: str


def module_file(module: str) -> Path:
    """The file of `rsembed.x.y`."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def parsed(module: str) -> ast.Module:
    """The module's source as a tree."""
    return ast.parse(module_file(module).read_text())


@functools.cache
def definitions(module: str) -> dict[str, Definition]:
    """Public names that the module defines itself; of constants those that a docstring follows."""
    body, found = parsed(module).body, {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and (_string(after) or module_file(module).name != "__init__.py"):
                found[target.id] = node
    return {name: node for name, node in found.items() if not name.startswith("_") and name != "__all__"}


@functools.cache
def reexports(module: str) -> dict[str, str]:
    """Names that the module passes on from other modules of the library, and from where."""
    tree, found = parsed(module), {}
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rsembed"):
            for alias in node.names:
                is_module = module_file(f"{node.module}.{alias.name}").is_file()
                if not is_module and (alias.asname == alias.name or (listed and alias.name in listed[0])):
                    found[alias.name] = str(node.module)
    return found


def public_names(module: str) -> list[str]:
    """Every name that users may import from the module, in alphabetical order."""
    own = [] if module_file(module).name == "__init__.py" else list(definitions(module))
    return sorted({*own, *reexports(module)}, key=lambda name: (name.lower(), name))


def find(module: str, name: str) -> Found:
    """The definition behind a public name."""
    own = definitions(module)
    if name in own:
        source, body = module_file(module).read_text(), parsed(module).body
        place = next(i for i, node in enumerate(body) if node.lineno == own[name].lineno)
        return Found(source, own[name], _string(body[place + 1]) if place + 1 < len(body) else "")
    origin = reexports(module).get(name) or _imported_from(module, name)
    return find(origin, name)


def _imported_from(module: str, name: str) -> str:
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return str(node.module)
    raise KeyError(f"{module} has no {name}")


def _string(node: ast.AST | None) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return str(node.value.value) if is_text else ""  # type: ignore[union-attr, attr-defined]


def markdown(docstring: str) -> str:
    """A docstring with Google sections as Markdown; the rest of our docstrings is Markdown already."""
    lines, parts = textwrap.dedent(docstring).strip().splitlines(), []
    first, rest = lines[:1], textwrap.dedent("\n".join(lines[1:])).splitlines()
    lines, text = [*first, *rest], []
    while lines:
        line = lines.pop(0)
        match = SECTION.fullmatch(line)
        if not match:
            text.append(line)
            continue
        parts, body = [match[2]] if match[2] else [], []
        while lines and (not lines[0].strip() or lines[0].startswith(" ")):
            body.append(lines.pop(0))
        body = textwrap.dedent("\n".join([*body])).splitlines()
        text += ["", *_section(match[1], parts, body), ""]
    return "\n".join(text)


def _section(kind: str, opening: list[str], body: list[str]) -> Iterator[str]:
    if kind == "Example":
        yield from ("**Example**", "", "```pycon", *opening, *(line for line in body if line.strip()), "```")
    elif kind in LISTS:
        yield from (f"**{LISTS[kind]}**", "")
        for entry in _entries([*opening, *body]):
            name, colon, meaning = entry.partition(": ")
            yield f"- `{name.strip('`')}`: {meaning}" if colon and " " not in name.rstrip() else f"- {entry}"
    else:
        yield from (f"**{kind}**", "", *opening, *body)


def _entries(lines: list[str]) -> list[str]:
    """`name: text` entries; deeper lines go on with the one before."""
    entries: list[str] = []
    for line in lines:
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        elif line.strip():
            entries.append(line.strip())
    return entries


def _signature(source: str, node: ast.FunctionDef) -> str:
    """The `def` as written, decorators included, without its body."""
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    lines = source.splitlines()[first - 1 : max(node.body[0].lineno - 1, node.lineno)]
    return textwrap.dedent("\n".join(lines)).rstrip().removesuffix(":").replace("(\n    self,\n", "(\n")


def _class_head(source: str, node: ast.ClassDef) -> str:
    """Bases and fields."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign | ast.Assign)]
    shown = [text for item in fields if not (text := ast.get_source_segment(source, item) or "").startswith("_")]
    decorators = [f"@{ast.unparse(item)}" for item in node.decorator_list if "dataclass" in ast.unparse(item)]
    head = f"class {node.name}({bases})" if bases else f"class {node.name}"
    return "\n".join([*decorators, head + (":" if shown else ""), *(f"    {field}" for field in shown)])


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def entry(module: str, name: str) -> list[str]:
    """Heading, signature and text of one public name."""
    try:
        source, node, text = find(module, name)
    except KeyError as problem:
        raise SystemExit(f"reference: {problem}") from None
    lines = [f"% {module}.{name}", "", f"### `{name}`", ""]  # the comment is what tests read
    if isinstance(node, ast.FunctionDef):
        return [*lines, *_code(_signature(source, node)), markdown(ast.get_docstring(node, clean=False) or ""), ""]
    if not isinstance(node, ast.ClassDef):
        return [*lines, *_code(ast.get_source_segment(source, node) or ""), markdown(text), ""]
    lines += [*_code(_class_head(source, node)), markdown(ast.get_docstring(node, clean=False) or ""), ""]
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or (method.name.startswith("_") and method.name != "__init__"):
            continue
        own = ast.get_docstring(method, clean=False) or ""
        if own or method.name == "__init__":
            lines += [*_code(_signature(source, method)), markdown(own), ""]
    return lines


def rooms() -> dict[str, list[str]]:
    """Modules of each page, by room."""
    pages = {"rsembed": ["rsembed"]}
    package = ROOT / "rsembed"
    for path in sorted(package.iterdir()):
        room = path.stem
        if (path / "__init__.py").is_file():
            own = [f"rsembed.{room}"] if reexports(f"rsembed.{room}") else []
            modules = [*own, *(f"rsembed.{room}.{module}" for module in PUBLISHED_MODULES.get(room, []))]
            if modules:
                pages[room] = modules
        elif room in {"checkpoint", "linen", "nnx", "progress"}:
            pages[room] = [f"rsembed.{room}"]
    order = list(TITLES)
    return dict(sorted(pages.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))


def page(room: str, modules: list[str]) -> str:
    """The whole page of a room."""
    lines = [f"# {TITLES.get(room, room.capitalize())}", ""]
    for module in modules:
        about = ast.get_docstring(parsed(module)) or ""
        names = public_names(module)
        lines += [f"## `{module}`", "", about, ""]
        for name in names:
            lines += entry(module, name)
    return "\n".join(lines)


def write(folder: Path) -> None:
    """All pages and their table of contents."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = rooms()
    for room, modules in pages.items():
        (folder / f"{room}.md").write_text(page(room, modules))
    contents = [
        "# Reference", "",
        "Every public name, by room. Shapes stand in the signatures, in the notation of jaxtyping: "
        '`Float[Array, "rows dim"]` is an array of floats with two axes; equal names are equal sizes.',
        "", "```{toctree}", ":maxdepth: 1", "", *pages, "```", "",
    ]  # fmt: skip
    (folder / "index.md").write_text("\n".join(contents))
