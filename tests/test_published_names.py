"""The page names every public name and argument of four systems: where it is here, or why it is not."""

import pytest

from rsembed import tbe, tt
from rsembed.refusals import REFUSALS
from tests import published_names

EVERY_SYSTEM = pytest.mark.parametrize("system", published_names.SYSTEMS.values(), ids=list(published_names.SYSTEMS))
LEAST_ROWS = {"sparsecore": 200, "tbe": 100, "tt": 50, "sok": 35}


@EVERY_SYSTEM
def test_the_page_tells_the_place_of_every_name_and_argument(system):
    table = published_names.table(system, system.record())
    on_page = system.begin + table + published_names.END in published_names.PAGE.read_text()
    assert on_page, "run python -m tests.published_names"
    assert table.count("\n| ") > LEAST_ROWS[system.name]


@EVERY_SYSTEM
def test_a_refused_name_says_why_where_it_is_used(system):
    table = published_names.table(system, system.record())
    for module, names in system.record()["package"].items():
        for name in names if module in system.here else ():
            try:
                published_names.resolve(f"rsembed.{system.here[module]}.{name}")
            except REFUSALS as error:
                assert f"refused: {error.reason}" in table and error.reason in str(error)
            except (AttributeError, ImportError):
                assert f"`rsembed.{system.here[module]}.{name}`" not in table


@pytest.mark.parametrize(
    ("names", "error"),
    [
        ({"no_such_function": []}, AttributeError),
        ({"get_table_specs": ["feature_specs", "no_such_argument"]}, AssertionError),
        ({"auto_stack_tables": ["no_such_argument"]}, AssertionError),  # takes options, and says which
    ],
)
def test_a_name_or_argument_that_is_nowhere_is_found(names, error):
    record = {"package": {"lib.nn.embedding": names}, "elsewhere": {}}
    with pytest.raises(error, match=r"no_such"):
        published_names.rows(published_names.SPARSECORE, record)


@pytest.mark.parametrize(
    ("system", "module", "name"),
    [
        (published_names.TT, "tt_embeddings_ops", "TTEmbeddingBag"),
        (published_names.SOK, "sok", "DistributedEmbedding"),
        (published_names.TBE, "split_table_batched_embeddings_ops_training", "SplitTableBatchedEmbeddingBagsCodegen"),
    ],
)
def test_an_argument_that_no_constructor_takes_is_found(system, module, name):
    record = {"package": {module: {name: ["no_such_argument"]}}, "elsewhere": {}}
    with pytest.raises(AssertionError, match="no_such_argument"):
        published_names.rows(system, record)


@EVERY_SYSTEM
def test_nothing_is_refused_that_was_never_published(system):
    everything = system.record()["package"] | system.record()["elsewhere"]
    keys = {f"{module}.{name}" for module, names in everything.items() for name in names} | set(everything)
    keys |= {f"{m}.{name}({one})" for m, names in everything.items() for name, given in names.items() for one in given}
    for refused in system.refused:
        assert any(f"{key}.".startswith(f"{refused}.") or key.endswith(f".{refused}") for key in keys), refused
    for told in (*system.places, *system.renamed):
        assert told in keys, told


SPECS = [(4, 2, tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CPU)]


def module_with(key):
    """A table-batched module that uses the member that a key of the table names."""
    kind, _, name = key.removeprefix("split_table_batched_embeddings_ops_training.").rstrip(")").partition("(")
    if kind == "UserEnabledConfigDefinition":
        return tbe.TableBatchedEmbeddingBags(SPECS, extra_optimizer_config=getattr(tbe, kind)(**{name: True}))
    member = getattr(tbe, kind)[name]
    if kind in ("EmbeddingLocation", "ComputeDevice"):
        own = (member, SPECS[0][3]) if kind == "EmbeddingLocation" else (SPECS[0][2], member)
        return tbe.TableBatchedEmbeddingBags([(4, 2, *own)])
    return tbe.TableBatchedEmbeddingBags(SPECS, **{{"OptimType": "optimizer"}.get(kind, "output_dtype"): member})


@pytest.mark.parametrize("key", published_names.TBE.refused)
def test_a_member_that_can_be_named_but_not_used_is_refused_by_the_module(key):
    name = key.rpartition("(")[2].rstrip(")")
    with pytest.raises((ValueError, NotImplementedError), match=name):
        module_with(key)


@pytest.mark.parametrize("key", published_names.TT.refused)
def test_a_rule_without_a_fused_update_is_refused_by_trains(key):
    name = key.rpartition("(")[2].rstrip(")")
    with pytest.raises(NotImplementedError, match=f"OptimType.{name} has no fused update"):
        tt.TTEmbeddingBag(8, 2, [1], optimizer=name)


@pytest.mark.parametrize("name", tbe.refused.ARGUMENTS)
def test_an_argument_that_a_module_has_not_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"takes no {name}: "):
        tbe.TableBatchedEmbeddingBags(SPECS, **{name: object()})
    assert tbe.TableBatchedEmbeddingBags(SPECS, **{name: None}).plan.tables[0].num_rows == 4
