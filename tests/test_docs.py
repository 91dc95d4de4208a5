"""Tests of the pages: the reference is complete, names and links exist, and programs run."""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import TypeVar
from unittest import mock

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import rsembed
from tests.world import module_of
from tools.published_names import resolve

ROOT = Path(__file__).resolve().parent.parent


reference, launch, gallery = (
    module_of(ROOT / "docs" / f"{name}.py") for name in ("reference", "launch", "gallery")
)


PACKAGES = sorted(
    f"rsembed.{file.parent.name}" for file in Path(rsembed.__file__).parent.glob("*/__init__.py")
)


@pytest.mark.parametrize("package", ["rsembed", *PACKAGES])
def test_the_reference_has_exactly_the_names_that_a_package_offers(package):
    module = importlib.import_module(package)
    # Names that do not occur in the file were put into the package by other imports.
    imported = set(re.findall(r"\b\w+\b", Path(module.__file__).read_text()))
    offered = {
        name
        for name, value in vars(module).items()
        if not (name.startswith("_") or inspect.ismodule(value))
    }
    listed = reference.public_names(package) if package in reference.MODULES else ()
    assert set(listed) == offered & imported


@pytest.mark.parametrize("name", reference.MODULES)
def test_the_reference_has_every_function_and_class_that_a_published_module_defines(name):
    defined = {
        key
        for key, value in vars(importlib.import_module(name)).items()
        if not key.startswith("_")
        and getattr(value, "__module__", None) == name
        and not isinstance(value, TypeVar)
    }
    assert defined - set(reference.public_names(name)) == set()


def test_every_public_object_has_one_entry_on_one_page():
    pages = "".join(reference.page(room) for rooms in reference.GROUPS.values() for room in rooms)
    named = re.findall(r"^\.\. auto(?:class|function|data):: (\S+)$", pages, re.M)
    assert sorted(named) == sorted({*reference.entries().values()})
    # No module exports these classes, but annotations of public functions and classes name them.
    assert {"rsembed.datasets.text.Text", "rsembed.optimizers.rules.F2A"} <= {*named}


@functools.cache
def objects(kind):
    """Objects of the reference by name: those for which `reference.kind` returns `kind`."""
    values = {name: reference.found(name) for name in sorted({*reference.entries().values()})}
    return {name: value for name, value in values.items() if reference.kind(value) == kind}


def test_every_public_function_and_class_says_what_it_is():
    named = objects("class") | objects("function")
    assert len(named) > 250
    silent = []
    for name, value in named.items():
        text = inspect.getdoc(value) or ""
        # Python generates docstrings with these beginnings for classes without a docstring.
        made = (f"{value.__name__}(", "An enumeration", "Create a collection")
        if not text or text.startswith(made):
            silent.append(name)
    assert silent == []


ARRAY = r"(jax\.)?Array( \| None)?|np\.ndarray( \| None)?"


def test_public_functions_tell_the_shapes_of_their_arrays():
    bare = []
    for name, function in objects("function").items():
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
        (node,) = ast.parse(source).body
        arguments = [part for part in ast.walk(node.args) if isinstance(part, ast.arg)]
        for hint in (*(argument.annotation for argument in arguments), node.returns):
            if hint and re.fullmatch(ARRAY, ast.unparse(hint)):
                bare.append(name)
    assert bare == []


def test_public_functions_name_the_errors_that_they_raise():
    missing = []
    for name, function in objects("function").items():
        raised = re.findall(r"\braise (\w+Error)\(", inspect.getsource(inspect.unwrap(function)))
        text = inspect.getdoc(function) or ""
        missing += [f"{name}: {error}" for error in raised if error not in text]
    assert missing == []


def test_docstrings_become_what_sphinx_reads():
    docstring = """What `Array`s are.

Args: rows: first line,
    second line.
Returns: `{a: b}`.

```
a `picture` of `Bags`
```
"""
    assert reference.restructured(docstring).split("\n") == [
        "What `Array`\\ s are.", "", "Args:", " rows: first line,", "    second line.", "", ":returns: `{a: b}`.", "",
        "::", "", "  a `picture` of `Bags`", "", "",
    ]  # fmt: skip


