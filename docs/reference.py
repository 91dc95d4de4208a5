"""What the reference has and where: one page per room, one entry per object. Sphinx's autodoc writes the entries."""

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
            f"rsembed.sparsecore{module}"
            for module in (
                *("", ".embedding", ".embedding_spec", ".table_stacking", ".utils", ".linen.embed"),
                *(".linen.embed_optimizer", ".nnx.embed", ".embedding_pipelining_utils"),
            )
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
    """Every name that users may import from the module: its own, and what it passes on as `x as x` or in `__all__`."""
    module = importlib.import_module(name)
    source = Path(str(module.__file__)).read_text()
    names = {*re.findall(r"\b(\w+) as \1\b", source), *getattr(module, "__all__", ())}
    if not hasattr(module, "__path__"):
        names |= {
            key for key, value in vars(module).items() if getattr(value, "__module__", None) == name
        }
        names |= set(re.findall(r"^(\w+)(?:: [^=\n]+)? = ", source, re.MULTILINE))  # constants
    shown = [
        n
        for n in names
        if not (n.startswith("_") or isinstance(getattr(module, n), ModuleType | TypeVar))
    ]
    return sorted(shown, key=lambda key: (key.lower(), key))


def found(name: str) -> object:
    """The object behind a dotted name of the reference."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def kind(value: object) -> str:
    """What autodoc calls it: class, function (also one behind `jax.jit`), or data."""
    # Which stands for what a stage does not pass on.
    if inspect.isclass(value) and value is not NoneType:
        return "class"
    return "function" if inspect.isfunction(inspect.unwrap(value)) else "data"  # type: ignore[arg-type]


@functools.cache
def entries() -> dict[str, str]:
    """By every public dotted name, and by where an object is defined: the name under which its one entry stands.

    That is the first place which passes the object on; rules stand together on their own page.
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
    """Places of classes that users of a module get and need not name: functions return them, or records hold them."""
    values = []
    for name in public_names(module):
        value = found(f"{module}.{name}")
        if kind(value) == "data":
            continue
        origin: Any = inspect.unwrap(value)  # type: ignore[arg-type]
        hints = getattr(origin, "__annotations__", {})
        types = hints.values() if inspect.isclass(value) else [hints["return"]]
        known = vars(importlib.import_module(origin.__module__))
        values += [
            value,
            *(known.get(word) for word in re.findall(r"\b[A-Z]\w+", " ".join(map(str, types)))),
        ]
    classes = {
        item
        for item in values
        if inspect.isclass(item) and item.__doc__ and not getattr(item, "_is_protocol", False)
    }
    names = {
        f"{item.__module__}.{item.__name__}" for item in classes if item.__module__ not in MODULES
    }
    return sorted(place for place in names if place.startswith("rsembed."))


def summary(value: object) -> str:
    """The first line of a docstring; numbers and types tell that of their class, which says nothing of them."""
    return (
        ""
        if kind(value) == "data"
        else _with_apart_code((inspect.getdoc(value) or "").partition("\n")[0])
    )


def told_of_constant(name: str) -> str:
    """What stands below a constant where it is defined, from which its module may have imported it."""
    module, _, constant = name.rpartition(".")
    source = Path(str(importlib.import_module(module).__file__)).read_text()
    if origin := re.search(rf"^from ([\w.]+) import .*\b{constant}\b", source, re.M):
        return told_of_constant(f"{origin[1]}.{constant}")
    text = re.search(rf'^{constant}\b[^=\n]* = .*\n"""((?:.|\n)*?)"""', source, re.M)
    return text[1] if text else ""


def _with_apart_code(text: str) -> str:
    """`Array`s, which reStructuredText does not read as code: a mark goes between it and the letters behind."""
    return re.sub(r"(`[^`]+`)(\w?)", lambda code: "\\ ".join(filter(None, code.groups())), text)


def restructured(text: str) -> str:
    """A docstring in Markdown as reStructuredText, its sections as Sphinx's napoleon wants them."""
    text = re.sub(
        r"^```\n(.*?)^```$",
        lambda block: "::\n\n" + indent(block[1], "  "),
        text,
        flags=re.M | re.S,
    )
    text = _with_apart_code(text)
    text = re.sub(r"^Returns: ", "\n:returns: ", text, flags=re.M)  # whose first colon ends no type
    return re.sub(
        r"^(Args|Attributes|Raises|Yields|Source|Example): (?=\S)", r"\1:\n ", text, flags=re.M
    )


