"""Tests of the recommended setup."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ebbtide.errors import MachineError
from ebbtide.features.advise.recommendation import recommend
from ebbtide.interleave.model.workload import Workload
from ebbtide.interleave.replay.recorded_job import RecordedJob
from ebbtide.interleave.replay.replay import replay
from tests.conftest import slow_case
from tests.features.advise.test_ablation import ran
from tests.interleave import job_files
from tests.interleave.job_files import machine

DEEPSPEED = RecordedJob(stage=3)


def workload(**changes: Any) -> Workload:
    """The workload of `job_files` with five times as large subgroups, for which fewer
    plans are searched."""
    return job_files.workload(**{"subgroup_params": 5e8, **changes})


@pytest.fixture(autouse=True)
def _no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for no updates beside the step, which have tests of their own."""
    for name in ("OPTIMIZER_OVERLAP", "DEEPSPEED_OVERLAP"):
        monkeypatch.setattr(f"ebbtide.features.advise.choice.{name}", "none")


def test_recommend__does_not_offload_state_that_always_fits() -> None:
    # 24 GB of state, and 4 GB of gradients that stay until the update.
    enough = workload(gpu_free_bytes=28e9)
    advice = recommend(enough, machine())
    assert (advice.policy, advice.deepspeed, advice.best.code) == (
        "gpu-only",
        None,
        None,
    )
    took = ran("gpu-only", enough, machine()).iteration_s * 1e3
    assert advice.line.startswith(
        "do not offload: the optimizer's state (24.0 GB a rank) fits"
    )
    assert f"takes {took:,.0f} ms then" in advice.line
    assert (
        recommend(workload(gpu_free_bytes=27.9e9), machine(), DEEPSPEED).policy
        == "adaptive"
    )
    # If the free memory is not known, nothing is said to fit.
    assert (
        recommend(workload(gpu_free_bytes=None), machine(), DEEPSPEED).policy
        == "interleaved:2"
    )


def test_recommend__never_offloads_where_gpu_and_cpu_share_one_memory() -> None:
    unified = replace(machine(), unified_memory=True)
    reason = f"GPU and CPU of {unified.name} share one memory: offload frees none of it"
    for free, fits in ((28e9, True), (6e9, False)):
        advice = recommend(workload(gpu_free_bytes=free), unified, DEEPSPEED)
        assert advice.policy == "gpu-only"
        # What does not fit is no advice.
        assert (advice.advice is not None) == fits
        if advice.advice is not None:
            assert advice.advice.kind == "deepspeed"
            assert advice.advice.settings == {"offload_optimizer": {"device": "none"}}
        assert advice.line.count(reason) == 1
        assert ("the job does not fit: it needs" in advice.line) is not fits
    assert reason not in recommend(workload(gpu_free_bytes=28e9), machine()).line


def test_recommend__leaves_state_on_the_device_where_it_is_today() -> None:
    # 8 GB of bf16 moments fit, 24 GB of InterleavedAdamW do not.
    small, own = workload(gpu_free_bytes=8.5e9), RecordedJob(state_bytes=4.0)
    assert recommend(small, machine()).policy == "adaptive"
    advice = recommend(small, machine(), own)
    assert (advice.policy, advice.is_as_today) == ("gpu-only", True)
    replayed = replay(small, machine(), ["gpu-only", "zero-offload"], own)
    assert replayed.results[0].fits is True
    assert replayed.results[0].iteration_ms == advice.setups[0].iteration_ms
    assert "gpu-only has the job's own state of 4 B a parameter, others 12 B" in list(
        replayed.memory_lines()
    )


def test_replay__says_why_the_simpler_policy_is_recommended() -> None:
    fits = workload(gpu_free_bytes=40e9)
    replayed = replay(fits, machine())
    assert replayed.late is not None
    results = [
        one
        for one in (*replayed.results, *replayed.late.results)
        if one.fits and one.exact
    ]
    fastest = min(results, key=lambda one: one.iteration_ms)
    assert recommend(fits, machine()).policy == "gpu-only"
    lines = list(replayed.simplest_lines())
    assert len(lines) == (fastest.policy != "gpu-only")
    assert all(
        line.startswith(f"{fastest.policy}: ") and "the simpler one wins" in line
        for line in lines
    )


