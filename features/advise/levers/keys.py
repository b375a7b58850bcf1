"""The documented settings of each framework for each change of a job."""

import tomllib
from pathlib import Path
from typing import Any

TITLES = {
    "transformers": "HF Trainer",
    "trl": "TRL",
    "llamafactory": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "torchtune": "torchtune",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "fsdp2": "FSDP2",
    "torch": "plain torch",
}
# A key with this value is left out where there is one host.
HOSTS = "{hosts}"
KEYS: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("keys.toml").read_text("utf-8")
)


def settings_for(
    framework: str, levers: list[str], values: dict[str, int]
) -> dict[str, Any]:
    """Return the settings of a framework for some changes; `values` fill in the
    placeholders, by their name."""
    settings: dict[str, Any] = {}
    for lever in levers:
        settings |= _filled(KEYS[framework][lever], values)
    return settings


def settings_text(settings: dict[str, Any]) -> str:
    """Return settings as text, the names of nested ones joined by a point."""
    return ", ".join(f"{name}: {_value(value)}" for name, value in _flat("", settings))


def _filled(value: Any, values: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {
            key: _filled(part, values)
            for key, part in value.items()
            if part != HOSTS or values["hosts"] > 1
        }
    return values.get(value[1:-1], value) if isinstance(value, str) else value


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix.removesuffix("."), value)]
    return [
        pair for key, part in value.items() for pair in _flat(f"{prefix}{key}.", part)
    ]


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