def with_all_arguments(record: type, text: str) -> str:
    """The docstring of a dataclass with those fields, too, that a base class describes or an interval bounds."""
    fields = [
        field
        for field in dataclasses.fields(record)
        if field.init and f"\n  {field.name}: " not in text
    ]
    texts = [
        f"  {field.name}: {meaning}" for field in fields if (meaning := _meaning(record, field))
    ]
    if not texts:
        return text
    if "Args:\n" not in text:
        text = f"{text.rstrip()}\n\nArgs:\n"
    return text.replace("Args:\n", "\n".join(["Args:", *texts, ""]), 1)


# What a signature shows in the place of a function that is a default.
LAWS = {"default_initializer": "normal(stddev=1/sqrt(embedding_dim))"}


def with_defaults(record: type, signature: str) -> str:
    """The signature of a dataclass with the values that its factories make, instead of `<factory>`."""
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
    for base in record.__mro__[1:]:
        if match := re.search(
            rf"^  {field.name}: (.*(?:\n    .*)*)", inspect.getdoc(base) or "", re.M
        ):
            return match[1]
    interval = field.metadata.get("interval")
    return f"in {interval}." if interval else ""


@functools.cache
def words() -> dict[str, str]:
    """Entries by what texts call them: `rsembed.sok.Init`, `sok.Init`, and `Bags`, where one class is called so."""
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
    """The entry that a piece of code in a text means, such as `rs.Bags` or `collection.lookup(...)`; or None."""
    match = re.fullmatch(r"(?:(rs)\.|(collection)\.)?([\w.]+)(?:\([^()]*\))?", code)
    if match is None:
        return None
    prefix = "rsembed." if match[1] else "rsembed.EmbeddingCollection." if match[2] else ""
    parts = (prefix + match[3]).split(".")
    for length in range(len(parts), 0, -1):
        if owner := words().get(".".join(parts[:length])):
            return ".".join([owner, *parts[length:]])
    return None


def where_described(member: str) -> Iterator[str]:
    """Where a member may have its entry that has none below its class: there under its other names, in a base class.

    The last is the class itself, whose text may tell of a member without an entry.
    """
    owner, _, name = member.rpartition(".")
    if inspect.isclass(value := found(owner) if owner in entries() else None):
        origins = (f"{base.__module__}.{base.__name__}" for base in value.__mro__)
        yield from (f"{entries()[origin]}.{name}" for origin in origins if origin in entries())
        yield entries().get(f"{value.__module__}.{value.__name__}", owner)


def page(room: str) -> str:
    """The page of a room, for Sphinx."""
    title, modules = PAGES[room]
    (purpose,) = (group for group, rooms in GROUPS.items() if room in rooms)
    head = [title, "=" * len(title), "", f"*{purpose}.*", ""]
    return "\n".join([*head, *(line for module in modules for line in _part(module))])


def _part(module: str) -> Iterator[str]:
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
    earlier = {name for other in MODULES[: MODULES.index(module)] for name in records(other)}
    for name in [*names, *(name for name in records(module) if name not in earlier)]:
        if entries()[name] == name:
            value = found(name)
            options = (
                ["   :members:", f"   :inherited-members: {_described_apart(value)}"]
                if kind(value) == "class"
                else []
            )
            bases = {
                f"{base.__module__}.{base.__name__}" for base in getattr(value, "__bases__", ())
            }
            options += ["   :show-inheritance:"] if bases & set(entries()) else []
            # And where this machine has it.
            options += ["   :no-value:"] if "<module" in repr(value) else []
            yield from (f".. auto{kind(value)}:: {name}", *options, "")


def _described_apart(value: Any) -> str:
    """Bases whose members an entry leaves out: those with entries of their own, and other packages'."""
    bases = [(base.__module__, base.__name__) for base in value.__mro__[1:]]
    return ", ".join(
        n for m, n in bases if f"{m}.{n}" in entries() or m.partition(".")[0] != "rsembed"
    )


def write(folder: Path) -> None:
    """All pages and their table of contents."""
    folder.mkdir(parents=True, exist_ok=True)
    for room in PAGES:
        (folder / f"{room}.rst").write_text(page(room))
    text = (
        "# Reference\n\nEvery public name, by room. Shapes are in the signatures, in the notation of jaxtyping: "
        '`Float[Array, "rows dim"]` is an array of floats with two axes; equal names are equal sizes.\n'
    )
    trees = [
        ["```{toctree}", f":caption: {name}", ":maxdepth: 1", "", *rooms, "```", ""]
        for name, rooms in GROUPS.items()
    ]
    (folder / "index.md").write_text("\n".join([text, *(line for tree in trees for line in tree)]))
