"""The whole voyage in miniature: real text, a ladder, a frozen prediction, a run that is killed once, a verdict, an export.

Question   Can six small runs of the hero recipe predict a run of eight times the compute of the largest?
Expected   Bits per byte inside the 90 % interval that was frozen before the run; the interval no wider than 10 % of its median.
Time       About four minutes on two idle cores, without an accelerator; less than 2 GiB of memory.
Command    noon run experiments/miniature.py

Your own text: copy this file, point TEXT at a folder of plain text files (six megabytes or more), run the copy.
"""

from pathlib import Path

from noonsight.model.families import FAMILIES, miniature
from noonsight.recipe.window import (
    Experiment,
    Fault,
    Placement,
    curate,
    evaluate,
    export,
    forecast,
    pretrain,
    sample,
    settle,
    text_folders,
)
from noonsight.scaling.ladder import MINIATURE, MINIATURE_TARGET

TEXT = Path(__file__).parents[1] / "assets" / "voyages"
KINDS = {
    "jargon": "reference",
    "milton": "poetry",
    "shakespeare": "drama",
    "sqlite-docs": "manual",
    "sqlite-source": "code",
}
VOCABULARY = 4096
BETA2 = FAMILIES["miniature"].beta2  # 0.98, declared: the transfer rule would clamp it at this batch size
PROMPTS = ("HAMLET.\nThe king", "A hacker is", "SQLite opens the")


def experiment(name: str = Path(__file__).stem, seed: int = 0) -> Experiment:
    """The graph, named like this file, so that a copy has results of its own.

    Another seed changes initial weights and the order of the data, everywhere.
    """
    corpus = curate(text_folders(TEXT, kinds=KINDS), vocab_size=VOCABULARY)
    rungs = [
        pretrain(
            rung,
            corpus,
            model=miniature(rung.width, rung.num_layers, VOCABULARY),
            seed=seed,
            beta2=BETA2,
        )
        for rung in MINIATURE
    ]
    model = miniature(MINIATURE_TARGET.width, MINIATURE_TARGET.num_layers, VOCABULARY)
    prediction = forecast(rungs, MINIATURE_TARGET, model)
    run = pretrain(
        MINIATURE_TARGET,
        corpus,
        model=model,
        seed=seed,
        beta2=BETA2,
        prediction=prediction,
        checkpoint_every=200,
        evaluate_every=400,
        hash_every=10,
        placement=Placement(faults=(Fault(kind="kill", at_step=619),)),  # 20 steps after a checkpoint, on purpose
    )
    evaluation = evaluate(run, corpus)
    exported = export(run, corpus)
    return Experiment(
        name=name,
        question="Do six small runs predict a run of eight times the compute of the largest?",
        expected="Bits per byte inside the frozen 90 % interval.",
        stages=(
            *corpus.stages,
            *rungs,
            prediction,
            run,
            evaluation,
            settle(prediction, evaluation, run),
            exported,
            sample(exported, PROMPTS, seed=seed),
        ),
    )
