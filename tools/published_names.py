"""Public names and arguments of four systems, recorded, and the pages that tell where each of them is here.

Run as a program, `python -m tools.published_names` writes the tables of docs/names-*.md. The records hold one
published version each: those of the SparseCore API and of FBGEMM were read from the packages, the other two, which
cannot be installed everywhere, were written by hand from their pages and sources.
"""

import dataclasses
import enum
import functools
import importlib
import importlib.util
import inspect
import json
import pathlib
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class System:
    """One of those whose programs run here.

    Args:
      name: of its record, and of its table on the page.
      here: where the names of a module are, below `rsembed`.
      places: where single names are, if elsewhere, as a whole.
      options: where the arguments go that a function or class takes as `**options`.
      renamed: what an argument is called here.
    """

    name: str
    here: Mapping[str, str]
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def file(self):
        """The record."""
        return ROOT / "tests" / "data" / f"{self.name}_names.json"

    @property
    def page(self):
        """The page that ends with its table."""
        return ROOT / "docs" / f"names-{self.name}.md"

    @property
    def begin(self):
        """The line of the page before its table."""
        return f"<!-- names of {self.name}: written by tools/published_names.py -->\n"

    def record(self):
        """The recorded names, their arguments by module and name, and by reason what of them is not here."""
        return json.loads(self.file.read_text())

    @functools.cached_property
    def refused(self):
        """Why modules, names and arguments, `name(argument)`, are not here, or are refused by what reads them."""
        return {
            name: reason for reason, names in self.record()["refused"].items() for name in names
        }

    def place(self, key):
        """Where a published name is here, if it is."""
        module = next(package for package in self.here if f"{key}.".startswith(f"{package}."))
        return self.places.get(key, f"rsembed.{self.here[module]}{key.removeprefix(module)}")

    def refusal(self, key):
        """Why a name or an argument is refused, or what it belongs to; else None."""
        return next(
            (reason for name, reason in self.refused.items() if f".{name}." in f".{key}."), None
        )


SPARSECORE = System(
    "sparsecore",
    here={
        "lib.nn.embedding": "sparsecore.embedding",
        "lib.nn.embedding_spec": "sparsecore.embedding_spec",
        "lib.nn.table_stacking": "sparsecore.table_stacking",
        "lib.nn.embedding_proto_utils": "sparsecore.embedding",
        "lib.nn.embedding_pipelining_utils": "sparsecore.embedding_pipelining_utils",
        "lib.flax.linen.embed": "sparsecore.linen.embed",
        "lib.flax.linen.embed_optimizer": "sparsecore.linen.embed_optimizer",
        "lib.flax.nnx.embed": "sparsecore.nnx.embed",
        "lib.fdo.fdo_client": "fdo",
        "lib.fdo.file_fdo_client": "fdo",
        "lib.fdo.csv_file_fdo_client": "fdo",
        "utils.utils": "sparsecore.utils",
    },
    options={
        "rsembed.sparsecore.embedding.auto_stack_tables": "rsembed.sparsecore.table_stacking.auto_stack_tables",
        "rsembed.sparsecore.embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor": (
            "rsembed.sparsecore.embedding.preprocess_sparse_dense_matmul_input"
        ),
    },
)
_TBE_MODULE = "split_table_batched_embeddings_ops_training"
TBE = System(
    "tbe",
    here={_TBE_MODULE: "tbe"},
    places={
        f"{_TBE_MODULE}.SplitTableBatchedEmbeddingBagsCodegen.forward": (
            "rsembed.tbe.SplitTableBatchedEmbeddingBagsCodegen.__call__"
        )
    },
)
_TRAINS = ("TTEmbeddingBag", "TableBatchedTTEmbeddingBag")
TT = System(
    "tt",
    here={"tt_embeddings_ops": "tt"},
    places={f"tt_embeddings_ops.{name}.forward": f"rsembed.tt.{name}.__call__" for name in _TRAINS},
    options={"rsembed.tt.TTEmbeddingBag": "rsembed.tt.TableBatchedTTEmbeddingBag"},
)
_ADAM = "tf.keras.optimizers"
_SOK_LAYERS = ("DistributedEmbedding", "All2AllDenseEmbedding")
SOK = System(
    "sok",
    here={"sok": "sok", "deeprec": "sok"},
    places={f"sok.{name}.call": f"rsembed.sok.{name}.__call__" for name in _SOK_LAYERS}
    | {
        f"sok.{_ADAM}.adam.Adam": "rsembed.sok.optimizers.Adam",
        f"sok.{_ADAM}.lazy_adam.LazyAdamOptimizer": "rsembed.sok.optimizers.LazyAdam",
    },
    renamed={f"sok.{name}.call(inputs)": "keys" for name in _SOK_LAYERS}
    | {"sok.dump(dump_vars)": "variables", "sok.load(load_vars)": "variables"},
    options={f"rsembed.sok.{name}": "rsembed.sok.layers._Layer" for name in _SOK_LAYERS}
    | {
        "rsembed.sok.layers._Layer": "rsembed.sok.embedding_variable",
        "rsembed.sok.embedding_variable": "rsembed.Hashed",
        "rsembed.sok.Init": "rsembed.parallel.init",
    },
)
SYSTEMS = {system.name: system for system in (SPARSECORE, TBE, TT, SOK)}


