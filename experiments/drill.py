"""A small run to rehearse disasters with: a hundred times smaller than the miniature's, and recovered by the same code.

Question   Does a run that is killed, frozen, starved of disk and fed NaNs end as if nothing had happened?
Expected   Nothing lost, nothing repeated, the same weights bit for bit.
Time       About five minutes on two idle cores for 20 faults.
Command    noon drill experiments/drill.py --kills 20
           noon drill experiments/drill.py --kills 10 --stage pair      (two processes that share the run)
"""

from dataclasses import replace
from pathlib import Path

from noonsight.model.families import FAMILIES, miniature
from noonsight.recipe.window import Experiment, Placement, curate, hero_optimizer, pretrain, text_folders
from noonsight.scaling.ladder import Rung

TEXT = Path(__file__).parents[1] / "assets" / "voyages"
VOCABULARY = 512
PAIR = Placement(num_devices=2, num_processes=2)
RUNG = Rung(name="small", width=32, num_layers=2, num_steps=600, batch_size=4, sequence_length=64)


def experiment(name: str = Path(__file__).stem, seed: int = 0) -> Experiment:
    """Six hundred steps on one kind of text, with a checkpoint every twenty; a shorter run for two processes."""
    corpus = curate(text_folders(TEXT, kinds={"milton": "poetry"}), vocab_size=VOCABULARY)
    model = replace(miniature(RUNG.width, RUNG.num_layers, VOCABULARY), sequence_length=RUNG.sequence_length)
    told = {"model": model, "seed": seed, "optimizer": hero_optimizer(RUNG, beta2=FAMILIES["miniature"].beta2)}
    run = pretrain(RUNG, corpus, checkpoint_every=20, hash_every=10, **told)
    pair = replace(RUNG, name="pair", num_steps=150)
    gang = pretrain(pair, corpus, checkpoint_every=10, hash_every=10, placement=PAIR, **told)
    return Experiment(
        name=name,
        question="Do a small run and a pair of processes train, so that disasters can be rehearsed with them?",
        expected="A loss below that of the first step.",
        stages=(*corpus.stages, run, gang),
    )
