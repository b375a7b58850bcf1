"""The report of `benchmarks/gpu` from given results, and a rehearsal of all steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.phases import PHASES
from tests.benchmarks.conftest import GPU


def _pair(measured: float, predicted: float) -> dict[str, float]:
    return {"measured": measured, "predicted": predicted, "ratio": measured / predicted}


def _contestant(iteration_ms: list[float], loss: float = 6.25) -> dict[str, Any]:
    sizes = {
        "params": 1_500_000_000,
        "tokens": 8192,
        "peak_device_bytes": 30_000_000_000,
        "host_bytes": 21_000_000_000,
    }
    return {"iteration_ms": iteration_ms, "losses": [7.0, loss], **sizes}


FIGURE_PHASES = (*PHASES, "iteration")
FIGURES: dict[str, dict[str, Any]] = {
    "calibrate": {
        "rates": {"h2d_bytes_per_s": 5.5e10},
        "counters": {
            "nvml-counters": {"refused": "Not Supported"},
            "gpm": {
                direction: {
                    "scale": 0.98,
                    "lag_ms": 71.0,
                    "dropouts": 0.0,
                    "samples": 9,
                }
                for direction in ("h2d", "d2h")
            },
        },
        "checks": {"a source is right": True, "only there": None, "not so": False},
        "aims": {"as fast": False},
    },
    "predictions": {
        "params": 1_500_000_000,
        "device": "NVIDIA",
        "beforehand": {"update_ms": {"adaptive": 400.0}},
        "results": {
            "adaptive": {
                **{f"{phase}_ms": _pair(440.0, 400.0) for phase in FIGURE_PHASES},
                "peak_device_bytes": _pair(9.1e9, 9.1e9),
            }
        },
        "bound": {"exposed_ms": 400.0},
        "failed": {"pipelined": "exit status 1"},
    },
    "layers": {
        "results": {
            "keep, resident": {
                "iteration_ms": _pair(90.0, 100.0),
                "device_bytes": _pair(2e9, 2e9),
            }
        },
        "budget_bytes": 1e9,
    },
    "cost": {"step_ms": [{"bare": 100.0, "ebbtide": 100.5, "torch.profiler": 120.0}]},
    "table": {
        "about": {
            name: [f"about {name}", "fp32"]
            for name in ("ebbtide none", "ZeRO-Offload", "SuperOffload", "torchao")
        },
        "failed": {"SuperOffload": "it died of SIGSEGV"},
        "rounds": [
            {
                "ebbtide none": _contestant([1000.0, 1100.0, 1200.0]),
                "ZeRO-Offload": _contestant([2200.0] * 3, 6.5),
            },
            {
                "ebbtide none": _contestant([1000.0] * 3),
                "ZeRO-Offload": _contestant([2500.0] * 3, 6.5),
            },
        ],
    },
    "smoke": {
        "parts": {
            "both": {"why": "EngineError: no", "seconds": 9.0},
            "none": {"runs": {}, "seconds": 8.0},
        }
    },
    "windows": {
        "runs": {
            "adaptive, by phase": {
                "median_iteration_ms": 4000.0,
                "update_ms": 300.0,
                "parked": 9,
                "subgroups": 20,
                "state_peak_bytes": 1.5e10,
                "allocator_retries": 0,
                "card": {
                    "capacity_bytes": 150_000_000_000,
                    "most_bytes": 140_000_000_000,
                    "readings": 100,
                },
            }
        }
    },
}


def test_print_report__prints_all_tables(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {
        "date": "2026-11-21",
        "rehearsed": False,
        "gpu": "NVIDIA",
        "cpu": "CPU",
        "cores": 16,
        "versions": {},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    for name, figures in FIGURES.items():
        why = "failed checks: not so" if name == "calibrate" else None
        result = {
            "name": name,
            "about": "",
            "status": "done",
            "why": why,
            "seconds": 1.0,
            "figures": figures,
        }
        module("runner").write_result(tmp_path, result)
    module("report").print_report(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    for expected in (
        "| calibrate |  | done in 1 s, failed checks: not so |",
        "| calibrate | only there | needs a GPU |",
        "| `gpm` | h2d | 0.980 | 71.000 | 0.000 | 9.000 |  |",
        "| `nvml-counters` | d2h | - | - | - | - | Not Supported |",
        "`adaptive` exposes 440.0 ms, the bound is 400.0 ms: 1.10 times the bound.",
        "`pipelined` failed: exit status 1",
        "| ebbtide | 1.005 (1.005 to 1.005) |",
        "| calibrate | as fast | **no** |",
        "| both | 9.0 | EngineError: no |",
        "| ebbtide none | about ebbtide none | fp32 | 1000 (1000 to 1200) | 2.25 (2.00 "
        "to 2.50) | 30.0 | 21.0 "
        "| 6.250000 | yes |",
        "| ZeRO-Offload | about ZeRO-Offload | fp32 | 2350 (2200 to 2500) | 1.00 (1.00 "
        "to 1.00) | 30.0 | 21.0 "
        "| 6.500000 | no |",
        "| SuperOffload | about SuperOffload | fp32 | not measured: it died of "
        "SIGSEGV |  |  |  |  |  |",
        "| torchao | about torchao | fp32 | not measured: not run yet |  |  |  |  |  |",
        "| adaptive, by phase | 4,000.0 | 300.0 | 9 of 20 | 15.00 | 140.00 | 150.00 | "
        "0 |",
    ):
        assert expected in lines
    assert not any("rehearsal" in printed for printed in lines)


def test_print_report__says_what_a_step_that_has_stopped_lacks(
    module: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {
        "date": "2026-11-21",
        "rehearsed": True,
        "gpu": None,
        "cpu": "CPU",
        "cores": 16,
        "versions": {},
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    result = {
        "name": "table",
        "about": "",
        "status": "failed",
        "why": "it broke",
        "seconds": 1.0,
    }
    module("runner").write_result(tmp_path, {**result, "figures": {"rounds": []}})
    module("report").print_report(tmp_path)
    assert "Stopped before all was measured: IndexError" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_rehearsal__runs_all_steps_and_writes_a_report(
    module: Any, tmp_path: Path
) -> None:
    environment = {
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        **os.environ,
    }
    command: Sequence[str | Path] = [
        sys.executable,
        GPU / "run.py",
        tmp_path / "out",
        "--rehearse",
        "--minutes",
        "55",
    ]
    codes = [
        subprocess.run(
            [*command, call], capture_output=True, check=False, env=environment
        ).returncode
        for call in module("listing").CALLS
    ]
    results = {
        file.stem: json.loads(file.read_text())
        for file in (tmp_path / "out").glob("*.json")
    }
    results = {name: result for name, result in results.items() if "status" in result}
    assert not any(codes), {
        name: result["tail"][-500:] for name, result in results.items() if result["why"]
    }
    assert results["smoke"]["figures"]["checks"]["both: the digest of the CPU"]
    assert results["table"]["figures"]["checks"]["every contestant ran"]
    assert results["windows"]["figures"]["checks"]["the same losses to the bit"]
    assert (
        (tmp_path / "out" / "report.md")
        .read_text()
        .startswith("**A rehearsal without a GPU")
    )
