"""Public names and arguments of jax-tpu-embedding, recorded, and the page that tells where each of them is here.

Run as a program, `python -m tests.sparsecore.published_names [folder of the package]` reads the package (0.1.0), where
a folder is given, and writes the record and the table in docs/migration.md.
"""

import ast
import importlib
import inspect
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
RECORD, PAGE = ROOT / "tests" / "data" / "sparsecore_names.json", ROOT / "docs" / "migration.md"
BEGIN, END = "<!-- names: written by tests/sparsecore/published_names.py -->\n", "<!-- end of names -->\n"

HERE = {
    "lib.nn.embedding": "sparsecore.embedding",
    "lib.nn.embedding_spec": "sparsecore.embedding_spec",
    "lib.nn.table_stacking": "sparsecore.table_stacking",
    "lib.nn.embedding_pipelining_utils": "sparsecore.embedding_pipelining_utils",
    "lib.flax.linen.embed": "sparsecore.linen.embed",
    "lib.flax.linen.embed_optimizer": "sparsecore.linen.embed_optimizer",
    "lib.flax.nnx.embed": "sparsecore.nnx.embed",
    "lib.fdo.fdo_client": "fdo.client",
    "lib.fdo.file_fdo_client": "fdo.file_fdo_client",
    "lib.fdo.csv_file_fdo_client": "fdo.csv_file_fdo_client",
    "utils.utils": "sparsecore.utils",
}
"""Where the names of a module are, below `rsembed`."""

TYPING = "a type variable or alias that only annotations use"
LOWERING = "a program for TPUs; every rule here is a function of JAX, see `CustomOptimizerSpec`"
PLACES = "`dataclasses.replace` would carry a place to a table of another size; set the public property instead"
CHECKPOINTS = "other items in files than here; `rsembed.checkpoint` keeps logical tables, which any topology restores"
REFUSED = {
    "lib.auto_pipelining": "takes a traced step apart by its TPU primitives; give the three parts of yours to "
    "`rsembed.sparsecore.pipelining.step`",
    "lib.core.constants": "padding is `rsembed.kernels.contract.NO_ROW`, the same number",
    "lib.core.input_preprocessing": "a slow reference for one table; what its aliases name, arrays and ragged rows, is "
    "taken by `rsembed.sparsecore.embedding.preprocess_sparse_dense_matmul_input`",
    "lib.core.primitives": "TPU custom calls; `sparse_dense_matmul` and its gradient run on every backend",
    "lib.proto.embedding_spec_pb2": "`EmbeddingSpecRecord` is written as JSON, with the published field names",
    "lib.flax.nnx.checkpoint_utils": CHECKPOINTS,
    "lib.flax.nnx.offline_converter": CHECKPOINTS,
    "lib.nn.custom_optimizer_lowering": LOWERING,
    "lib.nn.embedding.T": TYPING,
    "lib.nn.table_stacking.T": TYPING,
    "lib.nn.table_stacking.Shape": TYPING,
    "lib.nn.table_stacking.Indexer": TYPING,
    "lib.nn.table_stacking.ArrayLike": TYPING,
    "lib.flax.linen.embed.LogicalNames": TYPING,
    "lib.flax.linen.embed.Nested": TYPING,
    "lib.flax.linen.embed.A": TYPING,
    "lib.nn.embedding.SparseDenseMatmulInputStats.from_cc": "there is no C++ object to copy from",
    "get_optimizer_primitive": LOWERING,
    "lib.nn.embedding_spec.TableSpec(_stacked_table_spec)": PLACES,
    "lib.nn.embedding_spec.TableSpec(_setting_in_stack)": PLACES,
    "lib.nn.embedding_spec.FeatureSpec(_id_transformation)": PLACES,
}
"""Why a module, a name, or an argument of a name is not here."""


def _arguments(function):
    given = function.args
    if any("property" in ast.unparse(by) or ".setter" in ast.unparse(by) for by in function.decorator_list):
        return []
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs) if a.arg not in ("self", "cls", "_")]


def _is_public(name):
    return not name.startswith("_")


def _names_of(module):
    """Public names of a module's source, with arguments; of classes also those of their methods."""
    names = {}
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = _arguments(node)
        elif isinstance(node, ast.ClassDef):
            own = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)}
            fields = [
                part for part in node.body if isinstance(part, ast.AnnAssign) and "init=False" not in ast.unparse(part)
            ]
            made_by = own.get("__init__")
            names[node.name] = _arguments(made_by) if made_by else [field.target.id for field in fields]
            names |= {
                f"{node.name}.{name}": _arguments(part)
                for name, part in own.items()
                if _is_public(name) and name != "setup"
            }
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return {name: arguments for name, arguments in names.items() if _is_public(name)}


def published(folder):
    """What the package in a folder has: names and their arguments, by module."""
    result = {}
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        names = _names_of(ast.parse(path.read_text()))
        if path.stem not in ("__init__", "version") and names:
            result[".".join(path.relative_to(folder).with_suffix("").parts)] = names
    return result


def refusal(key):
    """Why a name is refused, by itself, or as what belongs to a module, or as a method of any class; None if not."""
    owners = [owner for owner in REFUSED if f"{key}.".startswith(f"{owner}.") or key.endswith(f".{owner}")]
    return REFUSED[owners[0]] if owners else None


def resolve(place):
    """The object at `rsembed.<module>.<name>`."""
    parts = place.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(place)


def accepted(place, arguments):
    """Those of the arguments that the object at a place takes."""
    if not arguments:
        return []
    own = inspect.signature(resolve(place)).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values())
    return [name for name in arguments if name in own or takes_any]


def rows(record):
    """The lines of the page's table. Raises: AssertionError: a name or argument is neither here nor refused."""
    lines = []
    for module, names in sorted((record["package"] | record["elsewhere"]).items()):
        reason = refusal(module)
        if reason:
            listed = ", ".join(f"`{name}`" for name in names) or "all"
            lines.append(f"| `{module}`: {listed} | refused: {reason} | |")
            continue
        for name, arguments in names.items():
            key, place = f"{module}.{name}", f"rsembed.{HERE[module]}.{name}"
            if refusal(key):
                lines.append(f"| `{key}` | refused: {refusal(key)} | |")
                continue
            taken = accepted(place, arguments)
            told = [", ".join(taken)] if taken else []
            for argument in arguments:
                if argument not in taken:
                    reason = REFUSED.get(f"{key}({argument})")
                    assert reason, f"{key}: {argument} is neither an argument of {place} nor refused"
                    told.append(f"refused: {argument} ({reason})")
            resolve(place)
            lines.append(f"| `{key}` | `{place}` | {'; '.join(told)} |")
    return lines


def table(record):
    """The page's table, as text."""
    head = ["| published | here | arguments |", "|---|---|---|"]
    return "\n".join([*head, *rows(record)]) + "\n"


def as_text(record):
    """The record in JSON, a name a line."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[^\]{}]*\]", lambda found: " ".join(found.group().split()), text) + "\n"


def main(folder=None):
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"version": "0.1.0", "elsewhere": {}}
    if folder:
        record["package"] = published(folder)
    RECORD.write_text(as_text(record))
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(before + BEGIN + table(record) + END + rest.split(END)[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
