"""The text of `ebbtide replay --recommend`: no loss, nothing that the job has, and no
invented value."""

from __future__ import annotations

import re

import pytest

from ebbtide.features.advise.printing import print_recommendation
from ebbtide.features.advise.recommendation import Recommendation, recommend
from ebbtide.interleave.replay.recorded_job import RecordedJob
from tests.interleave.job_files import machine, workload


def recommended(**job: object) -> Recommendation:
    return recommend(workload(), machine(), RecordedJob(**job))  # type: ignore[arg-type]


def printed(advice: Recommendation, capsys: pytest.CaptureFixture[str]) -> str:
    print_recommendation(advice, "script")
    return capsys.readouterr().out


def test_recommend__compares_with_the_jobs_own_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    advice = recommended(policy="zero-offload,grads=async")
    assert advice.advice is not None
    action = advice.advice.as_json()
    before, after = action["present_ms"], action["simulated_ms"]
    assert before == advice.present.iteration_ms
    assert (
        f": {before:,.0f} -> {after:,.0f} ms ({before / after:.2f}x, simulated)"
        in printed(advice, capsys)
    )
    assert advice.as_json()["advice"] == advice.as_json()["action"] == action


def test_recommend__advises_no_loss_against_the_recorded_iteration(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best_s = recommended().setups[0].iteration_ms / 1e3
    job = {"policy": "zero-offload", "machine": "box"}
    slower = recommended(**job, iteration_s=best_s * 1.05)
    assert slower.advice is not None
    assert slower.advice.as_json()["recorded_ms"] == pytest.approx(best_s * 1.05e3)
    for recorded_s in (best_s * 1.01, best_s * 0.96):
        advice = recommended(**job, iteration_s=recorded_s)
        assert (advice.advice, advice.split) == (None, None)
        assert all(system.iteration_ms < recorded_s * 1e3 for system in advice.systems)
        assert printed(advice, capsys).startswith(
            f"Nothing to change: {recorded_s * 1e3:,.0f} ms with zero-offload"
        )
    # Recorded on another machine, it says nothing of this one.
    assert (
        recommended(**job | {"machine": "other"}, iteration_s=best_s * 0.96).advice
        is not None
    )


def test_recommend__does_not_repeat_the_present_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = recommended().policy
    advice = recommended(policy=best)
    assert (advice.advice, advice.policy) == (None, best)
    assert "Nothing to change" in printed(advice, capsys)


def test_recommend__marks_values_that_are_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = printed(recommended(), capsys)
    assert re.search(
        r"^    lr=\.\.\.,  # fill in: your learning rate", text, re.MULTILINE
    )
    assert re.search(r"^    max_grad_norm=\.\.\.,  # fill in: ", text, re.MULTILINE)
    assert "values marked `fill in` are not known" in text
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "train_micro_batch_size_per_gpu": 2,
    }
    text = printed(recommended(config=config, stage=3), capsys)
    assert "    lr=0.0003,\n" in text
    assert "fill in" not in text
    assert "max_grad_norm" not in text


@pytest.mark.slow
def test_recommend__marks_values_of_the_configuration() -> None:
    config = recommended().best.deepspeed_config
    marked = [
        config["gradient_clipping"],
        config["train_micro_batch_size_per_gpu"],
        config["optimizer"]["params"]["lr"],
    ]
    assert all(str(value).startswith("fill in: ") for value in marked)