def resolve(place):
    """The object at `rsembed.<module>.<name>`. Raises: AttributeError or ImportError: there is none."""
    parts = place.split(".")
    value = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=1):
        try:
            value = getattr(value, part)
        except AttributeError:
            if hasattr(value, "__path__") and importlib.util.find_spec(
                ".".join(parts[: number + 1])
            ):
                value = importlib.import_module(".".join(parts[: number + 1]))
            else:
                value = getattr(_example(value), part)  # of objects only
    return value


@functools.cache
def _example(kind):
    """An object of a class whose published attributes are set by its constructor."""
    arguments = {"TTEmbeddingBag": (8, 2, [1]), "TableBatchedTTEmbeddingBag": (1, 8, 2, [1])}
    return kind(*arguments[kind.__name__]) if getattr(kind, "__name__", "") in arguments else kind


def _maker(value):
    """What takes the arguments of a class, or a function itself."""
    if not isinstance(value, type):
        return value
    return next(
        (vars(base)["__init__"] for base in value.__mro__[:-1] if "__init__" in vars(base)), value
    )


def accepted(system, place, arguments):
    """Those of the arguments that the object at a place takes."""
    value = resolve(place) if arguments else None
    if value is None:
        return []
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return [name for name in arguments if name in value.__members__]
    parameters = inspect.signature(_maker(value)).parameters
    taken = [name for name in arguments if name in parameters]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        onward = system.options.get(place)
        if onward is not None:
            taken += accepted(system, onward, [name for name in arguments if name not in taken])
    return taken


def rows(system, record):
    """The lines of a system's table. Raises: AssertionError: a name or argument is neither here nor refused."""
    lines = []
    for module, names in sorted((record["package"] | record["elsewhere"]).items()):
        if reason := system.refusal(module):
            listed = ", ".join(f"`{name}`" for name in names) or "all"
            lines.append(f"| `{module}`: {listed} | refused: {reason} | |")
            continue
        shown = "" if len(record["package"]) == 1 else f"{module}."
        for name, arguments in names.items():
            key, owner = f"{module}.{name}", name.rpartition(".")[0]
            if owner in names and system.refusal(f"{module}.{owner}"):
                continue  # told with its class
            if reason := system.refusal(key):
                listed = [
                    f"`{shown}{other}`" for other in names if f"{other}.".startswith(f"{name}.")
                ]
                lines.append(f"| {', '.join(listed)} | refused: {reason} | |")
                continue
            place = system.place(key)
            names_here = {
                argument: system.renamed.get(f"{key}({argument})", argument)
                for argument in arguments
            }
            taken = accepted(system, place, list(names_here.values()))
            texts, refusals = [], []
            for argument, our_name in names_here.items():
                reason = system.refusal(f"{key}({argument})")
                assert reason or our_name in taken, (
                    f"{key}: {argument} is neither an argument of {place} nor refused"
                )
                if reason:
                    refusals.append(f"refused: {argument} ({reason})")
                else:
                    texts.append(
                        argument if our_name == argument else f"{argument} (here {our_name})"
                    )
            texts = [", ".join(texts), *refusals] if texts else refusals
            resolve(place)
            owner, _, attribute = place.rpartition(".")
            is_set_by_init = isinstance(resolve(owner), type) and not hasattr(
                resolve(owner), attribute
            )
            shown_place = (
                f"`{owner}`, its attribute `{attribute}`" if is_set_by_init else f"`{place}`"
            )
            lines.append(f"| `{shown}{name}` | {shown_place} | {'; '.join(texts)} |")
    return lines


def table(system, record):
    """The table of a system, as text."""
    head = ["| published | here | arguments |", "|---|---|---|"]
    return "\n".join([*head, *rows(system, record)]) + "\n"


def main():
    for system in SYSTEMS.values():
        words = system.page.read_text().partition(system.begin)[0]
        system.page.write_text(words + system.begin + table(system, system.record()))


if __name__ == "__main__":
    main()
