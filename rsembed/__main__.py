"""Command line: `python -m rsembed doctor | run NOTEBOOK [NAME=VALUE ...] | launch SCRIPT`."""

import argparse
import ast
import base64
import importlib.metadata
import io
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_COLOUR_CODES = re.compile(r"\x1b\[[0-9;]*m")
_FAILED_LINE = re.compile(r"^-+>\s*\d+(.*)$", re.MULTILINE)


def find_notebook(name: str) -> Path:
    """Path of the notebook that a user names.

    Args:
      name: a path ending in `.ipynb`, the name of a tutorial, or the beginning of its name (`01`),
        if only one tutorial has this beginning.

    Raises: ValueError: no tutorial, or more than one, begins with `name`. The error message lists
      the tutorials that exist.
    """
    if name.endswith(".ipynb") and Path(name).is_file():
        return Path(name)
    # An installed package has the notebooks in `_bundled/notebooks`. In a checkout of the
    # repository, the notebooks are beside the package.
    folders = (
        _PACKAGE / "_bundled" / "notebooks",
        _PACKAGE.parent / "notebooks",
    )
    known = {path.stem: path for folder in folders for path in sorted(folder.glob("*.ipynb"))}
    matches = [name] if name in known else [stem for stem in known if stem.startswith(name)]
    if len(matches) == 1:
        return known[matches[0]]
    problem = (
        f"{name!r} could mean {', '.join(matches)}" if matches else f"there is no notebook {name!r}"
    )
    raise ValueError(f"{problem}; known: {', '.join(known) or 'none'}.")


def with_settings(source: str, settings: dict[str, str]) -> str:
    """Code of the parameters cell of a notebook, with an assignment for each entry of `settings`.

    Args:
      source: code of the parameters cell.
      settings: new values as Python literals, by the name of the parameter. Quotes may be left out
        if the cell assigns a string to the parameter.

    Raises:
      ValueError: `source` is not valid Python, `settings` has a name that the cell does not assign,
        or a value is not a Python literal. If `settings` has an unknown name, the error message
        lists the parameters.

    Example:
      >>> print(with_settings("STEPS = 20  # 5_000 in the docs", {"STEPS": "10"}))
      STEPS = 20  # 5_000 in the docs
      STEPS = 10
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"the cell tagged 'parameters' is no Python: {error}.") from None
    names = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    if unknown := sorted(settings.keys() - set(names)):
        known = ", ".join(names) or "none"
        raise ValueError(f"unknown parameter {', '.join(unknown)}; this notebook knows {known}.")
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    texts = [
        ast.unparse(node.targets[0])
        for node in assigned
        if isinstance(getattr(node.value, "value", 0), str)
    ]
    lines = [source]
    for name, text in settings.items():
        try:
            lines.append(f"{name} = {ast.literal_eval(text)!r}")
        except (ValueError, SyntaxError):
            if name not in texts:
                raise ValueError(
                    f"{name}={text}: the value must be a Python literal, such as 0.1."
                ) from None
            lines.append(f"{name} = {text!r}")
    return "\n".join(lines)


def parse_settings(arguments: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` arguments as a dictionary of strings.

    Raises: ValueError: an argument does not have the form `NAME=VALUE`, or repeats a name.
    """
    settings = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not (equals and name.isidentifier()) or name in settings:
            raise ValueError(
                f"{argument!r} is not of the form NAME=VALUE, such as STEPS=500, each NAME once."
            )
        settings[name] = value
    return settings


