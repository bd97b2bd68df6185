"""Figures and sentences for readers: how the atlas writes a number, a time, and the one line that says how a run went.

Sentences are written from the record, never by hand, so they cannot drift from what happened.
"""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any

from noonsight.logbook.record import Event, Prediction, Progress, Run, Verdict

UNITS = {
    "bits_per_byte": "bits per byte",
    "nats_per_token": "nats per token",
    "tokens_per_s": "tokens/s",
    "exact": "exact copies",
    "fuzzy": "near copies",
    "vocab_size": "tokens in the vocabulary",
    "num_samples": "samples",
}


def number(value: Any, digits: int = 4) -> str:
    """A figure as people read it: `digits` significant digits, thousands separated, a real minus sign."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        text = f"{int(value):,}"
    elif abs(value) >= 10 ** (digits - 1):
        text = f"{value:,.0f}"
    elif abs(value) >= 1e-3:
        text = f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"
    else:
        text = f"{value:.{max(1, digits - 2)}e}".replace("e-0", "e-")
    return text.replace("-", "−")


def exact(value: Any) -> str:
    """A value with nothing rounded away: what was asked for is quoted, not told."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    return repr(value) if isinstance(value, (int, float)) else str(value)


def fact(value: Any) -> str:
    """A measured value to seven digits, without idle zeros."""
    return f"{value:.7g}".replace("-", "−") if isinstance(value, float) and value % 1 else number(value)


def compact(value: float | None) -> str:
    """A large count in few letters: 1.38M, 6.7e12."""
    if value is None:
        return "–"
    for bound, letter in ((1e12, ""), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return (
                f"{value / (1e3 if letter == 'k' else bound):.3g}{letter}"
                if letter
                else f"{value:.3g}".replace("e+", "e")
            )
    return number(value)


def duration(seconds: float | None) -> str:
    """Seconds as `3 min 20 s`; below ten seconds with one decimal."""
    if seconds is None:
        return "–"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.1f} days"


def size(num_bytes: float | None) -> str:
    """Bytes in decimal units: `4.2 MB`."""
    if num_bytes is None:
        return "–"
    for bound, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= bound:
            return f"{num_bytes / bound:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def when(time: str | None) -> str:
    """An ISO time as `2 December 2026, 11:58:04 UTC`; what cannot be read is shown as it stands."""
    if not time:
        return "–"
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        return time
    return f"{moment.day} {moment:%B %Y, %H:%M:%S} UTC"


def short(digest: str | None) -> str:
    """The first twelve characters of a hash, enough to tell two apart by eye."""
    return digest[:12] if digest else "–"


def unit(name: str) -> str:
    """A unit in words."""
    return UNITS.get(name, name.replace("_", " "))


def span(low: float, high: float) -> str:
    """An interval, both ends with the same number of decimals."""
    decimals = max(0, 2 - math.floor(math.log10(max(high - low, 1e-9)))) if high > low else 3
    return f"{low:,.{min(decimals, 6)}f} to {high:,.{min(decimals, 6)}f}".replace("-", "−")


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def spelled(count: int) -> str:
    """Small counts as words, for headings."""
    words = "no one two three four five six seven eight nine ten eleven twelve".split()
    return words[count] if 0 <= count < len(words) else f"{count:,}"


def counted(count: int, noun: str) -> str:
    """`one voyage`, `two voyages`, `no voyages`."""
    return f"{spelled(count)} {noun if count == 1 else noun + 's'}"


def join(parts: list[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else ""


def first_line(text: str | None) -> str:
    """The last non-empty line of an error is its message; tracebacks put it there."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was recorded"


def status_sentence(
    run: Run | None,
    progress: Progress | None,
    events: list[Event],
    prediction: Prediction | None = None,
    verdict: Verdict | None = None,
) -> str:
    """How a training run went or goes, in one sentence made of its record."""
    if run is None:
        return "Nothing is recorded yet."
    match run.status:
        case "done":
            return _done(run, progress, events, prediction, verdict)
        case "running":
            return _running(run, progress, events, prediction)
        case "failed":
            at = f" at step {progress.step:,} of {progress.of:,}" if progress and progress.of else ""
            return f"Failed{at} after {duration(run.seconds)}: {first_line(run.error)}"
        case "interrupted":
            at = f" at step {progress.step:,} of {progress.of:,}" if progress and progress.of else ""
            return f"Interrupted{at} after {duration(run.seconds)}; the same command goes on from its last checkpoint."
    return "Waits for its inputs."


def _done(
    run: Run, progress: Progress | None, events: list[Event], prediction: Prediction | None, verdict: Verdict | None
) -> str:
    steps = run.facts.get("num_steps") or (progress.step if progress else None)
    work = f"Trained {plural(int(steps), 'step')}" if steps else f"Trained {compact(run.facts.get('tokens'))} tokens"
    sentence = f"{work} in {duration(run.seconds)}{_interruptions(run, events)}"
    if verdict:
        sentence += f"; {number(verdict.result)} {unit(verdict.metric)}"
        if prediction:
            side = "inside" if verdict.inside else ("above" if verdict.result > prediction.interval[1] else "below")
            sentence += f", {side} the predicted {span(*prediction.interval)}"
        return sentence + "."
    if (result := run.facts.get("bits_per_byte")) is not None:
        sentence += f"; {number(result)} bits per byte"
    if prediction:
        sentence += f", predicted {span(*prediction.interval)}, not scored yet"
    return sentence + "."


def _running(run: Run, progress: Progress | None, events: list[Event], prediction: Prediction | None) -> str:
    if progress is None or not progress.of:
        return "Started; no step is finished yet."
    sentence = f"At step {progress.step:,} of {progress.of:,}"
    if progress.rate:
        sentence += f", {number(progress.rate, 3)} {progress.unit}/s, about {duration((progress.of - progress.step) / progress.rate)} to go"
    sentence += _interruptions(run, events)
    if prediction:
        sentence += f"; predicted to end at {span(*prediction.interval)} {unit(prediction.metric)}"
    return sentence + "."


def _interruptions(run: Run, events: list[Event]) -> str:
    kills = [event for event in events if event.kind == "kill-injected"]
    faults = [event for event in events if event.kind == "restart" and event.cause != "injected"]
    parts = []
    if kills:
        places = join([f"step {kill.step:,}" for kill in kills if kill.step is not None])
        parts.append(f"killed {_times(len(kills))} on purpose" + (f" at {places}" if places else ""))
    if faults:
        parts.append(f"stopped {_times(len(faults))} by a fault")
    if not parts:
        return ", without an interruption" if run.status == "done" else ""
    identical = run.facts.get("resumed_bit_identical")
    ending = {True: " and resumed bit-identically", False: " and resumed, not bit-identically", None: " and resumed"}
    return ", " + join(parts) + (ending[identical] if run.status == "done" or identical is not None else "")


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
