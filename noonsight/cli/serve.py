"""Verbs of serving: export."""

from __future__ import annotations

from pathlib import Path


def export(run: Path, out: Path) -> int:
    """Write a trained model in Hugging Face form.

    Parameters
    ----------
    run
        Folder of a finished training stage, such as voyages/miniature/target@1.
    out
        Folder to write; it must not hold anything yet.
    """
    if not run.is_dir():
        raise ValueError(f"there is no folder {run}; noon show lists experiments, noon show NAME their stages.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder; an export is written into a new one. Choose another path.")
    from noonsight.recipe.publishing import export_run

    _, receipt = export_run(run, out)
    print(f"exported to {out}; loaded again it gives {'the same' if receipt.passed else 'OTHER'} logits.")
    return 0 if receipt.passed else 1
