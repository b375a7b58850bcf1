"""Threads that train at the same time, and threads that only seem to."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ebbtide.profiler.agent.threads import TrainingThreads
from tests.conftest import Recorded, phases_of
from tests.profiler.agent.jobs import PRELUDE, STEPS
from tests.profiler.agent.test_phases import trace_all

Record = Callable[..., Recorded]

TWO_TRAININGS = '''
import threading
alone, together = threading.Lock(), threading.Barrier(2)
class Meeting(nn.Module):
    """Ends, once it meets, when both threads are in their forward."""
    meets = False
    def forward(self, x):
        if self.meets:
            together.wait(60)
        return x
def train(steps):
    meeting = Meeting()
    model = nn.Sequential(meeting, mlp())
    optimizer = PlainSGD(model.parameters(), lr=1e-2)
    def step():
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Then both are known to train.
    with alone:
        step()
    together.wait(60)
    meeting.meets = True
    for _ in range(steps):
        step()
threads = [threading.Thread(target=train, args=(20,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
'''

# A parameter whose gradient is read by the recorder only in `read`, which may look at
# what the others do.
WATCHED = """
import sys, threading
released, in_backward, reads = threading.Event(), threading.Event(), []
def read():
    if in_backward.is_set() and not released.is_set():
        reads.append("the recorder has read a gradient while another thread was in its backward")
class Watched(nn.Parameter):
    @property
    def grad(self):
        frame = sys._getframe()
        while frame is not None and "profiler/agent/inventory" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            read()
        return super().grad
    @grad.setter
    def grad(self, value):
        torch.Tensor.grad.__set__(self, value)
def watched():
    model = mlp()
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Watched(parameter.data))
    return model, PlainSGD(model.parameters(), lr=1e-2)
def train(model, optimizer, steps):
    for _ in range(steps):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
def stay_in_backward():
    model, optimizer = watched()
    x, y = batch()
    loss = F.mse_loss(model(x), y)
    def hook(gradient):
        in_backward.set()
        assert released.wait(60)
    loss.register_hook(hook)
    begin.wait()
    loss.backward()
begin = threading.Event()
other = threading.Thread(target=stay_in_backward)
"""

# name: a job in which a second thread is in its backward while the first one trains; no
# reading may fall into it.
SECOND_BACKWARDS = {
    "that began before the first inventory": """
        class Meeting(PlainSGD):
            def step(self, closure=None):
                begin.set()
                assert in_backward.wait(60)
                super().step(closure)
        other.start()
        model, optimizer = watched()
        train(model, Meeting(model.parameters(), lr=1e-2), 5)
    """,
    "that begins during the first inventory": """
        judge = read
        def read():
            begin.set()
            in_backward.wait(1)
            judge()
        other.start()
        train(*watched(), 5)
    """,
}

# name: a job in which one thread trains
ONE_TRAINS = {
    "one thread after the other": """
        import threading
        def train():
            for _ in range(STEPS):
                x, y = batch()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        for _ in range(5):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
    """,
    "a thread that loads data, with transforms that are modules": """
        import queue, threading, time
        class Scale(nn.Module):
            def forward(self, x):
                time.sleep(0.0005)
                return x * 2
        batches = queue.Queue(4)
        scale = Scale()
        def load():
            for _ in range(100):
                x, y = batch()
                batches.put((scale(x), y))
        threading.Thread(target=load).start()
        for _ in range(100):
            x, y = batches.get()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
    "replicas in threads": """
        from concurrent.futures import ThreadPoolExecutor
        class Replicas(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = nn.ModuleList([mlp(), mlp()])
            def forward(self, x):
                # As nn.parallel.parallel_apply does.
                return sum(pool.map(lambda part: part(x), self.parts))
        pool = ThreadPoolExecutor(2)
        model = Replicas()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(50):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        pool.shutdown()
    """,
    "backwards in autograd's own threads": """
        from torch.utils.checkpoint import checkpoint
        def nested(depth, x):
            if not depth:
                return model(x)
            return checkpoint(nested, depth - 1, x, use_reentrant=True)
        for _ in range(STEPS):
            x, y = batch()
            F.mse_loss(nested(70, x.requires_grad_()), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    """,
}


@pytest.mark.slow
def test_profile__warns_of_two_threads_that_train(record: Record) -> None:
    recorded = record(PRELUDE + TWO_TRAININGS)
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.run.stderr.count("two threads train at the same time") == 1
    assert "one model per process" in recorded.run.stderr


def test_profile__warns_of_a_thread_that_trains_only_within_the_phases_of_another(
    record: Record,
) -> None:
    recorded = record(
        PRELUDE
        + textwrap.dedent("""
            import threading
            begin, end = threading.Event(), threading.Event()
            class Waiting(nn.Module):
                def forward(self, x):
                    begin.set()
                    assert end.wait(60)
                    return x
            def train(model, steps):
                optimizer = PlainSGD(model.parameters(), lr=1e-2)
                for _ in range(steps):
                    x, y = batch()
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
            def train_inside():
                assert begin.wait(60)
                train(mlp(), 5)
                end.set()
            thread = threading.Thread(target=train_inside)
            thread.start()
            train(mlp(), 2)
            train(nn.Sequential(Waiting(), mlp()), 1)
            thread.join()
        """)
    )
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert (
        sum(
            "two threads train at the same time" in note
            for note in recorded.trace.notes
        )
        == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("second_backward", SECOND_BACKWARDS)
def test_inventory__reads_no_gradient_beside_the_backward_of_another_thread(
    record: Record, second_backward: str
) -> None:
    end = "released.set()\nother.join()\nassert not reads, reads[0]\n"
    recorded = record(
        PRELUDE + WATCHED + textwrap.dedent(SECOND_BACKWARDS[second_backward]) + end,
        options=("--allocator-iterations", "2"),
    )
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.trace.rank(0).inventories == ()
    assert sum("several threads train" in note for note in recorded.trace.notes) == 1
    assert "several threads train" in recorded.run.stderr


def test_quiet__is_the_moment_outside_of_a_backward_of_the_only_thread_that_trains() -> (
    None
):
    threads = TrainingThreads(torch)

    def quiet() -> bool:
        with threads.quiet() as is_quiet:
            return is_quiet

    assert quiet()
    threads.enter_backward()
    assert quiet()
    inside: list[bool] = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: inside.append(quiet()))
    weight.sum().backward()
    assert inside == [False]
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(quiet).result()  # not the thread that trains
        pool.submit(threads.enter_backward).result()
        assert threads.several
        assert not quiet()
    # The other thread has ended.
    assert not threads.several
    assert quiet()


@pytest.mark.slow
def test_tracer__does_not_warn_where_one_thread_trains(tmp_path: Path) -> None:
    traces = trace_all(tmp_path, ONE_TRAINS)
    assert {name: trace.notes for name, trace in traces.items()} == {
        name: [] for name in ONE_TRAINS
    }
    assert (
        traces["one thread after the other"].phases(0)["iteration"].nunique()
        == 5 * STEPS
    )
    # Only before the first phases of the thread that trains, the other could be the
    # one.
    loading = phases_of(
        traces["a thread that loads data, with transforms that are modules"]
    )
    assert len(loading) >= 99
    assert loading[2:] == [["forward", "backward", "update"]] * (len(loading) - 2)
