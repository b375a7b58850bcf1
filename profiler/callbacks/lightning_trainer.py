"""A callback for the Trainer of Lightning."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ebbtide

# Lightning has two names; a script uses classes of one of them.
if TYPE_CHECKING or "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class LightningCallback(Callback):
    """Logs the figures of `ebbtide.metrics` at the steps at which Lightning logs; nothing where nothing is recorded.

    Import Lightning, as `lightning` or `pytorch_lightning`, before this class: it is a callback of that package. Under
    several ranks the figures are those of the rank that logs.
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log the figures if this step is logged."""
        # Each figure costs some microseconds, so not at every step.
        if trainer.log_every_n_steps and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(ebbtide.metrics(), on_step=True, on_epoch=False)