@pytest.mark.parametrize(
    "free",
    [
        0.0,
        6e9,
        *(pytest.param(free, marks=pytest.mark.slow) for free in (3e9, 14e9, 25e9)),
    ],
)
def test_recommend__gives_deepspeed_the_fastest_split_that_fits(free: float) -> None:
    job, target = job_files.workload(gpu_free_bytes=free), machine()
    advice = recommend(job, target, DEEPSPEED)
    assert advice.deepspeed is not None
    offload = advice.deepspeed["offload_optimizer"]
    assert isinstance(offload, dict)
    assert (offload["device"], advice.deepspeed["sub_group_size"]) == ("cpu", 10**8)
    policy = (
        "zero-offload" if offload["ratio"] == 1 else f"twin-flow:{offload['ratio']:g}"
    )
    chosen = ran(policy, job, target)
    assert chosen.fits_device(None)
    for twentieths in range(21):
        other = ran(f"twin-flow:{twentieths / 20}", job, target)
        assert not other.fits_device(None) or other.iteration_s >= chosen.iteration_s
    assert (offload["ratio"] == 1) == (free == 0)
    # The line has both iteration times.
    assert advice.line.startswith(
        f"adaptive: {ran('adaptive', job, target).iteration_s * 1e3:,.0f} ms an "
        "iteration"
    )
    assert (
        f"; {chosen.plan.policy} in plain DeepSpeed: {chosen.iteration_s * 1e3:,.0f} ms"
        in advice.line
    )


def test_recommend__gives_the_largest_of_equal_ratios() -> None:
    """With 20 subgroups each ratio is another split; with one, all ratios above 0 are
    the same."""
    advice = recommend(workload(subgroup_params=2e9), machine())
    assert advice.deepspeed is not None
    assert advice.deepspeed["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
        "ratio": 1.0,
    }


@pytest.mark.parametrize(
    ("free", "policy"), [(6e9, "adaptive"), (None, "interleaved:2")]
)
def test_recommend__has_lines_of_python_for_the_best_policy(
    free: float | None, policy: str
) -> None:
    advice = recommend(
        workload(gpu_free_bytes=free), machine(), DEEPSPEED, machine_source="box.json"
    )
    assert advice.policy == policy
    assert advice.best.code is not None
    assert advice.best.optimizer_code is not None
    for code in (advice.best.code, advice.best.optimizer_code):
        assert f'    policy="{policy}",\n' in code
        assert "    subgroup_params=500_000_000,\n" in code
        # Plans of other policies do not depend on rates.
        assert ('    machine=find_machine("box.json"),\n' in code) == (
            policy == "adaptive"
        )
        assert ("    memory_budget=6_000_000_000,\n" in code) == (free is not None)


def test_recommend__has_a_setup_per_policy_that_fits_fastest_first() -> None:
    job, target = job_files.workload(), machine()
    setups = recommend(job, target, DEEPSPEED).setups
    names = [setup.policy.partition(":")[0] for setup in setups]
    assert (names[0], len(names)) == ("adaptive", 5)
    assert set(names[1:]) == {"twin-flow", "interleaved", "pipelined", "zero-offload"}
    assert sorted(setups[1:], key=lambda setup: setup.iteration_ms) == list(setups[1:])
    for setup in setups:
        schedule = ran(setup.policy, job, target)
        assert schedule.iteration_s * 1e3 == pytest.approx(setup.iteration_ms)
        assert schedule.fits_device(None)
        is_plain = setup.policy.startswith(("twin-flow", "zero-offload"))
        assert (setup.code is None) == (setup.optimizer_code is None) == is_plain
    (interleaved,) = (
        setup for setup in setups if setup.policy.startswith("interleaved")
    )
    strides = [ran(f"interleaved:{stride}", job, target) for stride in range(1, 11)]
    fitting = [schedule for schedule in strides if schedule.fits_device(None)]
    assert min(schedule.iteration_s for schedule in fitting) * 1e3 == pytest.approx(
        interleaved.iteration_ms
    )


def test_recommend__leaves_out_policies_that_do_not_fit_the_host() -> None:
    """Only the policies with resident state need less than the 24 GB of all state."""
    advice = recommend(workload(), machine(host_memory_bytes=24e9))
    assert {"pipelined", "zero-offload"} <= advice.choice.left_out.keys()
    assert not {setup.policy for setup in advice.setups} & advice.choice.left_out.keys()
    assert (
        "of host memory, and a rank has 22.35 GiB"
        in advice.choice.left_out["pipelined"]
    )
    advice = recommend(workload(), machine(pinned_memory_bytes=7e9))
    assert (
        "of pinned host memory, and a rank may pin 6.52 GiB"
        in advice.choice.left_out["pipelined"]
    )


CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "steps_per_print": 10,
}


