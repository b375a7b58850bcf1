"""Threads that train at the same time, and threads that only seem to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Recorded, phases_of
from tests.profiler.agent.jobs import PRELUDE, STEPS
from tests.profiler.agent.test_phases import trace_all

Record = Callable[..., Recorded]

TWO_TRAININGS = """
import threading
def train(steps):
    model = mlp()
    optimizer = PlainSGD(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
threads = [threading.Thread(target=train, args=(200,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

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


def test_profile__warns_of_two_threads_that_train(record: Record) -> None:
    recorded = record(PRELUDE + TWO_TRAININGS)
    assert recorded.run.returncode == 0, recorded.run.stderr
    assert recorded.run.stderr.count("two threads train at the same time") == 1
    assert "one model per process" in recorded.run.stderr


@pytest.mark.slow
def test_tracer__does_not_warn_where_one_thread_trains(tmp_path: Path) -> None:
    traces = trace_all(tmp_path, ONE_TRAINS)
    assert {name: trace.notes for name, trace in traces.items()} == {name: [] for name in ONE_TRAINS}
    assert traces["one thread after the other"].phases(0)["iteration"].nunique() == 5 * STEPS
    # Only before the first phases of the thread that trains, the other could be the one.
    loading = phases_of(traces["a thread that loads data, with transforms that are modules"])
    assert len(loading) >= 99
    assert loading[2:] == [["forward", "backward", "update"]] * (len(loading) - 2)
