"""Adds what pyproject.toml cannot express: a .pth file beside the package, and links to
the repository of a release.

The .pth file loads the agent at the start of Python where `ebbtide profile` asks for it
in the environment, also where PYTHONPATH is ignored (`python -I`) or replaced.
Otherwise it does nothing.

The repository names no address of its own: a build in GitHub Actions links to the
repository that it was built from.
"""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

PTH = Path("ebbtide/profiler/inject/ebbtide-agent.pth")


def repository_urls():
    """Return the links of `[project.urls]` for a build in GitHub Actions, and none
    elsewhere."""
    server, repository = (
        os.environ.get("GITHUB_SERVER_URL"),
        os.environ.get("GITHUB_REPOSITORY"),
    )
    if not (server and repository):
        return {}
    address = f"{server}/{repository}"
    return {
        "Source": address,
        "Documentation": f"{address}/blob/main/docs/README.md",
        "Changelog": f"{address}/blob/main/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


class BuildWithPth(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file(
                str(PTH), str(Path(self.build_lib) / PTH.name), preserve_mode=False
            )

    def get_outputs(self, include_bytecode=True):
        return [
            *super().get_outputs(include_bytecode),
            str(Path(self.build_lib) / PTH.name),
        ]


class EditableFolder(editable_wheel):
    """Adds a folder with a link to the package to the path of Python.

    The import hooks of setuptools come after a folder of the same name in the path, as
    the clone in the folder that holds it. The root of the repository in the path would
    offer its other folders (`tests`, `profiler`) to jobs."""

    def _select_strategy(self, *arguments):
        class Link:
            def __enter__(self):
                return self

            def __exit__(self, *exception):
                return None

            def __call__(self, wheel, files, mapping):
                link = Path(".editable").resolve() / "ebbtide"
                link.parent.mkdir(exist_ok=True)
                link.unlink(missing_ok=True)
                link.symlink_to(Path("ebbtide").resolve())
                wheel.writestr("__editable__.ebbtide.pth", f"{link.parent}\n")
                wheel.writestr(PTH.name, PTH.read_bytes())

        return Link()


setup(
    project_urls=repository_urls(),
    cmdclass={"build_py": BuildWithPth, "editable_wheel": EditableFolder},
)
