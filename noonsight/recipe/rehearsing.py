"""The training run of an experiment, taken out to be rehearsed: no stage runs and no token store is opened."""

from __future__ import annotations

import difflib

from noonsight.model.count import count
from noonsight.plan.stage import Experiment, Stage
from noonsight.train.config import PretrainConfig
from noonsight.train.rehearse.job import Job, make_job


def job_of(
    experiment: Experiment,
    target: str,
    *,
    stage: str | None = None,
    rows_per_device: int | None = None,
    context: int = 1,
    moments_on_host: bool | None = None,
) -> Job:
    """The job of a training stage of `experiment` on `target`; without a name, of the one with most FLOPs.

    The devices of the stage's placement are those that its batch was planned for. Raises ValueError when there is no
    such stage, or for what `make_job` refuses.
    """
    chosen = training_stage(experiment, stage)
    return make_job(
        chosen.config,
        target,
        planned_devices=chosen.placement.num_devices,
        rows_per_device=rows_per_device,
        context=context,
        moments_on_host=moments_on_host,
    )


def training_stage(experiment: Experiment, name: str | None = None) -> Stage:
    """The training stage called `name`, or the largest. Raises ValueError with the names there are."""
    stages = {stage.name: stage for stage in experiment.ordered() if isinstance(stage.config, PretrainConfig)}
    if not stages:
        raise ValueError(f"the experiment {experiment.name!r} trains nothing, so there is no step to rehearse")
    if name is None:
        return max(stages.values(), key=lambda stage: _train_flops(stage.config))
    if name not in stages:
        near = difflib.get_close_matches(name, stages, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no training stage {name!r} in {experiment.name!r}{hint}; there are {', '.join(stages)}")
    return stages[name]


def _train_flops(config: PretrainConfig) -> int:
    return count(config.model).train_flops((config.num_steps - config.first_step) * config.batch_tokens)
