"""Steps of ZeRO stage 3 that return before all parameters are written. Importing it needs DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from ebbtide.interleave.deepspeed.fetch_gates import FetchGates
from ebbtide.interleave.deepspeed.settings import Settings
from ebbtide.interleave.deepspeed.subgroup_slices import SliceGradients
from ebbtide.interleave.deepspeed.supported import overlap_of
from ebbtide.interleave.engine.adaptive.runner import AdaptiveRunner


class LateSteps(DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """ZeRO stage 3 whose updates may run under the next forward.

    Gathers of parameters wait for those that they read. Everything else that uses parameters, gradients or state calls
    `synchronize` first.
    """

    settings = Settings()
    persistent_parameters: list[Any]
    _runner: AdaptiveRunner | None = None
    _gates: FetchGates | None = None
    _gradients: SliceGradients

    def synchronize(self) -> None:
        """Wait until the last step has written all parameters; with late updates it may not have when it returned.

        Raises:
            EngineError: An operation of the step failed.
        """
        if self._runner is not None:
            self._runner.finish_step()

    def backward_prologue(self) -> None:
        """Begin a backward, after the last step has ended."""
        self.synchronize()
        super().backward_prologue()

    def step(self, closure: None = None) -> None:
        """Run the step of DeepSpeed, after the last one has ended."""
        self.synchronize()
        super().step(closure)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state dict of DeepSpeed."""
        self.synchronize()
        super().load_state_dict(*args, **kwargs)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move what DeepSpeed can move to the host."""
        self.synchronize()
        super().offload_states(*args, **kwargs)

    def destroy(self) -> None:
        """Destroy DeepSpeed's part, and close the engine, after the last step has ended."""
        try:
            self.synchronize()
        finally:
            if self._gates is not None:
                self._gates.remove()
            if self._runner is not None and self._runner.has_storage:
                # Before, since DeepSpeed reads the masters, which would read all state into host memory.
                self._runner.close()
                self._runner = None
            super().destroy()
            if self._runner is not None:
                self._runner.close()

    @property
    def _is_late(self) -> bool:
        """Whether updates may be late: the same on all ranks, as it decides which collectives run."""
        return overlap_of(self.settings.policy) != "none"

    def _gate_gathers(self, params: Iterable[Any]) -> None:
        """Let gathers of parameters wait, if updates may be late."""
        if self._is_late:
            self._gates = FetchGates(params, self._wait_for)

    def _wait_for(self, params: Sequence[Any]) -> None:
        """Wait until late operations have written this rank's parts of parameters."""
        assert self._runner is not None
        self._runner.wait_for_params(
            [part for param in params for part in self._gradients.slices_of(self.get_param_id(param))]
        )

    def _post_step(self, timer_names: Any) -> None:
        """Leave small ("persistent") parameters to the modules that use them, if updates may be late.

        DeepSpeed gathers all of them at the end of a step, which would have to wait for all late updates. In its first
        step and after an overflow, it gathers them by module itself.
        """
        persistent = self.persistent_parameters
        if self._is_late:
            self.persistent_parameters = []
        super()._post_step(timer_names)
        self.persistent_parameters = persistent