def test_the_entry_of_a_rule_has_all_its_arguments():
    rules = [
        value for value in objects("class").values() if issubclass(value, rsembed.OptimizerSpec)
    ]
    for rule in rules:
        text = reference.with_all_arguments(rule, inspect.getdoc(rule))
        assert text.count("Args:\n") == 1 and text.count("  learning_rate: ") == 1, rule
    adam = reference.with_all_arguments(rsembed.optimizers.Adam, "Adam.")
    assert "  learning_rate: a number, or a function" in adam and "  beta_1: in [0, 1)." in adam
    assert len(rules) > 15


# A fixture of every test replaces this initializer with one that compiles fast.
DEFAULT_INITIALIZER = rsembed.specs.default_initializer


def test_the_entry_of_a_dataclass_shows_the_values_of_its_defaults(monkeypatch):
    monkeypatch.setattr("rsembed.specs.default_initializer", DEFAULT_INITIALIZER)
    signature = "(name: str, initializer: Initializer = <factory>, optimizer: Rule = <factory>)"
    assert reference.with_defaults(rsembed.TableSpec, signature) == (
        "(name: str, initializer: Initializer = normal(stddev=1/sqrt(embedding_dim)), "
        "optimizer: Rule = SGD())"
    )
    draw = rsembed.TableSpec("item", 1_000, 64).initializer
    rows = np.asarray(draw(jax.random.key(0), (1_000, 64)))
    assert_allclose([rows.mean(), rows.std()], [0, 1 / 8], atol=1e-3)


@pytest.mark.parametrize(
    ("code", "entry"),
    [
        ("rs.Bags", "rsembed.Bags"),
        ("sok.Init(global_batch_size=64)", "rsembed.sok.Init"),
        ("rs.optimizers.Adam", "rsembed.optimizers.Adam"),
        ("rsembed.sparsecore.embedding_spec.TableSpec", "rsembed.TableSpec"),
        ("collection.update(state, batch)", "rsembed.EmbeddingCollection.update"),
        ("TTEmbeddingBag.vjp", "rsembed.tt.TTEmbeddingBag.vjp"),
        ("rs.Bags.from_lists([[1]])", "rsembed.Bags.from_lists"),
        ("Bags.from_lists(rows).pad_to(8)", None),
        ("jnp.sum(x)", None),
    ],
)
def test_code_in_a_text_leads_to_the_one_entry_that_it_names(code, entry):
    assert reference.target(code) == entry


@pytest.mark.parametrize(
    ("member", "entries"),
    [
        (
            "rsembed.optimizers.LARS.short_name",
            ["LARS.short_name", "OptimizerSpec.short_name"],
        ),
        (
            "rsembed.tbe.SplitTableBatchedEmbeddingBagsCodegen.flush",
            ["TableBatchedEmbeddingBags.flush"],
        ),
        (
            "rsembed.tt.TTEmbeddingBag.__call__",
            ["TTEmbeddingBag.__call__", "TableBatchedTTEmbeddingBag.__call__"],
        ),
        ("rsembed.plot.nothing", None),
    ],
)
def test_a_member_without_an_entry_leads_to_a_base_class_or_to_its_class(member, entries):
    described = [name.split(".", 2)[2] for name in reference.where_described(member)]
    assert described == ([] if entries is None else [*entries, entries[0].split(".")[0]])


def test_an_entry_has_what_bases_without_an_entry_give_it():
    entry = r"autoclass:: rsembed.tbe.TableBatchedEmbeddingBags\n   :members:\n   :inherited-members: (.*)"
    bases = re.search(entry, reference.page("tbe"))[1].split(", ")
    assert "Module" in bases and "object" in bases and "TrainedTables" not in bases


TABLES = [ROOT / "docs" / "migration.md", *(ROOT / "docs").glob("names-*.md")]
NAMED = [name for page in TABLES for name in re.findall(r"`(rsembed\.[\w.]+)`", page.read_text())]


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_the_calls_of_the_migration_tables_exist(name):
    assert resolve(name) is not None


def test_links_between_pages_and_to_files_lead_somewhere():
    generated = {"notebooks/index.md", "api/index.md", "training.md"}
    broken = []
    for page in [
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "notebooks" / "README.md",
    ]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            place = (page.parent / link).resolve()
            # The site has a copy of the notebooks in docs/notebooks.
            in_notebooks = ROOT / link
            if link not in generated and not place.exists() and not in_notebooks.exists():
                broken.append(f"{page.name}: {link}")
    assert broken == []


