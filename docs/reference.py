"""Writes the pages of the reference: one page for each room, and one entry for each public object.

Sphinx's autodoc fills the entries.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from types import ModuleType, NoneType
from typing import Any, TypeVar

PAGES = {
    "rsembed": ("The core", ["rsembed"]),
    "nnx": ("Layers of Flax NNX", ["rsembed.nnx"]),
    "linen": ("Layers of Flax Linen", ["rsembed.linen"]),
    "optimizers": ("Optimizers", ["rsembed.optimizers"]),
    "kernels": ("Kernels", ["rsembed.kernels.api"]),
    "parallel": ("Devices", ["rsembed.parallel"]),
    "storage": ("Where rows are kept", ["rsembed.storage"]),
    "fdo": ("Statistics and limits", ["rsembed.fdo"]),
    "checkpoint": ("Checkpoints", ["rsembed.checkpoint"]),
    "sparsecore": (
        "The SparseCore wing",
        [
            "rsembed.sparsecore",
            "rsembed.sparsecore.embedding",
            "rsembed.sparsecore.embedding_spec",
            "rsembed.sparsecore.table_stacking",
            "rsembed.sparsecore.utils",
            "rsembed.sparsecore.linen.embed",
            "rsembed.sparsecore.linen.embed_optimizer",
            "rsembed.sparsecore.nnx.embed",
            "rsembed.sparsecore.embedding_pipelining_utils",
        ],
    ),
    "tbe": ("The TBE wing", ["rsembed.tbe", "rsembed.tbe.functional"]),
    "tt": ("The tensor-train wing", ["rsembed.tt"]),
    "sok": ("The SOK wing", ["rsembed.sok", "rsembed.sok.optimizers"]),
    "plot": ("Pictures", ["rsembed.plot"]),
    "datasets": ("Data", ["rsembed.datasets"]),
    "collection": ("Collections", ["rsembed.collection"]),
    "progress": ("Progress", ["rsembed.progress"]),
}
GROUPS = {
    "The library": [
        "rsembed",
        "optimizers",
        "nnx",
        "linen",
        "parallel",
        "datasets",
        "plot",
        "checkpoint",
        "fdo",
    ],
    "For programs written for another system": ["sparsecore", "tbe", "tt", "sok"],
    "For those who extend the library": ["collection", "storage", "kernels", "progress"],
}
MODULES = [module for _, modules in PAGES.values() for module in modules]


@functools.cache
def public_names(name: str) -> list[str]:
    """Names that users may import from a module, sorted.

    These are the names that the module exports as `x as x` or in `__all__`. If the module is not a
    package, they are also the names that it defines.
    """
    module = importlib.import_module(name)
    source = Path(str(module.__file__)).read_text()
    names = {*re.findall(r"\b(\w+) as \1\b", source), *getattr(module, "__all__", ())}
    if not hasattr(module, "__path__"):
        names |= {
            key for key, value in vars(module).items() if getattr(value, "__module__", None) == name
        }
        # Constants have no `__module__`.
        names |= set(re.findall(r"^(\w+)(?:: [^=\n]+)? = ", source, re.MULTILINE))
    shown = []
    for public_name in names:
        if public_name.startswith("_"):
            continue
        if not isinstance(getattr(module, public_name), ModuleType | TypeVar):
            shown.append(public_name)
    return sorted(shown, key=lambda key: (key.lower(), key))


def found(name: str) -> object:
    """The object with a dotted name, such as `rsembed.Bags`."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def kind(value: object) -> str:
    """Kind of an object in autodoc: class, function (also a jitted one), or data."""
    # Some constants are NoneType: the type of a result that a stage of a pipeline does not have.
    if inspect.isclass(value) and value is not NoneType:
        return "class"
    if inspect.isfunction(inspect.unwrap(value)):  # type: ignore[arg-type]
        return "function"
    return "data"


@functools.cache
def entries() -> dict[str, str]:
    """Name of the entry of each public object, by each of its dotted names.

    The keys are names in all modules that export an object, and in the module that defines it. The
    object has one entry, in the first module that exports it. The entries of optimizers are on
    their own page, even if another module exports them, too.
    """
    first: dict[object, str] = {}
    where: dict[str, str] = {}
    for module in ["rsembed.optimizers", *MODULES]:
        for name in public_names(module):
            value = found(f"{module}.{name}")
            is_itself = kind(value) != "data" and value.__name__ == name
            key = value if is_itself else (name, id(value))
            where[f"{module}.{name}"] = first.setdefault(key, f"{module}.{name}")
            if key is value:
                where[f"{value.__module__}.{name}"] = first[key]
    for module in ["rsembed.optimizers", *MODULES]:
        where |= {name: name for name in records(module) if name not in where}
    return where


