"""Ten thousand steps in which nothing is wrong: six small models of different sizes, seeds and kinds of text.

Question   How often do the sentinels speak when there is nothing to say?
Expected   Never, or once.
Time       Two minutes on two idle cores.
Command    noon run proofs/calm.py
"""

from dataclasses import replace
from pathlib import Path

from noonsight.model.families import FAMILIES, miniature
from noonsight.recipe.window import Corpus, Experiment, Stage, curate, hero_optimizer, pretrain, text_folders
from noonsight.scaling.ladder import Rung

TEXT = Path(__file__).parents[1] / "assets" / "voyages"
VOCABULARY, LENGTH = 512, 64
SHAPES = ((32, 2, 4, 0), (32, 2, 8, 1), (48, 2, 4, 2), (32, 3, 4, 3), (64, 2, 2, 4), (32, 2, 4, 5))
STEPS = 1700


def train(corpus: Corpus, width: int, num_layers: int, batch_size: int, seed: int, steps: int = STEPS) -> Stage:
    """One run of the hero recipe, evaluated six times on the way."""
    name = f"d{width}x{num_layers}b{batch_size}s{seed}"
    rung = Rung(
        name=name, width=width, num_layers=num_layers, num_steps=steps, batch_size=batch_size, sequence_length=LENGTH
    )
    model = replace(miniature(width, num_layers, VOCABULARY), sequence_length=LENGTH)
    recipe = hero_optimizer(rung, beta2=FAMILIES["miniature"].beta2)
    return pretrain(rung, corpus, model=model, seed=seed, optimizer=recipe, evaluate_every=250, checkpoint_every=500)


def experiment(name: str = Path(__file__).stem) -> Experiment:
    """Six runs on two kinds of text."""
    corpus = curate(text_folders(TEXT, kinds={"milton": "poetry", "jargon": "reference"}), vocab_size=VOCABULARY)
    return Experiment(
        name=name,
        question="How often do the sentinels speak when there is nothing to say?",
        expected="Never, or once.",
        stages=(*corpus.stages, *(train(corpus, *shape) for shape in SHAPES)),
    )
