"""Drives a headless browser: Debian's Chromium, by selenium."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains

PACKAGES = ("chromium", "chromium-driver")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--window-size=1280,1600",
)


@functools.cache
def installed() -> tuple[str, str]:
    """Return paths of browser and driver. Root on Debian installs them if missing; else
    the test is skipped."""
    if (
        os.geteuid() == 0
        and shutil.which("apt-get")
        and not all(map(shutil.which, ("chromium", "chromedriver")))
    ):
        for command in (
            ["update"],
            ["install", "--yes", "--no-install-recommends", *PACKAGES],
        ):
            environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(
                ["apt-get", *command],
                env=environment,
                capture_output=True,
                timeout=280,
                check=False,
            )
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip(f"needs the Debian packages {' and '.join(PACKAGES)}")
    return browser, driver


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """Start a browser with a fresh profile, which records its console and its
    network."""
    browser, driver = installed()
    options = ChromeOptions()
    options.binary_location = browser
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    chrome = Chrome(options=options, service=Service(driver))
    try:
        yield chrome
    finally:
        chrome.quit()


def errors(chrome: Chrome) -> list[str]:
    """Return the errors of the console since the last call; a violation of the policy
    is one."""
    return [
        entry["message"]
        for entry in chrome.get_log("browser")
        if entry["level"] == "SEVERE"
    ]


def requests(chrome: Chrome) -> list[str]:
    """Return the addresses that pages requested since the last call."""
    messages = [
        json.loads(entry["message"])["message"]
        for entry in chrome.get_log("performance")
    ]
    sent = [
        message["params"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [params["request"]["url"] for params in sent]


def point(chrome: Chrome, x: float, y: float) -> None:
    """Move the mouse to a point of the window, in two steps like a hand."""
    for step in (4, 0):
        actions = ActionChains(chrome, duration=50)
        actions.w3c_actions.pointer_action.move_to_location(
            round(x) + step, round(y) + step
        )
        actions.perform()


def prefer(chrome: Chrome, **features: str) -> None:
    """Emulate media features, such as prefers_color_scheme="dark"."""
    values = [
        {"name": name.replace("_", "-"), "value": value}
        for name, value in features.items()
    ]
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": values})


def run(chrome: Chrome, script: str, *arguments: Any) -> Any:
    """Run a script in the page and return its result."""
    return chrome.execute_script(script, *arguments)
