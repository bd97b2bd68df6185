"""What a pretraining run is: plain frozen dataclasses, importable without JAX.

They live apart from the code that obeys them so that an experiment file can be read, hashed and compared in
milliseconds. Every field is identity: two runs that differ in one of them are two runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from noonsight.model.config import ModelConfig, check_fields

LEAST_EPSILON = 1.1e-19
"""Square root of the smallest normal float32. Below it Adam's quotient has no bound: 1e-20 / (sqrt(0) + 1e-30)."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser and its schedule. Defaults are the hero's constants; what depends on the size of the run has none.

    Rates and `epsilon` come from the transfer rule (`scaling.transfer.hero_rates`); `beta2` is declared beside them.
    """

    kind: Literal["muonh", "adamw", "muon"] = "muonh"
    adam_lr: float
    """Peak rate of the Adam group (and of every leaf under `adamw`)."""
    matrix_lr: float
    """Peak rate of MuonH and AdamH: a relative rotation, not a distance. Of plain Muon: a distance. `adamw` does not
    use it.
    """
    beta1: float = 0.9
    beta2: float
    epsilon: float
    """Added outside the root; at least `LEAST_EPSILON`."""
    momentum: float = 0.95
    newton_schulz: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the Newton-Schulz matmuls; bfloat16 still accumulates in float32."""
    expert_hyperball: Literal["pooled", "per_matrix"] = "pooled"
    """One norm per layer over all experts (what the hero ran), or one per expert matrix."""
    weight_decay: float = 0.0
    """`muonh`: on head gate and router, falling linearly to 0 at the last step. `adamw`, `muon`: on the matrices of
    those groups, constant.
    """
    weight_decay_from: int = 0
    """The first step with weight decay. The hero began at 58,014, when gates had already shut; a new run begins at 0."""
    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    warmup_fraction: float = 0.01
    min_lr_fraction: float = 0.05
    decay_fraction: float = 0.2
    """`wsd` only: the last part of the run, in which the rate falls linearly to its minimum."""
    rewarm_from: int = 0
    rewarm_steps: int = 0
    """From step `rewarm_from` the rate rises once more from 0 to the schedule, over `rewarm_steps` steps (0: never)."""

    def peak(self, group: str) -> float:
        """The peak rate of an optimiser group."""
        return self.adam_lr if group in ("adam", "adamw") else self.matrix_lr

    def __post_init__(self) -> None:
        """Refuse what no schedule or optimiser can mean. Raises ValueError."""
        check_fields(self)
        for name in ("adam_lr", "matrix_lr", "epsilon", "weight_decay"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "a number that is not negative")
        rule = (
            f"at least {LEAST_EPSILON:g}: a smaller gradient has a square of 0 in float32, and nothing else divides it"
        )
        _require(self.epsilon >= LEAST_EPSILON, "epsilon", self.epsilon, rule)
        for name in ("weight_decay_from", "rewarm_from", "rewarm_steps"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "a number of steps, 0 or more")
        for name in ("beta1", "beta2", "momentum"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        for name in ("warmup_fraction", "min_lr_fraction", "decay_fraction"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share of the run, 0 to 1")
        if self.rewarm_from and not self.rewarm_steps:
            rule = "0 where rewarm_steps is 0; say over how many steps the rate rises again"
            _require(False, "rewarm_from", self.rewarm_from, rule)
        if self.weight_decay_from and not self.weight_decay:
            rule = "0 where weight_decay is 0; say how much decay begins there"
            _require(False, "weight_decay_from", self.weight_decay_from, rule)
        if self.schedule == "wsd" and self.warmup_fraction + self.decay_fraction > 1:
            raise ValueError(
                f"warmup_fraction {self.warmup_fraction} + decay_fraction {self.decay_fraction} is more than the whole "
                "run, so the decay would begin before the warm-up ends; make one of them smaller"
            )


MAY_CHANGE = ("sequence_length", "qk_mult", "exchange", "capacity_factor", "remat", "window", "z_loss_weight")
"""Fields of a model that a phase may change: none of them moves or shapes a parameter."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What is different from step `from_step` on: the whole model, the whole optimiser, the rows of a batch. None: as
    before. Mixtures have phases of their own (`tokens.mixture`).
    """

    name: str
    from_step: int
    model: ModelConfig | None = None
    """For another context (`families.lengthened`), qk_mult or exchange; only the fields of `MAY_CHANGE` may differ."""
    optimizer: OptimizerConfig | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse values of the wrong type. Raises ValueError."""
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """One pretraining run: model, optimiser, how long, how often to look. Every `*_every` is in steps; 0 means
    never.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    num_steps: int
    batch_size: int
    sequence_length: int
    seed: int
    evaluate_every: int = 0
    """0: only at the end."""
    checkpoint_every: int
    """Permanent checkpoints. The last state is always kept as the final one."""
    hash_every: int = 100
    """How often the hash of all parameters is recorded."""
    description: str = ""
    first_step: int = 0
    """The step from which the run goes on with the state that its input `parent` kept there; 0: a fresh state."""
    horizon: int | None = None
    """Steps for which schedule and mixture are made, where the run ends before them; None: its own."""
    phases: tuple[Phase, ...] = ()
    """What changes at named steps, in their order. Up to the first one the run is as the fields above say."""
    skip_steps: tuple[int, ...] = ()
    """Steps whose batch is passed over: it is taken, and nothing is learned from it."""
    skip_spikes: bool = True
    """Whether a step whose loss jumps far out of its usual range is passed over, with the one before it."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be run, and an optimiser whose times lie beyond the run. Raises ValueError."""
        check_fields(self)
        for name in ("num_steps", "batch_size", "sequence_length"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "at least 1")
        for name in ("seed", "evaluate_every", "checkpoint_every", "hash_every"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        rule = (
            f"the model's sequence_length, {self.model.sequence_length}: evaluation and export use the model's; "
            "change one of them (`families.lengthened` gives a model a longer context)"
        )
        _require(self.sequence_length == self.model.sequence_length, "sequence_length", self.sequence_length, rule)
        rule = f"a step before the last, {self.num_steps}"
        _require(0 <= self.first_step < self.num_steps, "first_step", self.first_step, rule)
        rule = f"None, or at least num_steps, {self.num_steps}"
        _require(self.schedule_steps >= self.num_steps, "horizon", self.horizon, rule)
        told, rule = self.optimizer, f"a step of the schedule, which has {self.schedule_steps}"
        _require(told.weight_decay_from < self.schedule_steps, "weight_decay_from", told.weight_decay_from, rule)
        risen, rule = told.rewarm_from + told.rewarm_steps, f"at most num_steps, {self.schedule_steps}"
        _require(risen <= self.schedule_steps, "rewarm_from + rewarm_steps", risen, rule)
        for step in self.skip_steps:
            _require(0 <= step < self.num_steps, "skip_steps", step, f"steps of the run, 0 to {self.num_steps - 1}")
        self._check_phases()

    def parts(self) -> tuple[PretrainConfig, ...]:
        """The run as one config per phase, each with its `first_step` and the `num_steps` at which it ends."""
        starts = [self.first_step, *(phase.from_step for phase in self.phases)]
        ends = [*starts[1:], self.num_steps]
        model, optimizer, rows, found = self.model, self.optimizer, self.batch_size, []
        for phase, start, end in zip((None, *self.phases), starts, ends):
            if phase is not None:
                model, optimizer = phase.model or model, phase.optimizer or optimizer
                rows = phase.batch_size or rows
            found.append(
                replace(
                    self,
                    model=model,
                    optimizer=optimizer,
                    batch_size=rows,
                    sequence_length=model.sequence_length,
                    first_step=start,
                    num_steps=end,
                    horizon=self.schedule_steps,
                    phases=(),
                    skip_steps=(),
                )
            )
        return tuple(found)

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before `step`; a step before `first_step` counts as one of the first phase."""
        parts = self.parts() if self.phases else (self,)
        total = parts[0].first_step * parts[0].batch_tokens
        for part in parts:
            total += max(0, min(step, part.num_steps) - part.first_step) * part.batch_tokens
        return total if step >= parts[0].first_step else step * parts[0].batch_tokens

    def _check_phases(self) -> None:
        """Phases must follow each other inside the run and keep every parameter as it is."""
        before = self.first_step
        for phase in self.phases:
            what = f"phase {phase.name!r}: from_step"
            rule = f"after {before} (the start of what comes before it) and before num_steps, {self.num_steps}"
            _require(before < phase.from_step < self.num_steps, what, phase.from_step, rule)
            before = phase.from_step
            if phase.model is not None:
                moved = [
                    field.name
                    for field in fields(phase.model)
                    if getattr(phase.model, field.name) != getattr(self.model, field.name)
                    and field.name not in MAY_CHANGE
                ]
                rule = f"as they are in the run's model; a phase may change {', '.join(MAY_CHANGE)}"
                _require(not moved, f"phase {phase.name!r}: other fields of the model", moved, rule)
            if phase.optimizer is not None:
                rule = f"the run's, {self.optimizer.kind!r}: its moments go on"
                kind = phase.optimizer.kind
                _require(kind == self.optimizer.kind, f"phase {phase.name!r}: optimizer.kind", kind, rule)
        self.parts() if self.phases else None

    @property
    def batch_tokens(self) -> int:
        """Tokens of one step."""
        return self.batch_size * self.sequence_length

    @property
    def schedule_steps(self) -> int:
        """The length of the run that schedule and mixture are made for."""
        return self.num_steps if self.horizon is None else self.horizon


def _require(good: bool, name: str, value: object, rule: str) -> None:
    if not good:
        raise ValueError(f"the training config has {name} = {value!r}; it must be {rule}")
