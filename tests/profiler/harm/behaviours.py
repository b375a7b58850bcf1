"""Random training jobs, composed of behaviours that a recorder could harm or be harmed
by.

A behaviour is a function that returns the text of a part of the job. Whatever the job
prints must not depend on time, on numbers of processes and descriptors, or on whether
it is recorded.
"""

from __future__ import annotations

import random
import sysconfig
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.profiler.harm.programs import TRAINING

HEADER = """
import sys
SITE_PACKAGES, TRACE, FLAGS = {site_packages!r}, {trace!r}, {flags!r}
if "-S" in FLAGS:
    sys.path.append(SITE_PACKAGES)
import atexit, glob, multiprocessing, os, resource, shutil, signal, subprocess, threading, time
"""

FUNCTIONS = """
descriptors = {}
trained = [0]

def say(*words):
    try:
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())
    except OSError:
        pass

def steps(count):
    trained[0] += count
    return train(count)

def open_files(count):
    descriptors.clear()
    for number in range(count):
        name = os.path.abspath(f"own-{number}.bin")
        descriptors[name] = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def write_files(text):
    for descriptor in descriptors.values():
        os.write(descriptor, text.encode())

def work(count, name):
    with open(name, "w") as file:
        file.write(str(train(count)))

def join(child):
    say("child", os.waitpid(child, 0)[1])
"""

# Requests for slices, as `ebbtide profile --attach` and others may leave them in the
# folder of the trace.
REQUESTS = """
def request(kind):
    link = TRACE + "/spool/slice-request"
    text = "ebbtide-slice-1 %d iterations 0:%d poll 1000 allocator 0 transfers 1"
    try:
        shutil.rmtree(link) if os.path.isdir(link) else os.path.lexists(link) and os.remove(link)
        if kind in ("folder", "pipe"):
            os.mkdir(link) if kind == "folder" else os.mkfifo(link)
        else:
            os.symlink(text % (time.monotonic_ns(), trained[0] + 4) if kind == "slice" else kind, link)
    except OSError:
        pass
    time.sleep(0.3)
    say(steps(3))
"""
REQUEST_KINDS = (
    "slice",
    "slice",
    "slice",
    "folder",
    "pipe",
    "import os",
    "/dev/zero",
    "x" * 4000,
)

SECOND = "say('second', train(2))\n"


@dataclass(frozen=True)
class Job:
    """A random job.

    Attributes:
        behaviours: Names of its behaviours, in order.
        text: The script.
        second: A second script, which the first may execute.
        flags: Flags of the interpreter.
        disk_kib: Size of the file system of the trace in KiB; None: that of the test's
            folder.
        keeps_count: Whether every iteration that the job prints as its own must be in
            the trace.
    """

    behaviours: tuple[str, ...]
    text: str
    second: str
    flags: tuple[str, ...]
    disk_kib: int | None
    keeps_count: bool


def close_all(rng: random.Random) -> str:
    return f"""
    descriptors.clear()
    os.closerange({rng.choice([3, 4, 10])}, {rng.choice([64, 256, 4096])})
    open_files({rng.randint(1, 12)})
    say(steps({rng.randint(1, 4)}))
    write_files("closed")
    """


def close_one_by_one(rng: random.Random) -> str:
    return f"""
    descriptors.clear()
    for number in range(3, {rng.choice([64, 512])}):
        try:
            os.close(number)
        except OSError:
            pass
        open_files(1) if number % {rng.randint(2, 9)} == 0 else None
    say(steps({rng.randint(1, 4)}))
    write_files("one by one")
    """


def duplicate_over_all(rng: random.Random) -> str:
    return f"""
    open_files({rng.randint(1, 4)})
    for number in range(max(descriptors.values()) + 1, {rng.choice([40, 128, 512])}):
        os.dup2(max(descriptors.values()), number)
    say(steps({rng.randint(1, 4)}))
    write_files("duplicated")
    """


def close_standard(rng: random.Random) -> str:
    number = rng.choice([0, 0, 1, 2])
    return f"""
    os.close({number})
    steps({rng.randint(1, 3)})
    say(os.open("standard-{number}", os.O_RDWR | os.O_CREAT | os.O_APPEND))
    """


