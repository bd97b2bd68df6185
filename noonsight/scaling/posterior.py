"""From a few finished rungs to a distribution for a larger run: many scaling laws, weighed by the rungs.

A law says how the loss shrinks with parameters N, tokens D and compute C. We draw many laws from a stated prior (five
forms, their exponents, the share of the loss that no model removes, the noise of a run), weigh each by the likelihood
of the rungs, and let each predict the target as a normal: the result is a mixture of normals, not a point. The scale of
the loss is integrated out exactly, so a law is a *shape* f and the rungs only need its ratios:

    log L_i = s + log f(N_i, D_i, C_i) + noise,   noise ~ Normal(0, sigma^2),   s flat
    parts      f = e + (1-e) [w (N/N_0)^-a + (1-w) (D/D_0)^-b]     N active parameters (Hoffmann et al. 2022, eq. 2)
    joint      f = e + (1-e) [w (N/N_0)^(-a/b) + (1-w) D_0/D]^b    small models gain less (Kaplan et al. 2020, eq. 1.5)
    compute    f = e + (1-e) (C/C_0)^-c                            the form of Marin's ladders, floor not pinned
    parts_cost and joint_cost take N = C / 6D, which counts head and attention too

Index 0 is the rung with most compute. Amplitudes stay positive by construction; the floor e is never pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import gammaln, logsumexp, ndtr
from scipy.stats import chi2, norm, qmc

FORMS = ("parts", "parts_cost", "joint", "joint_cost", "compute")


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed of a scaling law before the rungs are seen. Shares are of the largest rung's loss.

    Exponents and noise are log-normal: (median, standard deviation of the log). The medians follow public fits
    (Besiroglu et al. 2024: .348 / .366; Llama 3: .31 / .314; Marin's ladders in compute: .09 with their floors).
    """

    floor_share: tuple[float, float] = (0.0, 0.75)  # uniform
    size_exponent: tuple[float, float] = (0.35, 0.4)
    data_exponent: tuple[float, float] = (0.35, 0.4)
    compute_exponent: tuple[float, float] = (0.16, 0.45)
    noise: tuple[float, float] = (0.003, 0.8)  # of one run, relative
    form_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)  # in the order of FORMS
    num_draws: int = 8192  # per form


@dataclass(frozen=True, kw_only=True)
class Points:
    """Finished runs: active parameters, training tokens, training FLOPs, and the loss in any unit. Shape [n] each."""

    parameters: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    losses: np.ndarray

    def take(self, index) -> Points:
        return Points(
            parameters=self.parameters[index],
            tokens=self.tokens[index],
            flops=self.flops[index],
            losses=self.losses[index],
        )


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """Weighted predictions of one target. log_loss, std and weights have shape [draws]; weights sum to 1."""

    log_loss: np.ndarray
    std: np.ndarray  # of the log
    weights: np.ndarray
    forms: dict[str, float]  # posterior weight of each form
    floor: tuple[float, float, float]  # 5, 50, 95 % of the floor, in the unit of the loss
    effective_draws: float

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of the log loss."""
        mean = float(self.weights @ self.log_loss)
        return mean, float(np.sqrt(self.weights @ (self.std**2 + (self.log_loss - mean) ** 2)))


def infer(rungs: Points, target: Points, prior: Prior, *, drift: float = 0.0) -> Posterior:
    """Weigh draws from `prior` by the rungs and predict the one run in `target` (its losses are not read).

    `drift` is the extra standard deviation of the log loss for one factor e of compute between the largest rung and
    the target: what backtests show that the laws themselves do not know. Where parameters or tokens are NaN
    (unpublished), only the law in compute is used. Raises ValueError below three rungs.
    """
    if len(rungs.losses) < 3:
        raise ValueError(f"a forecast needs at least three rungs, got {len(rungs.losses)}; add rungs to the ladder")
    reference = int(np.argmax(rungs.flops))
    distance = max(0.0, float(np.log(target.flops[0] / rungs.flops[reference])))
    known = np.all(np.isfinite([rungs.parameters, rungs.tokens])) and np.all(
        np.isfinite([target.parameters, target.tokens])
    )
    forms = FORMS if known else ("compute",)
    parts = [_weigh(form, rungs, target, reference, prior) for form in forms]
    log_weights = np.concatenate([np.log(prior.form_weights[FORMS.index(f)]) + p[0] for f, p in zip(forms, parts)])
    weights = np.exp(log_weights - logsumexp(log_weights))
    by_form = weights.reshape(len(forms), -1).sum(axis=1)
    noise = np.concatenate([part[2] for part in parts])
    floors = np.concatenate([part[3] for part in parts])
    return Posterior(
        log_loss=np.concatenate([part[1] for part in parts]),
        std=np.sqrt(noise**2 + (drift * distance) ** 2),
        weights=weights,
        forms={form: float(w) for form, w in zip(forms, by_form)},
        floor=tuple(float(q) for q in _weighted_quantiles(floors, weights, (0.05, 0.5, 0.95))),
        effective_draws=float(1.0 / np.sum(weights**2)),
    )


def _weigh(form, rungs, target, reference, prior):
    """(log weight, predicted log loss, std, floor) of every draw of one form. Shape [draws] each.

    The log weights are relative to the prior, so their sum over a form is the form's evidence.
    """
    num = len(rungs.losses)

    def fit(cube):
        draws = _draws(form, prior, cube)
        residual = np.log(rungs.losses) - np.log(_shape(form, draws, rungs, rungs, reference))
        scale = residual.mean(axis=1)
        squares = np.sum((residual - scale[:, None]) ** 2, axis=1)
        return draws, scale, -(num - 1) * np.log(draws["noise"]) - squares / (2 * draws["noise"] ** 2)

    normals, log_weights = _sample(lambda z: fit(z)[2], prior.num_draws, seed=FORMS.index(form))
    draws, scale, _ = fit(normals)
    at_target = np.log(_shape(form, draws, target, rungs, reference))[:, 0]
    return log_weights, scale + at_target, draws["noise"] * np.sqrt(1 + 1 / num), draws["floor"] * np.exp(scale)


def _sample(log_likelihood, num_draws, *, seed, dims=5, rounds=10, freedom=6.0):
    """Adaptive importance sampling of likelihood x standard normal prior: (z [draws, dims], log weights [draws]).

    Each round draws from a Student t around the last round's weighted mean and covariance (Oh and Berger 1992). Early
    weights are tempered until a tenth of the draws counts, so that the first rounds cannot collapse to one point.
    """
    cube = np.clip(qmc.Sobol(d=dims + 1, scramble=True, seed=seed).random(num_draws), 1e-6, 1 - 1e-6)
    shapes = norm.ppf(cube[:, :dims]) * np.sqrt(freedom / chi2.ppf(cube[:, dims:], freedom))
    mean, root = np.zeros(dims), np.eye(dims)
    for _ in range(rounds):
        z = mean + shapes @ root.T
        log_proposal = -(freedom + dims) / 2 * np.log1p(np.sum(shapes**2, axis=1) / freedom)
        log_proposal += _log_t_constant(freedom, dims) - np.log(np.abs(np.diag(root))).sum()
        log_weights = log_likelihood(z) - 0.5 * np.sum(z**2, axis=1) - dims / 2 * np.log(2 * np.pi) - log_proposal
        weights = _tempered(log_weights, num_draws / 10)
        mean = weights @ z
        centred = z - mean
        root = np.linalg.cholesky((centred * weights[:, None]).T @ centred + 1e-6 * np.eye(dims))
    return z, log_weights - np.log(num_draws)


def _log_t_constant(freedom, dims):
    return gammaln((freedom + dims) / 2) - gammaln(freedom / 2) - dims / 2 * np.log(freedom * np.pi)


def _tempered(log_weights, least_effective):
    """Normalised weights raised to the largest power <= 1 that keeps the effective number of draws."""
    power = 1.0
    while True:
        weights = np.exp(power * log_weights - logsumexp(power * log_weights))
        if power < 1e-3 or 1 / np.sum(weights**2) >= least_effective:
            return weights
        power *= 0.7


def _draws(form: str, prior: Prior, z) -> dict[str, np.ndarray]:
    """The law's numbers from standard normals z [draws, 5]."""
    z = np.clip(z, -8.0, 8.0)  # beyond, the prior has no weight and powers overflow
    low, high = prior.floor_share
    first = prior.compute_exponent if form == "compute" else prior.size_exponent
    return {
        "floor": low + (high - low) * ndtr(z[:, 0]),
        "split": np.clip(ndtr(z[:, 1]), 1e-9, 1 - 1e-9),
        "first": _log_normal(z[:, 2], first),
        "second": _log_normal(z[:, 3], prior.data_exponent),
        "noise": _log_normal(z[:, 4], prior.noise),
    }


