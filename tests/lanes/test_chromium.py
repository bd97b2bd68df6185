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
    assert len(PAGES) >= 20


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


def open_target(browser, **options):
    page, complaints = open_page(browser, next(path for path in PAGES if path.name == "target@1.html"), **options)
    page.locator("figure[data-chart]").first.scroll_into_view_if_needed()
    page.locator(".u-over").first.wait_for()
    return page, complaints


def test_one_axis_for_the_whole_page(browser):
    page, complaints = open_target(browser)
    ends = {}
    for axis in ("step", "tokens", "time"):
        page.locator(f'input[name="axis"][value="{axis}"]').check(force=True)
        ends[axis] = page.evaluate("noonsight.plots.filter((p) => p.u).map((p) => p.u.scales.x.max)")
    assert ends["step"][0] == 1347
    assert ends["tokens"][0] == 1348 * 1024
    assert 190 < ends["time"][0] < 210
    assert complaints == []
    page.context.close()


def test_the_keyboard_reads_zooms_and_changes_the_axis(browser):
    page, complaints = open_target(browser)
    plot = page.locator('figure[data-chart="main"] .plot')
    plot.focus()
    page.keyboard.press("Home")
    reading = page.locator('figure[data-chart="main"] .reading')
    assert reading.inner_text().startswith("step 0: target 8.")
    page.keyboard.press("+")
    assert page.evaluate("noonsight.state.view[1] < 1347")
    page.keyboard.press("0")
    assert page.evaluate("noonsight.state.view === null")
    page.keyboard.press("l")
    assert page.locator('figure[data-chart="main"] [data-do="log"]').get_attribute("aria-pressed") == "true"
    assert complaints == []
    page.context.close()


def test_a_chart_leaves_as_csv_and_as_a_picture(browser):
    page, _ = open_target(browser)
    figure = page.locator('figure[data-chart="main"]')
    with page.expect_download() as taken:
        figure.locator('[data-do="csv"]').click()
    rows = Path(taken.value.path()).read_text().splitlines()
    assert rows[0] == "run,series,line,step,value"
    assert sum(row.startswith('"target@1"') and ",surviving," in row for row in rows) == 1348
    assert sum(",replaced," in row for row in rows) == 12
    with page.expect_download() as taken:
        figure.locator('[data-do="png"]').click()
    assert Path(taken.value.path()).read_bytes().startswith(b"\x89PNG")
    page.context.close()


def test_a_spike_of_one_step_in_a_million_is_drawn(browser):
    page, _ = open_target(browser)
    kept = page.evaluate(
        """() => {
          const n = 1000000, xs = Float64Array.from({ length: n }, (_, i) => i), ys = new Float32Array(n);
          ys[123457] = 7;
          const [x, y] = noonsight.thin(xs, ys, 0, n, 800);
          return [x.length <= 1600, x[y.indexOf(7)]];
        }"""
    )
    assert kept == [True, 123457]
    page.context.close()


def test_printing_draws_every_chart_on_white_paper(browser):
    page, complaints = open_target(browser, scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("noonsight.plots.every((plot) => plot.u)")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(251, 250, 246)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(251, 250, 246)"
    assert complaints == []
    page.context.close()


def test_no_script_of_others_could_run(browser):
    """Even if markup slipped through: the page's policy allows the scripts it was made with, and no other."""
    page, complaints = open_target(browser)
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), { text: 'document.title=2' }))")
    page.wait_for_timeout(100)
    assert page.title().startswith("target@1")
    assert any("Content Security Policy" in text for text in complaints)
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
