"""Lets Ray Train run its training function in the process of a dry run, as one of the workers that the job asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ebbtide.profiler.agent.patches import Patches, when_imported
from ebbtide.profiler.dryrun.frameworks.process_groups import ProcessGroups


def patch_ray_train(patches: Patches, groups: ProcessGroups) -> Callable[[], None]:
    """Use Ray Train's local mode until `patches.undo()`; the returned function stops the wait for its import."""

    def patch(module: Any) -> None:
        def fit(trainer: Any) -> Any:
            if not groups.stated:
                groups.state(max(1, trainer.scaling_config.num_workers))
            return trainer._get_local_controller().run(trainer._get_train_func())

        patches.set(module.DataParallelTrainer, "fit", fit)

    return when_imported("ray.train.v2.api.data_parallel_trainer", patch)
