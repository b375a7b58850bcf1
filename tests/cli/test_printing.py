"""Standard output has what commands print and nothing of any library: whole commands in
processes of their own."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ebbtide import cli
from ebbtide.cli.printing import echo, own_stdout
from tests.conftest import ebbtide, ebbtide_in_process, run_process, slow, slow_case

TRACE = Path("traces/a100-13b-async.ebb").resolve()
COMMANDS = {
    "findings": ["findings", TRACE],
    "plan": ["plan", TRACE, "--machine", "a100-40gb-published"],
    "replay": ["replay", TRACE, "--machine", "a100-40gb-published"],
    "summary": ["summary", TRACE],
    "windows": ["windows", TRACE],
}
NOISE = "noise of a library"
# Loaded when Python starts. From the import of numpy on, the process prints in all ways
# that a library can.
NOISY_LIBRARY = f"""
    import ctypes, os, subprocess, sys, atexit

    class Noise:
        def find_spec(self, name, path=None, target=None):
            if name == "numpy":
                sys.meta_path.remove(self)
                print("{NOISE}: print")
                os.write(1, b"{NOISE}: descriptor\\n")
                ctypes.CDLL(None).printf(b"{NOISE}: buffer of C\\n")
                subprocess.run(["echo", "{NOISE}: child"])
                atexit.register(print, "{NOISE}: at exit")

    sys.meta_path.insert(0, Noise())
"""


@pytest.fixture
def noisy(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which a library prints when it is imported and when the
    process ends."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(NOISY_LIBRARY))
    return {
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        )
    }


@pytest.mark.parametrize("command", slow(["findings", "replay"], but=["findings"]))
def test_json__is_one_object_whatever_libraries_print(
    command: str, noisy: dict[str, str]
) -> None:
    result = ebbtide(*COMMANDS[command], "--json", env=noisy)
    assert result.returncode == 0, result.stderr
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stdout.count("\n") == 1
    assert result.stderr.count(NOISE) == 5


@pytest.mark.parametrize("command", slow(COMMANDS, but=["summary"]))
def test_json__is_one_object_with_the_installed_libraries(command: str) -> None:
    result = ebbtide(*COMMANDS[command], "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stdout.count("\n") == 1


def test_text__has_nothing_that_libraries_print(noisy: dict[str, str]) -> None:
    noisy_result, result = (
        ebbtide(*COMMANDS["summary"], env=noisy),
        ebbtide_in_process(*COMMANDS["summary"]),
    )
    assert noisy_result.stdout == result.stdout != ""


def test_linear_program__prints_nothing_in_any_process() -> None:
    program = """
        from ebbtide.interleave.simulation.linear_program import LinearProgram

        program = LinearProgram()
        variable = program.add_variable("x", integer=True)
        program.add_row({variable: 2.0}, lower=3.0)
        assert program.minimize(variable)[variable] == 2.0
    """
    result = run_process([sys.executable, "-c", textwrap.dedent(program)])
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_own_stdout__ends_quietly_if_the_reader_has_ended() -> None:
    words = [sys.executable, "-m", "ebbtide", *map(str, COMMANDS["findings"])]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 1)


@pytest.mark.parametrize(
    ("closed", "printed"),
    [slow_case(">&-", ""), slow_case("2>&-", '{"findings"'), (">&- 2>&-", "")],
)
def test_own_stdout__takes_closed_streams(closed: str, printed: str) -> None:
    words = [sys.executable, "-m", "ebbtide", *map(str, COMMANDS["findings"]), "--json"]
    result = run_process(["sh", "-c", f'"$@" {closed}', "sh", *words])
    assert (
        result.returncode,
        result.stdout[: len(printed) or None],
        result.stderr,
    ) == (0, printed, "")


def test_own_stdout__prints_to_a_replaced_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with own_stdout():
        print("of a library")
        echo("of the command")
    print("afterwards")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (
        "of the command\nafterwards\n",
        "of a library\n",
    )


def test_commands__print_with_echo_and_console_alone() -> None:
    """Any other call would print to stderr while a command runs."""
    folder = Path(str(cli.__file__)).parent
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        if path.name == "printing.py" or path.parent.name == "live_view":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "typer.echo",
                "Console",
                "print",
            ):
                to_stderr = {"err": "True", "stderr": "True", "file": "sys.stderr"}
                if not any(
                    ast.unparse(word.value) == to_stderr.get(word.arg or "")
                    for word in node.keywords
                ):
                    wrong.append(f"{path}:{node.lineno}")
    assert not wrong
