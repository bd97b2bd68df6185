"""The hero: 535 billion parameters, 18 trillion tokens, 704 accelerators. The published run (Marin, #8435) as code.

Question   Does a run of 535B-A23B on 11 racks of GB200 do what the closed forms and four small runs of its recipe say?
Expected   0.7406 bits per byte on Paloma (the public forecast); about 17 s a step, 77 days.
Time       About 80 days on 704 GB200, and 45 minutes on a laptop to rehearse every part of it.
Command    noon rehearse experiments/hero.py --target gb200:11x16x4

The run goes through contexts of 4K, 8K, 65K and 262K tokens, each a stage that goes on from the last state of the one
before, with one schedule over all. A cooldown branch leaves at day 15, so that there is a finished model early.

The text is yours: put folders of plain text below TEXT. Without them nothing can run and all can be rehearsed. Ours,
where the published run says nothing: the batch keeps its tokens when the context grows; a cell starts over where it is
used up; the phases' weights follow the quality of a cell instead of the 200 published numbers.
"""

from dataclasses import replace
from pathlib import Path

from noonsight.model.config import ModelConfig
from noonsight.model.families import LLAMA3_VOCABULARY, hero, lengthened
from noonsight.recipe.window import (
    Corpus,
    Experiment,
    Placement,
    Stage,
    curate,
    hero_optimizer,
    pretrain,
    text_folders,
)
from noonsight.scaling.ladder import HERO_TARGET, Rung
from noonsight.tokens.mixture import MixtureConfig, Phase
from noonsight.train.config import OptimizerConfig
from noonsight.train.schedule import share_of_peak

TEXT = Path(__file__).parent / "hero-text"
STEPS = HERO_TARGET.num_steps  # 390,251: 791 tokens for each active parameter
BLOCK_ROWS = 49_152  # every block of so many rows has the same cells; 48 steps of 11,264 rows are whole blocks
MIXTURES = (("broad", 0), ("technical", 108_000), ("cooldown", 312_192))  # name, first step: a multiple of 48
CONTEXTS = (  # tokens of a row, first step: so that whole blocks of rows lie before it
    (4_096, 0),
    (8_192, 195_168),
    (65_536, 370_944),
    (262_144, 387_072),
)
STEPS_A_DAY = 24 * 3_600 / 16.8
FORK, COOLDOWN_STEPS = 78_000, 7_200  # day 15; 1.4 days
CHECKPOINT_EVERY, EVALUATE_EVERY = 6_000, 3_000
EXACT = Placement(num_devices=704)


def model(context: int) -> ModelConfig:
    """The hero at one context, the inputs of layers kept on the host."""
    return replace(lengthened(hero(), context), remat="offload")


def optimizer() -> OptimizerConfig:
    """MuonH at the rates of the transfer rule. Decay acts on head gates and router from the step at which it was found
    missing.
    """
    rates = hero_optimizer(HERO_TARGET, beta2=0.95)
    return replace(rates, newton_schulz="bfloat16", weight_decay=0.02, weight_decay_from=58_014)


def cooldown(rates: OptimizerConfig) -> OptimizerConfig:
    """From the rates at FORK in a straight line to the floor of the whole run, over COOLDOWN_STEPS."""
    share = float(share_of_peak(rates, STEPS, FORK))
    return replace(
        rates,
        adam_lr=rates.adam_lr * share,
        matrix_lr=rates.matrix_lr * share,
        schedule="wsd",
        warmup_fraction=0.0,
        decay_fraction=COOLDOWN_STEPS / (FORK + COOLDOWN_STEPS),
        min_lr_fraction=rates.min_lr_fraction / share,
    )


def corpus() -> Corpus:
    """A vocabulary as large as the published one, and three mixtures that lean towards quality more and more."""
    phases = tuple(
        Phase(name=name, start_step=step, quality_tilt=tilt) for (name, step), tilt in zip(MIXTURES, (0.0, 0.25, 0.5))
    )
    mix = MixtureConfig(phases=phases, run_steps=STEPS, run_tokens=HERO_TARGET.num_tokens, block_rows=BLOCK_ROWS)
    return curate(text_folders(TEXT) if TEXT.is_dir() else {}, vocab_size=LLAMA3_VOCABULARY, mix=mix)


def part(context: int, name: str) -> Rung:
    """The rung of the hero with rows of `context` tokens, as many tokens in a batch."""
    rows = HERO_TARGET.batch_tokens // context
    return replace(HERO_TARGET, name=name, sequence_length=context, batch_size=rows)


def experiment(name: str = Path(__file__).stem, seed: int = 0) -> Experiment:
    """Four parts, one after the other, and the branch."""
    text, rates, parts = corpus(), optimizer(), list[Stage]()
    for number, (context, first) in enumerate(CONTEXTS):
        last = CONTEXTS[number + 1][1] if number + 1 < len(CONTEXTS) else STEPS
        before = {"parent": parts[-1], "first_step": first} if parts else {}
        parts.append(
            pretrain(
                part(context, f"context-{context // 1024}k"),
                text,
                model=model(context),
                seed=seed,
                optimizer=rates,
                until=last,
                checkpoint_every=CHECKPOINT_EVERY,
                evaluate_every=EVALUATE_EVERY,
                placement=EXACT,
                **before,
            )
        )
    branch = pretrain(
        replace(part(4_096, "cooldown"), num_steps=FORK + COOLDOWN_STEPS),
        text,
        model=model(4_096),
        seed=seed,
        optimizer=cooldown(rates),
        parent=parts[0],
        first_step=FORK,
        checkpoint_every=CHECKPOINT_EVERY,
        placement=EXACT,
    )
    return Experiment(
        name=name,
        question="Does the largest run do what the closed forms and small runs of its recipe say?",
        expected="0.7406 bits per byte on Paloma; 17 s a step.",
        stages=(*text.stages, *parts, branch),
    )
