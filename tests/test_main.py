"""Tests of the command line. Most of them run a tiny notebook."""

import io
import os
import subprocess
import sys

import nbformat
import pytest

from rsembed import __main__ as command_line

PARAMETERS = (
    'STEPS = 3  # 5_000 for the docs\nSOURCE = "bundled"\nrates: list = [\n    0.1,\n]  # é\n'
)
STORY = """import sys
import matplotlib.pyplot as plt
print(f"steps={STEPS} source={SOURCE} rates={rates}")
print(sys.prefix)
import beside
print(beside.SENTENCE)
plt.plot([1, 2, 3])
plt.show()
f"loss {1 / STEPS:.3f}"
"""


@pytest.fixture
def notebook_folder(tmp_path, monkeypatch):
    """The `notebooks` folder of a made-up checkout. It has a notebook `01_tiny` and a module."""
    notebook = nbformat.v4.new_notebook()
    parameters = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# A tiny one"),
        parameters,
        nbformat.v4.new_code_cell(STORY),
    ]
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(notebook, folder / "01_tiny.ipynb")
    (folder / "beside.py").write_text('SENTENCE = "a module beside the notebook"')
    monkeypatch.setattr(command_line, "_PACKAGE", tmp_path / "rsembed")
    monkeypatch.chdir(tmp_path)
    return folder


def test_run_executes_with_given_parameters_and_this_python(notebook_folder, tmp_path, capsys):
    assert command_line.main(["run", "01", "STEPS=8", "SOURCE=a=b", "rates=(1, 2)"]) == 0
    printed = capsys.readouterr().out
    assert "steps=8 source=a=b rates=(1, 2)" in printed
    assert "loss 0.125" in printed
    assert sys.prefix in printed
    assert "executed/01_tiny.ipynb" in printed
    before_the_end = printed.partition("Finished in")[0]
    assert " s: executed/01_tiny/cell-03-1.png" in before_the_end
    assert "a module beside the notebook" in printed
    assert (tmp_path / "executed/01_tiny.ipynb").is_file()
    assert (tmp_path / "executed/01_tiny/cell-03-1.png").read_bytes().startswith(b"\x89PNG")


def test_run_reports_a_failing_cell_and_keeps_the_notebook(notebook_folder, tmp_path, capsys):
    output = tmp_path / "elsewhere"
    assert command_line.main(["run", "01_tiny", "STEPS=0", "--output", str(output)]) == 1
    message = capsys.readouterr().err
    assert "cell 3: ZeroDivisionError: division by zero" in message
    assert "Traceback" not in message
    assert "ZeroDivisionError" in (output / "01_tiny.ipynb").read_text()


@pytest.mark.parametrize("content", [b"no json", b"\xff\xfe", b'{"cells": 3}', b"[]"])
def test_run_refuses_a_file_that_is_no_notebook(notebook_folder, capsys, content):
    (notebook_folder / "own.ipynb").write_bytes(content)
    assert command_line.main(["run", str(notebook_folder / "own.ipynb")]) == 2
    message = capsys.readouterr().err
    assert "own.ipynb is no notebook: " in message and message.count("\n") == 1


@pytest.mark.parametrize("place", ["notebooks/beside.py", "notebooks/beside.py/below", "taken"])
def test_run_says_where_it_cannot_write(notebook_folder, capsys, place):
    notebook_folder.with_name("taken").joinpath("01_tiny.ipynb").mkdir(parents=True)
    assert command_line.main(["run", "01", "--output", place]) == 2
    message = capsys.readouterr().err
    assert f"--output {place}: " in message and message.count("\n") == 1


def test_bundled_notebooks_serve_where_there_is_no_checkout(tmp_path, monkeypatch):
    bundled = tmp_path / "rsembed" / "_bundled" / "notebooks"
    bundled.mkdir(parents=True)
    (bundled / "01_tiny.ipynb").touch()
    monkeypatch.setattr(command_line, "_PACKAGE", tmp_path / "rsembed")
    assert command_line.find_notebook("01_tiny") == bundled / "01_tiny.ipynb"


def test_settings_are_assigned_below_the_parameters_also_of_those_assigned_together():
    source = "A, B = 1, 2\n" + PARAMETERS
    values = {}
    exec(command_line.with_settings(source, {"B": "[1]", "SOURCE": "real"}), values)
    assert values["A"] == 1 and values["B"] == [1]
    assert values["STEPS"] == 3 and values["SOURCE"] == "real" and values["rates"] == [0.1]


def test_doctor_names_each_kernel_implementation(capsys):
    assert command_line.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("jax ") for line in lines)
    assert any("8 × cpu" in line for line in lines if line.startswith("devices"))
    assert any(line.split() == ["reference", "live"] for line in lines)


@pytest.mark.slow
def test_doctor_says_in_one_line_that_a_device_is_not_here():
    run = [sys.executable, "-m", "rsembed", "doctor"]
    done = subprocess.run(
        run, env=os.environ | {"JAX_PLATFORMS": "tpu"}, capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert last.startswith("rsembed: JAX finds no device: ") and "'tpu'" in last


def test_doctor_speaks_to_a_terminal_that_lacks_its_signs(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert command_line.main(["doctor"]) == 0
    terminal.flush()
    assert b"8 ? cpu" in terminal.buffer.getvalue()


def test_a_failed_assert_shows_its_line(tmp_path, monkeypatch, capsys):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1\nassert x > 2")])
    nbformat.write(notebook, tmp_path / "claim.ipynb")
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["run", str(tmp_path / "claim.ipynb")]) == 1
    assert "AssertionError: assert x > 2" in capsys.readouterr().err
