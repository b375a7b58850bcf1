"""A callback for the Trainer of Hugging Face."""

import warnings
from typing import Any

from transformers import Trainer, TrainerCallback

import ebbtide
from ebbtide.profiler.callbacks import record_out_of_memory


class HuggingFaceCallback(TrainerCallback):
    """Adds the figures of `ebbtide.metrics` to the logs of training steps; nothing
    where nothing is recorded.

    `HuggingFaceCallback.add_to(trainer)` puts it before the callbacks of the loggers
    (`report_to`), which see what was in the logs when their turn comes. In
    `Trainer(callbacks=[...])` its turn comes after theirs: the figures then reach
    `trainer.state.log_history` and the progress bar only. Under several ranks the
    figures describe the rank that logs, rank zero.

    Args:
        out_of_memory: Trace for `record_out_of_memory`; None: none. For trainers of
            TRL, too.
    """

    def __init__(self, out_of_memory: str | None = None) -> None:
        self._is_first = False
        if out_of_memory is not None:
            record_out_of_memory(out_of_memory)

    @classmethod
    def add_to(cls, trainer: Trainer, out_of_memory: str | None = None) -> None:
        """Add a callback to a Trainer, before all others."""
        callback = cls(out_of_memory)
        callback._is_first = True
        trainer.callback_handler.callbacks.insert(0, callback)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        """Warn if the loggers would not see the figures."""
        if args.report_to and not self._is_first:
            warnings.warn(
                f"the loggers of report_to ({', '.join(args.report_to)}) do not see "
                "ebbtide's figures: "
                "use HuggingFaceCallback.add_to(trainer) instead of callbacks=[...]",
                stacklevel=2,
            )

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to the logs of a step, and to the Trainer's entry of them."""
        # Logs without a loss are results of the evaluation or of the whole training,
        # which the Trainer returns.
        if logs is not None and "loss" in logs:
            figures = ebbtide.metrics()
            logs.update(figures)
            state.log_history[-1].update(figures)
