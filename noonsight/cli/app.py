"""The verbs by name, and what happens to their errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import cyclopts

from noonsight.cli import atlas, logbook, machine, model, plan, serve

WRONG_USE, LOCKED, INTERRUPTED = 2, 4, 130

app = cyclopts.App(
    name="noon",
    help="Train a foundation model in the open, predictably: predict, train, measure, publish.",
    help_epilogue="Exit codes: 0 done, 1 failed, 2 wrong use, 3 results moved, 4 in use, 130 interrupted.",
    version_flags=[],
    default_parameter=cyclopts.Parameter(negative=()),
)
for verb in (
    plan.run,
    logbook.show,
    logbook.check,
    logbook.sql,
    atlas.site,
    model.count,
    serve.export,
    plan.prune,
    machine.doctor,
):
    app.command(verb)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; known errors become one message on stderr."""
    from noonsight.logbook.claim import Held

    try:
        code = app(arguments, exit_on_error=False, print_error=True, result_action="return_value")
        return code if isinstance(code, int) else 0
    except cyclopts.CycloptsError:  # already printed
        return WRONG_USE
    except Held as error:
        return _say(error, LOCKED)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        return _say(error, WRONG_USE)
    except KeyboardInterrupt:
        return INTERRUPTED


def _say(error: Exception, code: int) -> int:
    print(f"noon: {error}", file=sys.stderr)
    return code
