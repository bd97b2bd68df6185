"""One answer: what a step would need and do on each device of a machine, for people and for scripts.

`rehearse(job)` compiles; `Rehearsal` holds what came out beside the closed forms; `told` is its JSON and `page` its text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from noonsight.model.count.flops import StepFlops, step_flops
from noonsight.train.rehearse import mistakes
from noonsight.train.rehearse.compile import Found, compile_job
from noonsight.train.rehearse.job import Job
from noonsight.train.rehearse.mistakes import Advice, Mistake, sized
from noonsight.train.rehearse.roofline import Estimate, estimate
from noonsight.train.rehearse.targets import GIB
from noonsight.train.rehearse.traffic import Exchanged, exchanged


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A job, what the compiler found, and what follows."""

    job: Job
    found: Found
    flops: StepFlops
    exchanged: Exchanged | None
    estimate: Estimate
    mistakes: tuple[Mistake, ...]
    advice: tuple[Advice, ...]

    @property
    def budget(self) -> int:
        return self.job.machine.chip.budget

    @property
    def fits(self) -> bool:
        return self.found.peak_bytes <= self.budget

    @property
    def precision(self) -> str:
        """Where float32 parameters lie: "B", on the device, cast at use; "A", the published run's first, on the host."""
        return "B"


def rehearse(job: Job, *, price: float | None = None) -> Rehearsal:
    """Compile the step of `job` and say what would happen. `price`: dollars for an hour of one device.

    Raises CompilationFailed (a ValueError) when it does not compile here.
    """
    return concluded(job, compile_job(job), price=price)


def concluded(job: Job, found: Found, *, price: float | None = None) -> Rehearsal:
    """What follows from what the compiler found."""
    training, machine = job.training, job.machine
    flops = step_flops(training.model, job.rows, optimizer=training.optimizer.kind)
    optimizer = flops.optimizer * machine.num_slices  # every slice makes the same update
    flops = StepFlops(**{**asdict(flops), "optimizer": optimizer})
    sent = exchanged(job, found.collectives)
    return Rehearsal(
        job=job,
        found=found,
        flops=flops,
        exchanged=sent,
        estimate=estimate(
            machine,
            flops,
            found.collectives,
            step_tokens=job.rows * training.sequence_length,
            run_tokens=training.schedule_steps * training.batch_tokens,
            host_bytes=found.host_resident_bytes,
            ragged_bytes=sent.sent_bytes if sent and training.model.exchange == "ragged" else None,
            price=price,
        ),
        mistakes=tuple(mistakes.mistakes(job, found)),
        advice=tuple(mistakes.advice(job, found, budget=machine.chip.budget)),
    )


def told(rehearsal: Rehearsal) -> dict[str, Any]:
    """The JSON of a rehearsal. Bytes are of one device and one step, FLOPs of all devices."""
    job, found, flops, time = rehearsal.job, rehearsal.found, rehearsal.flops, rehearsal.estimate
    model = job.training.model
    return {
        "target": job.target,
        "devices": job.machine.num_devices,
        "mesh": job.mesh,
        "batch_rows": job.rows,
        "rows_per_device": job.rows_per_device,
        "sequence_length": job.training.sequence_length,
        "precision_phase": rehearsal.precision,
        "exchange": model.exchange,
        "capacity_factor": model.capacity_factor,
        "remat": model.remat,
        "lower_s": round(found.lower_s, 3),
        "compile_s": round(found.compile_s, 3),
        "host_memory_bytes": found.host_memory_bytes,
        "argument_bytes_per_device": found.argument_bytes,
        "temp_bytes_per_device": found.temp_bytes,
        "output_bytes_per_device": found.output_bytes,
        "peak_bytes_per_device": found.peak_bytes,
        "compiler_peak_bytes_per_device": found.compiler_peak_bytes,
        "host_resident_bytes_per_device": found.host_resident_bytes,
        "streamed_bytes_per_device": found.streamed_bytes,
        "host_temp_bytes_per_device": found.host_temp_bytes,
        "host_placement_modelled": found.host_modelled,
        "budget_bytes_per_device": rehearsal.budget,
        "fits": rehearsal.fits,
        "collectives": [_row(row) for row in found.collectives],
        "exchanged": rehearsal.exchanged and asdict(rehearsal.exchanged) | {"ratio": rehearsal.exchanged.ratio},
        "flops": {
            "useful": flops.useful,
            "recompute": flops.recompute,
            "padding": flops.padding,
            "mask": flops.attention_mask,
            "optimizer": flops.optimizer,
        },
        "useful_and_recompute_over_model_flops": (flops.useful + flops.recompute) / flops.model,
        "executed_over_model_flops": flops.executed / flops.model,
        "step_s_estimate": time.step_s,
        "step_s_bound": time.bound_s,
        "mfu_estimate": time.mfu,
        "tokens_per_s_estimate": time.tokens_per_s,
        "days_estimate": time.days,
        "dollars_estimate": time.dollars,
        "assumptions": list(time.assumptions),
        "largest": [dict(zip(("name", "bytes", "kind"), each)) for each in mistakes.holders(found)],
        "mistakes": [asdict(each) for each in rehearsal.mistakes],
        "advice": [asdict(each) for each in rehearsal.advice],
        "warnings": list(found.warnings),
    }


