"""Tests the report in a browser: it opens, zooms, shows figures at the pointer, sorts,
and makes no requests."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from ebbtide.analysis.findings import find
from ebbtide.analysis.metrics.windows import find_windows
from ebbtide.analysis.report import write_report
from ebbtide.profiler.trace import Trace
from tests.analysis.report.chromium import (
    chromium,
    errors,
    point,
    prefer,
    requests,
    run,
)
from tests.analysis.report.report_traces import (
    GIB,
    hostile,
    long,
    trained,
    with_categories,
    with_copies,
    with_kernels,
)

MIN_BYTES = 20 * GIB
# A figure of the timeline by its name, and the window coordinates of a point of its
# data.
FIGURE = """
const figure = (name) => [...Bokeh.documents.at(-1).all_models].find((m) => m.type === "Figure" && m.name === name);
const view = (name) => find(Bokeh.index.roots, figure(name));
function find(views, model) {
  for (const view of views) {
    if (view.model === model) return view;
    const inside = find(view.child_views ?? [], model);
    if (inside) return inside;
  }
}
"""
POINT = (
    FIGURE
    + """
const {frame, el} = view(arguments[0]), {x, y} = el.getBoundingClientRect();
return [x + frame.x_scale.compute(arguments[1]), y + frame.y_scale.compute(arguments[2])];
"""
)
# Tooltips are in shadow trees, outside of the page's own elements.
TEXT = """
const texts = (node) => {
  if (node.nodeType === 3) return [node.textContent];
  if (["STYLE", "SCRIPT"].includes(node.nodeName)) return [];
  return [...(node.shadowRoot?.childNodes ?? []), ...node.childNodes].flatMap(texts);
};
return texts(document.body).join(" ");
"""


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def copies() -> Trace:
    """Return a trace of two ranks with copies, whose page several tests open."""
    return with_copies(trained(ranks=2)).build()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Trace], Path]:
    """Return a function that writes the report of a trace, once for each trace."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def write(trace: Trace) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.html"
        write_report(trace, find(trace), path, MIN_BYTES)
        return path

    return write


@pytest.fixture
def shown(chrome: Chrome, pages: Callable[[Trace], Path]) -> Callable[[Trace], Path]:
    """Return a function that opens the report of a trace, waits for its timeline, and
    returns the path of the page."""

    def show(trace: Trace) -> Path:
        path = pages(trace)
        prefer(chrome, prefers_color_scheme="light")
        requests(chrome), errors(chrome)
        chrome.get(path.as_uri())
        drawn = (
            "return !document.querySelector('.timeline') || !!(globalThis.Bokeh && "
            "Bokeh.documents.length)"
        )
        wait(
            chrome,
            lambda: run(chrome, f"{drawn} && document.documentElement.dataset.painted"),
        )
        return path

    return show


def wait(chrome: Chrome, until: Callable[[], Any]) -> Any:
    """Wait for a true result, and return it."""
    return WebDriverWait(chrome, 20, poll_frequency=0.05).until(lambda _: until())


def scroll_to_timeline(chrome: Chrome) -> None:
    """Scroll so that the timeline is visible."""
    run(
        chrome,
        "document.querySelector('.rank:not([hidden]) .readout').scrollIntoView()",
    )


def x_range(chrome: Chrome) -> list[float]:
    """Return the start and end of the time axis."""
    bounds: list[float] = run(
        chrome,
        FIGURE + "const {start, end} = figure('memory').x_range; return [start, end]",
    )
    return bounds


def window_point(
    chrome: Chrome, figure: str, x: float, y: float
) -> tuple[float, float]:
    """Return the window coordinates of a point in data coordinates."""
    window_x, window_y = run(chrome, POINT, figure, x, y)
    return window_x, window_y


def test_page__opens_without_errors_and_requests(
    chrome: Chrome, shown: Any, copies: Trace
) -> None:
    page = shown(copies)
    assert errors(chrome) == []
    urls = requests(chrome)
    assert page.as_uri() in urls
    assert [
        url
        for url in urls
        if not url.startswith((page.parent.as_uri(), "data:", "blob:"))
    ] == []
    heads = [
        head.text
        for head in chrome.find_elements(By.TAG_NAME, "h2")
        if head.is_displayed()
    ]
    assert heads[:4] == ["Key figures", "Findings", "Timeline rank 0", "Phases"]
    assert heads[-2:] == ["Ranks compared", "The job"]


