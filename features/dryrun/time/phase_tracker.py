"""Phases and iterations of a dry run, on its clock."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from ebbtide.features.dryrun.time.clock import Times, VirtualClock
from ebbtide.features.dryrun.time.iteration_end import IterationEnd
from ebbtide.machines.kernels.time_priors import TYPICAL
from ebbtide.phases import PHASES
from ebbtide.profiler.agent.iteration_rule import (
    BACKWARD,
    FORWARD,
    UPDATE,
    IterationRule,
    UnsteppedIterations,
)
from ebbtide.profiler.agent.patches import wrapper

# Backwards without a forward of a module and without an optimizer, after which a job is
# taken to have no other end.
MOST_BACKWARDS = 64


@dataclass
class FakePhase:
    """A phase that ran.

    Attributes:
        gpu_start, gpu_end: When the device passed the same two points, in each case of
            the clock.
        iteration: Its iteration; None until it ends.
    """

    phase: str
    start_ns: int
    end_ns: int
    gpu_start: Times
    gpu_end: Times
    iteration: int | None = None


@dataclass(frozen=True)
class FakeForward:
    """A forward without gradients: its device times in ns, and how many phases ended
    before it."""

    start_ns: int
    end_ns: int
    phases_before: int


@dataclass(frozen=True)
class FakeMark:
    """A range that the job names, by the times of the host and of the device, in ns."""

    name: str
    start_ns: int
    end_ns: int
    gpu_start_ns: int
    gpu_end_ns: int


class FakeForwards:
    """Collects the outermost forwards while grad mode is off and no phase is open, as
    the recorder's class does; `active`: whether one runs."""

    def __init__(self, clock: VirtualClock, phases: list[FakePhase]) -> None:
        self.active = False
        self.rows: list[FakeForward] = []
        self._clock, self._phases = clock, phases
        self._start_ns = self._phases_before = 0

    def begin(self) -> bool:
        """Begin a forward."""
        self._clock.tick()
        self._start_ns, self._phases_before = (
            self._clock.record()[TYPICAL],
            len(self._phases),
        )
        self.active = True
        return True

    def end(self) -> None:
        """End the forward. It is dropped if phases ran in it."""
        self.active = False
        if len(self._phases) == self._phases_before:
            self.rows.append(
                FakeForward(
                    self._start_ns, self._clock.record()[TYPICAL], self._phases_before
                )
            )


