"""A voyage of tiny stages: the toy experiment in a folder of its own, edited by replacing text."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from noonsight.plan import runner
from noonsight.plan.screen import Screen

TOY = Path(__file__).parent / "toy.py"
RUN = "import sys; from noonsight.plan.runner import *; sys.exit(run_experiment('toy.py', 'voyages'))"


class Voyage:
    def __init__(self, folder: Path):
        self.folder, self.file, self.root = folder, folder / "toy.py", folder / "voyages"
        self.file.write_text(TOY.read_text())
        (folder / "beside.py").write_text("def triple(value):\n    return value * 3\n")
        self.pages = 0

    def edit(self, old: str, new: str, file: str = "toy.py") -> None:
        path = self.folder / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def add(self, stage: str) -> None:
        self.edit("# more stages", f"\n    last.append({stage})\n    # more stages")

    def run(self, **options) -> tuple[int, str]:
        stream = io.StringIO()

        def after(root):
            self.pages += 1

        code = runner.run_experiment(self.file, self.root, after=after, screen=Screen(stream), **options)
        return code, stream.getvalue()

    def start(self) -> subprocess.Popen:
        """The runner in a process of its own."""
        return subprocess.Popen(
            [sys.executable, "-c", RUN], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[2])},
        )  # fmt: skip

    def out(self, address: str) -> Path:
        return self.root / "toy" / address

    def pids(self) -> list[int]:
        """Worker and its child of the stage `wait`, once they are there."""
        until(lambda: (self.out("wait@1") / "pids.json").exists())
        return msgspec.json.decode((self.out("wait@1") / "pids.json").read_bytes())


def until(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether no process has this pid, or only the remains of one."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.fixture
def voyage(tmp_path):
    yield Voyage(tmp_path)
    sys.modules.pop("beside", None)
    sys.path[:] = [each for each in sys.path if each != str(tmp_path)]
