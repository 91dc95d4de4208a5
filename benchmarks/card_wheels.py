"""Which wheels a machine with jax and CUDA, but no network, still needs for `card.py`."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
JAX, PYTHON = "0.11.2", "3.12"
# Of the extras, what the stages use; the rest of `dev` and `notebooks` (editors, linters, browsers) stays at home.
OF_EXTRAS = {
    "notebooks": ("ipykernel", "nbclient", "ipywidgets", "jsonschema"),
    "dev": ("pytest", "pytest-xdist", "beartype", "hypothesis", "nbmake", "safetensors"),
}
# `packaging` reads requirements here; torch and FBGEMM are peers, and large: carry them if they are wanted.
ALSO = ("packaging",)
# What `pip install jax[cuda13]` brings by itself.
ASSUMED = ("jax", "jaxlib", "numpy", "scipy", "ml-dtypes", "opt-einsum")
PLATFORMS = ("2_28", "2_27", "2_24", "2_17", "2014", "2_12", "2_5", "1")


def canonical(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def roots() -> dict[str, Requirement]:
    """What the library and the stages ask for by themselves, from `pyproject.toml`."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    asked = [Requirement(text) for text in project["dependencies"]]
    for extra, names in OF_EXTRAS.items():
        of_extra = {canonical(own.name): own for own in map(Requirement, project["optional-dependencies"][extra])}
        asked += [of_extra[name] for name in names]
    return {canonical(own.name): own for own in [*asked, *map(Requirement, ALSO)]}


def closure() -> tuple[dict[str, str], set[str]]:
    """All that these need in turn on the other machine: name and version here; and what is not installed here.

    Requirements are those of the versions installed here, read for Linux and the other machine's Python.
    """
    there = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0", "sys_platform": "linux"}
    there |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    there |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    needed: dict[str, str] = {}
    unknown, seen = set(), set()
    waiting = list(roots().values())
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            unknown.add(name)
            continue
        needed[name] = found.version
        for text in found.requires or []:
            inner = Requirement(text)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate(there | {"extra": extra}) for extra in extras):
                waiting.append(inner)
    return needed, unknown


def present(listing: str | None) -> set[str]:
    """Packages in the output of `pip list` or `pip freeze`; without one, what jax with CUDA brings."""
    if listing is None:
        return set(ASSUMED)
    return {canonical(match[1]) for match in re.finditer(r"^([A-Za-z0-9][\w.-]*?)(?:\s+\S|==|\s*@)", listing, re.M)}


def missing(listing: str | None) -> list[str]:
    """Names to carry, in alphabetical order."""
    needed, unknown = closure()
    return sorted((set(needed) | unknown) - present(listing))


def instructions(listing: str | None) -> str:
    """Commands for a machine with a network, then for the one without."""
    bounds = {name: str(own.specifier) for name, own in roots().items() if own.specifier}
    names = [f"'{name}{bounds[name]}'" if name in bounds else name for name in missing(listing)]
    platforms = " ".join(f"--platform manylinux{'_' if '_' in one else ''}{one}_x86_64" for one in PLATFORMS)
    lines = [names[start : start + 8] for start in range(0, len(names), 8)]
    wrapped = " \\\n    ".join(" ".join(line) for line in lines)
    return f"""# For a machine that has Python {PYTHON}, jax {JAX} with CUDA 13 (jax[cuda13]) and no network.
# {"What it has was read from the list." if listing else "It is taken to have nothing but " + ", ".join(ASSUMED) + "."}
# {len(names)} packages. Where there is a network, in the root of the checkout:
mkdir -p wheels
python{PYTHON} -m pip download --no-deps --only-binary=:all: --python-version {PYTHON} --implementation cp \\
    {platforms} \\
    -d wheels \\
    {wrapped}
# The library itself. Building needs a C++ compiler, scikit-build-core, cmake and ninja, and jaxlib's headers, which
# must be those of the jax there: a library made with newer ones is passed over. So it is built before:
echo jaxlib=={JAX} > wheels/constraint.txt
PIP_CONSTRAINT=wheels/constraint.txt python{PYTHON} -m pip wheel --no-deps -w wheels .
# Peers, if they are wanted and not there: torch (with the CUDA libraries that it asks for) and the fbgemm-gpu whose
# version belongs to that torch.

# There, in the root of the checkout, with the folder `wheels`:
python3 -m pip install --no-index --no-deps --find-links wheels wheels/*.whl
# or, where nothing may be installed:
#   python3 -m pip install --no-index --no-deps --target /tmp/site wheels/*.whl && export PYTHONPATH=/tmp/site
python3 benchmarks/card.py --out results"""
