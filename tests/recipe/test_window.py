"""What an experiment file buys: the hero recipe, or an optimiser of its own; families and experiments say the same."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from noonsight.corpus.select import SelectConfig, select
from noonsight.model.families import FAMILIES
from noonsight.recipe.window import Stage, hero_optimizer, pretrain, spell
from noonsight.scaling.ladder import MINIATURE_TARGET

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
DOCUMENTS = Stage(name="documents", version="1", function=select, config=SelectConfig(), sentence="Any stage.")
CORPUS = spell(DOCUMENTS, "ACGT")
MODEL = FAMILIES["miniature"].config()


@pytest.mark.parametrize(("name", "run"), [("miniature", "target"), ("nucleotide", "run")])
def test_an_experiment_trains_the_run_of_its_family(name, run):
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = next(each for each in module.experiment().stages if each.name == run).config
    family = FAMILIES[name]
    assert (config.model, config.num_steps, config.batch_size) == (family.config(), family.num_steps, family.batch_size)
    assert config.optimizer.beta2 == family.beta2 == 0.98


def test_the_recipe_is_the_default_and_another_optimiser_is_taken_as_it_stands():
    recipe = hero_optimizer(MINIATURE_TARGET, beta2=0.98)
    assert (recipe.kind, recipe.newton_schulz, recipe.weight_decay) == ("muonh", "float32", 0.0)
    assert pretrain(MINIATURE_TARGET, CORPUS, model=MODEL, seed=0, beta2=0.98).config.optimizer == recipe
    own = replace(recipe, kind="adamw", weight_decay=0.1)
    assert pretrain(MINIATURE_TARGET, CORPUS, model=MODEL, seed=0, optimizer=own).config.optimizer == own


@pytest.mark.parametrize("given", [{}, {"beta2": 0.98, "optimizer": hero_optimizer(MINIATURE_TARGET, beta2=0.98)}])
def test_one_optimiser_and_no_more(given):
    with pytest.raises(ValueError, match="target needs either beta2"):
        pretrain(MINIATURE_TARGET, CORPUS, model=MODEL, seed=0, **given)


def test_a_rate_on_its_clamp_is_refused():
    with pytest.raises(ValueError, match="short: matrix_lr"):
        hero_optimizer(replace(MINIATURE_TARGET, name="short", width=32, num_steps=160), beta2=0.98)
