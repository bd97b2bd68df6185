"""Every metric that may appear in `metrics.jsonl`: its unit, which way is good, and one sentence for an outsider.

A metric that is not here has no page, no alarm and no meaning, so a check refuses it. Names that end in `/` are
families: `norm/grad/` covers `norm/grad/router` and any other parameter group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

Direction = Literal["lower", "higher", "steady"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """What a name in the logbook means."""

    name: str
    unit: str
    direction: Direction  # which way is good; "steady" means that change itself is the news
    sentence: str


class Vocabulary(Mapping[str, Metric]):
    """Names to metrics; a name of a family is found by its longest prefix."""

    def __init__(self, metrics: list[Metric]):
        self._metrics = {metric.name: metric for metric in metrics}

    def __getitem__(self, name: str) -> Metric:
        if name in self._metrics:
            return self._metrics[name]
        parts = name.split("/")
        for length in range(len(parts) - 1, 0, -1):
            family = self._metrics.get("/".join(parts[:length]) + "/")
            if family is not None and all(parts[length:]):
                return dataclasses.replace(family, name=name)
        raise KeyError(f"{name!r} is not in logbook/vocabulary.py: add it with unit, direction and one sentence")

    def __iter__(self) -> Iterator[str]:
        return iter(self._metrics)

    def __len__(self) -> int:
        return len(self._metrics)


def _metric(name: str, unit: str, direction: Direction, sentence: str) -> Metric:
    return Metric(name=name, unit=unit, direction=direction, sentence=sentence)


METRICS: Mapping[str, Metric] = Vocabulary(
    [
        # Learning
        _metric("batch_digest", "1", "steady", "48 bits over the batch: equal digests are equal samples."),
        _metric("loss", "nats/token", "lower", "What the optimiser minimises: cross-entropy plus the z-loss term."),
        _metric(
            "cross_entropy", "nats/token", "lower", "Mean surprise at the next token of the batch, before the step."
        ),
        _metric("z_loss", "nats/token", "steady", "Penalty that keeps the log of the softmax's denominator near zero."),
        _metric("logsumexp", "nats", "steady", "Mean log of the softmax's denominator; the z-loss holds it near zero."),
        _metric(
            "eval/bits_per_byte",
            "bits/byte",
            "lower",
            "Bits needed per byte of held-out text: comparable across tokenizers, and what predictions are about.",
        ),
        _metric(
            "eval/bits_per_byte_sample",
            "bits/byte",
            "lower",
            "Bits per byte on every fourth held-out document, for a quick look during the run.",
        ),
        _metric("bits_per_byte", "bits/byte", "lower", "`eval/bits_per_byte` of a finished run: what is predicted."),
        _metric("eval/bits_per_byte/", "bits/byte", "lower", "Bits per byte of held-out text of one domain."),
        _metric(
            "eval/bits_per_byte_macro",
            "bits/byte",
            "lower",
            "Mean over domains of bits per byte: each counts the same.",
        ),
        _metric("eval/loss", "nats/token", "lower", "Mean surprise at the next token of held-out text."),
        # Optimiser
        _metric("rate/", "1", "steady", "Learning rate of one group of parameters; must equal the schedule."),
        _metric("norm/grad", "1", "steady", "Norm of the gradient over all parameters, before any clipping."),
        _metric("norm/grad/", "1", "steady", "Norm of the gradient of one group of parameters."),
        _metric("norm/param", "1", "steady", "Norm of all parameters."),
        _metric(
            "norm/param/", "1", "steady", "Norm of one group of parameters; constant where the optimiser constrains it."
        ),
        _metric("norm/update/", "1", "steady", "Norm of the last change of one group of parameters."),
        _metric(
            "ratio/update/", "1", "steady", "Size of the last change of one group relative to the size of the group."
        ),
        _metric("skipped", "steps", "lower", "1 where a step took its batch and nothing was learned from it."),
        _metric(
            "attention/gate_mean", "1", "steady", "Mean of the head gates; 1 at the start, near 0 means shut heads."
        ),
        _metric("attention/gate_min", "1", "steady", "Mean of the head gates of the layer that is shut most."),
        # Experts
        _metric(
            "router/entropy", "nats", "higher", "Entropy of the mean load over experts; ln(experts) is perfect balance."
        ),
        _metric(
            "router/entropy/", "nats", "higher", "Entropy of the mean load over experts of one layer or of one kind."
        ),
        _metric(
            "router/load_max_over_mean", "1", "lower", "Load of the busiest expert over the mean load, worst layer."
        ),
        _metric("router/load_max_over_mean/", "1", "lower", "Load of the busiest expert over the mean, one layer."),
        _metric("router/load_min_over_mean", "1", "higher", "Load of the idlest expert over the mean load: 0 is dead."),
        _metric(
            "router/grad_min_over_mean",
            "1",
            "higher",
            "Gradient norm of the expert with the smallest one over the mean of its layer, worst layer: 0 does not learn.",
        ),
        _metric("router/drop_rate", "1", "lower", "Share of token-expert assignments that found no room."),
        _metric("router/drop_rate/", "1", "lower", "Share of assignments refused by the sender, or by the receiver."),
        _metric("router/bias_min", "1", "steady", "Smallest routing bias that balancing has set, over all layers."),
        _metric("router/bias_max", "1", "steady", "Largest routing bias that balancing has set, over all layers."),
        # Speed
        _metric("tokens", "tokens", "higher", "Tokens consumed since the start of the run."),
        _metric("tokens_per_s", "tokens/s", "higher", "Tokens of the step over its wall time."),
        _metric("step_s", "s", "lower", "Wall time of the step, saving and evaluation not counted."),
        _metric("flops_per_s", "FLOP/s", "higher", "Model FLOPs of the step over its wall time."),
        _metric("mfu", "1", "higher", "Model FLOPs per second over what the machine could do at most."),
        _metric("save_s", "s", "lower", "Time for which saving a checkpoint held up training."),
        _metric("memory_bytes", "bytes", "steady", "Resident memory of the training process."),
        # Data
        _metric("data/share/", "1", "steady", "Share of the batch that came from one cell of the mixture."),
        _metric("data/documents", "documents", "steady", "Documents that end in the batch."),
        _metric("data/empty_documents", "documents", "lower", "Documents of the batch that are nothing but an end."),
        _metric("data/padding", "1", "lower", "Share of the positions of the batch that carry no loss."),
    ]
)