def execute(notebook: Any, *, beside: Path, after_cell: Callable[..., None]) -> str | None:
    """Runs all cells of a notebook, with the Python that runs this function.

    Args:
      notebook: an `nbformat` notebook. Outputs of cells are written into the notebook. If a cell
        fails, the notebook has the outputs of all cells up to the failed cell.
      beside: folder of the notebook, from which cells can import modules.
      after_cell: function that is called after each code cell with `cell=` and `cell_index=`, the
        index of the cell from 0.

    Returns: None if all cells ran, or a description of the failure in one line.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    failed_cells: list[int] = []

    def after_error(*, cell_index: int, **_: Any) -> None:
        failed_cells.append(cell_index + 1)

    modules = os.pathsep.join(filter(None, [str(beside.resolve()), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        manager = AsyncKernelManager(
            kernel_name="python3",
            # With an empty `kernel_dirs`, Jupyter starts the Python that runs this function.
            # Without `kernel_dirs=[]`, Jupyter might start the Python of a kernel that the user has
            # installed.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=f"{folder}/connection.json",
            # Use sockets in the temporary folder, because other users could connect to ports.
            transport="ipc",
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=None,
            on_cell_executed=after_cell,
            on_cell_error=after_error,
        )
        try:
            client.execute(cleanup_kc=True, env=os.environ | {"PYTHONPATH": modules})
        except CellExecutionError as error:
            text = _COLOUR_CODES.sub("", error.evalue)
            if not text:
                # An assert without a message has an empty text, so show its line of code.
                lines = _FAILED_LINE.findall(_COLOUR_CODES.sub("", error.traceback))
                text = lines[0].strip() if lines else ""
            return f"cell {failed_cells[-1]}: {error.ename}: {text}"
        except DeadKernelError:
            return (
                "the Python process of the notebook died; run the cells in JupyterLab to see where"
            )
    return None


def run(name: str, settings: dict[str, str], output: Path) -> int:
    """Executes a tutorial, prints its outputs as they appear, and saves the executed notebook.

    Args:
      name: see `find_notebook`.
      settings: see `with_settings`.
      output: folder for `<notebook>.ipynb` and the pictures under `<notebook>/`.

    Returns: the exit status, 0 or, if a cell failed, 1.

    Raises: ValueError: the notebook or a parameter is unknown, the file is not a notebook, the
      folder cannot be written to, or the `notebooks` extra is not installed.
    """
    try:
        import nbclient  # noqa: F401
        import nbformat
    except ImportError as error:
        raise ValueError(f"{error}; install the extra: pip install 'rsembed[notebooks]'.") from None

    path = find_notebook(name)
    try:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except (ValueError, TypeError, AttributeError, KeyError, nbformat.ValidationError) as error:
        raise ValueError(f"{path} is no notebook: {_first_line(error)}") from None
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if settings and not cells:
        raise ValueError(f"{path.stem} has no cell tagged 'parameters', so nothing can be set.")
    for cell in cells[:1]:
        cell.source = with_settings(cell.source, settings)

    title = path.stem
    if settings:
        title += " with " + " ".join(f"{key}={value}" for key, value in settings.items())
    print(f"Running {title} ...", flush=True)
    start = time.monotonic()
    executed = output / path.name
    folder = output / path.stem
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The notebook is written before the first cell runs, so that a folder without write access
        # raises an error at once.
        nbformat.write(notebook, executed)
        # Delete the pictures of an earlier run.
        for picture in folder.glob("cell-*.png"):
            picture.unlink()
    except OSError as error:
        raise ValueError(
            f"--output {output}: {error}; name a folder that can be written."
        ) from None

    def tell(*, cell: Any, cell_index: int, **_: Any) -> None:
        """Prints the output and the result of a cell.

        Pictures are saved as `cell-<number>-<picture>.png`.
        """
        num_pictures = 0
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = ""
            if "image/png" in data:
                num_pictures += 1
                picture = folder / f"cell-{cell_index + 1:02d}-{num_pictures}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
                text = f"{time.monotonic() - start:.0f} s: {picture}"
            elif output.output_type == "stream" and output.name == "stdout":
                text = output.text
            elif output.output_type == "execute_result" or "text/markdown" in data:
                text = data.get("text/markdown", data.get("text/plain", ""))
            for line in text.splitlines():
                print(f"  {line}", flush=True)

    failure = execute(notebook, beside=path.parent, after_cell=tell)
    seconds = time.monotonic() - start
    nbformat.write(notebook, executed)
    if failure:
        print(f"{path.stem} failed after {seconds:.0f} s: {failure}", file=sys.stderr)
        print(f"The notebook up to there, with the traceback: {executed}", file=sys.stderr)
        return 1
    print(f"Finished in {seconds:.0f} s.")
    print(f"Executed notebook: {executed}")
    return 0


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def doctor() -> int:
    """Prints versions and devices, and which kernels and backends work on this machine.

    Raises: ValueError: an environment variable requests devices or kernels that do not exist.
    """
    import jax

    from rsembed.kernels.api import backend_evidence, implementation_states

    print(f"{'python':<12}{platform.python_version()} on {platform.system()} {platform.machine()}")
    for package in ("rsembed", "jax", "jaxlib", "flax", "optax", "numpy"):
        try:
            print(f"{package:<12}{importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package:<12}not installed")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise ValueError(f"JAX finds no device: {_first_line(error)}") from None
    print(f"{'devices':<12}{len(devices)} × {devices[0].device_kind} ({devices[0].platform})")
    print("kernels")
    for name, state in implementation_states():
        print(f"  {name:<12}{state}")
    print("backends")
    for name, words in backend_evidence():
        print(f"  {name:<18}{words}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command of the command line.

    Returns: the exit status: 1 if a notebook failed, 2 if the arguments are wrong, else 0. `launch`
      returns the exit status of the script.
    """
    parser = argparse.ArgumentParser(prog="rsembed", description="Embedding tables in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="versions, devices, and which kernels are live")
    runner = commands.add_parser(
        "run", help="execute a tutorial, with other parameters if you like"
    )
    runner.add_argument(
        "notebook", help="name or its beginning, such as 01_shakespeare or 01; or a path"
    )
    runner.add_argument(
        "settings", nargs="*", metavar="NAME=VALUE", help="parameter, such as STEPS=500"
    )
    runner.add_argument(
        "--output", type=Path, default=Path("executed"), help="folder of the results"
    )
    launcher = commands.add_parser(
        "launch", help="start a script in several processes on this machine"
    )
    launcher.add_argument("--processes", type=int, default=2, help="how many (default: 2)")
    launcher.add_argument(
        "--devices-per-process", type=int, default=1, help="CPU devices of each (default: 1)"
    )
    launcher.add_argument("script", help="Python file that calls rsembed.parallel.init()")
    launcher.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    options = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Print a question mark for a character that the encoding of the terminal lacks.
            stream.reconfigure(errors="replace")
    try:
        if options.command == "launch":
            from rsembed.parallel import launch

            return launch(
                options.script,
                options.arguments,
                num_processes=options.processes,
                devices_per_process=options.devices_per_process,
            )
        if options.command == "run":
            return run(options.notebook, parse_settings(options.settings), options.output)
        return doctor()
    except ValueError as error:
        # A ValueError reports a mistake of the user, so the message is printed without a traceback.
        print(f"rsembed: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
