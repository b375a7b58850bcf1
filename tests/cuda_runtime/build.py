"""Compiles the stand-in for the CUDA runtime, and makes the environment of processes that run on it.

python -m tests.cuda_runtime.build FOLDER    # prints the variables
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

SOURCES = Path(__file__).with_name("src")
RUNTIME = ("device", "memory", "stream", "graph", "kernel", "order", "refused")
FLAGS = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")


def missing_requirement() -> str | None:
    """Return what this environment lacks for the stand-in, or None."""
    if shutil.which("gcc") is None:
        return "the stand-in for the CUDA runtime needs gcc"
    if not (_packages() / "nvidia" / "cu13" / "include" / "cuda_runtime_api.h").exists():
        return "the stand-in for the CUDA runtime needs a CUDA 13 build of torch: make test-cuda"
    return None


def compile_if_changed(folder: Path) -> None:
    """Compile the libraries unless they are newer than their sources."""
    oldest = min((path.stat().st_mtime for path in folder.glob("lib*.so.*[0-9]")), default=0.0)
    if len(list(folder.glob("lib*.so.*[0-9]"))) < 3 or oldest < max(one.stat().st_mtime for one in SOURCES.iterdir()):
        compile_libraries(folder)


def compile_libraries(folder: Path) -> None:
    """Compile `libcudart`, `libcuda` and `libcupti` into a folder, for the torch of this environment."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = "libcudart.so.13"
    _compile(folder, runtime, RUNTIME, ["-Wl,-Bsymbolic-functions", "-ldl"])
    link = [f"-L{folder}", f"-l:{runtime}"]
    _compile(folder, "libcuda.so.1", ("driver", "refused_driver"), link, is_versioned=False)
    _compile(folder, "libcupti.so.13", ("cupti",), link)


def environment(folder: Path, **settings: float | str) -> dict[str, str]:
    """Return the variables of processes that run on the libraries in a folder.

    Args:
        folder: Where `compile_libraries` has put them.
        settings: Of the stand-in, without their prefix: `jitter_us=1500` is CUDA_RUNTIME_JITTER_US.
    """
    preloaded = [str(folder / name) for name in ("libcudart.so.13", "libcupti.so.13")]
    own = {f"CUDA_RUNTIME_{name.upper()}": str(value) for name, value in settings.items()}
    return {
        **os.environ,
        "LD_PRELOAD": _joined(preloaded, os.environ, "LD_PRELOAD"),
        "LD_LIBRARY_PATH": _joined([str(folder)], os.environ, "LD_LIBRARY_PATH"),
        "CUDA_MODULE_LOADING": "LAZY",
        **own,
    }


def _joined(paths: list[str], variables: Mapping[str, str], name: str) -> str:
    return ":".join([*paths, *filter(None, [variables.get(name)])])


def _packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def _compile(folder: Path, library: str, sources: tuple[str, ...], link: list[str], is_versioned: bool = True) -> None:
    """Compile one library, with the version of symbols that torch asks for."""
    headers = [
        *("-isystem", str(_packages() / "nvidia" / "cu13" / "include")),
        *("-idirafter", str(_packages() / "triton" / "backends" / "nvidia" / "include")),
    ]
    names = [f"-Wl,-soname,{library}"]
    if is_versioned:
        versions = folder / f"{library}.map"
        versions.write_text(f"{library} {{ global: *; }};\n")
        names.append(f"-Wl,--version-script={versions}")
    files = [str(SOURCES / f"{source}.c") for source in sources]
    command = ["gcc", *FLAGS, *headers, *files, *names, *link, "-o", str(folder / library)]
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
