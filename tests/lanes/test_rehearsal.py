"""A small step compiled for machines that are only described, by the compilers of the extras rehearse-gpu and -tpu.

Run by `.ci/lanes/rehearsal.sh`, which installs them; skipped where they are not.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from noonsight.model.count.devices import carry_bytes
from noonsight.train.rehearse.job import Job, make_job
from noonsight.train.rehearse.report import rehearse
from proofs.rehearsal import small_job

pytestmark = pytest.mark.lane("rehearsal")


def lacking(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def ragged(target: str) -> Job:
    """The small job with rows sent, inputs of layers and moments on the host."""
    training = small_job().training
    model = replace(training.model, exchange="ragged", capacity_factor=1.15, remat="offload")
    return make_job(replace(training, model=model), target, rows_per_device=4)


@lacking("jax_cuda13_plugin")
def test_a_gpu_that_is_not_there():
    answer = rehearse(ragged("gb200:2x1x4"))
    found = answer.found
    assert answer.fits and not answer.mistakes
    assert answer.exchanged.ratio == pytest.approx(1, abs=0.05)
    assert {row.axes for row in found.collectives} >= {"expert", "replica"}
    assert found.host_temp_bytes >= carry_bytes(answer.job.training.model, answer.job.device_tokens)
    assert not found.host_modelled and found.host_resident_bytes > 0, "described GPUs know no memory of the host"
    assert found.peak_bytes == found.compiler_peak_bytes - found.host_resident_bytes + found.streamed_bytes


@lacking("libtpu")
def test_a_tpu_that_is_not_there():
    answer = rehearse(ragged("v5p:2x2x1"))
    assert answer.fits and not answer.mistakes
    assert answer.found.host_modelled and answer.found.peak_bytes == answer.found.compiler_peak_bytes
