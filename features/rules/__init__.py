"""Update rules beside AdamW: Adam, SGD, Lion, and AdamW with smaller state."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "rules",
    {
        "rules": {
            "adam": "adam",
            "adamw-8bit": "adamw_8bit",
            "adamw-bf16": "adamw_bf16",
            "pure-bf16": "pure_bf16",
            "adamw-remainder": "adamw_remainder",
            "lion": "lion",
            "sgd": "sgd",
        }
    },
)