@functools.cache
def records(module: str) -> list[str]:
    """Dotted names of classes that users of a module get, even if no module exports them.

    These are classes of the module, classes that its functions return, and classes in annotations
    of its classes. Classes are left out if the reference has the module that defines them.
    """
    values = []
    for name in public_names(module):
        value = found(f"{module}.{name}")
        if kind(value) == "data":
            continue
        origin: Any = inspect.unwrap(value)  # type: ignore[arg-type]
        hints = getattr(origin, "__annotations__", {})
        types = hints.values() if inspect.isclass(value) else [hints["return"]]
        known = vars(importlib.import_module(origin.__module__))
        values.append(value)
        for word in re.findall(r"\b[A-Z]\w+", " ".join(map(str, types))):
            values.append(known.get(word))
    names = set()
    for item in values:
        is_documented = inspect.isclass(item) and item.__doc__
        if not is_documented or getattr(item, "_is_protocol", False):
            continue
        if item.__module__ not in MODULES:
            names.add(f"{item.__module__}.{item.__name__}")
    return sorted(place for place in names if place.startswith("rsembed."))


def summary(value: object) -> str:
    """First line of the docstring of a class or function, or "" for data."""
    if kind(value) == "data":
        return ""
    first_line = (inspect.getdoc(value) or "").partition("\n")[0]
    return _with_apart_code(first_line)


def told_of_constant(name: str) -> str:
    """Docstring below the definition of a constant, which may be in another module."""
    module, _, constant = name.rpartition(".")
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    if origin := re.search(rf"^from ([\w.]+) import .*\b{constant}\b", source, re.M):
        return told_of_constant(f"{origin[1]}.{constant}")
    text = re.search(rf'^{constant}\b[^=\n]* = .*\n"""((?:.|\n)*?)"""', source, re.M)
    return text[1] if text else ""


def _with_apart_code(text: str) -> str:
    """A text with a mark between code and the letters after it, as in `Array`s.

    Without the mark, reStructuredText would not read it as code.
    """
    return re.sub(r"(`[^`]+`)(\w?)", lambda code: "\\ ".join(filter(None, code.groups())), text)


def restructured(text: str) -> str:
    """A docstring in Markdown as reStructuredText, with the sections of Sphinx's napoleon."""
    text = re.sub(
        r"^```\n(.*?)^```$",
        lambda block: "::\n\n" + indent(block[1], "  "),
        text,
        flags=re.M | re.S,
    )
    text = _with_apart_code(text)
    # In a section `Returns`, napoleon would read the text before the first colon as a type.
    text = re.sub(r"^Returns: ", "\n:returns: ", text, flags=re.M)
    return re.sub(
        r"^(Args|Attributes|Raises|Yields|Source|Example): (?=\S)", r"\1:\n ", text, flags=re.M
    )


def with_all_arguments(record: type, text: str) -> str:
    """The docstring of a dataclass, with more fields if it does not describe all of them.

    The descriptions come from a base class, or from the interval of a field.
    """
    texts = []
    for field in dataclasses.fields(record):
        if not field.init or f"\n  {field.name}: " in text:
            continue
        meaning = _meaning(record, field)
        if meaning:
            texts.append(f"  {field.name}: {meaning}")
    if not texts:
        return text
    if "Args:\n" not in text:
        text = f"{text.rstrip()}\n\nArgs:\n"
    return text.replace("Args:\n", "\n".join(["Args:", *texts, ""]), 1)


# Texts for default values that are functions, by the name of the function.
LAWS = {"default_initializer": "normal(stddev=1/sqrt(embedding_dim))"}


def with_defaults(record: type, signature: str) -> str:
    """The signature of a dataclass, with values of default factories in place of `<factory>`."""
    for field in dataclasses.fields(record):
        if field.default_factory is dataclasses.MISSING:
            continue
        value = field.default_factory()
        shown = repr(value)
        if callable(value):
            shown = LAWS.get(getattr(value, "__name__", ""), shown)
        start = signature.find(f"{field.name}: ")
        head, tail = signature[:start], signature[start:]
        signature = head + tail.replace("<factory>", shown, 1)
    return signature


def _meaning(record: type, field: dataclasses.Field[Any]) -> str:
    entry = rf"^  {field.name}: (.*(?:\n    .*)*)"
    for base in record.__mro__[1:]:
        if match := re.search(entry, inspect.getdoc(base) or "", re.M):
            return match[1]
    interval = field.metadata.get("interval")
    return f"in {interval}." if interval else ""


