"""ZeRO-3 in forked processes: an error in the child, and the bits of the parent."""

from __future__ import annotations

from typing import Any

from tests.interleave.engine.forked import forked

from .training import batches, config, digest, engine, loss_of, train


def test_fork__leaves_the_parents_bits_and_refuses_steps_of_the_child(
    deepspeed: Any,
) -> None:
    """Late updates and streamed gradients are in flight."""
    settings, results = config("bf16"), []
    for forks in (False, True):
        with engine("pipelined,overlap=forward", settings) as running:
            losses = train(running, 2)
            for batch in batches(running, 1, seed=5):
                running.backward(loss_of(running, batch))
                if forks:
                    for call in (
                        running.optimizer.step,
                        lambda: running.optimizer.fp32_partitioned_groups_flat[0],
                    ):
                        assert "process groups of torch.distributed do not work" in str(
                            forked(call).error
                        )
                    assert forked(running.optimizer.synchronize).error is None
                running.step()
            results.append((losses, train(running, 1), digest(running)))
    assert results[0] == results[1]
