"""The event loop of the simulator: tasks on lanes, whose speeds follow from pools of
bandwidth that lanes share.

A pool slows all of its lanes by one factor where they need more than it has, or gives
two lanes max-min fair shares. A lane is slowed by its pool, by that pool's parent, and
so on. The functions only read items of arrays or lists, so that numba may compile them
(see `compiled_fluid.py`); results are the same to the bit.
"""

# numba types these functions.
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from typing import Any, NamedTuple

INFINITE = float("inf")
# Ends that differ by less than this share of the time coincide: they differ by
# rounding.
_SAME_TIME = 1e-13


class Tasks(NamedTuple):
    """Tasks, as columns. Each lane runs the first of its tasks that is ready, one at a
    time.

    Attributes:
        lane: Number of the lane.
        alone_s: Seconds if nothing else runs.
        demand: Bandwidth of the lane's pools that it needs if nothing else runs,
            bytes/s.
        mode: Its row of `Bandwidth.scales`.
        before: By dependency: the task that ends first.
        after: By dependency: the task that waits for it.
    """

    lane: Any
    alone_s: Any
    demand: Any
    mode: Any
    before: Any
    after: Any


class Bandwidth(NamedTuple):
    """The limits of lanes, as columns.

    Attributes:
        pool: By lane: its pool, -1 for none.
        parent: By pool: the pool that it draws from, a later one; -1 for none.
        limit: By pool: bytes/s.
        is_fair: By pool: whether its two lanes get max-min fair shares.
        scales: By mode and lane: the share of its speed that a lane has while a task
            with the mode runs.
    """

    pool: Any
    parent: Any
    limit: Any
    is_fair: Any
    scales: Any


class State(NamedTuple):
    """The state of a run, as columns.

    Attributes:
        starts: By task: when it started, s.
        ends: By task: when it ended, s.
        waits: By task: how many tasks it waits for.
        first: By task: where those that wait for it begin in `successors`, and at last
            where all end.
        successors: Tasks that wait for others, by what they wait for.
        queue: Tasks that are ready, by lane as heaps.
        queue_begin: By lane: where its heap begins.
        ready: By lane: how many tasks are ready.
        waiting_s: By lane: seconds alone of the tasks that have not started.
        running: By lane: the task that runs, -1 for none.
        end_s: By lane: when that ends; infinite if none runs.
        speed: By lane: its speed as a share of that alone.
        next_speed: By lane: the speed from now on.
        left_s: By lane: seconds alone that were left when the speed last changed.
        since_s: By lane: when that was.
        needs: By pool: bytes/s that its lanes need.
    """

    starts: Any
    ends: Any
    waits: Any
    first: Any
    successors: Any
    queue: Any
    queue_begin: Any
    ready: Any
    waiting_s: Any
    running: Any
    end_s: Any
    speed: Any
    next_speed: Any
    left_s: Any
    since_s: Any
    needs: Any


def new_state(tasks: Tasks, bandwidth: Bandwidth, floats: Any, integers: Any) -> State:
    """Return a state of zeros. `floats` and `integers` return as many zeros as asked
    for."""
    count, lanes = len(tasks.lane), len(bandwidth.pool)
    return State(
        starts=floats(count),
        ends=floats(count),
        waits=integers(count),
        first=integers(count + 1),
        successors=integers(len(tasks.before)),
        queue=integers(count),
        queue_begin=integers(lanes + 1),
        ready=integers(lanes),
        waiting_s=floats(lanes),
        running=integers(lanes),
        end_s=floats(lanes),
        speed=floats(lanes),
        next_speed=floats(lanes),
        left_s=floats(lanes),
        since_s=floats(lanes),
        needs=floats(len(bandwidth.limit)),
    )


def prepare(tasks, state):
    """Sort dependencies by what ends first, and make tasks ready that wait for
    nothing."""
    first, waits, queue_begin = state.first, state.waits, state.queue_begin
    for task in tasks.before:
        first[task + 1] += 1
    for task in range(len(waits)):
        first[task + 1] += first[task]
    # Each place is counted up to the begin of the next task's.
    for dependency in range(len(tasks.before)):
        task, successor = tasks.before[dependency], tasks.after[dependency]
        state.successors[first[task]] = successor
        first[task] += 1
        waits[successor] += 1
    for task in range(len(waits) - 1, -1, -1):
        first[task + 1] = first[task]
    first[0] = 0
    for task in range(len(waits)):
        queue_begin[tasks.lane[task] + 1] += 1
        state.waiting_s[tasks.lane[task]] += tasks.alone_s[task]
    for lane in range(len(state.running)):
        queue_begin[lane + 1] += queue_begin[lane]
        state.running[lane] = -1
        state.end_s[lane] = INFINITE
    for task in range(len(waits)):
        if not waits[task]:
            push(tasks, state, task)


