"""The user's files in a dry run: nothing is saved, nothing large is read, and what is
opened for writing is listed."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.features.dryrun.session import DryRun
from ebbtide.features.dryrun.torch_2_13.files import user_files
from tests.features.dryrun.forked import run_forked

ELEMENTS = 100_000


def test_save__writes_nothing_and_counts_bytes(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(b"the user's own")

    def observe() -> list[str]:
        with DryRun() as run:
            weight = torch.zeros(1_000_000, device="cuda")
            torch.save({"weight": weight, "view": weight[:10]}, checkpoint)
            safetensors.torch.save_file(
                {"weight": weight}, tmp_path / "model.safetensors"
            )
        return run.user_files.lines()

    lines = run_forked(observe)
    assert lines == [
        "the job saved 2 times, 7.63 MiB in all: nothing of it was written",
        "files that the job changed, removed or renamed are as they were: "
        f"{checkpoint}",
    ]
    assert checkpoint.read_bytes() == b"the user's own"
    assert list(tmp_path.iterdir()) == [checkpoint]


@pytest.mark.parametrize("max_read_bytes", [0, 1 << 30])
def test_load__gives_fake_tensors_of_the_right_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_read_bytes: int
) -> None:
    monkeypatch.setattr(user_files, "_MAX_READ_BYTES", max_read_bytes)
    path = tmp_path / "model.pt"
    content = {
        "weight": torch.ones(ELEMENTS, dtype=torch.bfloat16),
        "step": torch.tensor(7),
        "name": "x",
    }
    torch.save(content, path)
    before = path.read_bytes()

    def observe() -> Any:
        with DryRun():
            loaded = torch.load(path, map_location="cuda")
            weight = loaded["weight"]
            step = loaded["step"].item()
        return (
            type(weight).__name__,
            str(weight.device),
            tuple(weight.shape),
            str(weight.dtype),
            loaded["name"],
            step,
        )

    *facts, step = run_forked(observe)
    assert facts == ["FakeTensor", "cuda:0", (ELEMENTS,), "torch.bfloat16", "x"]
    # A checkpoint that is read has its small values.
    assert step == (7 if max_read_bytes else 1)
    assert path.read_bytes() == before


def test_safetensors__gives_fake_tensors_from_the_header_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(
        {"weight": torch.ones(400, 300, dtype=torch.float16), "bias": torch.ones(300)},
        path,
        {"format": "pt"},
    )
    # Without the data behind its header.
    header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    path.write_bytes(header)

    def observe() -> Any:
        with DryRun():
            tensors = safetensors.torch.load_file(path, device="cuda")
            with safetensors.safe_open(path, framework="pt") as file:
                part = file.get_slice("weight")[:100]
                names, metadata = sorted(file.keys()), file.metadata()
        weight = tensors["weight"]
        return (
            type(weight).__name__,
            str(weight.device),
            str(weight.dtype),
            tuple(part.shape),
            names,
            metadata,
        )

    assert run_forked(observe) == (
        "FakeTensor",
        "cuda:0",
        "torch.float16",
        (100, 300),
        ["bias", "weight"],
        {"format": "pt"},
    )
    with pytest.raises(Exception, match=r".+"):
        safetensors.torch.load_file(path)


def test_safetensors__gives_small_tensors_their_values(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    groups = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    safetensors.torch.save_file(
        {"groups": groups, "scale": torch.tensor(0.5), "none": torch.ones(0)}, path
    )
    content = path.read_bytes()

    def observe() -> Any:
        with DryRun():
            tensors = safetensors.torch.load_file(path, device="cuda")
            assert isinstance(tensors["groups"], FakeTensor)
            return [
                {name: tensor.tolist() for name, tensor in loaded.items()}
                for loaded in (tensors, safetensors.torch.load(content))
            ]

    assert (
        run_forked(observe)
        == [{"groups": [[0, 1, 2], [3, 4, 5]], "scale": 0.5, "none": []}] * 2
    )


def test_opened_files__are_listed_where_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x")

    def observe() -> list[str]:
        with DryRun() as run:
            (tmp_path / "data.txt").read_text()
            (tmp_path / "log.txt").write_text("y")
        (tmp_path / "afterwards.txt").write_text("z")
        return run.user_files.lines()

    log = tmp_path / "log.txt"
    assert run_forked(observe) == [
        f"the job opened files for writing; new ones were removed again: {log}"
    ]
    assert not log.exists()


def test_torch_load__gives_back_what_was_saved_in_the_run(tmp_path: Path) -> None:
    def observe() -> Any:
        net = torch.nn.Linear(300, 300)
        with DryRun() as run:
            net.cuda()
            optimizer = torch.optim.AdamW(net.parameters())
            net(torch.ones(2, 300, device="cuda")).sum().backward()
            optimizer.step()
            bytes_before = run.memory.requested_bytes
            torch.save(
                {
                    "model": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": 3,
                },
                tmp_path / "a.pt",
            )
            kept = run.memory.requested_bytes - bytes_before
            os.replace(
                shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt"), tmp_path / "c.pt"
            )
            loaded = torch.load(tmp_path / "c.pt", weights_only=True)
            net.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            on_host = torch.load(tmp_path / "a.pt", map_location="cpu")["model"][
                "weight"
            ].device.type
            buffer = io.BytesIO()
            torch.save(net, buffer)
            buffer.seek(0)
            with pytest.raises(
                RuntimeError, match=r"torch.load of a Linear .* save its state_dict"
            ):
                torch.load(buffer, weights_only=False)
        weight = loaded["model"]["weight"]
        step = loaded["optimizer"]["state"][0]["step"].item()
        return (
            kept,
            weight.device.type,
            tuple(weight.shape),
            step,
            loaded["epoch"],
            on_host,
        )

    assert run_forked(observe) == (0, "cuda", (300, 300), 1.0, 3, "cpu")
    assert list(tmp_path.iterdir()) == []


def test_torch_load__refuses_what_another_dry_run_has_saved() -> None:
    def observe() -> Any:
        buffer = io.BytesIO()
        with DryRun():
            torch.save(torch.ones(3), buffer)
        buffer.seek(0)
        with DryRun():
            torch.save(torch.zeros(4), io.BytesIO())
            with pytest.raises(RuntimeError, match=r"that another dry run has in"):
                torch.load(buffer)
        return True

    assert run_forked(observe)


def test_safetensors__gives_back_what_was_saved_in_the_run(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def observe() -> Any:
        with DryRun():
            net = torch.nn.Sequential(
                torch.nn.Linear(300, 300), torch.nn.Linear(300, 3)
            ).cuda()
            net[0].bias = net[1].bias
            safetensors.torch.save_model(net, str(path), {"format": "pt"})
            tensors = safetensors.torch.load_file(path, device="cuda")
            again = safetensors.torch.load(safetensors.torch.save(tensors))
        return {
            name: (tuple(tensor.shape), tensor.device.type)
            for name, tensor in tensors.items()
        }, sorted(again)

    shapes, again = run_forked(observe)
    # `save_model` leaves out the second name of shared weights.
    assert shapes == {
        "0.bias": ((3,), "cuda"),
        "0.weight": ((300, 300), "cuda"),
        "1.weight": ((3, 300), "cuda"),
    }
    assert again == sorted(shapes)
    assert not path.exists()


def test_distributed_checkpoint__writes_nothing(tmp_path: Path) -> None:
    def observe() -> list[str]:
        import torch.distributed.checkpoint as dcp

        with DryRun() as run:
            state = {"weight": torch.zeros(1000, 1000, device="cuda")}
            dcp.save(state, checkpoint_id=tmp_path / "step-1")
            dcp.async_save(state, checkpoint_id=tmp_path / "step-2").result()
            dcp.load(state, checkpoint_id=tmp_path / "step-2")
            with pytest.raises(FileNotFoundError):
                dcp.load(state, checkpoint_id=tmp_path / "step-3")
        return run.user_files.lines()[:1]

    assert run_forked(observe) == [
        "the job saved 2 times, 7.63 MiB in all: nothing of it was written"
    ]
    assert list(tmp_path.iterdir()) == []


def test_loggers__do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text(
        "raise RuntimeError('contacts a server')"
    )
    (tmp_path / "wandb.py").write_text(
        "def init(**options):\n    return options\n\nlogin = None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "online")

    def observe() -> Any:
        with DryRun():
            import mlflow
            import wandb
            from mlflow.tracking import MlflowClient

            with mlflow.start_run(run_name="x") as run:
                mlflow.log_metric("loss", 1.0)
                MlflowClient().log_param(run.info.run_id, "a", 1)

            @mlflow.trace(name="x")
            def double(value: int) -> int:
                return 2 * value

            with pytest.raises(ModuleNotFoundError):
                import neptune  # noqa: F401 - not installed
            return (
                double(2),
                wandb.init(mode="online"),
                os.environ["WANDB_MODE"],
                os.path.join("a", str(run)),
            )

    assert run_forked(observe) == (4, {"mode": "disabled"}, "disabled", "a/dry-run")


def test_programs_that_change_files__are_not_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_text("weights")

    def observe() -> Any:
        with DryRun() as run:
            status = os.system(f"rm -rf {checkpoint}")
            subprocess.run(["bash", "-c", f"mv {checkpoint} {tmp_path}/x"], check=True)
            text = subprocess.run(
                ["echo", "text"], capture_output=True, text=True, check=True
            ).stdout
        return status, text, run.user_files.lines()

    assert run_forked(observe) == (
        0,
        "text\n",
        ["programs that the job called to change files were not run: rm, mv"],
    )
    assert checkpoint.read_text() == "weights"