def page(rehearsal: Rehearsal) -> str:
    """The same to be read."""
    job, found, time = rehearsal.job, rehearsal.found, rehearsal.estimate
    mesh = " x ".join(f"{axis} {size}" for axis, size in job.mesh.items() if size > 1) or "one device"
    lines = [
        f"{job.target}: {job.machine.num_devices} x {job.machine.chip.title}, {mesh}",
        f"A step of {job.rows:,} rows of {job.training.sequence_length:,} tokens, {job.rows_per_device} a device; "
        f"compiled in {found.lower_s + found.compile_s:.0f} s with {found.host_memory_bytes / GIB:.1f} GiB. "
        "Nothing was executed.",
        f"Parameters are float32 on the device and cast at use (precision phase {rehearsal.precision}); moments lie "
        f"{'on the host' if job.moments_on_host else 'on the device'}; exchange {job.training.model.exchange}, remat "
        f"{job.training.model.remat}.",
        "",
        *_memory(rehearsal),
        "",
        *(f"MISTAKE ({each.kind}): {each.text}" for each in rehearsal.mistakes),
        *(["", "To make it fit, the most effective first (about):"] if rehearsal.advice else []),
        *(f"  {sized(each.bytes):>12}  {each.text}" for each in rehearsal.advice),
        "",
        "Largest arrays of one device (they do not all live at one time)",
        *(f"  {sized(size):>12}  {kind:11.11}  {name}" for name, size, kind in mistakes.holders(found)),
        "",
        "Collectives of one device in one step        count        result          sent",
        *(_collective(row) for row in found.collectives),
        *_exchange(rehearsal),
        "",
        *_work(rehearsal),
        "",
        f"Step about {time.step_s:.1f} s ({time.mfu:.1%} MFU, {time.tokens_per_s:,.0f} tokens/s); "
        f"no faster than {time.bound_s:.1f} s. The whole run about {time.days:,.1f} days and ${time.dollars:,.0f}.",
        "Assumed: " + "; ".join(time.assumptions) + ".",
        *(f"The compiler says: {each}" for each in found.warnings if not rehearsal.fits),
    ]
    return "\n".join(_squeezed(lines))


def _memory(rehearsal: Rehearsal) -> list[str]:
    found = rehearsal.found
    verdict = "fits" if rehearsal.fits else "DOES NOT FIT"
    rows = [
        ("arguments", found.argument_bytes, ""),
        ("temporary", found.temp_bytes, ""),
        ("outputs", found.output_bytes, "donated inputs become these" if found.alias_bytes else ""),
        ("compiler's peak", found.compiler_peak_bytes, ""),
    ]
    if found.host_resident_bytes and not found.host_modelled:
        rows += [
            ("- moments on the host", found.host_resident_bytes, "which this compiler counts as the device's"),
            ("+ streamed at a time", found.streamed_bytes, "the moments of the largest leaf"),
        ]
    rows += [("peak", found.peak_bytes, verdict), ("budget", rehearsal.budget, rehearsal.job.machine.chip.title)]
    if found.host_temp_bytes:
        rows.append(("on the host meanwhile", found.host_temp_bytes, "offloaded inputs of layers"))
    return [
        "Memory of one device",
        *(f"  {name:22}{sized(size):>13}  {text}".rstrip() for name, size, text in rows),
    ]


def _work(rehearsal: Rehearsal) -> list[str]:
    flops = rehearsal.flops
    parts = {
        "useful": flops.useful,
        "hidden by the mask": flops.attention_mask,
        "padding": flops.padding,
        "recomputed": flops.recompute,
        "optimiser": flops.optimizer,
    }
    lines = [f"  {name:22}{value:12.4e}  {value / flops.model:6.1%}" for name, value in parts.items() if value]
    whole = f"  {'executed':22}{flops.executed:12.4e}  {flops.executed / flops.model:6.1%}"
    return ["FLOPs of a step, all devices, in closed form; share of three forwards", *lines, whole]


def _exchange(rehearsal: Rehearsal) -> list[str]:
    sent = rehearsal.exchanged
    if sent is None:
        return []
    return [f"  The exchange's formula says {sized(sent.formula_bytes)}, so {sent.ratio:.1%} of it was found; "
            f"{sized(sent.sent_bytes)} of rows travel."]  # fmt: skip


def _collective(row: Any) -> str:
    where = f"{row.kind} along {row.axes} ({row.group})"
    return f"  {where:42}{row.count:8,}{sized(row.bytes_per_device):>14}{sized(row.wire_bytes):>14}"


def _row(row: Any) -> dict[str, Any]:
    return asdict(row) | {"wire_bytes_per_device": row.wire_bytes}


def _squeezed(lines: list[str]) -> list[str]:
    """Without two empty lines in a row."""
    return [line for at, line in enumerate(lines) if line or (at and lines[at - 1])]