def fork(rng: random.Random) -> str:
    inside = rng.choice(
        [
            "pass",
            "write_files('child')",
            "os.closerange(3, 4096)",
            "os.chdir('/')",
            "os.setsid()",
        ]
    )
    train = rng.choice(["pass", "say('child', steps(2))"])
    end = rng.choice(
        [
            "os._exit(3)",
            "sys.exit(4)",
            "raise ValueError('child')",
            "os.kill(os.getpid(), 15)",
        ]
    )
    return f"""
    child = os.fork()
    if child == 0:
        {inside}
        {train}
        {end}
    {rng.choice(["steps(1)", "pass"])}
    join(child)
    """


def fork_exec(rng: random.Random) -> str:
    return """
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, *FLAGS, os.path.join(START, "second.py")])
    join(child)
    """


def spawn(rng: random.Random) -> str:
    method = rng.choice(["spawn", "forkserver", "fork"])
    return f"""
    process = multiprocessing.get_context("{method}").Process(target=work, args=(2, os.path.abspath("{method}")))
    process.start()
    {rng.choice(["steps(2)", "pass"])}
    process.join()
    say(process.exitcode)
    """


def subprocess_run(rng: random.Random) -> str:
    environment = rng.choice(["{}", "os.environ"])
    program = "import os; print(sorted(os.listdir('/proc/self/fd')), os.umask(0))"
    return f"""
    say(subprocess.run([sys.executable, "-c", {program!r}], env={environment}, stdout=subprocess.PIPE).stdout)
    """


def thread(rng: random.Random) -> str:
    return f"""
    names = [os.path.abspath(f"thread-{{n}}") for n in range({rng.randint(1, 3)})]
    threads = [threading.Thread(target=work, args=(1, name)) for name in names]
    for one in threads:
        one.start()
        one.join()
    say(threading.active_count())
    """


def handled_signals(rng: random.Random) -> str:
    name = rng.choice(["SIGUSR1", "SIGTERM", "SIGINT", "SIGHUP", "SIGCHLD"])
    send = rng.choice(
        [
            "os.kill(os.getpid(), number)",
            "os.killpg(os.getpgid(0), number)",
            "os.kill(0, number)",
        ]
    )
    return f"""
    number, received = signal.{name}, []
    signal.signal(number, lambda *_: received.append(1))
    for _ in range({rng.randint(1, 5)}):
        {send}
        steps(1)
    say(len(received), "received")
    signal.signal(number, signal.SIG_IGN if number != signal.SIGCHLD else signal.SIG_DFL)
    """


def alarms(rng: random.Random) -> str:
    return f"""
    ticks = []
    signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, {rng.choice([0.0005, 0.002])})
    say(steps(30))
    signal.setitimer(signal.ITIMER_REAL, 0)
    say(bool(ticks))
    """


def no_children(rng: random.Random) -> str:
    return """
    try:
        say(os.waitpid(-1, os.WNOHANG) and "children")
    except ChildProcessError:
        say("no children")
    """


def change_folder(rng: random.Random) -> str:
    name = f"sub-{rng.randint(1, 3)}"
    removed = (
        f"os.rmdir(os.path.join('..', {name!r}))" if rng.random() < 0.2 else "pass"
    )
    return f"""
    os.makedirs({name!r}, exist_ok=True)
    os.chdir({name!r})
    {removed}
    say(steps(1))
    os.chdir(START) if not os.path.exists(".") or {removed != "pass"} else None
    """


def limit_descriptors(rng: random.Random) -> str:
    return f"""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, ({rng.choice([3, 4, 8])}, before[1]))
    say(steps({rng.randint(1, 4)}))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    """


