"""Methods of an optimizer for those who use its parameters outside of a forward, or from another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from ebbtide.interleave.engine.errors import EngineError
from ebbtide.interleave.engine.pending_params import PendingParams
from ebbtide.interleave.engine.read_checks import UnguardedAccess

Method = TypeVar("Method", bound=Callable[..., Any])


class GuardedReads:
    """The part of InterleavedAdamW that waits for its updates."""

    _pending: PendingParams

    def synchronize(self) -> None:
        """Wait until the last step has written all parameters. Only with `overlap` it may not have when it returned.

        Raises:
            EngineError: As `step`; or the job wrote to a parameter before.
        """
        self._pending.finish()

    @contextmanager
    def hold_steps(self) -> Iterator[None]:
        """Let no other thread step meanwhile, after the last step has ended.

        A thread that saves checkpoints reads `model.state_dict()`, whose tensors are the parameters themselves, and
        `state_dict()` inside it, to have both after the same step.

        Raises:
            EngineError: As `synchronize`.
        """
        with self._pending.lock:
            self.synchronize()
            yield

    def check_reads(self) -> AbstractContextManager[list[UnguardedAccess]]:
        """Return a context that reports reads and writes of parameters which do not wait for their updates.

        Inside it, steps end before they return, and then make the parameters that they have updated NaN until
        something waits for them, as if every update were late: nothing depends on timing or on the plan. An operation
        of this thread, or of a backward that it starts, on such a parameter is logged as a warning, once for each line,
        and gets the right values: the bits of the job do not change. What other threads and code outside of torch read
        by themselves is NaN, and shows in its results; their writes are reported without a line, and lost.

        Compiled functions run eagerly. It needs a copy of all parameters, on their device.

        It is a context and no option of the constructor: it slows jobs down, so some iterations are enough, and modes
        of torch, which show operations, belong to a thread and must be left in the reverse order.

        Returns:
            The context; its value is a list of what was found, with an entry for each warning.

        Raises:
            EngineError: No module waits for updates; or as `synchronize`.
        """
        if not self._pending.names:
            raise EngineError("check_reads() needs a module that waits for updates: pass model= and overlap='forward'")
        return self._pending.check_reads()


def locked(method: Method) -> Method:
    """Return a method of GuardedReads that comes before or after all others that other threads call."""

    @wraps(method)
    def locked_method(self: GuardedReads, *args: Any, **kwargs: Any) -> Any:
        # Memory that is allocated in inference mode could not be written outside of it.
        with self._pending.lock, torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return cast(Method, locked_method)
