"""The verbs by name, and what happens to their errors."""

from __future__ import annotations

import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

import cyclopts

from noonsight.cli import atlas, drill, logbook, machine, model, plan, rehearse, serve

FAILED, WRONG_USE, LOCKED, INTERRUPTED = 1, 2, 4, 130

app = cyclopts.App(
    name="noon",
    help="Train a foundation model in the open, predictably: predict, train, measure, publish.",
    help_epilogue="Exit codes: 0 done, 1 failed, 2 wrong use, 3 results moved, 4 in use, 130 interrupted.",
    version=lambda: importlib.metadata.version("noonsight"),
    version_flags="--version",
    default_parameter=cyclopts.Parameter(negative=()),
)
for verb in (
    plan.run,
    logbook.show,
    logbook.check,
    logbook.sql,
    atlas.site,
    model.count,
    rehearse.rehearse,
    drill.drill,
    serve.export,
    plan.prune,
    machine.doctor,
):
    app.command(verb)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; known errors become one message on stderr."""
    from noonsight.logbook.claim import Held

    _make_printable()
    try:
        code = app(arguments, exit_on_error=False, print_error=True, result_action="return_value")
        return code if isinstance(code, int) else 0
    except cyclopts.CycloptsError:  # already printed
        return WRONG_USE
    except Held as error:
        return _say(error, LOCKED)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if list(arguments[:1]) != ["run"]:
            return 0
        return _say(
            "whoever read the output is gone, so the run was stopped; the same command goes on from here.", FAILED
        )
    except (ValueError, OSError) as error:
        return _say(error, WRONG_USE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _make_printable() -> None:
    """Let every text be printed: a terminal without Unicode shows ? for what it lacks, a closed one shows nothing."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _say(error: Exception | str, code: int) -> int:
    print(f"noon: {error}", file=sys.stderr)
    return code
