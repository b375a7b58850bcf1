"""The event loop of the simulator: tasks on five resources and the storage that share bandwidth as a fluid.

Plans of many thousand operations are simulated again and again while one is searched for, so the loop is written out
for each resource, without calls.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

# Reads and writes of the storage follow: of path p, STORAGE + 2 p and the next number.
CPU, GPU, H2D, D2H, COMPUTE, STORAGE = range(6)
INFINITE = float("inf")
# Ends that differ by less than this share of the time coincide: they differ by rounding.
_SAME_TIME = 1e-13
_WHOLE_LINK = (1.0, 1.0)


class StorageChannels:
    """The channels of all paths: of path p, 2 p reads and 2 p + 1 writes. Both are slowed by one factor if together
    they exceed what the path moves, and all by the factor of host memory."""

    def __init__(self, limits: Sequence[float], queues: Sequence[list[int]]) -> None:
        """Initialize without any running task."""
        count = len(queues)
        self._limits = limits
        self._queues = queues
        self._task = [-1] * count
        self._end = [INFINITE] * count
        self._left = [0.0] * count
        self._since = [0.0] * count
        self._speed = [1.0] * count
        self._demand = [0.0] * count
        self._path_share = [1.0] * len(limits)
        self.next_end = INFINITE  # When the next running task ends.
        self.traffic = 0.0  # Bytes/s of host memory that the running tasks need if nothing but their path slows them.

    def start(self, now: float, alone_s: list[float], demand: list[float], starts: list[float]) -> bool:
        """Start ready tasks on idle channels, and return whether the traffic has changed."""
        changed = False
        for channel, queue in enumerate(self._queues):
            if self._task[channel] >= 0 or (not queue and not self._demand[channel]):
                continue
            changed = True
            if not queue:
                self._demand[channel] = 0.0
                continue
            task = heappop(queue)
            self._task[channel] = task
            starts[task] = self._since[channel] = now
            self._left[channel] = alone_s[task]
            self._end[channel] = now + alone_s[task] / self._speed[channel]
            self._demand[channel] = demand[task]
        if changed:
            self._share_paths()
            self.next_end = min(self._end)
        return changed

    def _share_paths(self) -> None:
        self.traffic = 0.0
        for path, limit in enumerate(self._limits):
            both = self._demand[2 * path] + self._demand[2 * path + 1]
            self._path_share[path] = limit / both if both > limit else 1.0
            self.traffic += min(both, limit)

    def slow(self, share: float, now: float) -> None:
        """Run all tasks at a share of the speed that their paths allow."""
        for channel, task in enumerate(self._task):
            speed = share * self._path_share[channel // 2]
            if speed == self._speed[channel]:
                continue
            if task >= 0:
                self._left[channel] -= (now - self._since[channel]) * self._speed[channel]
                self._since[channel] = now
                self._end[channel] = now + self._left[channel] / speed
            self._speed[channel] = speed
        self.next_end = min(self._end)

    def finish(self, latest: float) -> list[int]:
        """Return the tasks that end until a moment, which free their channels."""
        done = [channel for channel, end in enumerate(self._end) if end <= latest]
        tasks = [self._task[channel] for channel in done]
        for channel in done:
            self._task[channel], self._end[channel] = -1, INFINITE
        self.next_end = min(self._end)
        return tasks


def link_factors(up_rate: float, down_rate: float, limit: float) -> tuple[float, float]:
    """Return the factors by which both directions of the link are slowed that together exceed a limit.

    Each gets half of it, and what the other one leaves of its half (max-min fairness)."""
    half = limit / 2
    up = min(up_rate, max(half, limit - down_rate))
    down = min(down_rate, limit - up)
    return up / up_rate if up_rate else 1.0, down / down_rate if down_rate else 1.0


class TaskGraph:
    """Tasks, each on one resource, and which of them wait for which."""

    def __init__(
        self, resource: list[int], alone_s: list[float], demand: list[float], storage_limits: Sequence[float] = ()
    ) -> None:
        # Resource of each task: one of `CPU`, `GPU`, `H2D`, `D2H`, `COMPUTE`, or from `STORAGE` on.
        self.resource = resource
        self.alone_s = alone_s  # Seconds of each task if nothing else runs.
        self.demand = demand  # Host memory traffic of each task if nothing else runs, bytes/s.
        self.pending = [0] * len(resource)  # How many tasks each task waits for. Running the graph counts them down.
        self.successors: list[list[int]] = [[] for _ in resource]
        # By task of `COMPUTE`: the shares of the link that are left while it goes on, to the device and to the host.
        self.link_left: dict[int, tuple[float, float]] = {}
        # Tasks of `GPU` during which tasks of `COMPUTE` stand still that take any time.
        self.stops_compute: frozenset[int] = frozenset()
        self.storage_limits = storage_limits  # Limit of reads and writes together of each path of the storage, bytes/s.

    def add_dependency(self, task: int, successor: int) -> None:
        self.successors[task].append(successor)
        self.pending[successor] += 1


def run_tasks(
    graph: TaskGraph, duplex_bytes_per_s: float, host_bytes_per_s: float, limit_s: float
) -> tuple[list[float], list[float]] | None:
    """Return the start and the end of each task, s; None if the last one surely ends after a limit. Each resource runs
    the first of its ready tasks, slowed as `simulate` says. Raises RuntimeError if tasks wait for each other."""
    alone_s, demand, pending, successors = graph.alone_s, graph.demand, graph.pending, graph.successors
    total = len(alone_s)
    starts, ends = [0.0] * total, [0.0] * total
    queues: list[list[int]] = [[] for _ in range(STORAGE + 2 * len(graph.storage_limits))]
    cpu_ready, gpu_ready, up_ready, down_ready, compute_ready = queues[:STORAGE]
    queue = [queues[resource] for resource in graph.resource]
    # Seconds of work that has not started, of each resource alone.
    work_s = [0.0] * len(queues)
    for task, resource in enumerate(graph.resource):
        work_s[resource] += alone_s[task]
        if not pending[task]:
            queues[resource].append(task)
    cpu_work_s, gpu_work_s, up_work_s, down_work_s = work_s[:COMPUTE]
    limit_s *= 1 + 1e-9
    # Per resource: the task that runs (-1: none) and when it will end. Of those that share bandwidth also the speed as
    # a share of that alone, the traffic alone, and how much work was left when the speed last changed.
    cpu = gpu = up = down = compute = -1
    cpu_end = gpu_end = up_end = down_end = compute_end = INFINITE
    cpu_speed = up_speed = down_speed = 1.0
    cpu_demand = up_demand = down_demand = 0.0
    cpu_left = up_left = down_left = 0.0
    cpu_since = up_since = down_since = 0.0
    link_left, stops_compute = graph.link_left, graph.stops_compute
    left = _WHOLE_LINK
    up_share, down_share = left
    storage = StorageChannels(graph.storage_limits, queues[STORAGE:]) if graph.storage_limits else None
    storage_traffic = 0.0
    now = 0.0
    done = 0
    while done < total:
        changed = False
        if compute < 0 and compute_ready:
            compute = heappop(compute_ready)
            starts[compute] = now
            compute_end = now + alone_s[compute]
            if gpu in stops_compute and alone_s[compute]:
                compute_end += gpu_end - now
        if gpu < 0 and gpu_ready:
            gpu = heappop(gpu_ready)
            starts[gpu] = now
            gpu_end = now + alone_s[gpu]
            if gpu in stops_compute and compute >= 0 and alone_s[compute]:
                compute_end += alone_s[gpu]
            if now + gpu_work_s > limit_s:
                return None
            gpu_work_s -= alone_s[gpu]
        if link_left:
            # The job's collectives run only while compute does.
            before, left = left, _WHOLE_LINK if gpu in stops_compute else link_left.get(compute, _WHOLE_LINK)
            if left != before:
                changed = True
                up_share, down_share = left
        if cpu < 0:
            if cpu_ready:
                changed = True
                cpu = heappop(cpu_ready)
                starts[cpu] = cpu_since = now
                cpu_left = alone_s[cpu]
                cpu_end = now + cpu_left / cpu_speed
                cpu_demand = demand[cpu]
                if now + cpu_work_s > limit_s:
                    return None
                cpu_work_s -= cpu_left
            elif cpu_demand:
                changed = True
                cpu_demand = 0.0
        if up < 0:
            if up_ready:
                changed = True
                up = heappop(up_ready)
                starts[up] = up_since = now
                up_left = alone_s[up]
                up_end = now + up_left / up_speed
                up_demand = demand[up]
                if now + up_work_s > limit_s:
                    return None
                up_work_s -= up_left
            elif up_demand:
                changed = True
                up_demand = 0.0
        if down < 0:
            if down_ready:
                changed = True
                down = heappop(down_ready)
                starts[down] = down_since = now
                down_left = alone_s[down]
                down_end = now + down_left / down_speed
                down_demand = demand[down]
                if now + down_work_s > limit_s:
                    return None
                down_work_s -= down_left
            elif down_demand:
                changed = True
                down_demand = 0.0
        if storage is not None and storage.start(now, alone_s, demand, starts):
            changed = True
            storage_traffic = storage.traffic
        if changed:
            up_link = down_link = 1.0
            link_demand = up_demand * up_share + down_demand * down_share
            if link_demand > duplex_bytes_per_s:
                up_link, down_link = link_factors(up_demand * up_share, down_demand * down_share, duplex_bytes_per_s)
                link_demand = duplex_bytes_per_s
            all_demand = cpu_demand + link_demand + storage_traffic
            share = host_bytes_per_s / all_demand if all_demand > host_bytes_per_s else 1.0
            if share != cpu_speed:
                if cpu >= 0:
                    cpu_left -= (now - cpu_since) * cpu_speed
                    cpu_since = now
                    cpu_end = now + cpu_left / share
                cpu_speed = share
            speed = share * up_link * up_share
            if speed != up_speed:
                if up >= 0:
                    up_left -= (now - up_since) * up_speed
                    up_since = now
                    up_end = now + up_left / speed
                up_speed = speed
            speed = share * down_link * down_share
            if speed != down_speed:
                if down >= 0:
                    down_left -= (now - down_since) * down_speed
                    down_since = now
                    down_end = now + down_left / speed
                down_speed = speed
            if storage is not None:
                storage.slow(share, now)
        now = min(cpu_end, gpu_end, up_end, down_end, compute_end)
        if storage is not None:
            now = min(now, storage.next_end)
        if now == INFINITE:
            raise RuntimeError(f"nothing can run, and {total - done} operations wait")
        latest = now + _SAME_TIME * now
        finished = storage.finish(latest) if storage is not None else []
        if cpu_end <= latest:
            finished.append(cpu)
            cpu, cpu_end = -1, INFINITE
        if gpu_end <= latest:
            finished.append(gpu)
            gpu, gpu_end = -1, INFINITE
        if up_end <= latest:
            finished.append(up)
            up, up_end = -1, INFINITE
        if down_end <= latest:
            finished.append(down)
            down, down_end = -1, INFINITE
        if compute_end <= latest:
            finished.append(compute)
            compute, compute_end = -1, INFINITE
        for task in finished:
            ends[task] = now
            for successor in successors[task]:
                pending[successor] -= 1
                if not pending[successor]:
                    heappush(queue[successor], successor)
        done += len(finished)
    return starts, ends
