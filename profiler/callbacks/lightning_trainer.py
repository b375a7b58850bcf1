"""A callback for the Trainer of Lightning."""

import sys
from typing import TYPE_CHECKING, Any

import ebbtide
from ebbtide.profiler.callbacks import record_out_of_memory

# Lightning has two names; a script uses classes of one of them.
if TYPE_CHECKING or "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class LightningCallback(Callback):
    """Logs the figures of `ebbtide.metrics` at the steps at which Lightning logs;
    nothing where nothing is recorded.

    Import Lightning, as `lightning` or `pytorch_lightning`, before this class: it is a
    callback of that package. Under several ranks the figures describe the rank that
    logs, rank zero.

    Args:
        out_of_memory: Trace for `record_out_of_memory`; None: none.
    """

    def __init__(self, out_of_memory: str | None = None) -> None:
        self._logged_step = 0
        if out_of_memory is not None:
            record_out_of_memory(out_of_memory)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Log the figures if this batch ended a step that is logged."""
        step = trainer.global_step
        if (
            step == self._logged_step
            or not trainer.log_every_n_steps
            or step % trainer.log_every_n_steps
        ):
            return
        self._logged_step = step
        figures = ebbtide.metrics()
        # Not `log_dict`, which repeats values of figures not known any more.
        # Lightning's first step is 0.
        for logger in trainer.loggers if figures else ():
            logger.log_metrics(figures, step=step - 1)
