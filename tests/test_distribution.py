"""The source distribution, the wheel that is built from it, and the wheel in an
environment of its own."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import ebbtide
from tests.conftest import run_process

ROOT = Path(__file__).parents[1]
PACKAGES = ("ebbtide", "analysis", "features", "interleave", "profiler")
INSTALL_TIMEOUT_S = 900.0
REPOSITORY = {
    "GITHUB_SERVER_URL": "https://code.example",
    "GITHUB_REPOSITORY": "someone/ebbtide",
}
JOB = """
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Distributions:
    """The files of a release: a source distribution, and the wheel that is built from
    its content."""

    sdist: Path
    wheel: Path

    def wheel_files(self) -> list[str]:
        """The names of the files in the wheel; one that it has twice is there twice."""
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def metadata(self) -> Message:
        """The metadata of the wheel."""
        with zipfile.ZipFile(self.wheel) as archive:
            name = next(
                name
                for name in archive.namelist()
                if name.endswith(".dist-info/METADATA")
            )
            return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    source.mkdir()
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, source)
    for package in (*PACKAGES, "tests"):
        shutil.copytree(
            ROOT / package,
            source / package,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    # Builds the wheel from the source distribution.
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder / "dist",
    ]
    run = run_process(build, cwd=source, env={**os.environ, **REPOSITORY})
    assert run.returncode == 0, run.stderr
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Distributions(sdist, wheel)


@pytest.mark.slow
def test_wheel__has_each_file_of_the_packages_once_and_nothing_else(
    distributions: Distributions,
) -> None:
    packages = {
        f"{link.relative_to(ROOT)}/{file.relative_to(link)}"
        for link in (
            ROOT / "ebbtide",
            *(path for path in (ROOT / "ebbtide").iterdir() if path.is_symlink()),
        )
        for file in link.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pth"
    }
    files = [name for name in distributions.wheel_files() if ".dist-info/" not in name]
    assert sorted(files) == sorted({*packages, "ebbtide-agent.pth"})
    assert {
        "ebbtide/py.typed",
        "ebbtide/analysis/report/templates/page.html.j2",
    } <= set(files)


@pytest.mark.slow
def test_metadata__has_the_version_of_the_package_and_links_to_the_repository_of_the_build(
    distributions: Distributions,
) -> None:
    metadata = distributions.metadata()
    assert metadata["Version"] == ebbtide.__version__
    assert "Source, https://code.example/someone/ebbtide" in metadata.get_all(
        "Project-URL", []
    )
    assert metadata["Requires-Python"] == ">=3.11"


@pytest.mark.slow
def test_sdist__has_the_changelog_and_no_tests(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "setup.py",
    } <= names
    assert not any(name.startswith("tests") for name in names)


def test_changelog__has_this_version_with_its_date_and_one_line_a_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    version = rf"{re.escape(ebbtide.__version__)} \(\d{{4}}-\d\d-\d\d\)"
    assert re.fullmatch(
        version, next(name for name in headings if name != "Unreleased")
    )
    lines = [line for line in text.splitlines() if line]
    assert max(map(len, lines)) <= 160
    assert [line for line in lines if line[0] not in "-#O"] == []


TRACE = ROOT / "traces" / "a100-13b-async.ebb"
# Extra -> commands that need it; PYTHON is the environment's.
EXTRAS = {
    "": (f"summary {TRACE}", f"plot {TRACE} -o run.png"),
    "remote": (f"summary {TRACE}",),
    "report": (f"report {TRACE} -o report.html",),
    "plan": (f"replay {TRACE} --recommend",),
    "live": ("watch --help",),
    "mcp": ("mcp --help",),
    "dask": ("sweep --help",),
    "calibrate": ("calibrate --seconds 2 -o machine.json",),
    "run": (
        "profile -o run.ebb -- PYTHON job.py",
        "compare --params 1e5 --steps 3",
    ),
    "dry-run": ("dry-run -o predicted.ebb -- PYTHON job.py",),
    "transformers": ("--help",),
    "deepspeed": ("--help",),
    "all": ("profile -o run.ebb -- PYTHON job.py", "report run.ebb -o report.html"),
}


def test_extras__are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of_users = set(project["optional-dependencies"]) - {"docs", "test"}
    assert of_users == set(EXTRAS) - {""}


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 300)
@pytest.mark.parametrize("extra", EXTRAS)
def test_wheel__works_in_an_environment_of_its_own(
    distributions: Distributions, tmp_path: Path, extra: str
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    run_process([sys.executable, "-m", "venv", tmp_path / "environment"])
    wheel = f"{distributions.wheel}[{extra}]" if extra else distributions.wheel
    install = [python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", wheel]
    installed = run_process(install, cwd=tmp_path, timeout_s=INSTALL_TIMEOUT_S)
    assert installed.returncode == 0, installed.stderr
    (tmp_path / "job.py").write_text(JOB)
    for command in EXTRAS[extra]:
        words = command.replace("PYTHON", str(python)).split()
        run = run_process([python.parent / "ebbtide", *words], cwd=tmp_path)
        assert run.returncode == 0, f"{command}: {run.stderr}"
    if "report" in "".join(EXTRAS[extra]):
        assert "<html" in (tmp_path / "report.html").read_text()
