"""Update rules beside AdamW: Adam, SGD, Lion, and AdamW with state of 2 bytes or 1."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "rules",
    {"rules": {"adam": "adam", "adamw-8bit": "adamw_8bit", "adamw-bf16": "adamw_bf16", "lion": "lion", "sgd": "sgd"}},
)
