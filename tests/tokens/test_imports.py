"""The room is light: documents become batches without an accelerator library."""

import subprocess
import sys


def test_the_room_does_not_import_jax():
    code = "import sys, noonsight.tokens.trace; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
