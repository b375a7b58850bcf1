"""Logs of steps: lines of many programs, and texts that real programs have written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ebbtide.features.explain import formats
from ebbtide.features.explain.answer import Answer, explain_records
from ebbtide.features.explain.pasted import PastedText, clean_lines, read_pasted
from ebbtide.features.explain.readers.step_logs import StepLog
from ebbtide.features.explain.record import Records, read_records

TEXTS = Path(__file__).parent / "texts"
GIB = 1 << 30
# A line of a step of each program, and figures of it.
LINES = {
    "torchtitan 0.2": (
        "[rank0]:[titan] 2026-03-02 11:20:31,996 - root - INFO - step:  2  loss:  9.69 "
        "grad_norm: 26.5000  memory: 174.94GiB(98.42%)  tps: 7,402  tflops: 232.94  "
        "mfu: 10.35%",
        {
            "step": 2,
            "reserved_bytes": 174.94 * GIB,
            "tokens_per_s": 7402,
            "mfu": 0.1035,
        },
    ),
    "Megatron-LM core 0.14": (
        " iteration      412/   50000 | consumed samples:       421888 | elapsed time "
        "per iteration (ms): 91407.1 | learning rate: 2.060E-05 | lm loss: 2.2E+00 |",
        {"step": 412, "step_s": 91.4071},
    ),
    "NeMo 2.4": (
        "Training epoch 0, iteration 1/249 | lr: 3.922e-06 | global_batch_size: 8 | "
        "global_step: 1 | reduced_train_loss: 1.653 | train_step_timing in s: 2.505",
        {"step": 1, "step_s": 2.505},
    ),
    "verl 0.5": (
        "(TaskRunner pid=4411) step:11 - actor/pg_loss:0.012 - "
        "perf/max_memory_allocated_gb:61.4 - timing_s/gen:38.1 - timing_s/step:97.3",
        {"step": 11, "step_s": 97.3, "part:gen": 38.1, "allocated_bytes": 61.4 * GIB},
    ),
    "axolotl 0.13": (
        "{'loss': '0.71', 'grad_norm': '12.79', 'memory/max_active (GiB)': '2.98', "
        "'memory/max_allocated (GiB)': '2.97', 'memory/device_reserved (GiB)': '4.12'}",
        {"active_bytes": 2.98 * GIB, "reserved_bytes": 4.12 * GIB},
    ),
    "ms-swift 3.8": (
        "{'loss': 1.6, 'token_acc': 0.6, 'memory(GiB)': 2.44, 'train_speed(iter/s)': "
        "0.25, 'epoch': 0.0, 'global_step/max_steps': '1/9060', 'elapsed_time': '3s'}",
        {"step": 1, "step_s": 4.0, "reserved_bytes": 2.44 * GIB},
    ),
    "torchtune 0.6": (
        "Step 1 | loss:1.5 lr:2e-05 tokens_per_second_per_gpu:1234.5 "
        "peak_memory_active:12.1 peak_memory_alloc:12.0 peak_memory_reserved:13.0",
        {"step": 1, "tokens_per_s": 1234.5, "active_bytes": 12.1 * GIB},
    ),
    "litgpt 0.5": (
        "Epoch 1 | iter 10 step 10 | loss train: 1.230, val: n/a | iter time: 123.45 "
        "ms (step) remaining time: 0:01:02",
        {"step": 10, "step_s": 0.12345},
    ),
    "nanoGPT": (
        "iter 10: loss 3.1234, time 123.45ms, mfu 33.20%",
        {"step": 10, "step_s": 0.12345, "mfu": 0.332},
    ),
    "modded-nanogpt": (
        "step:10/1000 train_time:1234ms step_avg:123.40ms",
        {"step": 10, "step_s": 0.1234},
    ),
    "prime-rl 0.3": (
        "12:00:00 SUCCESS Step 10 | Time: 40.00s | Loss: 1.2 | LR: 2.00e-05 | "
        "Throughput: 1200 tokens/s | MFU: 5.0% | Peak Mem.: 29.1/31.0 GiB (93.9%)",
        {"step": 10, "step_s": 40, "tokens_per_s": 1200, "allocated_bytes": 29.1 * GIB},
    ),
    "NeMo-RL 0.4": (
        "  • Total step time: 97.30s\n  • policy_training: 41.90s (43.1%)\n"
        "  • generation: 38.00s (39.1%)",
        {"step_s": 97.3, "part:policy_training": 41.9, "part:generation": 38},
    ),
    "slime 0.2": (
        "perf 12: {'perf/rollout_time': 30.5, 'perf/tokens_per_gpu_per_sec': 1234.5}",
        {"step": 12, "part:rollout": 30.5, "tokens_per_s": 1234.5},
    ),
    "torchvision 0.24": (
        "Epoch: [0]  [ 10/500]  eta: 0:01:02  lr: 0.01  loss: 2.3 (2.5)  time: 0.1234  "
        "data: 0.0012  max mem: 1234",
        {"step_s": 0.1234, "part:data": 0.0012, "allocated_bytes": 1234 << 20},
    ),
    "timm 1.0": (
        "Train: 0 [  50/1251 (  4%)]  Loss: 6.93 (6.93)  Time: 0.412s, 2485.06/s  "
        "(0.500s, 2048.00/s)  LR: 1.000e-06  Data: 0.010 (0.050)",
        {"step_s": 0.412, "part:data": 0.01},
    ),
    "mmengine 0.10": (
        "2026-03-02 10:00:00,255 - INFO - Epoch [1][3100/23454]  lr: 5.0e-04, eta: 1 "
        "day, 18:47:47, time: 0.430, data_time: 0.006, memory: 6814, loss: 5.1984",
        {"step_s": 0.43, "part:data": 0.006, "allocated_bytes": 6814 << 20},
    ),
    "Liger-Kernel 0.5": (
        "{'loss': 7.5, 'epoch': 1.0, 'step_peak_memory_allocated_MB': 26279.24, "
        "'step_peak_memory_reserved_MB': 47172.0, 'step_tokens_per_second': 18801.8}",
        {"reserved_bytes": 47172 << 20, "tokens_per_s": 18801.8},
    ),
    "nanotron 0.4": (
        "03/02/2026 10:00:27 [INFO|DP=0|PP=0|TP=0|node]: iteration: 991 / 1000 | "
        "elapsed_time_per_iteration_ms: 45 | tokens_per_sec_per_gpu: 1.78K | "
        "cuda_memory_allocated: 75.2M | cuda_max_memory_reserved: 547M",
        {"step": 991, "step_s": 0.045, "tokens_per_s": 1780, "reserved_bytes": 547e6},
    ),
    "DeepSpeed 0.19 (see_memory_usage)": (
        "MA 8.31 GB         Max_MA 10.37 GB         CA 15.57 GB         Max_CA 16 GB \n"
        "CPU Virtual Memory:  used = 98.0 GB, percent = 39.0%",
        {"allocated_bytes": 10.37 * GIB, "host_bytes": 98 * GIB},
    ),
    "a progress bar": (
        "steps:   2%|2         | 10/600 [02:53<2:50:59, 17.39s/it, avr_loss=0.0977]",
        {"step": 10, "step_s": 17.39},
    ),
    "a program that is not known": (
        "step 7: my_loss=0.5 sec/iter=0.25 alloc=3.5",
        {"step": 7, "step_s": 0.25, "allocated_bytes": 3.5 * GIB, "my_loss": 0.5},
    ),
}


def text_of(content: str, name: str = "text") -> PastedText:
    return PastedText(name, tuple(clean_lines(content)))


def logs_of(text: PastedText) -> list[StepLog]:
    return [record for record in read_records(text) if isinstance(record, StepLog)]


def answers_to(*contents: str) -> dict[str, Answer]:
    texts = [text_of(content, f"text{n}") for n, content in enumerate(contents)]
    records = [record for text in texts for record in read_records(text)]
    answers = explain_records(Records(tuple(records))).answers
    return {answer.rule: answer for answer in answers}


@pytest.mark.parametrize("program", LINES)
def test_line__has_the_figures_of_its_program(program: str) -> None:
    content, figures = LINES[program]
    (log,) = logs_of(text_of(content))
    assert log.program == program
    row = log.steps.iloc[0]
    for column, value in figures.items():
        assert row[column] == pytest.approx(value), column


@pytest.mark.parametrize(
    ("line", "figures"),
    [
        (
            "Epoch: [11][ 8/48]  Time 0.664 (1.196)  Data 0.002 (0.004)  Loss 12.3 (9)",
            {"step": 8, "step_s": 0.664, "part:data": 0.002},
        ),
        (
            "Epoch [3] [1/9] Time 1.5 (1.5) Data 0.1 (0.1) Acc@1 3.1 (3.1)",
            {"step": 1, "step_s": 1.5},
        ),
        ("ep 1 train, step 96, ce 4.2, mem: 8.9GB, 0.815 sec/step", {"step_s": 0.815}),
        ("step 4: loss 1.0 (120.5 ms/step)", {"step_s": 0.1205}),
        ("iter 144: id:7, time:1.722(sec), total-loss 0.5", {"step_s": 1.722}),
        (
            "[Rank 0] (after 20 iterations) memory (MB) | allocated: 3270.16 | max "
            "allocated: 5670.39 | reserved: 6406.00 | max reserved: 6500.00",
            {"allocated_bytes": 5670.39 * 2**20, "reserved_bytes": 6500 << 20},
        ),
        ("step 3: loss=2 allocated=6120 reserved=7000", {"reserved_bytes": 7000 << 20}),
        ("step 3: loss=2 alloc=6.1 reserved_mb=7000", {"reserved_bytes": 7000 << 20}),
        ("step 3: loss=2 reserved=7516192768", {"reserved_bytes": 7 * GIB}),
        (
            "[x] [RANK:0] GPU memory usage after adapters: 25.7GB (+0.07GB cache)",
            {"allocated_bytes": 25.7 * GIB},
        ),
        (
            "09-24 22:50:46 Epoch 0/7 itr 26/3489: lr: 0.0001\nitr 27/3489: lr: 0.0001",
            {"step": 26},
        ),
        (
            "epoch 1/50 - it 6/100 - loss: 2.4\nepoch 1/50 - it 7/100 - loss: 2.3",
            {"step": 6},
        ),
    ],
)
def test_line__is_read_in_many_forms(line: str, figures: dict[str, float]) -> None:
    log = logs_of(text_of(line))[0]
    row = log.steps.iloc[0]
    for column, value in figures.items():
        assert row[column] == pytest.approx(value), column


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards: 100%|####| 4/4 [00:10<00:00,  2.50s/it]",
        "Evaluating:  50%|#####     | 25/50 [00:10<00:10,  2.50it/s]",
        "Map (num_proc=8):  50%|####| 500/1000 [00:01<00:01, 500.0it/s]",
        "  Gradient Accumulation steps = 4",
    ],
)
def test_line__of_other_work_is_no_step(line: str) -> None:
    assert not logs_of(text_of(line))


def test_rate_of_one_digit__tells_less_than_the_clock_of_lines() -> None:
    line = "I0912 {}.585236 1466 controller.py:466] train | step: {} | steps/sec: 0.1"
    lines = [line.format("22:45:08", 160), line.format("22:51:21", 180)]
    (log,) = logs_of(text_of("\n".join(lines)))
    assert list(log.values("step_s")) == [pytest.approx(373 / 20)]
    precise = "\n".join(lines).replace(" 0.1", " 0.125")
    assert list(logs_of(text_of(precise))[0].values("step_s")) == [8, 8]


def test_clock_of_whole_seconds__tells_the_mean_of_a_run() -> None:
    lines = [
        f"2026-03-02 23:59:{56 + n} step {n}: loss=2.5".replace(":60", ":59")
        for n in range(4)
    ]
    lines += [f"2026-03-03 00:00:{n:02d} step {10 + n}: loss=2.5" for n in range(9)]
    (log,) = logs_of(text_of("\n".join(lines)))
    assert log.values("mean_step_s")[-1] == pytest.approx(12 / 18)
    assert not len(log.values("step_s"))


def test_iterations_of_litgpt__are_added_to_steps() -> None:
    lines = [
        f"iter {n} step {n // 2}: loss 3.5, iter time: {500 + 200 * (n % 2 == 0)}.0ms"
        for n in range(1, 10)
    ]
    (log,) = logs_of(text_of("\n".join(lines)))
    assert list(log.values("step_s")) == pytest.approx([1.2] * 4)
    assert "a step takes 1.20 s" in answers_to("\n".join(lines))["step-time"].title


def test_bars_of_two_runs__are_compared_and_those_of_other_work_are_not() -> None:
    slow, fast = (
        f"{{'loss': 2.0}}\n 10%|#   | 222/2220 [{elapsed}<56:07,  {rate}s/it]"
        for elapsed, rate in (("06:18", 1.69), ("03:20", 0.9))
    )
    answers = answers_to(f"{slow}\n\nwith one GPU:\n{fast}")
    assert "1.88 times faster" in answers["slower-run"].title
    inner = " 10%|#   | 5/50 [00:01<00:07,  6.00it/s]"
    assert "slower-run" not in answers_to(f"{slow}\n{inner}")
    assert "1.69 s" in answers_to(f"{inner}\n{slow}")["step-time"].title


# Number of steps, and a figure of the last one that the program printed.
REAL = {
    "transformers-trainer": (12, "step_s", 1.20),
    "transformers-tokens": (7, "mean_step_s", 1 / 1.384),
    "trl-sft": (8, "step_s", 0.70922),
    "trl-grpo": (7, "mean_step_s", 1 / 0.321),
    "accelerate-tqdm": (10, "step_loss", 0.502),
    "lightning": (1, "train_loss", 0.354),
    "deepspeed-memory": (6, "host_bytes", 8.07 * GIB),
}


@pytest.mark.parametrize("name", REAL)
def test_text_of_a_real_program__is_read_whole(name: str) -> None:
    count, column, last = REAL[name]
    logs = logs_of(read_pasted(TEXTS / f"{name}.txt"))
    sizes = {len(log.steps): log for log in logs}
    assert count in sizes
    assert sizes[count].values(column)[-1] == pytest.approx(last)


def lines_of(times_s: list[float], more: str = "") -> str:
    lines = [
        f"step {step}: loss=1.5 step_time={time_s}{more}"
        for step, time_s in enumerate(times_s)
    ]
    return "\n".join(lines)


NOISE = np.random.default_rng(0).normal(1, 0.01, 60)
EVEN, JUMP = [*NOISE], [*NOISE[:30], *(5 * NOISE[30:])]


def test_rules__say_what_two_runs_differ_in() -> None:
    answers = answers_to(
        lines_of([1.0] * 9, " gen_time=1"), lines_of([2.0] * 9, " gen_time=1")
    )
    assert answers["slower-run"].title == "the second run is 2.00 times slower a step"
    restarted = f"{lines_of([1.0] * 9)}\n{lines_of([0.5] * 9)}"
    assert "2.00 times faster" in answers_to(restarted)["slower-run"].title
    for same in ([1.0] * 9, [1.1] * 9, EVEN):
        assert "slower-run" not in answers_to(lines_of([1.0] * 9), lines_of(same))


def test_rules__find_steps_that_become_slower_and_no_others() -> None:
    assert "slower-steps" in answers_to(lines_of(JUMP))
    for sound in (EVEN, [3.0, 2.0, *EVEN], EVEN[:5]):
        assert "slower-steps" not in answers_to(lines_of(sound))


def test_step_time__leaves_out_the_warm_up_and_says_what_is_left() -> None:
    answer = answers_to(lines_of([60.0, 30.0, *[1.0] * 10]))["step-time"]
    assert answer.title == "a step takes 1.00 s (median)"
    bar = "\n".join(f"{n}/100 [00:0{n}<01:00, 2.00s/it]" for n in range(1, 5))
    assert any(
        "96 steps are left" in line for line in answers_to(bar)["step-time"].evidence
    )


@pytest.mark.parametrize(
    ("rule", "speaking", "silent"),
    [
        ("wrong-mfu", "step 1: loss=2.0 step_time=1.0 mfu={}", ("1.4", "0.4")),
        ("cached-memory", "step 1: alloc=10.0 reserved={}", ("14.0", "10.5")),
        ("no-memory-counted", "step 1: step_time=1.0 alloc={}", ("0", "3.0")),
        (
            "host-nearly-full",
            "CPU Virtual Memory:  used = 26.4 GB, percent = {}%",
            ("84.6", "22.6"),
        ),
        ("retries", "{} CUDA memory allocation retries.\nstep 1: alloc=3", ("2", "0")),
    ],
)
def test_rule__speaks_where_its_figures_say_so(
    rule: str, speaking: str, silent: tuple[str, str]
) -> None:
    yes, no = (speaking.format(value) for value in silent)
    if rule == "wrong-mfu":
        yes, no = (
            LINES["nanoGPT"][0].replace("33.20%", value) for value in ("140.0%", "40%")
        )
    assert rule in answers_to(yes)
    assert rule not in answers_to(no)


def test_columns__are_in_seconds_and_bytes() -> None:
    assert formats.scaled(formats.STEP_S, 5, "ms", 1) == 0.005
    assert formats.scaled(formats.ALLOCATED, 5, "MiB", 1) == 5 << 20
    assert formats.scaled(formats.STEP_S, 5, "GiB", 1) is None


def test_bar__without_a_rate_has_no_times() -> None:
    (log,) = logs_of(
        text_of("1/10 [00:01<00:09, 0.00it/s]\n2/10 [00:02<00:08, 0.00it/s]")
    )
    assert len(log.steps) == 2
    assert not len(log.values(formats.STEP_S))