def limit_file_size(rng: random.Random) -> str:
    action = rng.choice(
        ["signal.SIG_IGN", "signal.SIG_DFL", "lambda *_: say('too large')"]
    )
    restore = rng.choice(["resource.setrlimit(resource.RLIMIT_FSIZE, before)", "pass"])
    return f"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, {action})
    resource.setrlimit(resource.RLIMIT_FSIZE, ({rng.choice([0, 1000, 6000, 20000])}, before[1]))
    say(steps({rng.choice([1, 20, 60])}))
    {restore}
    """


def limit_memory(rng: random.Random) -> str:
    return f"""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + {rng.choice([60, 400])} * 2**20, before[1]))
    say(steps({rng.randint(1, 4)}))
    resource.setrlimit(resource.RLIMIT_AS, before)
    """


def damage_spools(rng: random.Random) -> str:
    damage = rng.choice(
        [
            "os.truncate(path, 0)",
            "os.truncate(path, 50)",
            "os.truncate(path, os.path.getsize(path) // 2)",
            "os.remove(path)",
            "os.rename(path, path + '.moved')",
            "os.chmod(path, 0)",
        ]
    )
    return f"""
    for path in glob.glob(TRACE + "/**/*.spool", recursive=True):
        {damage}
    say(steps({rng.choice([1, 10, 200])}))
    """


def remove_trace(rng: random.Random) -> str:
    return f"""
    shutil.rmtree({rng.choice(["TRACE", "os.path.join(TRACE, 'spool')"])}, ignore_errors=True)
    say(steps(2))
    """


def clear_environment(rng: random.Random) -> str:
    return "\n    os.environ.clear()\n    say(steps(1))\n"


def at_exit(rng: random.Random) -> str:
    return "\n    atexit.register(lambda: say('at exit', train(2)))\n"


def change_umask(rng: random.Random) -> str:
    return f"\n    os.umask({rng.choice([0o77, 0o777])})\n    say(steps(1))\n"


def many_steps(rng: random.Random) -> str:
    return (
        f"\n    say(steps({rng.choice([1, 10, 300])}))\n    "
        f"time.sleep({rng.choice([0, 0.3])})\n"
    )


CLOSING = (close_all, close_one_by_one, duplicate_over_all)
# Shares of the draws, in parts of their sum.
BEHAVIOURS: dict[Callable[[random.Random], str], int] = {
    **dict.fromkeys(CLOSING, 3),
    close_standard: 2,
    fork: 6,
    fork_exec: 1,
    spawn: 1,
    subprocess_run: 1,
    thread: 2,
    handled_signals: 4,
    alarms: 2,
    no_children: 2,
    change_folder: 3,
    limit_descriptors: 2,
    limit_file_size: 3,
    limit_memory: 2,
    damage_spools: 4,
    remove_trace: 2,
    clear_environment: 1,
    at_exit: 2,
    change_umask: 1,
    many_steps: 4,
}
# After these, iterations may be missing in the trace, or its last iteration is that of
# the exit.
LOSE_ITERATIONS = {
    "thread",
    "limit_descriptors",
    "limit_file_size",
    "limit_memory",
    "damage_spools",
    "remove_trace",
    "at_exit",
    "change_umask",
}

ENDS = {
    "return": "pass",
    "exit": "sys.exit(7)",
    "raise": "raise RuntimeError('at the end')",
    "_exit": "os._exit(5)",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "terminate": (
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nos.kill(os.getpid(), "
        "signal.SIGTERM)"
    ),
    "exec": (
        "os.execv(sys.executable, [sys.executable, *FLAGS, os.path.join(START, "
        "'second.py')])"
    ),
    "daemonize": (
        "if os.fork():\n    os._exit(0)\nos.setsid()\ntime.sleep(0.3)\nsay('daemon', "
        "train(2))"
    ),
}


def random_job(rng: random.Random, trace: Path, on_demand: bool = False) -> Job:
    """Compose a random job that is recorded into `trace`, on demand with requests for
    slices between its parts."""
    flags = tuple(flag for flag in ("-I", "-S") if rng.random() < 0.1)
    parts, names = [], []
    for _ in range(rng.randint(3, 7)):
        behaviour = rng.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))[0]
        # Processes of multiprocessing talk to each other through descriptors that would
        # be closed.
        if behaviour is spawn and any(closing.__name__ in names for closing in CLOSING):
            continue
        names.append(behaviour.__name__)
        parts.append(textwrap.dedent(behaviour(rng)))
        if behaviour is spawn and not any(
            closing.__name__ in names for closing in CLOSING
        ):
            # Its helper processes stay: nothing may close their descriptors afterwards.
            break
    if on_demand:
        parts = [f"request({rng.choice(REQUEST_KINDS)!r})\n{part}" for part in parts]
    end = rng.choice(list(ENDS))
    parts.append(
        "say('iterations of the job', trained[0])\nwrite_files('end')\n"
        + ENDS[end]
        + "\n"
    )
    head = HEADER.format(
        site_packages=sysconfig.get_path("purelib"), trace=str(trace), flags=flags
    )
    start = "START = os.getcwd()\n"
    body = textwrap.indent("".join(parts), "    ")
    return Job(
        behaviours=(*names, end),
        text=head
        + TRAINING
        + FUNCTIONS
        + REQUESTS
        + f'if __name__ == "__main__":\n    {start}{body}',
        second=head + TRAINING + FUNCTIONS + REQUESTS + SECOND,
        flags=flags,
        disk_kib=rng.choice([64, 256]) if rng.random() < 0.12 else None,
        keeps_count=not LOSE_ITERATIONS.intersection(names),
    )