def test_recommend__repeats_the_settings_of_a_recorded_job() -> None:
    advice = recommend(
        workload(), machine(), RecordedJob(CONFIG, stage=2, micro_steps=2)
    )
    config = dict(advice.best.deepspeed_config)
    assert config.pop("zero_optimization")["stage"] == 3
    # The batch of all ranks follows from the others; keys that do not matter here stay
    # in the user's file.
    assert config == {
        key: value
        for key, value in CONFIG.items()
        if key not in ("train_batch_size", "steps_per_print")
    }
    assert advice.placeholders == ()
    # The size of subgroups in checkpoints stays, where it exceeds the parameters too.
    large = RecordedJob(
        {**CONFIG, "zero_optimization": {"sub_group_size": 1e12}}, stage=3
    )
    assert (
        recommend(workload(), machine(), large).best.deepspeed_config[
            "zero_optimization"
        ]["sub_group_size"]
        == 10**12
    )
    assert advice.best.optimizer_code is not None
    for argument in (
        "lr=0.0003",
        "betas=(0.9, 0.95)",
        "weight_decay=0.0",
        "max_grad_norm=0.5",
        'loss_scale="dynamic"',
    ):
        assert f"    {argument},\n" in advice.best.optimizer_code
    assert "needs zero_optimization.stage 3: this job has stage 2" in advice.line
    (plain,) = (setup for setup in advice.setups if setup.policy == "zero-offload")
    assert plain.deepspeed_config["zero_optimization"]["stage"] == 2


def test_recommend__names_the_values_that_are_not_known() -> None:
    advice = recommend(workload(), machine())
    assert advice.placeholders == (
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
        "optimizer",
    )
    assert set(advice.placeholders) < advice.best.deepspeed_config.keys()
    without = recommend(workload(clipping=False), machine())
    assert "gradient_clipping" not in (
        *without.placeholders,
        *without.best.deepspeed_config,
    )
    assert "max_grad_norm" not in (without.best.optimizer_code or "max_grad_norm")
    assert 'gradients="streamed"' in (advice.best.optimizer_code or "")
    assert "gradients=" not in (
        recommend(workload(gradients_stay=True), machine()).best.optimizer_code
        or "gradients="
    )
    # `auto` is filled in by the caller of DeepSpeed, Hugging Face's Trainer for
    # example.
    unresolved = RecordedJob({"train_micro_batch_size_per_gpu": "auto"}, stage=3)
    assert (
        "train_micro_batch_size_per_gpu"
        in recommend(workload(), machine(), unresolved).placeholders
    )


def test_recommend__has_no_call_for_jobs_that_offload_parameters() -> None:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    advice = recommend(
        workload(), machine(), RecordedJob({"zero_optimization": zero}, stage=3)
    )
    assert (advice.policy, advice.best.code) == ("adaptive", None)
    assert "needs offload_param to be off" in advice.line


def test_recommend__offloads_everything_if_free_memory_is_not_known() -> None:
    advice = recommend(workload(gpu_free_bytes=None), machine())
    assert advice.deepspeed is not None
    assert advice.deepspeed["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
        "ratio": 1.0,
    }


@pytest.mark.parametrize(
    ("free", "mentioned"),
    [
        (15.9e9, None),
        (16e9, "8-bit moments"),
        slow_case(19.9e9, "8-bit moments"),
        slow_case(20e9, "bf16 moments"),
    ],
)
def test_recommend__mentions_smaller_state_that_would_fit(
    free: float, mentioned: str | None
) -> None:
    """2e9 parameters: 6 or 8 bytes of state each, and 2 of gradient."""
    changes = recommend(workload(gpu_free_bytes=free), machine()).alternatives
    assert len(changes) == (mentioned is not None)
    assert all(change.startswith(f"with {mentioned} ") for change in changes)
    assert all(
        "nothing would have to be offloaded (other arithmetic, other results)" in text
        for text in changes
    )


def test_recommend__mentions_the_master_as_remainder_for_half_precision_parameters() -> (
    None
):
    job = workload(gpu_free_bytes=24e9)
    (change,) = recommend(job, machine()).alternatives
    assert change.startswith(
        "with InterleavedOptimizer(..., 'adamw-remainder') on bf16 parameters (10 B a "
        "parameter), 20.0"
    )
    (change,) = recommend(replace(job, param_bytes=4.0), machine()).alternatives
    assert change.startswith("with bf16 moments ")


