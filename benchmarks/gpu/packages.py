"""Lists the packages that the steps need, those that a machine with a GPU has, and
those that wheels.py fetches.

python benchmarks/gpu/packages.py    # prints those that are needed and there
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
_EXTRAS = ("calibrate", "plan", "report", "run")
# In addition to the dependencies of ebbtide: contestants, and what the tests marked
# `gpu` import.
STEPS_NEED = (
    "deepspeed",
    "torchao",
    "triton",
    "prometheus-client",
    "pytest",
    "pytest-timeout",
    "hypothesis",
)
# Published as source: their wheels have Python code only, and DeepSpeed compiles the
# rest at its first use.
BUILT = ("deepspeed", "hjson")
FETCHED = (
    "pydantic",
    "pydantic_core",
    "typing-inspection",
    "annotated-types",
    "typing_extensions",
    "typer",
    "annotated-doc",
    "tzdata",
    "msgspec",
    "highspy",
    "bokeh",
    "tornado",
    "xyzservices",
    # Not in constraints.txt, since only the machine with the GPU uses it.
    "torchao==0.18.0",
)
# The environment of that machine, for the markers of requirements.
ENVIRONMENT = {
    "python_version": "3.12",
    "python_full_version": "3.12.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "extra": "",
}


def _dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        text for name in _EXTRAS for text in project["optional-dependencies"][name]
    ]
    return [
        text
        for text in (*project["dependencies"], *extras)
        if not text.startswith("ebbtide[")
    ]


def names(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def present() -> set[str]:
    """Return the packages that the machine has."""
    lines = (FOLDER / "packages.txt").read_text().splitlines()
    return names([text for text in lines if not text.startswith("#")])


def fetched() -> set[str]:
    """Return the packages that are brought along."""
    return names([*BUILT, *FETCHED])


def needed() -> dict[str, str]:
    """Return the packages that the steps need, each with the package that requires it.

    The requirements of packages are those of the versions installed here, that is of
    constraints.txt.
    """
    todo = [
        *((text, "ebbtide") for text in _dependencies()),
        *((name, "the steps") for name in STEPS_NEED),
    ]
    packages: dict[str, str] = {}
    while todo:
        text, parent = todo.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in packages or (
            requirement.marker and not requirement.marker.evaluate(ENVIRONMENT)
        ):
            continue
        packages[name] = parent
        try:
            todo += [(text, name) for text in importlib.metadata.requires(name) or []]
        except importlib.metadata.PackageNotFoundError:
            # What is only there with CUDA, which needs torch alone.
            assert name in names(list(STEPS_NEED)), name
    return packages


def missing() -> dict[str, str]:
    """Return the packages that the steps need and the machine would not have."""
    there = present() | fetched()
    return {name: parent for name, parent in needed().items() if name not in there}


def module_of(requirement: str) -> str:
    """Return the module to import of a requirement."""
    name = re.split(r"[<>=!~\[; ]", requirement)[0]
    return {"nvidia-ml-py": "pynvml", "torchao": "torchao.optim"}.get(
        name, name.replace("-", "_")
    )


def importable() -> list[str]:
    """Return the modules that the steps import."""
    return [module_of(text) for text in (*_dependencies(), *STEPS_NEED)]


def main() -> None:
    """Print the packages that the steps need and the machine has."""
    print(*sorted((needed().keys() & present()) - fetched()))


if __name__ == "__main__":
    main()