class PhaseTracker:
    """Detects phases by the rules of the recorder; `OutermostCall` and `wrap_backward`
    report to it as to `Recorder`.

    `on_update` is called before an outermost optimizer step, when its gradients exist,
    and after it; `on_iteration` with the number of finished iterations, once for each:
    when it is whole, or before the first phase of the next one is numbered. The
    innermost of `module_names` is the last. `threads`, the threads that train, is set
    by the backend.
    """

    def __init__(
        self,
        clock: VirtualClock,
        on_update: Callable[[], None],
        on_iteration: Callable[[int], None],
    ) -> None:
        self.phases: list[FakePhase] = []
        self.without_gradients = FakeForwards(clock, self.phases)
        self.marks: list[FakeMark] = []
        self.rule = IterationRule()
        # The number of iterations with phases.
        self.iterations = 0
        self.modules: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.module_names: list[str] = []
        self.optimizers: WeakSet[Any] = WeakSet()
        self.end = IterationEnd(self.optimizers)
        # Read and set by the hooks of the recorder.
        self.live, self.recomputes, self.source = True, False, 0
        self.called: Any = None
        self.batch: dict[str, Any] = {}
        self.threads: Any = None
        self._clock, self._on_update, self._on_iteration = (
            clock,
            on_update,
            on_iteration,
        )
        # Code of the open phase, and its start for the host and the device.
        self._open: tuple[int, int, Times] | None = None
        self._step_depth = 0
        # Optimizers that have stepped in the open backward.
        self._streamed: list[Any] = []
        self._backwards = self._numbered = self._ended = 0
        self._unstepped = UnsteppedIterations()
        self._names: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

    def begin_mark(self, name: str) -> Callable[[], None]:
        """Begin a range that the job names; return the function that ends it."""
        start_ns, gpu_start_ns = self._clock.tick(), self._clock.record()[TYPICAL]

        def end() -> None:
            end_ns, gpu_end_ns = self._clock.tick(), self._clock.record()[TYPICAL]
            self.marks.append(
                FakeMark(name, start_ns, end_ns, gpu_start_ns, gpu_end_ns)
            )

        return end

    @property
    def in_phase(self) -> bool:
        """Whether a phase is open, to which belongs what begins now."""
        return self._open is not None

    @property
    def phase(self) -> int:
        """Code of the open phase."""
        return self._open[0] if self._open else FORWARD

    def enter(self, phase: int) -> bool:
        """Open a phase; return whether it is the outermost one."""
        if not self.live:
            return False
        if phase == BACKWARD:
            self._backwards += 1
        if self.in_phase:
            return False
        if self.rule.index < 0 and not self.end.made:
            if self._unstepped.begins(phase):
                self._on_iteration(self._unstepped.number + 1)
            elif phase == BACKWARD and self._backwards > MOST_BACKWARDS:
                self._on_iteration(self._backwards)
        self._clock.in_job = True
        self._open = phase, self._clock.tick(), self._clock.record()
        return True

    def leave(self, keep: bool = True) -> None:
        """Close the open phase, and keep it or not."""
        if self._open is not None and keep:
            phase, start_ns, gpu_start = self._open
            end_ns = self._clock.tick()
            self._unstepped.add(phase, 0)
            if phase == BACKWARD and self.rule.index < 0 and not self.end.made:
                self._on_update()
            self.phases.append(
                FakePhase(
                    PHASES[phase], start_ns, end_ns, gpu_start, self._clock.record()
                )
            )
        self._open = self.called = None
        if self._streamed:
            optimizers, self._streamed = self._streamed, []
            self._on_update()
            iteration = self.rule.add_update(optimizers, self._backwards)
            self._number_phases(iteration, optimizers)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Open an update, and return the arguments with a closure that has phases of
        its own."""
        self.optimizers.add(optimizer)
        self._step_depth += 1
        if self._step_depth > 1 or not self.enter(UPDATE):
            return None
        self._on_update()
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._wrap_closure(args[1]), *args[2:]), kwargs
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._wrap_closure(kwargs["closure"])}
        return None

    def _wrap_closure(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Before its closure is called, an optimizer has done nothing.
            self.leave(keep=False)
            result = closure(*args, **kwargs)
            self.enter(UPDATE)
            return result

        return call

    def after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._step_depth -= 1
        if self._step_depth or not self.live:
            return
        if self.in_phase and self.phase == BACKWARD:
            # Gradients are streamed: each is used, and released, while the backward
            # goes on, which is the update, too.
            self._streamed.append(optimizer)
        if self.phase != UPDATE:
            return
        self._on_update()
        iteration = self.rule.add_update([optimizer], self._backwards)
        # One before any backward makes the optimizer's state, and is no training.
        self.leave(keep=iteration is not None)
        self._number_phases(iteration, [optimizer])

    def _number_phases(self, iteration: int | None, optimizers: list[Any]) -> None:
        """Give the phases since the last update the iteration of this one; None: it has
        none."""
        if iteration is None:
            return
        if iteration == self.iterations:
            self.finish_iteration()
            self.iterations += 1
            self.end.begin()
        for phase in self.phases[self._numbered :]:
            phase.iteration = iteration
        self._numbered = len(self.phases)
        if self.end.add(optimizers):
            self.finish_iteration()

    def finish_iteration(self) -> None:
        """Report the last iteration, unless it was reported."""
        if self._ended < self.iterations:
            self._ended = self.iterations
            self._on_iteration(self.iterations)

    def number_unstepped(self) -> None:
        """Number the phases of a job in which no optimizer has stepped: an iteration
        ends before the forward that follows a backward."""
        if self.iterations:
            return
        rule, following = UnsteppedIterations(), list[FakePhase]()
        for phase in self.phases:
            code = PHASES.index(phase.phase)
            rule.add(code, 0)
            following.append(phase)
            if code == BACKWARD:
                for each in following:
                    each.iteration = rule.number
                following, self.iterations = [], rule.number + 1

    @wrapper
    def wrap_update(
        self,
        optimizer_of: Callable[..., Any],
        original: Callable[..., Any],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Make each call of a method one update, whatever optimizers step in it.

        A call of `GradScaler.step` unscales the gradients before, and DeepSpeed's
        optimizers contain others."""
        optimizer = optimizer_of(*args)
        self.before_step(optimizer, (), {})
        result = original(*args, **kwargs)
        self.after_step(optimizer, (), {})
        return result

    def enter_module(self, module: Any, _args: Any) -> None:
        name = self._names.get(module)
        if name is None:
            for path, part in module.named_modules():
                self._names.setdefault(part, path or type(module).__name__)
            name = self._names[module]
        self.module_names.append(name)

    def leave_module(self, _module: Any, _args: Any, _result: Any) -> None:
        if self.module_names:
            self.module_names.pop()
