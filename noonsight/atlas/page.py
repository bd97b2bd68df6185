"""Turning collected data into one HTML file: templates, figures for readers, and everything inline.

All text is escaped by the templates (autoescape is on and no HTML is made in Python). A page carries a content security
policy that allows the scripts it was made with, by hash, and no request to anywhere; so even text that slipped through
as markup could neither run nor phone home. The same data gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from noonsight.atlas import story

HERE = Path(__file__).parent
SCRIPTS = ("uPlot.iife.min.js", "points.js", "charts.js")
STYLES = ("uPlot.min.css", "site.css")
GLYPHS = {
    "done": ("●", "done"),
    "running": ("◐", "running"),
    "failed": ("▲", "failed"),
    "interrupted": ("▲", "interrupted"),
    "unreadable": ("▲", "record unreadable"),
    "waiting": ("○", "not started"),
}


def render_page(template: str, data: dict[str, Any]) -> str:
    """Fill one template with `data`. `data["charts"]`, when present, is embedded for the script of the charts."""
    charts = data.get("charts")
    scripts = [asset(name) for name in SCRIPTS] if charts else []
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    return (
        _environment()
        .get_template(template)
        .render(
            page=data,
            up="../" if data.get("stage") else "",
            scripts=scripts,
            script_source=hashes,
            style=Markup("\n").join(asset(name) for name in STYLES),
        )
    )


def stage_link(experiment: str, address: str) -> str:
    """Address of a stage's page, relative to the folder of the site."""
    return f"{quote(experiment)}/{quote(address)}.html"


@cache
def asset(name: str) -> Markup:
    """The text of a shipped script or style, as it stands inside a page."""
    text = (HERE / "assets" / name).read_text("utf-8")
    assert "</script" not in text and "</style" not in text, name
    return Markup(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": story.number,
        "exact": story.exact,
        "fact": story.fact,
        "compact": story.compact,
        "duration": story.duration,
        "size": story.size,
        "when": story.when,
        "short": story.short,
        "unit": story.unit,
        "words": lambda name: re.sub(r"[_/]", " ", str(name)),
        "glyph": lambda status: GLYPHS.get(status, ("○", status))[0],
        "status": lambda status: GLYPHS.get(status, ("○", status))[1],
        "quoted": quote,
    }
    environment.globals |= {"stage_link": stage_link, "plural": story.plural, "span": story.span}
    return environment


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
