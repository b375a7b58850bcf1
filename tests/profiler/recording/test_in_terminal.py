"""`ebbtide profile` in a terminal: it returns when the trace is finished, and ends as its
job does."""

from __future__ import annotations

import os
import pty
import signal
import sys
import time
from pathlib import Path

import pytest

from ebbtide.profiler import open_trace

TRAIN = """
import signal, sys, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
print("trained", flush=True)
"""
ENDS = {
    "code": "sys.exit(7)",
    "signal": "time.sleep(1); signal.raise_signal(signal.SIGKILL)",
    "waiting": "time.sleep(60)",
}


def run_in_terminal(
    path: Path, end: str, sent: bytes | int | None = None
) -> tuple[int, str]:
    """Record a job in a terminal, send keys of the terminal or a signal once it has
    trained, and return its wait status, and what was printed until it ended."""
    command = [sys.executable, "-m", "ebbtide", "profile", "-o", str(path), "--"]
    command += [sys.executable, "-c", TRAIN + ENDS[end]]
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, command)
    output = b""
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        try:
            output += os.read(terminal, 4096)
        except OSError:  # all processes of the terminal have ended
            break
        if sent is not None and b"trained" in output:
            time.sleep(1)  # What was recorded is written a few times a second.
            if isinstance(sent, bytes):
                os.write(terminal, sent)
            else:
                os.kill(pid, sent)
            sent = None
    status = os.waitpid(pid, 0)[1]
    # Before anything that ends later could write it.
    assert open_trace(path).meta.state == "complete"
    return status, output.decode()


def test_profile__returns_after_the_trace_with_the_code_of_the_job(
    tmp_path: Path,
) -> None:
    status, output = run_in_terminal(tmp_path / "run.ebb", "code")
    assert os.waitstatus_to_exitcode(status) == 7
    assert "trace:" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "sent", "code"),
    [
        ("signal", None, -signal.SIGKILL),
        ("waiting", b"\x03", -signal.SIGINT),
        ("waiting", signal.SIGTERM, -signal.SIGTERM),
    ],
)
def test_profile__ends_by_the_signal_of_the_job(
    tmp_path: Path, end: str, sent: bytes | int | None, code: int
) -> None:
    status, output = run_in_terminal(tmp_path / "run.ebb", end, sent)
    assert os.waitstatus_to_exitcode(status) == code
    assert "trace:" in output
