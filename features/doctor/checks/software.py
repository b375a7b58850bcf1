"""Checks of the driver, of torch and of DeepSpeed."""

import ctypes.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ebbtide.features.doctor.check import Answer, check
from ebbtide.features.doctor.host import JobHost
from ebbtide.numa.topology import read_text

_CUDA = re.compile(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)", re.MULTILINE)
_HIP = re.compile(r"^hip\b[^=]*=\s*'", re.MULTILINE)


@check("torch")
def torch(host: JobHost) -> Iterator[Answer]:
    """Compare the build of torch with the GPU and the driver."""
    package = host.packages.get("torch")
    if package is None:
        python = host.job.python or "this Python"
        yield (
            "unknown",
            f"{python} has no torch"
            if host.packages
            else f"{python} cannot be asked for its packages",
        )
        return
    text = _text(package.file and package.file.with_name("version.py"))
    cuda = _CUDA.search(text)
    driver = host.driver_cuda
    if cuda is None:
        build = "built for ROCm" if _HIP.search(text) else "built for the CPU"
        if host.cards and "CPU" in build:
            yield (
                "warning",
                f"torch {package.version} is {build}, and cannot use the GPU",
                "install a build with CUDA",
            )
        else:
            yield "ok", f"torch {package.version}, {build}"
        return
    version = int(cuda[1]), int(cuda[2])
    build = f"torch {package.version}, CUDA {version[0]}.{version[1]}"
    if driver is None:
        yield "ok", build
    elif version[0] > driver[0]:
        text = (
            f"{build}, but driver {host.driver} runs CUDA {driver[0]}.{driver[1]} at "
            "most: CUDA will not start"
        )
        yield (
            "warning",
            text,
            f"update the driver, or install torch for CUDA {driver[0]}",
        )
    else:
        yield "ok", f"{build}; driver {host.driver} (CUDA {driver[0]}.{driver[1]})"


@check("deepspeed")
def deepspeed(host: JobHost) -> Iterator[Answer]:
    """Check whether DeepSpeed's CPU Adam is built, or can be when it is first used."""
    package = host.packages.get("deepspeed")
    if package is None:
        if host.packages:
            yield "ok", "not installed"
        return
    if re.search(
        r"'cpu_adam': True",
        _text(package.file and package.file.with_name("git_version_info_installed.py")),
    ):
        yield "ok", f"DeepSpeed {package.version}, CPU Adam built"
        return
    tools = {
        "g++": shutil.which("g++"),
        "ninja": host.packages.get("ninja") or shutil.which("ninja"),
    }
    if missing := " and ".join(name for name, path in tools.items() if path is None):
        text = (
            f"DeepSpeed {package.version} builds its CPU Adam when a job starts, and "
            f"{missing} is missing"
        )
        yield (
            "warning",
            text,
            f"install {missing}; or DS_BUILD_CPU_ADAM=1 pip install deepspeed "
            "elsewhere",
        )
    else:
        yield (
            "ok",
            f"DeepSpeed {package.version}; CPU Adam is built when a job first uses it",
        )


@check("libaio")
def libaio(host: JobHost) -> Iterator[Answer]:
    """Check for the library with which DeepSpeed offloads to NVMe.

    Ebbtide's own storage does not need it.
    """
    if host.packages.get("deepspeed") is None:
        return
    if ctypes.util.find_library("aio"):
        yield "ok", "libaio is installed"
    else:
        text = (
            "no libaio: DeepSpeed cannot offload to NVMe (ebbtide's storage= does not "
            "need it)"
        )
        yield "unknown", text, "apt-get install libaio-dev"


def _text(path: Path | None) -> str:
    return (path and read_text(path)) or ""
