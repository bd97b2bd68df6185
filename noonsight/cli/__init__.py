"""The door: `noon VERB`. One file per room, one short function per verb; a room is imported when its verb is called.

Exit codes: 0 done, 1 a stage or a check failed, 2 wrong use, 3 results were made from something else than the
experiment says now, 4 another process holds the folder, 130 interrupted.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (the installer can be bypassed)
    sys.stderr.write(
        "noon: Python " + sys.version.split()[0] + " is too old: noonsight needs 3.11 or newer. "
        "Install one (for instance: uv python install 3.11) and run this with it.\n"
    )
    sys.exit(2)


def main(arguments=None):
    """Run the command line and leave with its exit code; every error is one message without a traceback."""
    from noonsight.cli.app import run

    sys.exit(run(sys.argv[1:] if arguments is None else arguments))
