"""From literals to stages: curate, pretrain, forecast, evaluate, settle, export, sample.

Everything given here is *what* (identity) except `placement`, which is *where*. A default is the value that the miniature uses;
a change is `dataclasses.replace` on a config or another argument in the experiment file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from noonsight.corpus import dedup, domains, quality, select, sources
from noonsight.logbook.record import Fault, Placement
from noonsight.model.config import ModelConfig
from noonsight.model.count import count
from noonsight.plan.stage import Experiment, Function, Stage
from noonsight.recipe import measuring, pretraining, publishing
from noonsight.scaling import forecast as forecasting
from noonsight.scaling import ladder, register, transfer
from noonsight.scaling.ladder import Rung
from noonsight.tokens import mixture, store, tokenizer
from noonsight.train.config import OptimizerConfig, Phase, PretrainConfig

__all__ = [
    "Corpus",
    "Experiment",
    "Fault",
    "Phase",
    "Placement",
    "Stage",
    "curate",
    "evaluate",
    "export",
    "forecast",
    "hero_optimizer",
    "pretrain",
    "sample",
    "settle",
    "spell",
    "text_folders",
]

BEST_PUBLIC_BITS_PER_BYTE = (
    0.8  # frontier models reach .68 to .76 on Paloma (Marin, issue #8824); no text of ours has a floor above
)
COPIES = "Find exact and near copies, each proven against a kept document."
JUDGED = "Apply the rules and grade every document from 0 to 4."
GROUPED = "Group the documents by what they are about."
CHOSEN = "Hold out a test set, then decide what trains, with reasons."
VOCABULARY = "Learn the vocabulary from the training text alone."
SPELLED = "Give each character of the alphabet a token."
STORED = "Write the documents as tokens, with the way back to the text."
MIXED = "Say how much of each cell is served, and when."


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The stages from text to batches; `stages` lists them in order. Documents that an experiment makes itself are
    neither judged nor chosen.
    """

    documents: Stage
    duplicates: Stage | None = None
    quality: Stage | None = None
    domains: Stage | None = None
    select: Stage | None = None
    tokenizer: Stage
    store: Stage
    mixture: Stage

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All of them, in running order."""
        judged = (self.duplicates, self.quality, self.domains, self.select)
        given = (self.documents, *judged, self.tokenizer, self.store, self.mixture)
        return tuple(stage for stage in given if stage is not None)


def text_folders(folder: str | Path, *, kinds: Mapping[str, str] | None = None) -> dict[str, tuple[Path, str, str]]:
    """Name -> (folder, kind, licence): one source per sub-folder, or one for all when files lie in `folder` itself.

    `kinds` gives the kind of a source ("prose" where it says nothing). The licence is the first line of its LICENCE.md.
    Raises FileNotFoundError when the folder does not exist.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the text folder {folder} does not exist. Give text_folders() a folder of plain text files."
        )
    files = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    whole = bool(files) or not below
    kinds = dict(kinds or {})
    return {path.name: (path, kinds.get(path.name, "prose"), _licence(path)) for path in ([folder] if whole else below)}


def curate(
    folders: Mapping[str, tuple[Path, str, str]],
    *,
    vocab_size: int = 4096,
    version: str = "1",
    selection: select.SelectConfig = select.SelectConfig(),
    duplicates: dedup.DuplicatesConfig = dedup.DuplicatesConfig(),
    mix: mixture.MixtureConfig = mixture.MixtureConfig(),
    on_bad: Literal["stop", "skip"] = "stop",
) -> Corpus:
    """Text folders (as `text_folders` returns them) to documents, judgements, a choice, tokens and a mixture.

    `on_bad` says what happens at a file that is not text: stop and name it, or skip it and count it.
    """
    scanned = tuple(
        sources.scan(path, name=name, kind=kind, licence=licence)
        for name, (path, kind, licence) in sorted(folders.items())
    )
    documents = Stage(
        name="documents",
        version=version,
        function=sources.collect,
        config=sources.CollectConfig(sources=scanned, on_bad=on_bad),
        placement=Placement(locations={name: str(path) for name, (path, _, _) in folders.items()}),
        sentence="Read the text and cut it into documents.",
    )

    def stage(name: str, function: Function, config: Any, sentence: str, **inputs: Stage) -> Stage:
        return Stage(name=name, version=version, function=function, config=config, inputs=inputs, sentence=sentence)

    copies = stage("duplicates", dedup.find_duplicates, duplicates, COPIES, documents=documents)
    judged = stage("quality", quality.judge, quality.QualityConfig(), JUDGED, documents=documents)
    grouped = stage("domains", domains.assign, domains.DomainsConfig(), GROUPED, documents=documents)
    judgements = {"documents": documents, "duplicates": copies, "quality": judged, "domains": grouped}
    chosen = stage("select", select.select, selection, CHOSEN, **judgements)
    words = tokenizer.TokenizerConfig(vocab_size=vocab_size)
    vocabulary = stage("tokenizer", tokenizer.train_tokenizer, words, VOCABULARY, documents=documents, select=chosen)
    text = {"documents": documents, "select": chosen, "tokenizer": vocabulary}
    tokens = stage("store", store.build_store, store.StoreConfig(), STORED, **text)
    mixed = stage("mixture", mixture.plan_mixture, mix, MIXED, store=tokens)
    return Corpus(
        documents=documents,
        duplicates=copies,
        quality=judged,
        domains=grouped,
        select=chosen,
        tokenizer=vocabulary,
        store=tokens,
        mixture=mixed,
    )


