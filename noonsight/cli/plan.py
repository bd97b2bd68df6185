"""Verbs of the plan: run and prune."""

from __future__ import annotations

from pathlib import Path

VOYAGES = Path("voyages")
COLUMNS = 100  # no line is wider, unless one path alone is


def run(file: Path, *, root: Path = VOYAGES, accept_code: bool = False) -> int:
    """Run the experiment in FILE: what is done is skipped, what is missing runs, then pages are made.

    Parameters
    ----------
    file
        A Python file that defines `experiment()`, such as experiments/miniature.py.
    root
        Where results live.
    accept_code
        Keep results although the code that made them moved, and record that decision.
    """
    line = f"noon run {file}: results in {root}"
    print(line if len(line) <= COLUMNS else line.replace(": results in ", "\nresults in "), flush=True)
    from noonsight.plan.runner import run_experiment

    code = run_experiment(file, root, accept_code=accept_code, after=render)
    page = root / "site" / "index.html"
    if page.is_file():
        print(f"pages: {page}")
    return code


def prune(*, root: Path = VOYAGES, apply: bool = False) -> int:
    """List what no experiment needs any more; remove it only with --apply.

    Never listed: a stage that an experiment has, an input of any other stage, anything with a prediction or a verdict.

    Parameters
    ----------
    root
        Where results live.
    apply
        Remove what is listed.
    """
    from noonsight.plan.prune import prunable, remove

    found = prunable(root)
    for each in found:
        print(f"{each.num_bytes / 1e6:10.1f} MB  {each.path}  ({each.reason})")
    total = sum(each.num_bytes for each in found) / 1e6
    if not found:
        print(f"nothing to prune in {root}.")
    elif apply:
        print(f"removed {remove(found)} of {len(found)}, {total:.1f} MB.")
    else:
        print(f"{len(found)} can go, {total:.1f} MB. Nothing was removed; to do it: noon prune --root {root} --apply")
    return 0


def render(root: Path) -> None:
    """Make the pages; a failure is told and does no harm."""
    from noonsight.atlas.site import build_site

    try:
        build_site(root)
    except Exception as error:  # results are safe; a page that cannot be made must not look like a failed voyage
        print(f"the pages could not be made ({type(error).__name__}: {error}); noon site --root {root} shows why")