def push(tasks, state, task):
    """Make a task ready."""
    lane = tasks.lane[task]
    first, place, queue = state.queue_begin[lane], state.ready[lane], state.queue
    while place and queue[first + (place - 1) // 2] > task:
        queue[first + place] = queue[first + (place - 1) // 2]
        place = (place - 1) // 2
    queue[first + place] = task
    state.ready[lane] += 1


def pop(tasks, state, lane):
    """Take the first of the ready tasks of a lane and return it."""
    state.ready[lane] -= 1
    first, size, queue = state.queue_begin[lane], state.ready[lane], state.queue
    task, last = queue[first], queue[first + size]
    place, child = 0, 1
    while child < size:
        if child + 1 < size and queue[first + child + 1] < queue[first + child]:
            child += 1
        if queue[first + child] >= last:
            break
        queue[first + place] = queue[first + child]
        place, child = child, 2 * child + 1
    queue[first + place] = last
    return task


def apply_modes(tasks, bandwidth, state):
    """Set the next speed of each lane to that under the modes of running tasks."""
    running, speed = state.running, state.next_speed
    for lane in range(len(speed)):
        speed[lane] = 1.0
    # Later lanes first: the mode of a task that one stops has no effect.
    for lane in range(len(speed) - 1, -1, -1):
        if running[lane] >= 0 and tasks.mode[running[lane]] and speed[lane] > 0.0:
            scales = bandwidth.scales[tasks.mode[running[lane]]]
            for other in range(len(speed)):
                speed[other] *= scales[other]


def add_needs(tasks, bandwidth, state):
    """Sum up the bandwidth that running tasks need of each pool."""
    pool, parent, limit = bandwidth.pool, bandwidth.parent, bandwidth.limit
    running, needs = state.running, state.needs
    for number in range(len(limit)):
        needs[number] = 0.0
    for lane in range(len(pool)):
        if pool[lane] >= 0 and running[lane] >= 0:
            needs[pool[lane]] += tasks.demand[running[lane]] * state.next_speed[lane]
    for number in range(len(limit)):
        if parent[number] >= 0:
            needs[parent[number]] += min(needs[number], limit[number])


def share(tasks, bandwidth, state):
    """Set the next speed of each lane from the tasks that run."""
    pool, parent, limit = bandwidth.pool, bandwidth.parent, bandwidth.limit
    running, speed, needs = state.running, state.next_speed, state.needs
    apply_modes(tasks, bandwidth, state)
    add_needs(tasks, bandwidth, state)
    for lane in range(len(pool)):
        number = pool[lane]
        is_fair = number >= 0 and bandwidth.is_fair[number]
        if is_fair and running[lane] >= 0 and needs[number] > limit[number]:
            own = tasks.demand[running[lane]] * speed[lane]
            least = max(limit[number] / 2, limit[number] - (needs[number] - own))
            if own > least:
                speed[lane] *= least / own
            number = parent[number]
        while number >= 0:
            if needs[number] > limit[number]:
                speed[lane] *= limit[number] / needs[number]
            number = parent[number]


def start_tasks(tasks, state, now, limit_s):
    """Start the first ready task of each idle lane, and return whether the last task
    may end before a limit."""
    for lane in range(len(state.running)):
        if state.running[lane] >= 0 or not state.ready[lane]:
            continue
        if now + state.waiting_s[lane] > limit_s:
            return False
        task = pop(tasks, state, lane)
        state.running[lane] = task
        state.starts[task] = state.since_s[lane] = now
        state.left_s[lane] = tasks.alone_s[task]
        state.waiting_s[lane] -= tasks.alone_s[task]
        state.speed[lane] = 0.0
        state.end_s[lane] = INFINITE if tasks.alone_s[task] > 0.0 else now
    return True


def next_end(tasks, state, now):
    """Give lanes their next speed, and return when the next task ends."""
    first_end = INFINITE
    for lane in range(len(state.running)):
        task, speed = state.running[lane], state.next_speed[lane]
        if task >= 0 and speed != state.speed[lane] and tasks.alone_s[task] > 0.0:
            state.left_s[lane] -= (now - state.since_s[lane]) * state.speed[lane]
            state.since_s[lane] = now
            state.speed[lane] = speed
            state.end_s[lane] = (
                now + state.left_s[lane] / speed if speed > 0.0 else INFINITE
            )
        first_end = min(first_end, state.end_s[lane])
    return first_end


def run(tasks: Any, bandwidth: Any, state: Any, limit_s: Any) -> Any:
    """Run tasks from a state of zeros, and return how many ended.

    Fewer than all end if the last one would surely end after the limit, and -1 is
    returned if tasks wait for each other."""
    prepare(tasks, state)
    now, done = 0.0, 0
    while done < len(state.ends):
        if not start_tasks(tasks, state, now, limit_s):
            return done
        share(tasks, bandwidth, state)
        now = next_end(tasks, state, now)
        if now == INFINITE:
            return -1
        for lane in range(len(state.running)):
            if state.end_s[lane] > now + _SAME_TIME * now:
                continue
            task = state.running[lane]
            state.running[lane] = -1
            state.end_s[lane] = INFINITE
            state.ends[task] = now
            done += 1
            for place in range(state.first[task], state.first[task + 1]):
                successor = state.successors[place]
                state.waits[successor] -= 1
                if not state.waits[successor]:
                    push(tasks, state, successor)
    return done