def spell(documents: Stage, characters: str, *, version: str = "1") -> Corpus:
    """Made documents, one token for each character of an alphabet, in the proportions in which they were made.

    `documents` is a stage of the experiment that writes documents.parquet and kept.parquet (docs/decisions/contracts.md).
    """
    alphabet = tokenizer.AlphabetConfig(characters=characters)
    letters = Stage(
        name="tokenizer", version=version, function=tokenizer.write_alphabet, config=alphabet, sentence=SPELLED
    )
    made = {"documents": documents, "select": documents, "tokenizer": letters}
    tokens = Stage(
        name="store",
        version=version,
        function=store.build_store,
        config=store.StoreConfig(),
        inputs=made,
        sentence=STORED,
    )
    mixed = Stage(
        name="mixture",
        version=version,
        function=mixture.plan_mixture,
        config=mixture.MixtureConfig(),
        inputs={"store": tokens},
        sentence=MIXED,
    )
    return Corpus(documents=documents, tokenizer=letters, store=tokens, mixture=mixed)


def pretrain(
    rung: Rung,
    corpus: Corpus,
    *,
    model: ModelConfig,
    seed: int,
    beta2: float | None = None,
    optimizer: OptimizerConfig | None = None,
    version: str = "1",
    prediction: Stage | None = None,
    placement: Placement | None = None,
    evaluate_every: int = 0,
    checkpoint_every: int = 0,
    hash_every: int = 100,
    until: int | None = None,
    parent: Stage | None = None,
    first_step: int = 0,
    phases: tuple[Phase, ...] = (),
    skip_steps: tuple[int, ...] = (),
) -> Stage:
    """One run, a supervisor above its worker. With `prediction` it cannot start before that forecast is frozen.

    Give either `beta2`, for the hero recipe (`hero_optimizer`), or an `optimizer` of your own, which is taken as it
    stands: `optimizer=replace(hero_optimizer(rung, beta2=0.98), kind="adamw", weight_decay=0.1)`. Raises ValueError for
    both or neither, when a rate of the recipe sits on its clamp, or when rung and model differ in size.

    A run in parts: one that stops at step `until` of its rung, and one that goes on from the state which `parent` kept
    at `first_step` (a checkpoint of it). Schedule and mixture are those of the whole rung in both. `phases`: what changes
    at named steps within one run (`train.config.Phase`). `skip_steps`: batches that nothing is learned from.
    """
    _require_same_size(rung, model)
    config = PretrainConfig(
        model=model,
        optimizer=_recipe(rung, beta2, optimizer),
        num_steps=rung.num_steps if until is None else until,
        batch_size=rung.batch_size,
        sequence_length=rung.sequence_length,
        seed=seed,
        evaluate_every=evaluate_every,
        checkpoint_every=checkpoint_every,
        hash_every=hash_every,
        first_step=first_step,
        horizon=None if until is None else rung.num_steps,
        phases=phases,
        skip_steps=skip_steps,
    )
    if (parent is None) != (first_step == 0):
        raise ValueError(f"pretrain: {rung.name} needs both a parent and its first_step, or neither")
    inputs = {"store": corpus.store, "mixture": corpus.mixture, "prediction": prediction, "parent": parent}
    return Stage(
        name=rung.name,
        version=version,
        function=pretraining.run,
        config=config,
        inputs={name: stage for name, stage in inputs.items() if stage is not None},
        sentence=f"Train width {rung.width} with {rung.num_layers} layers on {rung.num_tokens:,} tokens.",
        resumable=True,
        placement=placement or Placement(),
        prediction="prediction" if prediction is not None else None,
    )


def _recipe(rung: Rung, beta2: float | None, optimizer: OptimizerConfig | None) -> OptimizerConfig:
    if beta2 is not None and optimizer is None:
        return hero_optimizer(rung, beta2=beta2)
    if optimizer is not None and beta2 is None:
        return optimizer
    raise ValueError(f"pretrain: {rung.name} needs either beta2, for the hero recipe, or an optimizer of your own")


