"""Jobs that cannot be dry-run, and jobs that fail by themselves: a line with place and
remedy, or the job's own end."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from ebbtide.features.dryrun import child
from ebbtide.features.dryrun.failures import explain_crash
from ebbtide.features.dryrun.torch_2_13 import backend
from tests.features.dryrun.forked import run_forked

assert backend  # imported here, so that forked processes have it
# A job that trains in `step`; what follows is on line 5.
MODEL = """import torch
x = torch.ones(4, 8, device="cuda")
model = torch.nn.Linear(8, 8).cuda(); optimizer = torch.optim.SGD(model.parameters(), lr=1)
def step(loss): loss.sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
TRAIN = "for _ in range(2): step({})"
NEEDS_DEVICE = "it needs a device: leave it out"
COMPILED = "it is compiled for CUDA: leave it out"
UNSUPPORTED = "fake tensors do not support it: leave it out"
SHAPE = "the shape of its result depends on values"
# Name -> (script, operation, remedy): status 2, and nothing but a line.
CANNOT = {
    "own operator": (
        'library = torch.library.Library("own", "DEF"); library.define("scale(Tensor '
        'x) -> Tensor")\n'
        'library.impl("scale", lambda x: x, "CUDA"); '
        'step(torch.ops.own.scale(model(x)))',
        "own.scale",
        "register one with torch.library.register_fake",
    ),
    "least squares": ("step(torch.linalg.lstsq(model.weight, x.t()).solution)", "linalg_lstsq", SHAPE),
    "values as an array": ("x.numpy()", ".numpy()", "fake tensors have no values: leave out"),
    "graph": ("torch.cuda.CUDAGraph()", "CUDAGraph", NEEDS_DEVICE),
    "graphed module": ("torch.cuda.make_graphed_callables(model, (x,))", "CUDAGraph", NEEDS_DEVICE),
    "memory pool": ("torch.cuda.MemPool()", "MemPool", NEEDS_DEVICE),
    "NCCL by name": ("torch.cuda.nccl.all_reduce([x])", "_nccl_all_reduce", NEEDS_DEVICE),
    "kernel as a text": (
        'torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x) { return x; }")(x)', "jiterator",
        NEEDS_DEVICE,
    ),
    "kernel of NVRTC": ('torch.cuda._compile_kernel("__global__ void f() {}", "f")', "torch.cuda._utils", NEEDS_DEVICE),
    "memory of another process": ("x.untyped_storage()._share_cuda_()", "CUDA", NEEDS_DEVICE),
    "extension of CUDA": (
        'from torch.utils.cpp_extension import load_inline; load_inline("own", "", "void f() {}")', "load_inline",
        "operations of torch",
    ),
    "extension of CUDA, quoted": (
        'from torch.utils.cpp_extension import load\ntry: load("own", ["own.cu"])\n'
        'except Exception as error: message = str(error)\nraise '
        'ModuleNotFoundError(f"no kernels: {message}")',
        "torch.utils.cpp_extension.load('own')", COMPILED,
    ),
    "library of CUDA": ('import ctypes; ctypes.CDLL("libcudart.so.99")', "libcudart.so.99", COMPILED),
    "flash attention": ("import flash_attn_2_cuda", "flash_attn", COMPILED),
    "kernels of GPTQ": ('raise ImportError("gptqmodel is required to load GPTQ weights")', "gptqmodel", COMPILED),
    "failure wrapped": (
        'try: torch.cuda.CUDAGraph()\nexcept Exception: raise ValueError("cannot train")', "CUDAGraph", NEEDS_DEVICE
    ),
    "compressed matrix": ("x.to_sparse_csr()", "_to_sparse_csr", "no implementation for fake tensors"),
    "product of sparse matrices": ("x.t().to_sparse() @ x.to_sparse()", "aten.mm", "take dense ones"),
    "quantised tensor": (
        "torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)", "quantize_per_tensor", UNSUPPORTED
    ),
    "nested tensor": ("torch.nested.nested_tensor([torch.ones(2, 8)]).cuda()", "_to_copy", UNSUPPORTED),
    "jagged tensor": (
        'torch.nested.nested_tensor([torch.ones(2, 8)], layout=torch.jagged, device="cuda")', "nested_int", UNSUPPORTED
    ),
    "export": ("torch.export.export(model, (x,))", "fake mode", "torch.export traces with fake tensors of its own"),
    "module that was saved": (
        'torch.save(model, "m.pt"); torch.load("m.pt", weights_only=False)', "torch.load", "save its state_dict()"
    ),
    "object of another rank": (
        'import torch.distributed as d; d.init_process_group("nccl"); '
        'd.recv_object_list([None], src=1)',
        "recv_object_list",
        "make it in the script itself",
    ),
    "thread that the job waits for": (
        "import threading, queue; results = queue.Queue(); run = lambda: "
        "results.put(x.to_sparse_csr())\n"
        "threading.Thread(target=run).start(); step(results.get())",
        "_to_sparse_csr",
        "no implementation for fake tensors",
    ),
    "thread whose result is not used": (
        "import threading; thread = threading.Thread(target=lambda: x.numpy()); "
        "thread.start(); thread.join()\n"
        + TRAIN.format("model(x)"),
        ".numpy()",
        "fake tensors have no values",
    ),
    "thread that the end waits for": (
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), x.numpy())).start()", ".numpy()",
        "fake tensors have no values",
    ),
    "process that the job forks": (
        "import multiprocessing\ndef train():\n    " + TRAIN.format("model(x)") + "\n"
        'process = multiprocessing.get_context("spawn").Process(target=train); '
        'process.start(); process.join()',
        "a training in a process that the job forks",
        "or by torch.multiprocessing.spawn",
    ),
    "sample of a data set": (
        "class Data(torch.utils.data.Dataset):\n    __len__ = lambda data: 2\n"
        "    __getitem__ = lambda data, index: x[index].numpy()\n"
        "for batch in torch.utils.data.DataLoader(Data(), num_workers=1, "
        "pin_memory=True): pass",
        ".numpy()",
        "fake tensors have no values",
    ),
    "worker of its own": (
        'import subprocess, sys; subprocess.run([sys.executable, "-c", "raise '
        'SystemExit(1)"], check=True)',
        "-c raise SystemExit(1)",
        "start the training in the script's own process",
    ),
}  # fmt: skip
# Name -> (script, status, last line but that about the status): the job's own end.
FAILED = {
    "syntax": ("def f(:", 1, "SyntaxError: invalid syntax"),
    "package": (
        "import nowhere_to_be_found",
        1,
        "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    ),
    "file": (
        'torch.load("missing.pt")',
        1,
        "FileNotFoundError: [Errno 2] No such file or directory: 'missing.pt'",
    ),
    "library": (
        'torch.ops.load_library("own.so")',
        1,
        "OSError: Could not load this library",
    ),
    "name that is no path": (
        "open(None)",
        1,
        "TypeError: expected str, bytes or os.PathLike object, not NoneType",
    ),
    "own error": ('raise ValueError("of the job")', 1, "ValueError: of the job"),
    "shapes": ("model(x.t())", 1, "RuntimeError: a and b must have same reduction dim"),
    "devices": (
        "model(torch.ones(4, 8))",
        1,
        "Expected all tensors to be on the same device",
    ),
    "device": (
        'model.to("cuda:1")',
        1,
        "AcceleratorError: CUDA error: invalid device ordinal",
    ),
    "own backward": (
        "class F(torch.autograd.Function):\n    forward = staticmethod(lambda ctx, y: "
        "y.clone())\n"
        "    @staticmethod\n    def backward(ctx, g): raise "
        "KeyError(3)\nstep(F.apply(model(x)))",
        1,
        "KeyError: 3",
    ),
    "compiler": (
        'torch.compile(model, backend="none")(x)',
        1,
        "InvalidBackend: Invalid backend: 'none'",
    ),
    "sample": (
        "class Data(torch.utils.data.Dataset):\n    __len__ = lambda data: 4\n"
        "    __getitem__ = lambda data, index: torch.ones(8) if index < 2 else "
        "{}[index]\n"
        "for batch in torch.utils.data.DataLoader(Data(), 2, num_workers=1): "
        "step(model(batch.cuda()))",
        1,
        "KeyError: 2",
    ),
    "other process": (
        'import subprocess; subprocess.run(["false"], check=True)',
        1,
        "CalledProcessError",
    ),
    "exit status": ("raise SystemExit(3)", 3, ""),
    "exit status of a usage": ("raise SystemExit(2)", 2, ""),
}
# Name -> script: runs to its end.
WORKS = {
    "memory that no device has": (
        'try: torch.empty(10**15, device="cuda")\nexcept torch.cuda.OutOfMemoryError: '
        "pass\n" + TRAIN.format("model(x)")
    ),
    "runtime": "torch.cuda.profiler.start(); torch.cuda.cudart().cudaMemGetInfo(0); "
    + "step(model(x))",
    "stream of a priority": (
        "with torch.cuda.stream(torch.cuda.Stream(priority=-1)): step(model(x))"
    ),
    "value that decides": (
        "y = model(x)\nif y.sum().item() > 1e9: raise ValueError\nstep(y)"
    ),
    "boolean index": "y = model(x); step(y[y > 0])",
    "no training": "model(x)",
    "sparse matrix": (
        "m = torch.sparse_coo_tensor(torch.zeros(2, 2).long().cuda(), "
        "torch.ones(2).cuda(), (8, 4)); step(model(m @ x))"
    ),
    "sparse gradient": (
        "step(torch.nn.Embedding(9, 8, sparse=True).cuda()(x[0].long()))"
    ),
    "folder of its own": 'import os; os.mkdir("own"); os.chdir("own")\n'
    + TRAIN.format("model(x)"),
    "training in a thread": (
        "import threading; thread = threading.Thread(target=lambda: [step(model(x)) "
        "for _ in range(9)])\n"
        "thread.start(); thread.join(); raise ValueError"
    ),
    "training in a thread that is not joined": (
        "import threading; threading.Thread(target=lambda: [step(model(x)) for _ in "
        "range(9)]).start()"
    ),
}
# Goes on in the main thread when another one has failed, as in Python.
THREAD = (
    'import threading\ndef fail(): raise ValueError("of a thread")\n'
    "thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
    + TRAIN.format("model(x)")
)
SIGTERM_LINE = "ebbtide: incomplete: the job ended with status 143; no trace is written"
CRASH = "import ctypes\ndef read(): ctypes.string_at(0)\nread()\n"


def run_jobs(folder: Path, scripts: dict[str, str]) -> dict[str, tuple[int, str]]:
    """Run dry runs of scripts one after the other. Returns the exit status and the
    lines on stderr by the name."""
    os.chdir(folder)
    threading.excepthook = threading.__excepthook__  # not that of pytest
    results = {}
    for name, script in scripts.items():
        Path("job.py").write_text(MODEL + script + "\n")
        results[name] = run_job(["job.py"])
    return results


def run_job(job: Sequence[str]) -> tuple[int, str]:
    settings = {
        "iterations": 2,
        "capacity_bytes": 10**9,
        "device_name": "dry run",
        "force": True,
    }
    path, log = list(sys.path), io.StringIO()
    with contextlib.redirect_stderr(log), contextlib.redirect_stdout(io.StringIO()):
        status = child.main(["run.ebb", json.dumps(settings), *job])
    sys.path[:] = path
    return status, log.getvalue()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    scripts = (
        {name: case[0] for name, case in [*CANNOT.items(), *FAILED.items()]}
        | WORKS
        | {"thread": THREAD}
    )
    folder = tmp_path_factory.mktemp("failures")
    results: dict[str, tuple[int, str]] = run_forked(lambda: run_jobs(folder, scripts))
    return results


@pytest.mark.parametrize("name", CANNOT)
def test_job_that_cannot_be_dry_run__ends_with_a_line(
    name: str, results: dict[str, tuple[int, str]]
) -> None:
    status, log = results[name]
    _, operation, remedy = CANNOT[name]
    lines = [line for line in log.splitlines() if line.startswith("ebbtide:")]
    assert (status, len(lines), "Traceback" in log) == (2, 1, False), log
    assert lines[0].startswith("ebbtide: cannot dry-run "), log
    assert operation in lines[0], log
    assert remedy in lines[0], log
    assert "job.py:" in lines[0], log


def test_jobs_that_several_processes_train__end_with_a_line(tmp_path: Path) -> None:
    script = (
        "import multiprocessing\ndef train():\n    " + TRAIN.format("model(x)") + "\n"
        "start = multiprocessing.get_context('spawn').Process\n"
        "processes = [start(target=train) for _ in range(2)]\n"
        "for process in processes: process.start()\n"
        "for process in processes: process.join()\n"
    )

    def run() -> tuple[int, str]:
        result = run_jobs(tmp_path, {"forks": script})["forks"]
        for process in multiprocessing.active_children():
            process.join()  # it ends after the dry run
        return result

    status, log = run_forked(run)
    assert status == 2
    assert "a training in a process that the job forks" in log


@pytest.mark.parametrize("name", FAILED)
def test_job_that_fails__keeps_its_own_end(
    name: str, results: dict[str, tuple[int, str]]
) -> None:
    status, log = results[name]
    _, expected, line = FAILED[name]
    assert (status, line in log) == (expected, True), log
    assert (
        log.splitlines()[-1]
        == f"ebbtide: incomplete: the job ended with status {status}; no trace is written"
    )
    assert "dryrun" not in log


@pytest.mark.parametrize("name", WORKS)
def test_job__that_looks_unusual_is_dry_run(
    name: str, results: dict[str, tuple[int, str]]
) -> None:
    assert results[name][0] == 0, results[name][1]


def test_thread__that_fails_leaves_the_job(results: dict[str, tuple[int, str]]) -> None:
    status, log = results["thread"]
    assert (status, "ValueError: of a thread\n" in log) == (0, True), log


@pytest.mark.parametrize("name", [name for name in WORKS if "training in" in name])
def test_training_in_a_thread__ends_after_its_iterations(
    name: str, results: dict[str, tuple[int, str]]
) -> None:
    assert results[name] == (0, "")


def test_defect_of_the_dry_run__shows_its_own_traceback(tmp_path: Path) -> None:
    settings = json.dumps({"scratch": None, "unheard_of": 1})
    command = ["-m", "ebbtide.features.dryrun", "run.ebb", settings, "job.py"]
    run = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True
    )
    # the process that waits goes on as usual: its folder is still there
    assert run.returncode == 1
    assert "unheard_of" in run.stderr.splitlines()[-1], run.stderr
    assert run.stderr.count("Traceback") == 1


