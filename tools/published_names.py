"""Tables of the public names and arguments of four other systems, and of their places in rsembed.

`python -m tools.published_names` writes the tables at the end of docs/names-*.md. The names are
recorded in tests/data/*_names.json, for one published version of each system. The records of the
SparseCore API and of FBGEMM were read from the packages. The other two packages cannot be installed
everywhere, so their records were written by hand from their pages and sources.
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
    """A system with public names that rsembed also has.

    Args:
      name: name of the system, in the names of its record and its page.
      here: the module below `rsembed` that has the names of a published module.
      places: full paths in rsembed of names that are in another module.
      options: path of the function or class that gets the `**options` of a function or class.
      renamed: our names of renamed arguments, by `module.name(argument)`.
    """

    name: str
    here: Mapping[str, str]
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def file(self):
        """Path of the record."""
        return ROOT / "tests" / "data" / f"{self.name}_names.json"

    @property
    def page(self):
        """Path of the page that ends with the table."""
        return ROOT / "docs" / f"names-{self.name}.md"

    @property
    def begin(self):
        """The line of the page before its table."""
        return f"<!-- names of {self.name}: written by tools/published_names.py -->\n"

    def record(self):
        """The record: arguments by module and name, and refused names by reason."""
        return json.loads(self.file.read_text())

    @functools.cached_property
    def refused(self):
        """Reasons why modules, names and arguments, `name(argument)`, are refused.

        A refused name does not exist in rsembed, or raises an error.
        """
        reason_of_name = {}
        for reason, names in self.record()["refused"].items():
            reason_of_name |= dict.fromkeys(names, reason)
        return reason_of_name

    def place(self, key):
        """Path in rsembed of a published name, if rsembed has it."""
        module = next(package for package in self.here if f"{key}.".startswith(f"{package}."))
        return self.places.get(key, f"rsembed.{self.here[module]}{key.removeprefix(module)}")

    def refusal(self, key):
        """Reason why a name or argument, or its class or module, is refused. None if it is not."""
        for name, reason in self.refused.items():
            if f".{name}." in f".{key}.":
                return reason
        return None


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
    """The object at `rsembed.<module>.<name>`.

    Raises: AttributeError, ImportError: there is no such object.
    """
    parts = place.split(".")
    value = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=1):
        try:
            value = getattr(value, part)
        except AttributeError:
            path = ".".join(parts[: number + 1])
            if hasattr(value, "__path__") and importlib.util.find_spec(path):
                value = importlib.import_module(path)
            else:
                # `__init__` may set the attribute.
                value = getattr(_example(value), part)
    return value


@functools.cache
def _example(kind):
    """An object of a class with published attributes that `__init__` sets, or `kind` itself."""
    arguments = {"TTEmbeddingBag": (8, 2, [1]), "TableBatchedTTEmbeddingBag": (1, 8, 2, [1])}
    name = getattr(kind, "__name__", "")
    if name in arguments:
        return kind(*arguments[name])
    return kind


def _maker(value):
    """The `__init__` that a class defines or inherits. Other objects are returned as they are."""
    if not isinstance(value, type):
        return value
    for base in value.__mro__[:-1]:
        if "__init__" in vars(base):
            return vars(base)["__init__"]
    return value


def accepted(system, place, arguments):
    """Names of those arguments that the function or class at a place accepts."""
    if not arguments:
        return []
    value = resolve(place)
    if value is None:
        return []
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return [name for name in arguments if name in value.__members__]
    parameters = inspect.signature(_maker(value)).parameters
    taken = [name for name in arguments if name in parameters]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        onward = system.options.get(place)
        if onward is not None:
            others = [name for name in arguments if name not in taken]
            taken += accepted(system, onward, others)
    return taken


def rows(system, record):
    """Lines of a system's table.

    Raises: AssertionError: rsembed neither has nor refuses an argument.
    """
    lines = []
    for module, names in sorted((record["package"] | record["elsewhere"]).items()):
        if reason := system.refusal(module):
            listed = ", ".join(f"`{name}`" for name in names) or "all"
            lines.append(f"| `{module}`: {listed} | refused: {reason} | |")
            continue
        shown = "" if len(record["package"]) == 1 else f"{module}."
        for name, arguments in names.items():
            key = f"{module}.{name}"
            owner = name.rpartition(".")[0]
            if owner in names and system.refusal(f"{module}.{owner}"):
                # The line of the class lists its members.
                continue
            if reason := system.refusal(key):
                listed = []
                for other in names:
                    if f"{other}.".startswith(f"{name}."):
                        listed.append(f"`{shown}{other}`")
                lines.append(f"| {', '.join(listed)} | refused: {reason} | |")
                continue
            place = system.place(key)
            names_here = {}
            for argument in arguments:
                names_here[argument] = system.renamed.get(f"{key}({argument})", argument)
            taken = accepted(system, place, list(names_here.values()))
            texts = []
            refusals = []
            for argument, our_name in names_here.items():
                reason = system.refusal(f"{key}({argument})")
                assert reason or our_name in taken, (
                    f"{key}: {argument} is neither an argument of {place} nor refused"
                )
                if reason:
                    refusals.append(f"refused: {argument} ({reason})")
                elif our_name == argument:
                    texts.append(argument)
                else:
                    texts.append(f"{argument} (here {our_name})")
            texts = [", ".join(texts), *refusals] if texts else refusals
            # This raises an error if rsembed does not have the name.
            resolve(place)
            owner, _, attribute = place.rpartition(".")
            owner_object = resolve(owner)
            shown_place = f"`{place}`"
            if isinstance(owner_object, type) and not hasattr(owner_object, attribute):
                shown_place = f"`{owner}`, its attribute `{attribute}`"
            lines.append(f"| `{shown}{name}` | {shown_place} | {'; '.join(texts)} |")
    return lines


def table(system, record):
    """The table of a system in Markdown."""
    head = ["| published | here | arguments |", "|---|---|---|"]
    return "\n".join([*head, *rows(system, record)]) + "\n"


def main():
    for system in SYSTEMS.values():
        words = system.page.read_text().partition(system.begin)[0]
        system.page.write_text(words + system.begin + table(system, system.record()))


if __name__ == "__main__":
    main()
