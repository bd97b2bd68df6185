"""The pages in a real browser: no error, no request, zoom works, nothing sticks out at 360 px, no serious barrier.

Run by `.ci/lanes/chromium.sh`, which installs the browser and writes the sample voyage; skipped everywhere else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.lane("chromium"),
    pytest.mark.skipif("NOON_AXE" not in os.environ, reason="the lane sets NOON_AXE"),
]

ROOT = Path(os.environ.get("NOON_ROOT", "/nowhere"))
PAGES = sorted((ROOT / "site").rglob("*.html"))
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield chromium
        chromium.close()


def open_page(browser, path: Path, *, width: int = 1200, scheme: str = "light"):
    """The page, and the list in which its complaints gather: console errors, exceptions, requests that leave the file."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else complaints.append(request.url),
    )
    page.goto(path.as_uri())
    page.wait_for_load_state("load")
    return page, complaints


def test_there_are_pages():
    assert len(PAGES) >= 18


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_opens_without_a_complaint_and_fits_a_phone(browser, path: Path):
    page, complaints = open_page(browser, path, width=360)
    assert complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "target@1.html", "select@1.html", "predictions.html"])
def test_no_serious_barrier(browser, name: str, scheme: str):
    path = next(path for path in PAGES if path.name == name)
    page, _ = open_page(browser, path, scheme=scheme)
    page.evaluate(Path(os.environ["NOON_AXE"]).read_text())
    found = page.evaluate("async () => (await axe.run()).violations")
    serious = [
        f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in found if each["impact"] in ("serious", "critical")
    ]
    assert serious == []
    page.context.close()


def test_dragging_zooms_and_double_click_resets(browser):
    path = next(path for path in PAGES if path.name == "target@1.html")
    page, complaints = open_page(browser, path)
    page.locator("figure[data-chart]").first.scroll_into_view_if_needed()  # charts are drawn when they come into view
    chart = page.locator(".u-over").first
    chart.wait_for()
    box = chart.bounding_box()
    before = page.screenshot(clip=box)
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 40, steps=5)
    page.mouse.up()
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
    zoomed = page.screenshot(clip=box)
    chart.dblclick(position={"x": 50, "y": 60})
    page.mouse.move(5, 5)
    page.wait_for_timeout(200)
    after = page.screenshot(clip=box)
    assert zoomed != before
    assert after == before
    assert complaints == []
    page.context.close()


def test_script_in_a_sample_is_shown_as_text(browser):
    path = next(path for path in PAGES if path.name == "samples@1.html")
    page, complaints = open_page(browser, path)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.reload()
    assert "<script>alert(1)</script>" in page.locator("body").inner_text()
    assert dialogs == [] and complaints == []
    page.context.close()
