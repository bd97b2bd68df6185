"""From a finished run to a folder that others can load: export with proof, and samples from what was exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from noonsight.logbook.claim import claim
from noonsight.logbook.record import Artifact, Receipt, encode
from noonsight.logbook.write import Writer, write_atomic


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """The form of the export."""

    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """What is asked of the exported model, and how it samples."""

    prompts: tuple[str, ...]
    max_tokens: int = 96
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


def run_export(config: ExportConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: export the `run` with its `tokenizer` to `out/model`, load it again, compare, write the receipt.

    Raises ValueError when the loaded model is not the trained one.
    """
    with claim(out, "stage") as owned:
        Writer(out, owned).progress(
            0, 1, unit="models", phase="start", text="writing safetensors, then loading them again"
        )
        facts, receipt = export_run(
            inputs["run"], out / "model", tokenizer=inputs["tokenizer"] / "tokenizer.json", dtype=config.dtype
        )
        (out / "receipts").mkdir(exist_ok=True)
        write_atomic(out / "receipts" / "export.json", encode(receipt))
    if not receipt.passed:
        failed = ", ".join(
            f"{check.name} {check.value:.3g} > {check.bound:.3g}" for check in receipt.checks if not check.passed
        )
        raise ValueError(
            f"the exported model is not the trained one: {failed}. The folder {out / 'model'} is kept for inspection."
        )
    return Artifact(
        facts=facts
        | {"receipt_passed": receipt.passed, "checks": {check.name: check.value for check in receipt.checks}}
    )


def export_run(run: Path, out: Path, *, tokenizer: Path | None = None, dtype: str = "float32") -> tuple[dict, Receipt]:
    """Export the final state of the training run in folder `run` to `out` and prove it; (facts, receipt).

    The tokenizer is the one its token store was written with, unless one is given. Raises ValueError for a folder that is no run.
    """
    from noonsight.recipe.pretraining import load_run
    from noonsight.serve.hf import export_model
    from noonsight.serve.parity import check_export

    config, params, extra = load_run(run)
    facts = export_model(params, extra, config.model, tokenizer or _tokenizer_of(run), out, dtype=dtype)
    return facts, check_export(out, params, extra, config.model, engine="jax", seed=0)


def run_samples(config: SampleConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: load the `export` and continue each prompt. Writes `tables/samples.json`."""
    from noonsight.serve.engine import generate
    from noonsight.serve.hf import import_model
    from noonsight.tokens.tokenizer import load

    folder = inputs["export"] / "model"
    with claim(out, "stage") as owned:
        writer = Writer(out, owned)
        params, extra, model = import_model(folder)
        tokenizer = load(folder / "tokenizer.json")
        rows = []
        for index, prompt in enumerate(config.prompts):
            ids = generate(
                params,
                extra,
                model,
                tokenizer.encode(prompt),
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                top_k=config.top_k,
                seed=config.seed + index,
                eos=tokenizer.eos,
            )
            rows.append([prompt, tokenizer.decode(ids)])
            writer.progress(index + 1, len(config.prompts), unit="samples")
        (out / "tables").mkdir(exist_ok=True)
        text = f"Sampled from the exported model at temperature {config.temperature}, top-k {config.top_k}."
        table = {"title": "Samples", "columns": ["prompt", "continuation"], "rows": rows, "text": text}
        write_atomic(out / "tables" / "samples.json", encode(table))
    return Artifact(facts={"num_samples": len(rows)})


def _tokenizer_of(run: Path) -> Path:
    """The tokenizer of a run: its token store names the stage that trained it."""
    from noonsight.logbook import read

    record = read.run(run)
    store = run.parent / record.inputs["store"]["stage"] if record and "store" in record.inputs else None
    written = read.run(store) if store else None
    if written is None or "tokenizer" not in written.inputs:
        raise ValueError(
            f"cannot find the tokenizer of {run}: its token store is not beside it. Export from the folder where it ran."
        )
    return run.parent / written.inputs["tokenizer"]["stage"] / "tokenizer.json"