@pytest.mark.parametrize(
    ("free", "in_backward", "micro_steps", "mentioned"),
    [
        (24e9, 28e9, 2, True),
        (24e9, 28e9, 1, False),
        (23e9, 28e9, 2, False),
        (24e9, 27e9, 2, False),
    ],
)
def test_recommend__mentions_less_accumulation_if_the_state_fits_without_it(
    free: float, in_backward: float, micro_steps: int, mentioned: bool
) -> None:
    """24 GB of state; 4 GB of accumulated gradients beside the activations."""
    job = workload(
        gpu_free_bytes=[
            {"at_s": 0, "bytes": free},
            {"at_s": 0.2, "bytes": in_backward},
            {"at_s": 0.8, "bytes": 28e9},
        ],
        accumulates=micro_steps > 1,
    )
    changes = recommend(
        job, machine(), RecordedJob(micro_steps=micro_steps)
    ).alternatives
    texts = [text for text in changes if "1 micro-step an update instead of 2" in text]
    assert len(texts) == mentioned
    assert all(
        "gradients (4.0 GB)" in text
        and "the state (24.0 GB) fits into the 24.0 GB" in text
        for text in texts
    )


def test_recommend__does_not_fit_state_beside_accumulated_gradients() -> None:
    """Free memory grows in the backward, where the gradients of a single micro-step
    would use it."""
    job = workload(
        gpu_free_bytes=[{"at_s": 0, "bytes": 24e9}, {"at_s": 0.2, "bytes": 28e9}]
    )
    assert recommend(job, machine()).policy == "gpu-only"
    assert recommend(replace(job, accumulates=True), machine()).policy == "adaptive"


@pytest.mark.parametrize(
    ("batch", "smaller"), [(8, 6), (2, 1), (1, None), (None, None)]
)
def test_recommend__mentions_the_largest_smaller_batch_that_would_fit(
    batch: int | None, smaller: int | None
) -> None:
    """State and gradients are 28 GB. Of 40 GB free without activations, 16 GB are used
    with the full batch."""
    job = workload(
        gpu_free_bytes=[{"at_s": 0, "bytes": 24e9}, {"at_s": 0.8, "bytes": 40e9}]
    )
    config = {} if batch is None else {"train_micro_batch_size_per_gpu": batch}
    changes = recommend(job, machine(), RecordedJob(config)).alternatives
    texts = [text for text in changes if "micro-batch" in text]
    assert [text.partition(" nothing")[0] for text in texts] == (
        [f"with a micro-batch of {smaller} instead of {batch}"] if smaller else []
    )


def test_recommend__states_the_uncertainty_of_the_machine() -> None:
    fit = {
        "residuals": {"a": 0.01, "b": -0.024},
        "unidentified": ["d2h_bytes_per_s", "step_overhead_s"],
    }
    assert (
        "within 2.4 % on the 2 runs"
        in recommend(workload(), machine(fit=fit)).as_json()["uncertainty"]
    )
    assert (
        "not validated"
        in recommend(workload(gpu_free_bytes=30e9), machine()).as_json()["uncertainty"]
    )


def test_recommend__names_the_machine_with_its_ranks() -> None:
    box = {"ranks": 4, "cpu_update_params_per_s": 8e9, "host_memory_bytes_per_s": 300e9}
    code = recommend(
        workload(), machine(box=box).for_ranks(8), machine_source="box.json"
    ).best.code
    assert code is not None
    assert '    machine=find_machine("box.json").for_ranks(8),\n' in code
    assert "find_machine" not in (
        recommend(workload(), machine()).best.code or "find_machine"
    )


def test_recommend__skips_deepspeed_if_rates_are_missing() -> None:
    advice = recommend(workload(), machine(cpu_cast_params_per_s=None), DEEPSPEED)
    assert (advice.policy, advice.deepspeed) == ("adaptive", None)
    assert "plain DeepSpeed" not in advice.line
    assert advice.best.code is not None
    with pytest.raises(MachineError, match="has no cpu_update_params_per_s"):
        recommend(workload(), machine(cpu_update_params_per_s=None))


def test_recommend__has_lines_for_storage_where_host_memory_is_short() -> None:
    drives = [
        {"read_bytes_per_s": 6e9, "write_bytes_per_s": 5e9, "path": path}
        for path in ("/a", "/b")
    ]
    job, target = workload(), machine(host_memory_bytes=20e9, storage=drives)
    advice = recommend(job, target, machine_source="box.json")
    assert advice.deepspeed is None
    assert len(advice.setups) > 2
    for setup in advice.setups:
        assert setup.uses_storage
        for code in (setup.optimizer_code, setup.code):
            assert code is not None
            assert '    machine=find_machine("box.json"),\n' in code
            assert (
                '    storage=["/a", "/b"],\n    host_memory_budget=20_000_000_000,\n'
                in code
            )
        assert ran(setup.policy, job, target).iteration_s * 1e3 == pytest.approx(
            setup.iteration_ms
        )