LOADERS = re.split(r"\n## ", (ROOT / "docs" / "loaders.md").read_text())


@pytest.mark.slow
def test_the_gallery_draws_every_picture_in_a_few_lines(tmp_path):
    page = (ROOT / "docs" / "gallery.md").read_text()
    drawn = [name for name in dir(rsembed.plot) if name.startswith("plot_")]
    pictures = {}
    for shown in gallery.run(page):
        if shown.figure is None:
            continue
        pictures[shown.name] = shown
        shown.figure.savefig(tmp_path / "picture.png")
        statements = [
            statement
            for statement in ast.parse(shown.program).body
            if not isinstance(statement, ast.ImportFrom | ast.Import)
        ]
        assert 2 <= len(statements) <= 6
        for ax in shown.figure.axes:
            assert ax.has_data() and ax.get_xlabel() and ax.get_ylabel(), shown.name
        if shown.name in drawn:
            assert f"rs.plot.{shown.name}(" in shown.program
    assert sorted(pictures) == sorted(["describe", *drawn])
    assert "rs.plot.explore(" in page


def test_pictures_of_the_gallery_follow_the_programs_that_draw_them(tmp_path):
    block = "## {}\n\n```python\n{}\n```\n"
    page = block.format("data", "import matplotlib.pyplot as plt") + block.format(
        "plot_line", "plt.plot([1, 2])"
    )
    text = gallery.with_pictures(page + "The end.", tmp_path / "gallery")
    assert text == page + "\n![What plot_line draws](gallery/plot_line.png)\nThe end."
    assert (tmp_path / "gallery" / "plot_line.png").stat().st_size > 1000


def test_the_report_that_the_page_on_loaders_shows_is_the_one_that_its_program_prints(
    capsys, monkeypatch
):
    monkeypatch.delenv("RSEMBED_DATA", raising=False)
    monkeypatch.setattr(rsembed.datasets, "movielens", mock.Mock(side_effect=FileNotFoundError))
    (section,) = (section for section in LOADERS if section.startswith("See your ids"))
    program, printed = re.findall(r"```(?:python)?\n(.*?)```", section, re.DOTALL)
    exec(compile(program, "docs/loaders.md", "exec"), {"rs": rsembed})
    assert capsys.readouterr().out == printed


def run_programs(page, sections=None):
    """Runs all programs of a page in one namespace, and returns it and the number of programs."""
    names = {"__name__": "page"}
    text = sections or (ROOT / "docs" / page).read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for program in programs:
        exec(compile(program, f"docs/{page}", "exec"), names)
    return names, len(programs)


@pytest.mark.parametrize("loader", LOADERS[1:-2], ids=lambda section: section.splitlines()[0])
def test_the_loaders_of_the_page_bring_what_a_step_takes(loader):
    try:
        names, _ = run_programs("loaders.md", LOADERS[0] + loader)
    except ImportError as error:
        pytest.skip(f"not installed: {error.name}")
    vectors = names.get("activations", names.get("vectors"))
    if vectors is None:
        film = names["collection"].tables(names["state"])["film"]
        assert_array_equal(film[7], np.ones(8))
    else:
        (shape,) = {array.shape for array in vectors.values()}
        assert shape in [(128, 8), (3, 8), (1, 8), (16, 8)]


def test_a_model_of_torch_is_taken_over_trained_and_given_back():
    pytest.importorskip("torch")
    names, count = run_programs("torch.md")
    assert count == 4 and names["loss"] < 0.6
    assert np.abs(names["after"] - names["before"]).max() > 0.1


def test_the_programs_of_the_page_on_optimizers_run_as_printed():
    names, count = run_programs("optimizers.md")
    assert count == 4
    assert np.isfinite(names["two_steps"](names["quick"])).all()
    # Schedules of optax compute with the integer step and floats.
    with jax.numpy_dtype_promotion("standard"):
        assert np.isfinite(names["two_steps"](names["rule"])).all()


OPTIMIZERS = (ROOT / "docs" / "optimizers.md").read_text()


