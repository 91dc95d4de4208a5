"""Public names and arguments of four systems, recorded, and the page that tells where each of them is here.

Run as a program, `python -m tests.published_names` writes the tables in docs/migration.md. The records hold one
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

from rsembed.refusals import REFUSALS
from rsembed.sparsecore import refused as sparsecore

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "migration.md"
END = "<!-- end of names -->\n"
WITH_REFUSED_NAMES = ("rsembed.tbe", "rsembed.tt", "rsembed.sok")
"""Wings that say for themselves which published names they have not."""


@dataclasses.dataclass(frozen=True)
class System:
    """One of those whose programs run here.

    Args:
      name: of its record, and of its table on the page.
      here: where the names of a module are, below `rsembed`.
      places: where single names are, if elsewhere, as a whole.
      options: where the arguments go that a function or class takes as `**options`; "any" if nothing is looked at.
      renamed: what an argument is called here.
      refused: why a module, a name or an argument is not here, where the wing does not say it itself; or why one that
        can be given is refused by what reads it.
    """

    name: str
    here: Mapping[str, str]
    places: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def file(self):
        """The record."""
        return ROOT / "tests" / "data" / f"{self.name}_names.json"

    @property
    def begin(self):
        """The line of the page before its table."""
        return f"<!-- names of {self.name}: written by tests/published_names.py -->\n"

    def record(self):
        """The recorded names: their arguments by module and name."""
        return json.loads(self.file.read_text())

    def refusal(self, key):
        """Why a name is refused, by itself, or as what belongs to a module, or as a method of any class; else None."""
        owners = [owner for owner in self.refused if f"{key}.".startswith(f"{owner}.") or key.endswith(f".{owner}")]
        return self.refused[owners[0]] if owners else None


TYPING = "a type variable or alias that only annotations use"
PLACES = "`dataclasses.replace` would carry a place to a table of another size; set the public property instead"
_SPARSECORE_REFUSED = {
    "lib.auto_pipelining": sparsecore.NAMES["auto_pipelining"],
    **{f"lib.core.{name}": sparsecore.NAMES[name] for name in ("constants", "input_preprocessing", "primitives")},
    "lib.proto.embedding_spec_pb2": sparsecore.NAMES["embedding_spec_pb2"],
    **{f"lib.flax.nnx.{name}": reason for name, reason in sparsecore.NAMES_OF_NNX.items()},
    "lib.nn.custom_optimizer_lowering": sparsecore.NAMES["custom_optimizer_lowering"],
    "lib.nn.embedding.T": TYPING,
    "lib.nn.table_stacking.T": TYPING,
    "lib.nn.table_stacking.Shape": TYPING,
    "lib.nn.table_stacking.Indexer": TYPING,
    "lib.nn.table_stacking.ArrayLike": TYPING,
    "lib.flax.linen.embed.LogicalNames": TYPING,
    "lib.flax.linen.embed.Nested": TYPING,
    "lib.flax.linen.embed.A": TYPING,
    "lib.nn.embedding.SparseDenseMatmulInputStats.from_cc": "there is no C++ object to copy from",
    "get_optimizer_primitive": sparsecore.NAMES["custom_optimizer_lowering"],
    "lib.nn.embedding_spec.TableSpec(_stacked_table_spec)": PLACES,
    "lib.nn.embedding_spec.TableSpec(_setting_in_stack)": PLACES,
    "lib.nn.embedding_spec.FeatureSpec(_id_transformation)": PLACES,
}

SPARSECORE = System(
    "sparsecore",
    here={
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
    },
    options={
        "rsembed.sparsecore.embedding.auto_stack_tables": "rsembed.sparsecore.table_stacking.auto_stack_tables",
        "rsembed.sparsecore.embedding.preprocess_sparse_dense_matmul_input_from_sparse_tensor": (
            "rsembed.sparsecore.embedding.preprocess_sparse_dense_matmul_input"
        ),
        "rsembed.sparsecore.embedding.get_all_reduce_interface": "any",
    },
    refused=_SPARSECORE_REFUSED,
)
_REFUSED_LATER = {
    **dict.fromkeys(
        [
            f"OptimType({name})"
            for name in (
                *("SGD", "ROWWISE_ADAGRAD", "SHAMPOO", "SHAMPOO_V2", "MADGRAD"),
                "EXACT_ROWWISE_WEIGHTED_ADAGRAD",
            )
        ],
        "can be named, and is refused by modules, as in the original",
    ),
    **dict.fromkeys(
        [f"SparseType({name})" for name in ("FP8", "NFP8", "INT8", "INT4", "INT2", "MX4")],
        "can be named; tables and outputs are FP32, FP16 or BF16",
    ),
    **dict.fromkeys(["EmbeddingLocation(MTIA)", "ComputeDevice(MTIA)"], "can be named; JAX has no such backend"),
    **dict.fromkeys(
        [f"UserEnabledConfigDefinition({name})" for name in ("writeback_first_feature_only", "precompute_writeback")],
        "can be said; modules refuse it, as it changes what a gradient means",
    ),
}
_TBE_MODULE = "split_table_batched_embeddings_ops_training"
_CALLS = ("SplitTableBatchedEmbeddingBagsCodegen", "DenseTableBatchedEmbeddingBagsCodegen")
TBE = System(
    "tbe",
    here={_TBE_MODULE: "tbe"},
    places={f"{_TBE_MODULE}.{name}.forward": f"rsembed.tbe.{name}.__call__" for name in _CALLS},
    refused={f"{_TBE_MODULE}.{key}": reason for key, reason in _REFUSED_LATER.items()},
)
_TRAINS = ("TTEmbeddingBag", "TableBatchedTTEmbeddingBag")
TT = System(
    "tt",
    here={"tt_embeddings_ops": "tt"},
    places={f"tt_embeddings_ops.{name}.forward": f"rsembed.tt.{name}.__call__" for name in _TRAINS},
    options={f"rsembed.tt.{name}": "rsembed.tt.tables.TTTables" for name in _TRAINS},
    refused=dict.fromkeys(
        [
            f"tt_embeddings_ops.OptimType({name})"
            for name in ("LAMB", "LARS_SGD", "PARTIAL_ROWWISE_ADAM", "PARTIAL_ROWWISE_LAMB")
        ],
        "can be named, and has no fused update: take `sparse=False` and any optax rule",
    ),
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
    refused={
        f"sok.{_ADAM}.{name}({argument})": reason
        for name in ("adam.Adam", "lazy_adam.LazyAdamOptimizer")
        for argument, reason in (
            ("amsgrad", "the rule keeps two moments, not their largest values"),
            ("name", "an optimizer is a value, and has none"),
        )
    },
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
    found = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            if hasattr(found, "__path__") and importlib.util.find_spec(".".join(parts[: number + 1])):
                found = importlib.import_module(".".join(parts[: number + 1]))
            else:
                found = getattr(_example(found), part)  # of objects only
    return found


@functools.cache
def _example(kind):
    """An object of a class whose published attributes are set by its constructor."""
    arguments = {"TTEmbeddingBag": (8, 2, [1]), "TableBatchedTTEmbeddingBag": (1, 8, 2, [1])}
    return kind(*arguments[kind.__name__]) if getattr(kind, "__name__", "") in arguments else kind


def _maker(found):
    """What takes the arguments of a class, or a function itself."""
    if not isinstance(found, type):
        return found
    return next((vars(own)["__init__"] for own in found.__mro__[:-1] if "__init__" in vars(own)), found)


def accepted(system, place, arguments):
    """Those of the arguments that the object at a place takes, and why it refuses others."""
    found = resolve(place) if arguments else None
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return [name for name in arguments if name in found.__members__], {}
    if found is None:
        return [], {}
    own = inspect.signature(_maker(found)).parameters
    taken, refused = [name for name in arguments if name in own], getattr(_maker(found), "refused_arguments", {})
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in own.values()):
        onward = system.options.get(place)
        if onward == "any":
            return list(arguments), refused
        if onward is not None:
            rest = accepted(system, onward, [name for name in arguments if name not in (*taken, *refused)])
            taken, refused = [name for name in arguments if name in (*taken, *rest[0])], refused | rest[1]
    return taken, refused


def rows(system, record):
    """The lines of a system's table. Raises: AssertionError: a name or argument is neither here nor refused."""
    lines = []
    for module, names in sorted((record["package"] | record["elsewhere"]).items()):
        reason = system.refusal(module)
        if reason:
            listed = ", ".join(f"`{name}`" for name in names) or "all"
            lines.append(f"| `{module}`: {listed} | refused: {reason} | |")
            continue
        shown = "" if len(record["package"]) == 1 else f"{module}."
        for name, arguments in names.items():
            key, owner = f"{module}.{name}", name.rpartition(".")[0]
            place = system.places.get(key, f"rsembed.{system.here[module]}.{name}")
            if owner in names and _reason(system, f"{module}.{owner}"):
                continue  # told with its class
            if reason := _reason(system, key):
                listed = [f"`{shown}{own}`" for own in names if f"{own}.".startswith(f"{name}.")]
                lines.append(f"| {', '.join(listed)} | refused: {reason} | |")
                continue
            names_here = {own: system.renamed.get(f"{key}({own})", own) for own in arguments}
            taken, refused = accepted(system, place, list(names_here.values()))
            told, refusals = [], []
            for argument, own in names_here.items():
                if own in taken and f"{key}({argument})" not in system.refused:
                    told.append(argument if own == argument else f"{argument} (here {own})")
                    continue
                reason = refused.get(argument) or system.refused.get(f"{key}({argument})")
                assert reason, f"{key}: {argument} is neither an argument of {place} nor refused"
                refusals.append(f"refused: {argument} ({reason})")
            resolve(place)
            owner, _, attribute = place.rpartition(".")
            is_set_by_init = isinstance(resolve(owner), type) and not hasattr(resolve(owner), attribute)
            shown_place = f"`{owner}`, its attribute `{attribute}`" if is_set_by_init else f"`{place}`"
            told = [", ".join(told), *refusals] if told else refusals
            lines.append(f"| `{shown}{name}` | {shown_place} | {'; '.join(told)} |")
    return lines


def _reason(system, key):
    """Why a name is refused, by the system's own word or by the wing's; None if it is there."""
    module = next(own for own in system.here if f"{key}.".startswith(f"{own}."))
    try:
        resolve(system.places.get(key, f"rsembed.{system.here[module]}.{key[len(module) + 1 :]}"))
    except REFUSALS as error:
        return error.reason
    except (AttributeError, ImportError):
        if system.refusal(key) is None:
            raise
    return system.refusal(key)


def table(system, record):
    """The table of a system, as text."""
    head = ["| published | here | arguments |", "|---|---|---|"]
    return "\n".join([*head, *rows(system, record)]) + "\n"


def main():
    for system in SYSTEMS.values():
        before, rest = PAGE.read_text().split(system.begin)
        PAGE.write_text(before + system.begin + table(system, system.record()) + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
