"""Fetch packages for a GPU machine without a network, as wheels for Python 3.12 on x86-64.

    python benchmarks/gpu/wheels.py [FOLDER]       # default: benchmarks/gpu/wheels, which git ignores

There:  python3 -m pip install -q --no-index --no-deps --no-compile --target SITE FOLDER/*.whl
        export PYTHONPATH=SITE
        python3 -c "import numba" || python3 -m pip install -q --no-index --no-deps --target SITE FOLDER/older/*.whl

DeepSpeed is published as source: its wheel is built here from Python code only; it compiles the rest at first use.
Versions are those of constraints.txt. torch, triton and numba are not included: such machines have them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CONSTRAINTS = FOLDER.parent.parent / "constraints.txt"
BUILT = ("deepspeed", "hjson")
FETCHED = (
    "pydantic",
    "pydantic_core",
    "typing-inspection",
    "annotated-types",
    "typing_extensions",
    "typer",
    "annotated-doc",
    "msgspec",
    "bokeh",
    "tornado",
    "xyzservices",
    "torchao",
)
# Installed only if the NumPy of that machine is too new for its numba.
OLDER = ("numpy",)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64"]
# The build uses the installed torch instead of fetching one.
WHEEL = ["wheel", "--quiet", "--no-deps", "--no-build-isolation"]
DOWNLOAD = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER / "wheels", help="folder to write (default: wheels)"
    )
    folder = flags.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    constrained = ["--constraint", str(CONSTRAINTS)]
    pip(*WHEEL, *constrained, "--wheel-dir", str(folder), *BUILT)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for names, to in ((FETCHED, folder), (OLDER, folder / "older")):
        pip(*DOWNLOAD, *constrained, "--python-version", "3.12", *platforms, "--dest", str(to), *names)
    files = sorted(folder.rglob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 1e6:6.1f} MB  {file.relative_to(folder)}")
    print(f"{sum(file.stat().st_size for file in files) / 1e6:6.1f} MB in all, in {folder}")


if __name__ == "__main__":
    main()
