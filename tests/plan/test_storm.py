"""Kill the runner again and again at random moments; the same command ends with the result of an undisturbed run."""

import random
import subprocess

from noonsight.logbook import read
from noonsight.plan import runner


def test_ten_kills_change_no_result(voyage):
    for index in range(3):
        voyage.add(
            f'Stage(name="more{index}", version="1", function=double, config=Config(), inputs={{"number": second}})'
        )
    moments = random.Random(0)
    for _ in range(10):
        process = voyage.start()
        try:
            process.wait(timeout=moments.uniform(0.05, 0.9))
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
    assert voyage.run()[0] == runner.DONE
    runs = [read.run(out) for out in read.stage_folders(voyage.root, "toy")]
    assert [run.facts["value"] for run in runs] == [2, 12, 24, 24, 24]
    assert voyage.run()[0] == runner.DONE
