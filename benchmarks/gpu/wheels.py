"""Fetch packages for a GPU machine without a network, as wheels for Linux on x86-64.

    python benchmarks/gpu/wheels.py [FOLDER] [--python 3.12]      # default: benchmarks/gpu/wheels, which git ignores

There: python3 -m pip install -q --no-index --no-deps --no-compile --target SITE
FOLDER/*.whl
        export PYTHONPATH=SITE
        python3 -c "import numba" || python3 -m pip install -q --no-index --no-deps --target SITE FOLDER/older/*.whl

`packages.py` lists what is fetched. Versions are those of constraints.txt. DeepSpeed's
wheel is built here.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from packages import BUILT, FETCHED, FOLDER, ROOT

# Installed only if the NumPy of that machine is too new for its numba.
OLDER = ("numpy",)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)] + [
    "manylinux2014_x86_64"
]
# The build uses the installed torch instead of fetching one.
WHEEL = ["wheel", "--quiet", "--no-deps", "--no-build-isolation"]
DOWNLOAD = [
    "download",
    "--quiet",
    "--no-deps",
    "--only-binary=:all:",
    "--implementation",
    "cp",
]


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=FOLDER / "wheels",
        help="folder to write (default: wheels)",
    )
    flags.add_argument(
        "--python", default="3.12", help="version of Python there (default: 3.12)"
    )
    args = flags.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    constrained = ["--constraint", str(ROOT / "constraints.txt")]
    pip(*WHEEL, *constrained, "--wheel-dir", str(args.folder), *BUILT)
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    for names, to in ((FETCHED, args.folder), (OLDER, args.folder / "older")):
        pip(
            *DOWNLOAD,
            *constrained,
            "--python-version",
            args.python,
            *platforms,
            "--dest",
            str(to),
            *names,
        )
    files = sorted(args.folder.rglob("*.whl"))
    for file in files:
        print(f"{file.stat().st_size / 1e6:6.1f} MB  {file.relative_to(args.folder)}")
    print(
        f"{sum(file.stat().st_size for file in files) / 1e6:6.1f} MB in all, in "
        f"{args.folder}"
    )


if __name__ == "__main__":
    main()
