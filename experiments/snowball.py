"""Snowball, 67 billion parameters of which 2 act (Marin, #6044), to be rehearsed on H100s.

Question   What would its step need and do on each device?
Expected   It fits the 80 GB of an H100 with four sequences of 8,192 tokens a device.
Time       Two minutes on two cores; nothing is trained.
Command    noon rehearse experiments/snowball.py --target h100:8x32x8

Half the batch until step 15,000, as published, would be another part; what is rehearsed is a step of the whole batch.
"""

from dataclasses import replace
from pathlib import Path

from noonsight.model.families import FAMILIES, snowball
from noonsight.recipe.window import Experiment, Placement, curate, pretrain, text_folders
from noonsight.scaling.ladder import Rung
from noonsight.scaling.transfer import may_rates
from noonsight.train.config import OptimizerConfig

TEXT = Path(__file__).parent / "snowball-text"  # folders of plain text; without them nothing can run, all be rehearsed
RUN = FAMILIES["snowball"]
MODEL = replace(snowball(), exchange="ragged", capacity_factor=1.15)
RUNG = Rung(
    name="snowball",
    width=MODEL.width,
    num_layers=MODEL.num_layers,
    num_steps=RUN.num_steps,
    batch_size=RUN.batch_size,
    sequence_length=MODEL.sequence_length,
)


def experiment(name: str = Path(__file__).stem, seed: int = 0) -> Experiment:
    """One run."""
    text = curate(text_folders(TEXT) if TEXT.is_dir() else {}, vocab_size=MODEL.vocab_size)
    rates = may_rates(RUNG.num_tokens, RUNG.width, RUNG.batch_tokens)
    optimizer = OptimizerConfig(
        adam_lr=rates.adam_lr,
        matrix_lr=rates.matrix_lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        epsilon=rates.epsilon,
        warmup_fraction=rates.warmup_fraction,
        min_lr_fraction=rates.min_lr_fraction,
    )
    run = pretrain(
        RUNG,
        text,
        model=MODEL,
        seed=seed,
        optimizer=optimizer,
        checkpoint_every=5_000,
        placement=Placement(num_devices=2_048),
    )
    return Experiment(
        name=name, question="What would each device need and do?", expected="It fits.", stages=(*text.stages, run)
    )