def test_policy__forbids_connections_and_images(
    chrome: Chrome, shown: Any, copies: Trace
) -> None:
    shown(copies)
    run(
        chrome,
        "fetch('https://example.invalid/').catch(() => {}); new Image().src = "
        "'https://example.invalid/x.png'",
    )
    refused: list[str] = []
    wait(chrome, lambda: refused.extend(errors(chrome)) or len(refused) >= 2)
    text = " ".join(
        message for message in refused if "Content Security Policy" in message
    )
    assert "connect-src" in text
    assert "img-src" in text


def test_page__runs_no_code_of_a_trace(chrome: Chrome, shown: Any) -> None:
    shown(hostile())
    assert chrome.title.endswith("· ebbtide")
    assert errors(chrome) == []
    assert run(chrome, "return document.images.length") == 0
    assert "alert(2)" in run(chrome, TEXT)


def test_timeline__zooms_with_the_wheel_and_resets(
    chrome: Chrome, shown: Any, copies: Trace
) -> None:
    shown(copies)
    scroll_to_timeline(chrome)
    initial = x_range(chrome)
    x, y = window_point(chrome, "memory", 40, 20)
    ActionChains(chrome).scroll_from_origin(
        ScrollOrigin.from_viewport(round(x), round(y)), 0, -300
    ).perform()
    start, end = wait(chrome, lambda: x_range(chrome) != initial and x_range(chrome))
    assert initial[0] < start < 40 < end < initial[1]
    assert window_point(chrome, "memory", 40, 20)[0] == pytest.approx(x, abs=2)
    assert window_point(chrome, "link", 40, 1)[0] == pytest.approx(x, abs=2)
    chrome.find_element(By.CSS_SELECTOR, "[data-reset]").click()
    assert wait(chrome, lambda: x_range(chrome) == initial)


