"""Compiles the stand-in for the CUDA runtime, and makes the environment of processes
that run on it.

python -m tests.cuda_runtime.build FOLDER    # prints the variables
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.cuda_runtime import triton_cache
from tests.nvml_mock.cards import MockCard, write_description

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("src")
# Of a card, which a stand-in does not have.
_STATE = (
    "utilization",
    "power_mw",
    "instant_power_mw",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "temperature_celsius",
)
NO_STATE: dict[str, Any] = dict.fromkeys(_STATE)
NVML_MOCK = ROOT / "tests" / "nvml_mock" / "nvml_mock.c"
RUNTIME = (
    "device",
    "counters",
    "memory",
    "stream",
    "graph",
    "kernel",
    "order",
    "refused",
)
DRIVER = "libcuda.so.1"
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-pthread",
)


def missing_requirement() -> str | None:
    """Return what this environment lacks for the stand-in, or None."""
    if shutil.which("gcc") is None:
        return "the stand-in for the CUDA runtime needs gcc"
    if not (
        _packages() / "nvidia" / "cu13" / "include" / "cuda_runtime_api.h"
    ).exists():
        return (
            "the stand-in for the CUDA runtime needs a CUDA 13 build of torch: make "
            "test-cuda"
        )
    return missing_for_launcher()


def missing_for_launcher() -> str | None:
    """Return what this environment lacks for Triton's launcher, or None."""
    if not (
        _packages() / "triton" / "backends" / "nvidia" / "include" / "cuda.h"
    ).exists():
        return "Triton's launcher needs triton, which is for Linux only"
    if shutil.which("gcc") is None:
        return "Triton's launcher and the driver below it need gcc"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Triton's launcher needs Python.h"
    return None


def compile_if_changed(folder: Path) -> None:
    """Compile the libraries unless they are newer than their sources."""
    libraries = list(folder.glob("lib*.so.*[0-9]"))
    oldest = min((path.stat().st_mtime for path in libraries), default=0.0)
    newest = max(path.stat().st_mtime for path in (NVML_MOCK, *SOURCES.iterdir()))
    if len(libraries) < 4 or oldest < newest:
        compile_libraries(folder)


def compile_libraries(folder: Path) -> None:
    """Compile the four libraries into a folder, for the torch of this environment."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = "libcudart.so.13"
    _compile(folder, runtime, RUNTIME, ["-Wl,-Bsymbolic-functions", "-ldl"])
    link = [f"-L{folder}", f"-l:{runtime}"]
    _compile(
        folder,
        DRIVER,
        ("launcher", "driver", "refused_driver"),
        link,
        is_versioned=False,
    )
    _compile(folder, "libcupti.so.13", ("cupti",), link)
    _compile(
        folder,
        "libnvidia-ml.so.1",
        (str(NVML_MOCK.with_suffix("")),),
        [],
        is_versioned=False,
    )


def compile_launcher(folder: Path) -> Path:
    """Compile the part of libcuda.so.1 that Triton's launcher uses, without the
    runtime, for a torch of the CPU."""
    _compile(folder, DRIVER, ("launcher", "host_device"), [], is_versioned=False)
    return folder / DRIVER


def environment(folder: Path, **settings: float | str) -> dict[str, str]:
    """Return the variables of processes that run on the libraries in a folder.

    Args:
        folder: Where `compile_libraries` has put them.
        settings: Of the stand-in, without their prefix: `jitter_us=1500` is
            CUDA_RUNTIME_JITTER_US.
    """
    own = {
        f"CUDA_RUNTIME_{name.upper()}": str(value) for name, value in settings.items()
    }
    shared = Path(tempfile.gettempdir()) / f"cuda_runtime.{os.getpid()}"
    shared.mkdir(exist_ok=True)
    preloaded = [str(folder / name) for name in ("libcudart.so.13", "libcupti.so.13")]
    return {
        **os.environ,
        "LD_PRELOAD": _joined(preloaded, os.environ, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _joined([str(folder)], os.environ, "LD_LIBRARY_PATH"),
        "PYTHONPATH": _joined(
            [str(Path(__file__).with_name("site")), str(ROOT)], os.environ, "PYTHONPATH"
        ),
        "CUDA_MODULE_LOADING": "LAZY",
        "TRITON_LIBCUDA_PATH": str(folder),
        **triton_cache.ENVIRONMENT,
        "CUDA_RUNTIME_COUNTERS": str(shared / "counters"),
        "NVML_MOCK": str(_describe_cards(shared, {**os.environ, **own})),
        **own,
    }


def is_on_stand_in() -> bool:
    """Return whether this process runs on the stand-in."""
    return "libcudart" in os.environ.get("LD_PRELOAD", "")


def _describe_cards(folder: Path, variables: Mapping[str, str]) -> Path:
    """Describe the devices as cards of the mock of libnvidia-ml.so.1."""
    total = int(float(variables.get("CUDA_RUNTIME_BYTES", 4 << 30)))
    cards = [
        MockCard(
            uuid=f"GPU-{uuid.UUID(bytes=f'ebbtide-standin{number}'.encode())}",
            name="Stand-in for a GPU",
            total=total,
            counters="uint64",
            throughput=False,
            **NO_STATE,
            live=str(folder / "counters"),
        )
        for number in range(int(variables.get("CUDA_RUNTIME_DEVICES", 1)))
    ]
    return write_description(folder / "nvml.txt", cards)


def _joined(paths: list[str], variables: Mapping[str, str], name: str) -> str:
    return ":".join([*paths, *filter(None, [variables.get(name)])])


def _packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def _compile(
    folder: Path,
    library: str,
    sources: tuple[str, ...],
    link: list[str],
    is_versioned: bool = True,
) -> None:
    """Compile one library, with the version of symbols that torch asks for."""
    headers = [
        *("-isystem", str(_packages() / "nvidia" / "cu13" / "include")),
        *(
            "-idirafter",
            str(_packages() / "triton" / "backends" / "nvidia" / "include"),
        ),
    ]
    names = [f"-Wl,-soname,{library}"]
    if is_versioned:
        versions = folder / f"{library}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        names.append(f"-Wl,--version-script={versions}")
    files = [str(SOURCES / f"{source}.c") for source in sources]
    command = [
        "gcc",
        *FLAGS,
        *headers,
        *files,
        *names,
        *link,
        "-o",
        str(folder / library),
    ]
    # Others may load the library while this one is made.
    command[-1] += f".{os.getpid()}"
    subprocess.run(command, check=True)
    os.replace(command[-1], folder / library)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    if message := missing_requirement():
        sys.exit(message)
    compile_libraries(folder)
    changed = environment(folder).items() - os.environ.items()
    print("\n".join(f"export {name}={value}" for name, value in sorted(changed)))


if __name__ == "__main__":
    main()
