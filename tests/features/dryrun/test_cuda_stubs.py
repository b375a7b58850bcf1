"""The stubs of torch's C++ objects refuse builds whose layout they do not know."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ebbtide.features.dryrun.backends import backend_of
from ebbtide.features.dryrun.errors import DryRunError
from ebbtide.features.dryrun.torch_2_13.device.cuda_stubs import CudaStubs


def build(
    version: str, hip: str | None = None, file: str = torch.__file__
) -> SimpleNamespace:
    """Return a module like torch."""
    return SimpleNamespace(
        __version__=version, version=SimpleNamespace(hip=hip), __file__=file
    )


@pytest.mark.parametrize(
    ("version", "hip", "line"),
    [
        ("2.13.0+rocm7.1", "7.1", "needs a build of torch for the CPU or CUDA"),
        ("2.12.0+cpu", None, "needs torch 2.13"),
    ],
)
def test_backend_of__refuses_other_versions(
    version: str, hip: str | None, line: str
) -> None:
    with pytest.raises(DryRunError, match=line):
        backend_of(build(version, hip))


def test_cuda_stubs__refuse_another_layout(tmp_path: Path) -> None:
    header = Path("include", "ATen", "detail", "AcceleratorHooksInterface.h")
    text = (Path(torch.__file__).parent / header).read_text(encoding="utf-8")
    (tmp_path / header).parent.mkdir(parents=True)
    swapped = (
        text.replace("isBuilt", "later")
        .replace("isAvailable", "isBuilt")
        .replace("later", "isAvailable")
    )
    (tmp_path / header).write_text(swapped, encoding="utf-8")
    with pytest.raises(DryRunError, match="layout"):
        CudaStubs(
            build(torch.__version__, file=str(tmp_path / "__init__.py")), devices=1
        )
