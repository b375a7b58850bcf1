"""MkDocs hook: run the notebooks in docs/ and make a page of each, with the outputs of
this run.

`python docs/hooks/notebook_pages.py` stores the outputs in the notebooks.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File
from nbclient import NotebookClient

TIMEOUT_S = 300
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def run_notebook(path: Path, root: Path) -> Any:
    """Run a notebook in its folder, with the ebbtide in the folder `root`, and return
    it with outputs.

    Raises:
        CellExecutionError: A cell has raised an error.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    # A kernel warns that others on this host may listen to its ports.
    quiet = ["--Application.log_level=ERROR"]
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        startup_timeout=TIMEOUT_S,
        resources=resources,
        extra_arguments=quiet,
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(root)})
    return notebook


def store_outputs(folder: Path) -> None:
    """Run all notebooks of a folder and keep them with their outputs, without the times
    of the run."""
    for path in sorted(folder.glob("*.ipynb")):
        notebook = run_notebook(path, folder.parents[1])
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
        nbformat.write(notebook, path)


def notebook_page(notebook: Any, name: str) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown of a notebook, and its pictures by file name."""
    pictures: dict[str, bytes] = {}
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [
            _output(output, f"{name}-{len(parts)}-{n}.png", pictures)
            for n, output in enumerate(cell.outputs)
        ]
    parts.insert(1, f'The notebook: <a href="{name}.ipynb" download>{name}.ipynb</a>')
    return "\n\n".join(part for part in parts if part) + "\n", pictures


def _output(output: Any, picture: str, pictures: dict[str, bytes]) -> str:
    if output.output_type == "stream":
        return _text(output.text) if output.name == "stdout" else ""
    data = output.data
    if "image/png" in data:
        pictures[picture] = base64.b64decode(data["image/png"])
        return f"![Output of the cell above]({picture})"
    if "text/html" in data:
        table = re.sub(
            r"<style.*?</style>|\n\s*", "", data["text/html"], flags=re.DOTALL
        )
        # Tables without a class get the style of the site.
        return table.replace(' border="1" class="dataframe"', "")
    return _text(data["text/plain"])


def _text(text: str) -> str:
    return f"```text\n{ANSI.sub('', text).rstrip()}\n```"


def on_files(files: Any, config: Any) -> Any:
    """Add a page, and its pictures, for each notebook."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        path = Path(file.abs_src_path)
        markdown, pictures = notebook_page(
            run_notebook(path, Path(config.docs_dir).parent), path.stem
        )
        files.append(
            File.generated(
                config, file.src_uri.removesuffix(".ipynb") + ".md", content=markdown
            )
        )
        for name, content in pictures.items():
            files.append(
                File.generated(
                    config, str(Path(file.src_uri).with_name(name)), content=content
                )
            )
    return files


if __name__ == "__main__":
    store_outputs(Path(__file__).parents[1] / "notebooks")