@pytest.mark.slow
def test_timeline__pans_by_drag_and_zooms_into_a_box_from_zero(
    chrome: Chrome, shown: Any
) -> None:
    shown(trained().build())
    scroll_to_timeline(chrome)
    chrome.find_element(By.CSS_SELECTOR, "[data-zoom='0.5']").click()
    start, end = x_range(chrome)
    x, y = window_point(chrome, "memory", (start + end) / 2, 20)

    def drag(distance: int) -> None:
        actions = ActionChains(chrome, duration=100)
        pointer = actions.w3c_actions.pointer_action
        pointer.move_to_location(round(x), round(y)).pointer_down()
        pointer.move_to_location(round(x) + distance // 2, round(y) + 20)
        pointer.move_to_location(round(x) + distance, round(y) + 60)
        pointer.pointer_up()
        actions.perform()

    drag(-100)
    panned = wait(chrome, lambda: x_range(chrome)[0] > start and x_range(chrome))
    assert panned[1] - panned[0] == pytest.approx(end - start)
    chrome.find_element(By.CSS_SELECTOR, "[data-drag=BoxZoomTool]").send_keys(
        Keys.ENTER
    )
    drag(150)
    boxed = wait(chrome, lambda: x_range(chrome) != panned and x_range(chrome))
    assert boxed[1] - boxed[0] < (panned[1] - panned[0]) / 3
    start, end = run(
        chrome,
        FIGURE + "const {start, end} = figure('memory').y_range; return [start, end]",
    )
    assert start == 0
    assert 10 < end < 40


def test_timeline__shows_figures_of_boxes_on_hover(
    chrome: Chrome, shown: Any, copies: Trace
) -> None:
    shown(copies)
    scroll_to_timeline(chrome)
    windows = find_windows(copies, MIN_BYTES).windows
    (window,) = [
        w for w in windows if (w.rank, w.iteration, w.phase) == (0, 1, "forward")
    ]
    assert (window.free_bytes, window.h2d_idle_share) == (30 * GIB, 0.5)
    for figure, y, text in (
        (
            "memory",
            25,
            "window: forward iteration 1 within it 2.00 ms to 6.00 ms length 4.00 ms "
            "least free 30.00 GiB",
        ),
        ("memory", 25, "h2d idle 50 % d2h idle 50 %"),
        ("strips", 1.5, "forward iteration 1 micro-step 0 length 4.00 ms"),
        ("strips", 0.5, "free in every iteration phase forward at least 30.00 GiB"),
    ):
        point(chrome, *window_point(chrome, figure, 21, y))
        wait(chrome, lambda text=text: text in " ".join(run(chrome, TEXT).split()))


def test_readout__shows_time_phase_and_value_of_every_line(
    chrome: Chrome, shown: Any, copies: Trace
) -> None:
    shown(copies)
    scroll_to_timeline(chrome)
    # a copy runs from 35 to 37 ms, and from 42 ms
    point(chrome, *window_point(chrome, "link", 2 * 19 + 5, 10))

    def readout() -> str:
        return " ".join(chrome.find_element(By.CLASS_NAME, "readout").text.split())

    wait(chrome, lambda: "iteration 2, backward" in readout())
    assert "device 30.00 GiB" in readout()
    assert "allocated 1.00 GiB" in readout()
    assert "free above device 10.00 GiB capacity 40.00 GiB" in readout()
    assert "h2d pinned 25.00 GB/s h2d pageable 0.00 GB/s" in readout()
    assert "d2h pinned 25.00 GB/s d2h pageable 0.00 GB/s peak 32 GB/s" in readout()
    assert readout().split("at ")[1].startswith("43.")


@pytest.mark.slow
def test_readout__hides_a_line_by_its_name(chrome: Chrome, shown: Any) -> None:
    shown(trained().build())
    visible = (
        "return [...Bokeh.documents[0].all_models].find((m) => m.name === "
        "'memory/allocated').visible"
    )
    key = chrome.find_element(By.CSS_SELECTOR, "[data-line='memory/allocated']")
    assert (run(chrome, visible), key.get_attribute("aria-pressed")) == (True, "true")
    key.send_keys(Keys.SPACE)
    assert (run(chrome, visible), key.get_attribute("aria-pressed")) == (False, "false")


def test_page__shows_another_rank_on_request(
    chrome: Chrome, shown: Any, copies: Trace
) -> None:
    shown(copies)
    assert run(chrome, "return Bokeh.documents.length") == 1
    Select(chrome.find_element(By.ID, "rank")).select_by_value("1")
    wait(chrome, lambda: run(chrome, "return Bokeh.documents.length") == 2)
    assert [
        v.is_displayed() for v in chrome.find_elements(By.CLASS_NAME, "rank")
    ] == 2 * [False, True]
    link = chrome.find_element(By.LINK_TEXT, "Windows of free memory")
    assert (link.get_attribute("href") or "").endswith("#section-windows-1")
    assert not chrome.find_element(
        By.CSS_SELECTOR, "[data-section='section-link']"
    ).is_displayed()
    scroll_to_timeline(chrome)
    point(chrome, *window_point(chrome, "memory", 30, 20))
    line = chrome.find_element(
        By.CSS_SELECTOR, "[data-rank='1'] [data-line='memory/allocated']"
    )
    wait(chrome, lambda: "2.00 GiB" in line.text)


def test_tables__sort_by_mouse_and_keyboard(chrome: Chrome, shown: Any) -> None:
    shown(trained(12).build())
    table = chrome.find_element(By.CSS_SELECTOR, "#windows-0 table")

    def column(position: int) -> list[str]:
        return [
            row.text
            for row in table.find_elements(
                By.CSS_SELECTOR, f"tbody td:nth-child({position})"
            )
        ]

    heads = table.find_elements(By.CSS_SELECTOR, "th")
    labels = [head.text.split()[0] for head in heads]
    iteration = labels.index("iteration")
    heads[iteration].find_element(By.TAG_NAME, "button").click()
    numbers = [int(text) for text in column(iteration + 1)]
    assert numbers == sorted(numbers, reverse=True)
    assert max(numbers) >= 10
    assert heads[iteration].get_attribute("aria-sort") == "descending"
    heads[iteration].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert [int(text) for text in column(iteration + 1)] == sorted(numbers)
    assert heads[iteration].get_attribute("aria-sort") == "ascending"
    heads[0].find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    assert column(1) == sorted(column(1))
    assert [head.get_attribute("aria-sort") for head in heads] == ["ascending"] + [
        "none"
    ] * (len(heads) - 1)


@pytest.mark.slow
def test_timeline__is_dark_on_a_dark_page(chrome: Chrome, shown: Any) -> None:
    shown(trained().build())
    colors = FIGURE + (
        "return [getComputedStyle(document.body).backgroundColor, "
        "figure('memory').left[0].major_label_text_color]"
    )
    light = run(chrome, colors)
    prefer(chrome, prefers_color_scheme="dark")
    wait(
        chrome,
        lambda: (
            run(chrome, "return document.documentElement.dataset.painted") == "dark"
        ),
    )
    dark = run(chrome, colors)

    def brightness(color: str) -> int:
        parts = (
            color[4:-1].split(",")
            if color.startswith("rgb(")
            else [str(int(color[n : n + 2], 16)) for n in (1, 3, 5)]
        )
        return sum(int(part) for part in parts)

    assert brightness(light[0]) == 3 * 255
    assert brightness(dark[0]) < 100
    assert brightness(light[1]) < 3 * 128 < brightness(dark[1])


@pytest.mark.slow
def test_page__fits_a_narrow_screen(chrome: Chrome, shown: Any, copies: Trace) -> None:
    shown(copies)
    screen = {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": False}
    chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    try:
        wait(
            chrome,
            lambda: (
                run(chrome, "return document.querySelector('.timeline').offsetWidth")
                < 390
            ),
        )
        assert wait(
            chrome,
            lambda: run(chrome, "return document.documentElement.scrollWidth") <= 390,
        )

        width = run(chrome, FIGURE + "return figure('memory').inner_width")
        assert 200 < width < 390
        # Nothing of a table is behind a scroll bar.
        widest = "return Math.max(...[...document.querySelectorAll('.scroll')].map"
        assert (
            run(chrome, widest + "((box) => box.scrollWidth - box.clientWidth))") == 0
        )
    finally:
        chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.slow
def test_page__prints_the_timeline_without_buttons(chrome: Chrome, shown: Any) -> None:
    shown(trained().build())
    scaled = (
        "addEventListener('beforeprint', () => { document.title = "
        "document.querySelector('.timeline').style.zoom })"
    )
    run(chrome, scaled)
    printed = chrome.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")
    assert 0.5 < float(chrome.title) < 1
    assert run(chrome, "return document.querySelector('.timeline').style.zoom") == ""
    chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        seen = [
            chrome.find_element(By.CLASS_NAME, name).is_displayed()
            for name in ("controls", "timeline", "readout")
        ]
        assert seen == [False, True, True]
    finally:
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.slow
def test_page__opens_for_a_long_trace(chrome: Chrome, shown: Any) -> None:
    shown(long())
    assert errors(chrome) == []
    scroll_to_timeline(chrome)
    point(chrome, *window_point(chrome, "memory", 300, 5))
    wait(
        chrome,
        lambda: (
            "GiB"
            in chrome.find_element(
                By.CSS_SELECTOR, "[data-line='memory/device'] b"
            ).text
        ),
    )


def test_page__opens_for_an_empty_trace(chrome: Chrome, shown: Any) -> None:
    shown(trained(0).build())
    assert errors(chrome) == []


def test_timeline__reads_and_hides_areas_of_stacks(chrome: Chrome, shown: Any) -> None:
    shown(with_categories(with_kernels(trained())).build())
    scroll_to_timeline(chrome)
    point(chrome, *window_point(chrome, "memory", 41, 20))
    read = (
        "return document.querySelector(`[data-line='${arguments[0]}'] b`).textContent"
    )
    for key, text in (
        ("memory/category activation", "5.00 GiB"),
        ("memory/category parameter", "4.00 GiB"),
        ("activity/compute/category compute", "100 %"),
        ("activity/communication/category communication", "0 %"),
    ):
        wait(chrome, lambda key=key, text=text: run(chrome, read, key) == text)
    button = chrome.find_element(
        By.CSS_SELECTOR, "[data-line='memory/category activation']"
    )
    button.click()
    hidden = (
        "return [...Bokeh.documents.at(-1).all_models].find((m) => m.name === "
        "arguments[0]).visible"
    )
    assert run(chrome, hidden, "memory/category activation") is False
    assert errors(chrome) == []