def _log_normal(z, median_and_spread):
    median, spread = median_and_spread
    return median * np.exp(spread * z)


def _shape(form, draws, points, rungs, reference):
    """f of the module's docstring at `points`, relative to the reference rung. [draws, points]"""
    log_flops = np.log(points.flops / rungs.flops[reference])
    column = {name: values[:, None] for name, values in draws.items()}
    if form == "compute":
        log_reducible = -column["first"] * log_flops
    else:
        log_tokens = np.log(points.tokens / rungs.tokens[reference])
        log_size = np.log(points.parameters / rungs.parameters[reference])
        if form.endswith("_cost"):
            log_size = log_flops - log_tokens
        power = column["second"] if form.startswith("joint") else 1.0
        of_size = np.log(column["split"]) - column["first"] / power * log_size
        of_tokens = np.log1p(-column["split"]) - column["second"] / power * log_tokens
        log_reducible = power * np.logaddexp(of_size, of_tokens)
    return column["floor"] + (1 - column["floor"]) * np.exp(log_reducible)


def _weighted_quantiles(values, weights, levels):
    order = np.argsort(values)
    return np.interp(levels, np.cumsum(weights[order]) - weights[order] / 2, values[order])


def to_components(posterior: Posterior, num: int = 16) -> tuple[tuple[float, float, float], ...]:
    """At most `num` normals (weight, mean, std) in the unit of the loss; mean and variance are those of the posterior.

    Draws are sorted by their prediction and cut into groups of equal weight; each group keeps its two moments.
    A log-normal of a few per cent is a normal to the precision that matters here.
    """
    order = np.argsort(posterior.log_loss)
    weights = posterior.weights[order]
    means = np.exp(posterior.log_loss[order])
    stds = means * posterior.std[order]
    group = np.minimum((np.cumsum(weights) - weights / 2) * num, num - 1).astype(int)
    components = []
    for index in np.unique(group):
        here = group == index
        weight = weights[here].sum()
        if weight <= 0:
            continue
        mean = weights[here] @ means[here] / weight
        variance = weights[here] @ (stds[here] ** 2 + (means[here] - mean) ** 2) / weight
        components.append((float(weight), float(mean), float(np.sqrt(variance))))
    total = sum(weight for weight, _, _ in components)
    return tuple((weight / total, mean, std) for weight, mean, std in components)
