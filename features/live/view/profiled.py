"""Records a job and shows the recording in the terminal meanwhile."""

import re
import sys
import time

import typer

from ebbtide.errors import UserError
from ebbtide.features.live.view.snapshot import tail
from ebbtide.features.live.view.terminal import require_terminal, show
from ebbtide.profiler.recording.collector import RecordedCommand
from ebbtide.profiler.recording.launch import BackgroundJob
from ebbtide.terminal_lines import print_note

_PERIOD_S = 0.2
# Lines of the output of a job that has failed.
_LAST_LINES = 15


def profile_and_show(command: RecordedCommand) -> int:
    """Record a job until it ends, and show its recording; return its exit code.

    Its output is shown when the user has left the view. After a signal, the exit code
    is 128 plus the signal's number. Raises UserError before the job starts: no
    terminal, or no recording.
    """
    require_terminal(
        "--watch",
        f"`ebbtide profile` without it records, and `ebbtide watch {command.output}` "
        "shows it elsewhere",
    )
    job = BackgroundJob(command)
    if command.service is not None:
        # It must not listen any more when the collector has ended.
        command.service.close()
    try:
        show(command.folder, job)
    except UserError as error:
        print_note(f"the view has ended ({error}); the job goes on")
    _follow_output(job)
    code = job.exit_code()
    if code:
        for line in tail(job.log).splitlines()[-_LAST_LINES:]:
            typer.echo(line, err=True)
    # With COLUMNS set the collector has wrapped them.
    for message in re.split("^ebbtide: ", job.messages, flags=re.MULTILINE)[1:]:
        print_note(" ".join(message.split()))
    print_note(f"output of the job: {job.log}")
    return code


def _follow_output(job: BackgroundJob) -> None:
    """Print the output of a job from now on until it is finished.

    Print nothing if it is already.
    """
    if job.is_finished():
        return
    print_note("the job goes on, and its output follows")
    with open(job.log, "rb") as file:
        file.seek(0, 2)
        is_finished = False
        while not is_finished:
            is_finished = job.is_finished()
            sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
            if not is_finished:
                time.sleep(_PERIOD_S)
