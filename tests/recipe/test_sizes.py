"""The shop window refuses a run whose parts do not belong together."""

from dataclasses import replace

import pytest

from noonsight.model.families import miniature
from noonsight.plan.stage import Stage
from noonsight.recipe.window import Phase, forecast, pretrain, spell
from noonsight.scaling.ladder import MINIATURE, MINIATURE_TARGET
from noonsight.tokens.tokenizer import AlphabetConfig, write_alphabet

DOCUMENTS = Stage(
    name="documents", version="1", function=write_alphabet, config=AlphabetConfig(characters="ab"), sentence="Made."
)
CORPUS = spell(DOCUMENTS, "ab")
RUNG = MINIATURE[-1]
MODEL = miniature(RUNG.width, RUNG.num_layers, 64)


def run(rung, model):
    return pretrain(rung, CORPUS, model=model, seed=0, beta2=0.98)


def test_a_stage_trains_the_model_of_its_rung():
    stage = run(RUNG, MODEL)
    assert (stage.config.model, stage.config.sequence_length) == (MODEL, RUNG.sequence_length)
    assert f"width {MODEL.width}" in stage.sentence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 32}, "'d64' has width = 32, but the model beside it has 64"),
        ({"num_layers": 3}, "has num_layers = 3, but the model beside it has 2"),
        ({"sequence_length": 128}, "has sequence_length = 128, but the model beside it has 256"),
    ],
)
def test_a_rung_of_another_size_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(replace(RUNG, **change), MODEL)


def test_a_forecast_is_about_the_model_of_its_target():
    with pytest.raises(ValueError, match="'target' has width = 96, but the model beside it has 64"):
        forecast([run(RUNG, MODEL)], MINIATURE_TARGET, MODEL)


def test_phases_and_skipped_steps_reach_the_config():
    phase = Phase(name="capped", from_step=10, model=replace(MODEL, exchange="pooled", capacity_factor=1.5))
    stage = pretrain(RUNG, CORPUS, model=MODEL, seed=0, beta2=0.98, phases=(phase,), skip_steps=(3,))
    assert stage.config.parts()[1].model.exchange == "pooled" and stage.config.skip_steps == (3,)
