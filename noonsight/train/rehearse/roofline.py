"""Time and money of a step, from closed forms and from what the compiled program sends. Nothing was executed.

    step = FLOPs / (peak x reached) + bytes that nothing hides / link + bytes of the host / link

A roofline says what cannot be faster and, with one measured number in it, about how fast: `REACHED` is chosen so that
the hero's step on 704 GB200 comes out near its published 16.8 s (Marin, #8435), and taken for every chip for want of
others. It is an order of magnitude and a way to compare two plans, not a forecast. All of `assumptions` is printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from noonsight.model.count.flops import StepFlops
from noonsight.train.rehearse.hlo import Collective
from noonsight.train.rehearse.targets import Target
from noonsight.train.rehearse.traffic import RAGGED

REACHED = 0.4
"""What the kernels reach of the peak, recomputation counted as work."""
HIDDEN = 0.5
"""What of the collectives inside an island is hidden behind products."""

SECONDS_OF_A_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step and the whole run on this target. `bound_s`: the same step with every product at its peak, all hidden."""

    step_s: float
    bound_s: float
    products_s: float
    links_s: float
    network_s: float
    host_s: float
    mfu: float
    tokens_per_s: float
    days: float
    dollars: float
    assumptions: tuple[str, ...]


def estimate(
    target: Target,
    flops: StepFlops,
    sent: Sequence[Collective],
    *,
    step_tokens: int,
    run_tokens: int,
    host_bytes: int,
    ragged_bytes: int | None = None,
    price: float | None = None,
) -> Estimate:
    """The step whose FLOPs on all devices are `flops` and that moves `host_bytes` of each device to and from the host.

    `ragged_bytes`: what travels in the ragged exchanges, whose results are room and not traffic.
    """
    chip, devices = target.chip, target.num_devices
    price = chip.price if price is None else price
    least = flops.executed / devices / chip.peak
    network = sum(row.wire_bytes for row in sent if crosses(row, target)) / chip.network
    inside = [row for row in sent if not crosses(row, target) and (ragged_bytes is None or row.kind != RAGGED)]
    links = (sum(row.wire_bytes for row in inside) + (ragged_bytes or 0)) / chip.link
    host = 2 * host_bytes / chip.host_link
    step = least / REACHED + (1 - HIDDEN) * links + network + host
    per_s = step_tokens / step
    days = run_tokens / per_s / SECONDS_OF_A_DAY
    return Estimate(
        step_s=step,
        bound_s=max(least, links, network, host),
        products_s=least / REACHED,
        links_s=links,
        network_s=network,
        host_s=host,
        mfu=flops.model / devices / chip.peak / step,
        tokens_per_s=per_s,
        days=days,
        dollars=days * 24 * devices * price,
        assumptions=(
            f"products reach {REACHED:.0%} of {chip.peak / 1e12:,.0f} TFLOP/s, recomputation counted as work",
            f"{HIDDEN:.0%} of what is sent inside {target.island} devices, {chip.link / 1e9:,.0f} GB/s a device, is hidden",
            f"nothing of what is sent beyond them, {chip.network / 1e9:,.0f} GB/s a device, is hidden",
            f"moments go both ways at {chip.host_link / 1e9:,.0f} GB/s, not hidden",
            f"an hour of one device costs ${price:,.2f}",
            "no stop, no evaluation, no checkpoint; every step as long as this one",
        ),
    )


def crosses(row: Collective, target: Target) -> bool:
    """Whether a collective leaves the island: replicas always do, and `data` where a slice is several islands."""
    axes = row.axes.split(" x ")
    return "replica" in axes or ("data" in axes and target.island * target.num_slices < target.num_devices)
