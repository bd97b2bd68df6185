"""MoE V1, 129 billion parameters of which 16 act (Marin, #4697), to be rehearsed: on TPU v4, where it was trained.

Question   What would its step need and do on each device?
Expected   It fits the 32 GiB of a v4 with one sequence a device; the report says with how much to spare.
Time       Two minutes on two cores; nothing is trained.
Command    noon rehearse experiments/moe_v1.py --target v4:8x8x16

AdamH turns its matrices in the published run; here MuonH does, at the rates of the same rule: the program that moves
matrices is what is rehearsed. The published 1.04 trillion tokens are 123,977 steps of 2,048 rows.
"""

from dataclasses import replace
from pathlib import Path

from noonsight.model.families import FAMILIES, moe_v1
from noonsight.recipe.window import Experiment, Placement, curate, pretrain, text_folders
from noonsight.scaling.ladder import Rung
from noonsight.scaling.transfer import moe_v1_rates
from noonsight.train.config import OptimizerConfig

TEXT = Path(__file__).parent / "moe-v1-text"  # folders of plain text; without them nothing can run, all be rehearsed
RUN = FAMILIES["moe-v1"]
MODEL = replace(moe_v1(), exchange="ragged", capacity_factor=1.15)
STEPS = RUN.tokens // (RUN.batch_size * MODEL.sequence_length)
RUNG = Rung(
    name="moe-v1",
    width=MODEL.width,
    num_layers=MODEL.num_layers,
    num_steps=STEPS,
    batch_size=RUN.batch_size,
    sequence_length=MODEL.sequence_length,
)


def experiment(name: str = Path(__file__).stem, seed: int = 0) -> Experiment:
    """One run."""
    text = curate(text_folders(TEXT) if TEXT.is_dir() else {}, vocab_size=MODEL.vocab_size)
    rates = moe_v1_rates(RUNG.num_tokens, RUNG.width, RUNG.batch_tokens)
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
        placement=Placement(num_devices=1_024),
    )
    return Experiment(
        name=name, question="What would each device need and do?", expected="It fits.", stages=(*text.stages, run)
    )