def test_the_page_on_optimizers_has_a_row_for_every_rule():
    rules = [name for name in dir(rsembed.optimizers) if name[0].isupper()]
    lost = [name for name in rules if f"| `{name}" not in OPTIMIZERS]
    assert lost == ["OptimizerSpec"], "add a row to the table in docs/optimizers.md"


def test_the_page_on_optimizers_says_what_every_accumulator_starts_from():
    (section,) = re.findall(r"\n## What accumulators start from\n(.*?)\n## ", OPTIMIZERS, re.DOTALL)
    starts = {}
    for names, start in re.findall(r"^\| (`.*?) \| (\S*).* \|", section, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            rule = name.removesuffix("OptimizerSpec")
            starts[rule] = float(start.rstrip(",")) if start[0].isdigit() else None
    classes = vars(rsembed.optimizers.rules) | vars(rsembed.optimizers.regularized)
    for rule in starts.keys() & classes.keys():
        made = classes[rule]()
        assert getattr(made, "initial_accumulator_value", None) == starts[rule], rule
    assert {"Adagrad": 0.1, "RowWiseAdagrad": 0.0, "FTRL": 0.1}.items() <= starts.items()


# A page for each phrase that readers search for. One of its sections is about the phrase.
PHRASES = {
    "learning rate schedule": "optimizers.md",
    "string ids": "loaders.md",
    "padding_idx": "torch.md",
    "KeyedJaggedTensor": "torch.md",
    "orbax": "flax.md",
    "dropout": "training.md",
    "early stopping": "training.md",
    "mixed precision": "training.md",
}


@pytest.mark.parametrize(("phrase", "name"), PHRASES.items())
def test_a_phrase_that_people_search_for_begins_a_section(phrase, name):
    page = ROOT / "docs" / name
    beginnings = []
    for section in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        first_paragraph = text.strip().partition("\n\n")[0]
        beginnings.append(f"{heading} {first_paragraph}".replace("\n", " ").lower())
    assert any(phrase.lower() in beginning for beginning in beginnings)
    # The search lists main entries of the index first, but not headings with a hyphen.
    assert re.search(rf"^```{{index}}.*! {phrase}\b", page.read_text(), re.MULTILINE)


def test_one_id_goes_the_way_that_the_page_tells():
    names, count = run_programs("how_it_works.md")
    assert count == 5 and names["rows"].tolist() == [4, 17, 99]
    assert_allclose(names["steps"], [1, 2, 1], rtol=1e-6)
    assert not np.any(names["unknown"]) and names["known"] == [4, 99, 2**40 + 17]
    assert_allclose(names["moved"], np.ones(4), rtol=1e-6)


def test_the_program_of_the_page_on_storages_trains_a_table_of_each_kind(capsys):
    names, count = run_programs("engine.md")
    assert count == 1 and int(names["state"].step) == 1 and capsys.readouterr().out == "2\n"


def test_the_program_of_the_page_on_checks_is_refused_in_the_words_that_it_shows(capsys):
    run_programs("checks.md")
    assert "word/vocabulary_size is 100, expected 200." in capsys.readouterr().out


def test_the_programs_of_the_page_on_long_runs_save_and_log_what_they_say(capsys, monkeypatch):
    # tensorboardX may not be installed.
    library = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "tensorboardX", library)
    names, count = run_programs("reliability.md")
    assert count == 6
    assert names["grown"].tables["word"].shape == (1_200, 8)
    assert capsys.readouterr().out == "step_000000000 {'input': 4096}\n"
    written = library.SummaryWriter.return_value.__enter__.return_value.add_scalar.call_args_list
    curves = {call.args[0]: call.args[1] for call in written}
    assert curves.pop("loss") > 0 and {"visitor/inserted", "visitor/evicted"} < set(curves)
    assert not any(curves.values()) and {call.kwargs["global_step"] for call in written} == {0}


def test_the_programs_of_the_page_on_troubleshooting_find_a_way_out_of_what_they_show():
    names, count = run_programs("troubleshooting.md")
    assert count == 7
    assert np.isfinite(names["collection"].tables(names["state"])["item"]).all()


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_page_on_installing_knows_every_extra():
    page = (ROOT / "docs" / "install.md").read_text()
    extras = PROJECT["optional-dependencies"]
    assert [extra for extra in extras if f"| `{extra}` |" not in page] == []


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text()
    for field in ("version", "license"):
        assert f"\n{field}: {PROJECT[field]}\n" in citation
    assert f"\ntitle: {PROJECT['name']}\n" in citation
    assert f"abstract: {PROJECT['description']}\n" in citation