def hero_optimizer(rung: Rung, *, beta2: float) -> OptimizerConfig:
    """The hero recipe for one run: MuonH at the rates, epsilon and warm-up of the transfer rule, and a declared `beta2`.

    Newton-Schulz runs in float32, the rate falls linearly, nothing decays (`weight_decay` is 0). Everything else is
    reached with `dataclasses.replace`. Raises ValueError when a rate sits on its clamp.
    """
    rates = transfer.declare(transfer.hero_rates(rung.num_tokens, rung.width, rung.batch_tokens), beta2=beta2)
    transfer.require_unclamped(rates, rung.name)
    return OptimizerConfig(
        adam_lr=rates.adam_lr,
        matrix_lr=rates.matrix_lr,
        beta1=rates.beta1,
        beta2=rates.beta2,
        epsilon=rates.epsilon,
        momentum=rates.momentum,
        newton_schulz="float32",
        warmup_fraction=rates.warmup_fraction,
        min_lr_fraction=rates.min_lr_fraction,
    )


def forecast(
    rungs: Sequence[Stage], target: Rung, model: ModelConfig, *, version: str = "1", target_version: str = "1"
) -> Stage:
    """The frozen forecast of the target's bits per byte, from finished rungs. `model` is the target's.

    Raises ValueError when the ladder has too few rungs or steps, or reaches too far, or when `model` is of another size.
    """
    _require_same_size(target, model)
    trained = [rung.config for rung in rungs]
    sizes = [
        replace(
            target,
            name=rung.name,
            width=config.model.width,
            num_layers=config.model.num_layers,
            num_steps=config.num_steps,
        )
        for rung, config in zip(rungs, trained)
    ]
    if wrong := ladder.problems(sizes, target, declared=("beta2",)):
        raise ValueError("this ladder cannot carry a forecast: " + "; ".join(wrong))
    counts = count(model)
    tokens = target.num_steps * target.batch_size * target.sequence_length
    config = forecasting.ForecastConfig(
        run=f"{target.name}@{target_version}",
        active_parameters=counts.active_parameters,
        tokens=tokens,
        train_flops=float(3 * counts.forward_flops_per_token * tokens),
        floor_at_most=BEST_PUBLIC_BITS_PER_BYTE,
    )
    return Stage(
        name="forecast",
        version=version,
        function=forecasting.forecast,
        config=config,
        inputs={rung.name: rung for rung in rungs},
        sentence=f"Predict the bits per byte of {target.name}, with an interval, before it runs.",
    )


def evaluate(run: Stage, corpus: Corpus, *, version: str = "1", batch_size: int = 16) -> Stage:
    """Bits per byte of a finished run on the held-out documents, by domain."""
    return Stage(
        name="evaluate",
        version=version,
        function=measuring.run,
        config=measuring.MeasureConfig(batch_size=batch_size),
        inputs={"run": run, "store": corpus.store},
        sentence="Measure bits per byte on held-out documents, by domain.",
    )


def settle(prediction: Stage, evaluation: Stage, run: Stage, *, version: str = "1") -> Stage:
    """The verdict: the prediction held against the evaluation of the run it was about."""
    return Stage(
        name="verdict",
        version=version,
        function=register.verdict,
        config=register.VerdictConfig(),
        inputs={"prediction": prediction, "result": evaluation, "run": run},
        sentence="Hold the result against the prediction.",
    )


def export(run: Stage, corpus: Corpus, *, version: str = "1") -> Stage:
    """The final model in Hugging Face form, loaded again and proven equal."""
    return Stage(
        name="export",
        version=version,
        function=publishing.run_export,
        config=publishing.ExportConfig(),
        inputs={"run": run, "tokenizer": corpus.tokenizer, "store": corpus.store},
        sentence="Write the model in Hugging Face form, load it again, prove that it is the same.",
    )


def sample(
    exported: Stage, prompts: Sequence[str], *, version: str = "1", max_tokens: int = 96, seed: int = 0
) -> Stage:
    """Continuations of `prompts` by the exported model."""
    return Stage(
        name="samples",
        version=version,
        function=publishing.run_samples,
        config=publishing.SampleConfig(prompts=tuple(prompts), max_tokens=max_tokens, seed=seed),
        inputs={"export": exported},
        sentence="Let the exported model write.",
    )


def _require_same_size(rung: Rung, model: ModelConfig) -> None:
    for name in ("width", "num_layers", "sequence_length"):
        told, found = getattr(rung, name), getattr(model, name)
        if told != found:
            raise ValueError(
                f"the rung {rung.name!r} has {name} = {told}, but the model beside it has {found}. Rates and words follow "
                "the rung, the run follows the model: make the model from the sizes of its rung."
            )


def _licence(folder: Path) -> str:
    note = folder / "LICENCE.md"
    if not note.is_file():
        return "not stated"
    lines = [line.lstrip("# ").strip() for line in note.read_text(encoding="utf-8").splitlines() if line.strip()]
    return lines[0] if lines else "not stated"