@functools.cache
def words() -> dict[str, str]:
    """Names of entries by names in texts, such as `rsembed.sok.Init` and `sok.Init`.

    A text may also name a class without its module, such as `Bags`, if no other class has the name.
    """
    bare: dict[str, set[str]] = {}
    for name in entries().values():
        bare.setdefault(name.rpartition(".")[2], set()).add(name)
    short = {name.removeprefix("rsembed."): entry for name, entry in entries().items()}
    classes = {
        word: min(names) for word, names in bare.items() if word[0].isupper() and len(names) == 1
    }
    modules = {name: name for name in MODULES if "." in name}
    return (
        modules
        | entries()
        | {name: entry for name, entry in short.items() if "." in name}
        | classes
    )


def target(code: str) -> str | None:
    """Name of the entry for code in a text, such as `rs.Bags` or `collection.lookup(...)`.

    None if the code names no public object.
    """
    match = re.fullmatch(r"(?:(rs)\.|(collection)\.)?([\w.]+)(?:\([^()]*\))?", code)
    if match is None:
        return None
    prefix = ""
    if match[1]:
        prefix = "rsembed."
    elif match[2]:
        prefix = "rsembed.EmbeddingCollection."
    parts = (prefix + match[3]).split(".")
    for length in range(len(parts), 0, -1):
        if owner := words().get(".".join(parts[:length])):
            return ".".join([owner, *parts[length:]])
    return None


def where_described(member: str) -> Iterator[str]:
    """Yields the names of entries that may describe a member of a class.

    These are the entries of the member in the class and its base classes. The last name is that of
    the class itself, because its text may describe a member without an entry.
    """
    owner, _, name = member.rpartition(".")
    if owner not in entries():
        return
    value = found(owner)
    if not inspect.isclass(value):
        return
    for base in value.__mro__:
        origin = f"{base.__module__}.{base.__name__}"
        if origin in entries():
            yield f"{entries()[origin]}.{name}"
    yield entries().get(f"{value.__module__}.{value.__name__}", owner)


def page(room: str) -> str:
    """Text of the page of a room, in reStructuredText."""
    title, modules = PAGES[room]
    (purpose,) = (group for group, rooms in GROUPS.items() if room in rooms)
    lines = [title, "=" * len(title), "", f"*{purpose}.*", ""]
    for module in modules:
        lines += _part(module)
    return "\n".join(lines)


def _part(module: str) -> Iterator[str]:
    """Yields the lines of a page about a module."""
    heading = f"``{module}``"
    yield from (
        heading,
        "-" * len(heading),
        "",
        f".. automodule:: {module}",
        "",
        ".. currentmodule:: None",
        "",
    )
    names = [f"{module}.{name}" for name in public_names(module)]
    yield from (".. list-table::", "   :widths: auto", "   :class: names", "")
    for name in names:
        yield from (f"   * - :py:obj:`~{entries()[name]}`", f"     - {summary(found(name))}")
    yield ""
    earlier_records = set()
    for other in MODULES[: MODULES.index(module)]:
        earlier_records |= set(records(other))
    names += [name for name in records(module) if name not in earlier_records]
    for name in names:
        if entries()[name] != name:
            continue
        value = found(name)
        options = []
        if kind(value) == "class":
            options += ["   :members:", f"   :inherited-members: {_described_apart(value)}"]
        bases = getattr(value, "__bases__", ())
        names_of_bases = {f"{base.__module__}.{base.__name__}" for base in bases}
        if names_of_bases & set(entries()):
            options.append("   :show-inheritance:")
        if "<module" in repr(value):
            # The value of a module has a path on this machine.
            options.append("   :no-value:")
        yield from (f".. auto{kind(value)}:: {name}", *options, "")


def _described_apart(value: Any) -> str:
    """Names of base classes with members that an entry leaves out.

    These are base classes with entries, and those of other packages.
    """
    names = []
    for base in value.__mro__[1:]:
        is_of_us = base.__module__.partition(".")[0] == "rsembed"
        if not is_of_us or f"{base.__module__}.{base.__name__}" in entries():
            names.append(base.__name__)
    return ", ".join(names)


def write(folder: Path) -> None:
    """Writes all pages and their table of contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for room in PAGES:
        (folder / f"{room}.rst").write_text(page(room))
    text = (
        "# Reference\n\nEvery public name, by room. Shapes are in the signatures, in the notation of jaxtyping: "
        '`Float[Array, "rows dim"]` is an array of floats with two axes; equal names are equal sizes.\n'
    )
    lines = [text]
    for name, rooms in GROUPS.items():
        lines += ["```{toctree}", f":caption: {name}", ":maxdepth: 1", "", *rooms, "```", ""]
    (folder / "index.md").write_text("\n".join(lines))