def test_every_source_file_that_a_page_names_exists():
    """A page may name a file by a part of its path, such as `collection/stack.py` or `stack.py`."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    folders = ("benchmarks", "datasets", "docs", "notebooks", "rsembed", "tests", "tools")
    files = []
    for folder in folders:
        files += [f"/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")]
    num_named = 0
    for page in pages:
        for path in re.findall(r"`([\w/]+\.py)`", page.read_text()):
            num_named += 1
            assert any(file.endswith(f"/{path}") for file in files), (page.name, path)
    assert num_named > 40


@pytest.mark.parametrize(("name", "least"), [("checks", 60), ("reliability", 15)])
def test_every_test_that_a_page_names_exists(name, least):
    page, file = (ROOT / "docs" / f"{name}.md").read_text(), None
    named = re.findall(r"`(tests/[\w/]+\.py|…)(?:::(\w+))?`", page)
    assert len(named) > least and page.count("`…") + page.count("`tests/") == len(named)
    for path, test in named:
        file = file if path == "…" else (ROOT / path).read_text()
        assert not test or f"def {test}(" in file, f"{path}::{test}"


@pytest.mark.parametrize(
    "url",
    [
        "https://github.com/someone/rsembed.git",
        "git@github.com:someone/rsembed.git",
        "https://github.com/someone/rsembed",
    ],
)
def test_a_host_that_knows_the_sources_links_notebooks_to_binder_and_colab(tmp_path, url):
    environment = {"READTHEDOCS_GIT_CLONE_URL": url, "READTHEDOCS_GIT_COMMIT_HASH": "abc"}
    line = launch.links(*launch.source(tmp_path, environment), "00_quickstart")
    assert "mybinder.org/v2/gh/someone/rsembed/abc?labpath=notebooks%2F00_quickstart.ipynb)" in line
    assert (
        "colab.research.google.com/github/someone/rsembed/blob/abc/notebooks/00_quickstart.ipynb)"
        in line
    )
    assert "git+https://github.com/someone/rsembed@abc" in line


def test_sources_that_are_nowhere_to_be_fetched_are_not_linked(tmp_path):
    assert launch.source(tmp_path, {}) is None
    assert launch.source(tmp_path, {"READTHEDOCS_GIT_CLONE_URL": "/storage/me/rsembed"}) is None


def test_pages_show_what_notebooks_print_or_say_how():
    hosted = (ROOT / ".readthedocs.yaml").read_text()
    assert "extra_requirements: [docs, notebooks]" in hosted and "keras-rs" in hosted
    configuration = (ROOT / "docs" / "conf.py").read_text()
    assert (
        'EXECUTES = bool({"RSEMBED_DOCS_EXECUTE", "READTHEDOCS"} & set(os.environ))'
        in configuration
    )
    note = launch.note_on_outputs("05_optimizers")
    assert "`make docs EXECUTE=1`" in note and "`rsembed run 05_optimizers`" in note
    makefile = (ROOT / "Makefile").read_text()
    assert "$(if $(EXECUTE),RSEMBED_DOCS_EXECUTE=1)" in makefile


def test_binder_installs_what_notebooks_need():
    assert (ROOT / ".binder" / "requirements.txt").read_text().strip() == ".[notebooks]"
    assert "g++" in (ROOT / ".binder" / "apt.txt").read_text().split()


def test_badges_say_what_the_package_says():
    (jax_requirement,) = (name for name in PROJECT["dependencies"] if name.startswith("jax>"))
    expected = {
        "python": PROJECT["requires-python"].removeprefix(">=") + "+",
        "jax": jax_requirement.removeprefix("jax>=") + "+",
        "licence": PROJECT["license"],
    }
    readme = (ROOT / "README.md").read_text()
    badges = list((ROOT / "docs" / "images").glob("badge-*.svg"))
    assert len(badges) == len(expected)
    for badge in badges:
        name = badge.stem.removeprefix("badge-")
        assert f"<title>{name}: {expected[name]}</title>" in badge.read_text()
        assert f"docs/images/{badge.name}" in readme