def test_explain_crash__names_the_call_and_the_line_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(CRASH)
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "job.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == -signal.SIGSEGV
    line = explain_crash("SIGSEGV", run.stderr)
    assert line.startswith(
        "cannot dry-run a call in string_at: it ended the job with SIGSEGV"
    ), line
    assert line.endswith(
        f"leave it out for the dry run, or register a fake implementation with "
        f"torch.library.register_fake ({tmp_path}/job.py:2)"
    ), line


@pytest.mark.parametrize(
    ("job", "line"),
    [
        (["nowhere.py"], "No such file or directory"),
        (["-m", "nowhere_at_all"], "nowhere_at_all"),
    ],
)
def test_program__that_is_missing_is_named(
    job: list[str], line: str, tmp_path: Path
) -> None:
    def run() -> tuple[int, str]:
        os.chdir(tmp_path)
        return run_job(job)

    status, log = run_forked(run)
    assert status == 1
    assert line in log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "status", "line"),
    [
        (CRASH, 2, "ebbtide: cannot dry-run a call in string_at: it ended the job with SIGSEGV, as "),
        ("os._exit(0)", 2, "ebbtide: incomplete: the job ended its process by os._exit or exec; no trace is written"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "ebbtide: incomplete: signal 9 (Killed) ended the job; no trace"),
        ("os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 143, SIGTERM_LINE),
        ("os.kill(0, signal.SIGTERM); time.sleep(60)", 143, SIGTERM_LINE),
        (
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
            "os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)",
            137, "ebbtide: incomplete: signal 9 (Killed) ended the job; no trace",
        ),
        ("os.kill(os.getppid(), signal.SIGINT); time.sleep(60)", 130, "ebbtide: interrupted: the trace has what ran"),
        (
            "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(60)\n"
            "except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGINT); time.sleep(0.1); raise SystemExit(7)",
            7, "ebbtide: incomplete: the job ended with status 7; no trace is written",
        ),
        (
            "import threading; threading.Thread(target=lambda: (time.sleep(2), "
            "os.kill(os.getppid(), signal.SIGINT), time.sleep(60))).start()",
            130, "ebbtide: interrupted before the end of the job: no trace is written",
        ),
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", -9, ""),
    ],
)  # fmt: skip
def test_dry_run__that_a_signal_ends_says_so(
    script: str, status: int, line: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(
        "import os, signal, time\nopen('notes', 'a').write('more')\n"
        "open('new', 'w').close(); os.rename('new', 'newer')\n"
        f"{script}\n"
    )
    (tmp_path / "notes").write_text("my notes")
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "ebbtide",
        "dry-run",
        "-o",
        "run.ebb",
        "--",
        "python",
        "job.py",
    ]
    run = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True,
        start_new_session=True, check=False,
    )  # fmt: skip
    first = next(iter(run.stderr.splitlines()), "")
    assert (run.returncode, first[: len(line)]) == (status, line), run.stderr
    assert (tmp_path / "run.ebb").exists() == ("the trace has" in line)
    assert (tmp_path / "notes").read_text() == "my notes"
    if status != -9:
        assert not [*folder.iterdir(), *tmp_path.glob("new*")]
    if status != 130:
        assert run.stderr.count("\n") == bool(line), run.stderr
