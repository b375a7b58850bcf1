"""Prints a recommendation: one line, and for each policy the blocks to paste."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from ebbtide.cli.printing import console, echo
from ebbtide.units import ms_text

if TYPE_CHECKING:
    from ebbtide.interleave.replay.recommend import PolicySetup, Recommendation, SystemSetup

# Objects within the object have one line up to this length.
_MAX_INNER_WIDTH = 60
# Keys of the configuration with the argument of InterleavedAdamW for the same.
_PLACEHOLDERS = {"gradient_clipping": "gradient_clipping (max_grad_norm)", "optimizer": "optimizer (lr)"}


def print_recommendation(advice: Recommendation) -> None:
    """Print the recommended policy, and under a heading for each policy what to paste."""
    _print_text(f"recommended: {advice.line}")
    for alternative in advice.alternatives:
        _print_text(f"instead of offloading: {alternative}")
    faster = [system for system in advice.systems if system.is_faster]
    if faster:
        texts = (f"{system.policy}{'' if system.exact else ' (not exact)'}" for system in faster)
        _print_text(f"{_advantage(faster[0], advice)} in other systems: {', '.join(texts)}")
    for policy, reason in advice.left_out.items():
        _print_text(f"not among the blocks below: {policy} ({reason})")
    if advice.placeholders:
        names = ", ".join(_PLACEHOLDERS.get(name, name) for name in advice.placeholders)
        _print_text(f"replace by the values of your job: {names}")
    for number, setup in enumerate(advice.setups):
        _print_setup(setup, is_recommended=not number)
    for system in advice.systems:
        _print_system(system, advice)


def json_block(value: Any, indent: int = 0) -> str:
    """Return a JSON value as text to copy: an object has a line per key, unless it fits into one line."""
    line = json.dumps(value)
    if not isinstance(value, dict) or (indent and len(line) <= _MAX_INNER_WIDTH):
        return line
    inner = " " * (indent + 2)
    entries = (f"{inner}{json.dumps(key)}: {json_block(entry, indent + 2)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + "\n" + " " * indent + "}"


def _print_text(text: str) -> None:
    """Print a sentence; on a terminal it is wrapped between words."""
    terminal = console()
    if terminal.is_terminal:
        text = textwrap.fill(text, terminal.width, subsequent_indent="  ", break_on_hyphens=False)
    echo(text)


def _print_setup(setup: PolicySetup, is_recommended: bool) -> None:
    title = f"{setup.policy}: {ms_text(setup.iteration_ms)} an iteration{' (recommended)' if is_recommended else ''}"
    echo(f"\n{title}\n{'-' * len(title)}")
    if setup.code is not None or not setup.uses_storage:
        echo(f"In the configuration of DeepSpeed, whose other keys stay:\n\n{json_block(setup.deepspeed_config)}")
    if setup.code is not None:
        echo(f"\nand in the script, before deepspeed.initialize:\n\n{setup.code}")
    if setup.optimizer_code is not None:
        echo(f"\nIn a script without DeepSpeed, instead of torch.optim.AdamW:\n\n{setup.optimizer_code}")
    if setup.policy == "gpu-only":
        echo("\nIn a script without DeepSpeed: keep torch.optim.AdamW.")


def _advantage(system: SystemSetup, advice: Recommendation) -> str:
    """Return in a word what a system has over the recommended policy: it is faster, or fits where that does not."""
    return "faster" if system.iteration_ms < advice.setups[0].iteration_ms else "fits"


def _print_system(system: SystemSetup, advice: Recommendation) -> None:
    kind = _advantage(system, advice) if system.is_faster else "the best fraction"
    title = (
        f"{system.policy}: {ms_text(system.iteration_ms)} an iteration ({kind}{'' if system.exact else ', not exact'})"
    )
    echo(f"\n{title}\n{'-' * len(title)}")
    if system.note is not None:
        _print_text(f"Not exact: {system.note}.")
    echo(f"{system.place}:\n\n{system.lines}")
