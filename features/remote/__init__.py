"""Reads traces at URLs, and uploads those that are recorded."""

from ebbtide.seams import Feature

FEATURE = Feature(
    "remote",
    {
        "services": {
            "remote-files": "files:RemoteFiles",
            "remote-spools": "upload:copy_spools",
            "upload": "upload:Upload",
        }
    },
)
