"""Commands that train on the stand-in, and DeepSpeed."""

import json
from pathlib import Path

import pytest

from tests.cuda_runtime.conftest import OnStandIn
from tests.features.dryrun.test_backends import JOB

POLICIES = ("zero-offload", "interleaved:2")


def test_compare__trains_on_the_device_with_equal_losses(
    on_stand_in: OnStandIn,
) -> None:
    # Without --machine it calibrates, as tests/features/calibrate/test_gpu.py does.
    options = ["--params", "1e5", "--steps", "3", "--machine", "rtx4090", "--json"]
    policies = [text for policy in POLICIES for text in ("--policy", policy)]
    done = on_stand_in(["-m", "ebbtide", "compare", *options, *policies])
    assert done.stderr == ""
    comparison = json.loads(done.stdout)
    assert comparison["device"]["name"] == "Stand-in for a GPU"
    assert not comparison["device"]["emulated"]
    assert comparison["losses_equal"]
    losses = {result["policy"]: result["losses"] for result in comparison["results"]}
    assert list(losses) == list(POLICIES)
    first, *_, last = losses["zero-offload"]
    assert first > last > 0
    assert losses["interleaved:2"] == losses["zero-offload"]


def test_enable__of_deepspeed_trains_on_the_device_with_equal_bits(
    on_stand_in: OnStandIn, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed", reason="needs DeepSpeed")
    policies = ["interleaved:2", "pipelined,overlap=forward"]
    done = on_stand_in(
        ["-m", "tests.cuda_runtime.deepspeed_job", str(tmp_path / "meeting"), *policies]
    )
    plain, *driven = json.loads(done.stdout.splitlines()[-1]).values()
    assert plain["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert {run["device"] for run in (plain, *driven)} == {"cuda:0"}
    assert {run["optimizer"] for run in driven} == {"InterleavedStage3"}
    assert [run["losses"] for run in driven] == [plain["losses"]] * 2
    assert driven[0]["digest"] == driven[1]["digest"]


def test_dry_run__calls_neither_runtime_nor_driver(on_stand_in: OnStandIn) -> None:
    done = on_stand_in(JOB, fail="cu:1:999:sticky")
    figures = json.loads(done.stdout)
    assert figures["phases"] == ["forward", "backward", "update"] * 2
    assert figures["peak_bytes"] > 70_000_000
