"""Explains texts that people paste: error messages, logs, tables of tools,
configurations.
"""

from ebbtide.seams import Feature

FEATURE = Feature(
    "explain",
    {"commands": {"explain": "command"}, "importers": {"steps": "series:IMPORTERS"}},
    ("importers",),
)
