"""`build_site(root)`: all pages of a root, written as one folder of files that open from anywhere.

The site is made from the logbook and nothing else, so it can be deleted and made again. One page that cannot be made
never stops the others: it is replaced by a page that says what happened, and the front page is always written.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from noonsight.atlas.page import render_page
from noonsight.atlas.pages import front, predictions, run, stage
from noonsight.atlas.voyage import open_voyages
from noonsight.logbook.write import write_atomic

Collect = Callable[[], dict[str, Any]]
Render = Callable[[dict[str, Any]], str]


def build_site(root: Path) -> Path:
    """Write `<root>/site/`: index.html, predictions.html and one page per stage. Returns the path of index.html.

    Pages of stages that no longer exist are removed. Raises OSError when the site cannot be written.
    """
    root = Path(root)
    site = root / "site"
    voyages = open_voyages(root)
    written = {
        _write(site / "predictions.html", predictions.render, lambda: predictions.collect(root, voyages=voyages)),
    }
    for voyage in voyages:
        for address, folder in voyage.folders.items():
            page = run if folder.is_training else stage
            where = {"experiment": voyage.name, "stage": address, "voyage": voyage}
            target = site / voyage.name / f"{address}.html"
            written.add(
                _write(target, page.render, lambda page=page, where=where: page.collect(root, **where), address)
            )
    index = _write(site / "index.html", front.render, lambda: front.collect(root, voyages=voyages))
    for old in site.rglob("*.html"):
        if old not in written and old != index:
            old.unlink()
    return index


def _write(path: Path, render: Render, collect: Collect, stage: str | None = None) -> Path:
    try:
        text = render(collect())
    except Exception as error:  # a page is about what happened, its own failure included: it is shown, not hidden
        fault = {"title": path.stem, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        text = render_page("fault.html", {**fault, "stage": stage, "as_of": None, "charts": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.encode("utf-8"))
    return path
