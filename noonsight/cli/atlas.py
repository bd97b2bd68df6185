"""Verbs of the atlas: site."""

from __future__ import annotations

from pathlib import Path

from noonsight.cli.plan import VOYAGES


def site(*, root: Path = VOYAGES) -> int:
    """Make the pages again from the logbook, and say where they are.

    Parameters
    ----------
    root
        Where results live.
    """
    from noonsight.atlas.site import build_site
    from noonsight.logbook import read

    if not read.experiments(root):
        raise ValueError(f"there is no experiment in {root}; make one with noon run, or say where with --root.")
    print(build_site(root))
    return 0
