"""Make the texts of tests/features/explain/texts/made with the programs that print
them, and what those knew.

`python -P benchmarks/pasted_texts.py FOLDER` needs transformers, trl, accelerate,
lightning, deepspeed and datasets, and no GPU; a program that is not installed is left
out. (Without -P modules of this folder hide those of programs.) Each text is what a program wrote on its output; `known.json` has, by its name,
figures that `ebbtide explain` must read from it.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

TRUTHS: dict[str, dict[str, float]] = {}
_MAKERS: dict[str, list[Callable[[Path], None]]] = {}
_GIB = 1 << 30


def needs(*modules: str) -> Callable[[Callable[[Path], None]], None]:
    """Decorate a function that makes texts with some modules."""

    def register(function: Callable[[Path], None]) -> None:
        if all(importlib.util.find_spec(module) for module in modules):
            _MAKERS.setdefault(function.__name__, []).append(function)
        else:
            print(f"{function.__name__}: not installed", file=sys.stderr)

    return register


@contextlib.contextmanager
def written(folder: Path, name: str) -> Iterator[dict[str, float]]:
    """Write what the process prints into a text; yield the figures that it knows."""
    truth: dict[str, float] = {}
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield truth
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(saved, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            file.seek(0)
            text = file.read().decode(errors="replace")
    (folder / f"{name}.txt").write_text(without_places(text), newline="")
    TRUTHS[name] = truth


def without_places(text: str) -> str:
    """Return a text without the folders and the host of this machine."""
    text = re.sub(r"(?:/[\w.+-]+)+/(?=site-packages/)", "/opt/venv/lib/", text)
    text = re.sub(r"(?:/[\w.+-]+)+/bin/", "/opt/venv/bin/", text)
    text = re.sub(r"(?:/[\w.+-]+)+/(?=lib/python3)", "/usr/", text)
    text = text.replace(__file__, "train.py")
    text = re.sub(r"/tmp/[\w./-]+", "/tmp/job", text)
    return text.replace(os.uname().nodename, "node1")


def tiny_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{n}" for n in range(60))]
    model = models.WordLevel(
        {word: n for n, word in enumerate(words)}, unk_token="<unk>"
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


@needs("transformers", "accelerate", "datasets")
def trainer(folder: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.starts: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.starts.append(time.perf_counter())
            time.sleep(0.25)

    rows = [{"input_ids": [5] * 32, "labels": [5] * 32}] * 64
    variants: dict[str, dict[str, Any]] = {
        "trainer-plain": {"logging_steps": 1},
        "trainer-tenth": {"logging_steps": 5},
        "trainer-quiet": {"logging_steps": 2, "disable_tqdm": True},
        "trainer-tokens": {"logging_steps": 2, "include_num_input_tokens_seen": "all"},
        "trainer-evaluation": {"logging_steps": 2, "eval_strategy": "steps"},
        "trainer-bf16": {"logging_steps": 1, "bf16": True},
        "trainer-accumulation": {"logging_steps": 1, "gradient_accumulation_steps": 2},
        "trainer-info": {"logging_steps": 1, "log_level": "info"},
    }
    for name, more in variants.items():
        clock = Clock()
        arguments = TrainingArguments(
            output_dir=str(folder / "out"),
            max_steps=12,
            per_device_train_batch_size=2,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            eval_steps=6,
            **more,
        )
        with written(folder, name) as truth:
            job = Trainer(
                tiny_model(),
                arguments,
                train_dataset=rows,
                eval_dataset=rows[:8],
                callbacks=[clock],
            )
            done = job.train()
            truth["steps"] = done.global_step
            truth["mean_step_s"] = 1 / done.metrics["train_steps_per_second"]


@needs("trl", "datasets")
def trl_trainers(folder: Path) -> None:
    from datasets import Dataset
    from trl import (
        DPOConfig,
        DPOTrainer,
        GRPOConfig,
        GRPOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

    texts = Dataset.from_dict({"text": ["w1 w2 w3 w4 w5 w6"] * 32})
    pairs = Dataset.from_dict(
        {
            "prompt": ["w1 w2"] * 32,
            "chosen": ["w3 w4"] * 32,
            "rejected": ["w5 w6"] * 32,
        }
    )
    prompts = Dataset.from_dict({"prompt": ["w1 w2 w3"] * 32})
    common = {
        "output_dir": str(folder / "out"),
        "max_steps": 8,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
    }

    def length(completions: list[str], **_: Any) -> list[float]:
        return [float(len(one)) for one in completions]

    def sft() -> Any:
        return SFTTrainer(
            tiny_model(),
            SFTConfig(**common, max_length=32),
            train_dataset=texts,
            processing_class=tiny_tokenizer(),
        )

    def dpo() -> Any:
        return DPOTrainer(
            tiny_model(),
            ref_model=tiny_model(),
            args=DPOConfig(**common, max_length=32),
            train_dataset=pairs,
            processing_class=tiny_tokenizer(),
        )

    def grpo() -> Any:
        return GRPOTrainer(
            tiny_model(),
            reward_funcs=length,
            args=GRPOConfig(**common, num_generations=2, max_completion_length=8),
            train_dataset=prompts,
            processing_class=tiny_tokenizer(),
        )

    def reward() -> Any:
        from transformers import LlamaForSequenceClassification

        config = tiny_model().config
        config.num_labels = 1
        return RewardTrainer(
            LlamaForSequenceClassification(config),
            RewardConfig(**common, max_length=32),
            train_dataset=pairs,
            processing_class=tiny_tokenizer(),
        )

    for name, make in {"sft": sft, "dpo": dpo, "grpo": grpo, "reward": reward}.items():
        try:
            with written(folder, f"trl-{name}") as truth:
                done = make().train()
                truth["steps"] = done.global_step
                truth["mean_step_s"] = 1 / done.metrics["train_steps_per_second"]
        except Exception as error:  # A version may refuse a job of this size.
            TRUTHS.pop(f"trl-{name}", None)
            (folder / f"trl-{name}.txt").unlink(missing_ok=True)
            print(f"trl-{name}: {error!r}", file=sys.stderr)


@needs("lightning")
def lightning(folder: Path) -> None:
    import lightning as pl
    from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            time.sleep(0.2)
            loss = self.layer(batch).square().mean()
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    bars: dict[str, list[Any]] = {
        "lightning-tqdm": [TQDMProgressBar(refresh_rate=1)],
        "lightning-rare": [TQDMProgressBar(refresh_rate=8)],
        "lightning-rich": [RichProgressBar(refresh_rate=1)],
        "lightning-leave": [TQDMProgressBar(refresh_rate=4, leave=True)],
    }
    for name, callbacks in bars.items():
        with written(folder, name) as truth:
            job = pl.Trainer(
                max_epochs=1,
                limit_train_batches=16,
                limit_val_batches=0,
                accelerator="cpu",
                logger=False,
                enable_checkpointing=False,
                callbacks=callbacks,
            )
            start = time.perf_counter()
            job.fit(Model(), torch.utils.data.DataLoader(torch.ones(64, 32)))
            truth["last_step"] = job.global_step
            truth["longest_s"] = (time.perf_counter() - start) / job.global_step


@needs("accelerate", "tqdm")
def loops(folder: Path) -> None:
    import logging

    from accelerate import Accelerator
    from accelerate.logging import get_logger
    from tqdm.auto import tqdm

    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        force=True,
    )
    accelerator = Accelerator(cpu=True)
    logger = get_logger("train")
    model = torch.nn.Linear(64, 64)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step(pause_s: float) -> tuple[float, float]:
        start = time.perf_counter()
        loss = model(torch.ones(4, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause_s)
        return float(loss), time.perf_counter() - start

    with written(folder, "accelerate-bar") as truth:
        times = []
        bar = tqdm(range(12), desc="Steps")
        for _ in bar:
            loss, step_s = step(0.3)
            times.append(step_s)
            bar.set_postfix(loss=loss, lr=1e-3)
        truth |= {"last_step": 12, "step_s": median(times)}
    logging.getLogger().handlers[0].setStream(sys.stderr)

    def write_steps(
        name: str, pause_s: float, show: Callable[[int, float, list[float]], object]
    ) -> None:
        """Write a text of eight steps; `show` prints one, by the times so far."""
        times: list[float] = []
        with written(folder, name) as truth:
            for number in range(8):
                loss, step_s = step(pause_s)
                times.append(step_s)
                show(number, loss, times)
            truth |= {"steps": 8, "step_s": median(times)}

    def show_imagenet(number: int, loss: float, times: list[float]) -> None:
        mean_s = sum(times) / len(times)
        print(
            f"Epoch: [0][{number:3d}/8]\tTime {times[-1]:6.3f} ({mean_s:6.3f})\t"
            f"Loss {loss:.4e} ({loss:.4e})"
        )

    write_steps(
        "accelerate-log",
        0.1,
        lambda number, loss, times: logger.warning(
            f"step {number}: loss={loss:.4f} step_time={times[-1]:.4f}s"
        ),
    )
    write_steps(
        "loop-ms",
        0.05,
        lambda number, loss, times: print(
            f"iter {number}: loss {loss:.4f}, time {times[-1] * 1000:.2f}ms"
        ),
    )
    write_steps("loop-imagenet", 0.05, show_imagenet)
    write_steps(
        "loop-dictionary",
        0.05,
        lambda number, loss, times: print(
            {"step": number, "loss": loss, "step_time": times[-1]}
        ),
    )


@needs("deepspeed")
def deepspeed(folder: Path) -> None:
    import deepspeed as ds
    from deepspeed.runtime.utils import see_memory_usage

    with written(folder, "deepspeed-memory") as truth:
        for when in ("Before creating fp16 partitions", "After", "Begin of a step"):
            see_memory_usage(when, force=True)
        truth["usages"] = 3
    environment = {
        **os.environ,
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
        "DS_ACCELERATOR": "cpu",
    }
    os.environ.update(environment)
    name = "deepspeed-timers"
    try:
        with written(folder, name) as truth:
            model = torch.nn.Linear(64, 64)
            engine, *_ = ds.initialize(
                model=model,
                model_parameters=model.parameters(),
                config={
                    "train_batch_size": 4,
                    "optimizer": {
                        "type": "Adam",
                        "params": {"lr": 1e-3, "torch_adam": True},
                    },
                    "bf16": {"enabled": True},
                    "zero_optimization": {"stage": 1},
                    "wall_clock_breakdown": True,
                },
            )
            for _ in range(6):
                data = torch.ones(4, 64, dtype=torch.bfloat16)
                loss = engine(data).square().mean()
                engine.backward(loss)
                time.sleep(0.1)
                engine.step()
            truth["updates"] = engine.global_steps
    except Exception as error:
        TRUTHS.pop(name, None)
        (folder / f"{name}.txt").unlink(missing_ok=True)
        print(f"{name}: {error!r}", file=sys.stderr)


@needs("torch")
def errors(folder: Path) -> None:
    for name, elements in {"host-large": 1 << 46, "host-huge": 1 << 50}.items():
        with written(folder, name) as truth:
            try:
                torch.empty(elements, dtype=torch.float32)
            except RuntimeError as error:
                print(f"RuntimeError: {error}", file=sys.stderr)
            truth["requested_bytes"] = elements * 4
    for name, command in {
        "bash-killed": "python3 -c 'import os; os.kill(os.getpid(), 9)'; true",
        "torchrun-killed": f"{sys.executable} -m torch.distributed.run "
        "--nproc-per-node 1 --master-port 29613 {job}",
        "accelerate-killed": f"{sys.executable} -m accelerate.commands.launch "
        "--cpu --num_processes 1 {job}",
    }.items():
        job = folder / "job.py"
        job.write_text("import os, sys\nos.kill(os.getpid(), 9)\n")
        with written(folder, name) as truth:
            shell = ["bash", "-c", command.replace("{job}", str(job))]
            subprocess.run(shell, check=False)
            truth["sigkill"] = 1
        job.unlink()
    with written(folder, "worker-killed") as truth:
        code = (
            "import os, torch\n"
            "class Rows(torch.utils.data.Dataset):\n"
            "    def __len__(self): return 8\n"
            "    def __getitem__(self, n): os.kill(os.getpid(), 9)\n"
            "if __name__ == '__main__':\n"
            "    list(torch.utils.data.DataLoader(Rows(), num_workers=1))\n"
        )
        subprocess.run([sys.executable, "-c", code], check=False)
        truth["sigkill"] = 1


@needs("torch")
def host_tables(folder: Path) -> None:
    def memory() -> dict[str, float]:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines[:30]}
        return {"total": sizes["MemTotal"], "available": sizes["MemAvailable"]}

    for name, command in {
        "free-kib": ["free"],
        "free-mib": ["free", "-m"],
        "free-human": ["free", "-h"],
        "free-bytes": ["free", "-b"],
        "meminfo": ["cat", "/proc/meminfo"],
    }.items():
        with written(folder, name) as truth:
            truth |= memory()
            subprocess.run(command, check=False)


@needs("transformers", "accelerate")
def settings(folder: Path) -> None:
    from accelerate.commands.config.default import write_basic_config
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        use_cpu=True,
        report_to="none",
    )
    with written(folder, "arguments-printed") as truth:
        print(arguments)
        truth["per_device_train_batch_size"] = 2
    with written(folder, "arguments-json") as truth:
        print(arguments.to_json_string())
        truth["per_device_train_batch_size"] = 2
    with written(folder, "accelerate-config") as truth:
        path = folder / "accelerate.yaml"
        write_basic_config(mixed_precision="bf16", save_location=str(path))
        print(path.read_text())
        path.unlink()
        truth["num_machines"] = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", default=[*_MAKERS], choices=[*_MAKERS])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path = options.folder / "known.json"
    if path.exists():
        TRUTHS.update(json.loads(path.read_text()))
    torch.set_num_threads(1)
    try:
        for name in options.only:
            for make in _MAKERS[name]:
                make(options.folder)
    finally:
        _write(path)


def _write(path: Path) -> None:
    path.write_text(json.dumps(TRUTHS, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
