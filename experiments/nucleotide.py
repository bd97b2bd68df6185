"""A hero-shaped model of 169 thousand parameters on sequences of bases whose entropy is known.

The sequences are generated, not read from an organism, so that the score can be held against the truth: bases follow a
Markov chain of second order, one in a hundred could not be read (N), and now and then one of four motifs of twelve bases
is planted. What no model can beat on average is the code length of the held-out sequences under the process itself, found
by its exact filter over hidden states. To come near it a model must have learned the chain and the motifs. Beside it
stands a chain of fixed order, counted on the training sequences: strong, because five bases nearly tell a motif.

Question   How near does the small hero come to the entropy of a process it has to discover?
Expected   Within 0.05 bits per base of the process; inside a motif it predicts the next base as often as the process
           itself can, within three points.
Time       About a minute and a half on two idle cores, without an accelerator; less than 1 GiB of memory.
Command    noon run experiments/nucleotide.py
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from noonsight.corpus.document import DOCUMENTS, hexdigest, write_table
from noonsight.corpus.select import KEPT
from noonsight.logbook.record import Artifact, encode
from noonsight.logbook.write import write_atomic
from noonsight.model.families import FAMILIES, NUCLEOTIDES, nucleotide
from noonsight.recipe.window import Experiment, Stage, pretrain, spell
from noonsight.scaling.ladder import published

BETA2 = FAMILIES["nucleotide"].beta2  # 0.98, declared: the transfer rule would clamp it at this batch size
RUNG = published("nucleotide", "run")  # width 64, 3 layers, 600 steps of 8 rows
UNREAD = NUCLEOTIDES.index("N")
CERTAIN = 4  # after so many bases of a motif the process itself is all but certain of the next
CHAIN_ORDER = 5  # of the counted chain that the model is compared with


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The process and how much of it is written down. A document is one row with its end, or less."""

    seed: int = 0
    num_documents: int = 7_000
    heldout_every: int = 35
    shortest: int = 120
    longest: int = 255
    num_motifs: int = 4
    motif_bases: int = 12
    motif_rate: float = 0.03  # that a motif begins at a base that is in none
    unread_rate: float = 0.01
    concentration: float = 0.5  # of the Dirichlet draws of the chain; smaller is easier to predict


class Process:
    """The chain [5, 5, 5] (p of the third base after two), motifs [M, J], and the hidden states: 0 is the chain, then
    the bases of every motif in turn."""

    def __init__(self, config: ProcessConfig):
        rng = np.random.default_rng([config.seed, 0])
        num, length = config.num_motifs, config.motif_bases
        read = rng.dirichlet([config.concentration] * UNREAD, (UNREAD + 1, UNREAD + 1)) * (1 - config.unread_rate)
        self.chain = np.concatenate([read, np.full((*read.shape[:2], 1), config.unread_rate)], axis=-1)
        self.motifs = rng.integers(0, UNREAD, (num, length))
        self.moves = np.zeros((1 + num * length, 1 + num * length))  # from a state to the state of the next base
        begin = np.r_[1 - config.motif_rate, np.tile(np.eye(length)[0], num) * config.motif_rate / num]
        self.moves[0] = self.moves[length::length] = begin
        for state in range(1, 1 + num * length):
            if state % length:
                self.moves[state, state + 1] = 1.0
        self.emits = np.eye(UNREAD + 1)[self.motifs.reshape(-1)]  # [M * J, 5], of the motif states

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Bases and hidden states, both [rows, length]."""
        bases, states = np.full((rows, length + 2), UNREAD), np.zeros((rows, length + 1), np.int64)
        for t in range(length):
            states[:, t] = _draw(rng, self.moves[states[:, t - 1]])  # before the first base: the last column, all 0
            chain = self.chain[bases[:, t], bases[:, t + 1]]
            planted = self.emits[np.maximum(states[:, t] - 1, 0)]
            bases[:, t + 2] = _draw(rng, np.where(states[:, t, None] > 0, planted, chain))
        return bases[:, 2:], states[:, :length]

    def predict(self, bases: np.ndarray) -> np.ndarray:
        """p[length, 5] of each base given all before it: the exact filter, the best that any model can do."""
        belief, found = self.moves[0], np.zeros((len(bases), UNREAD + 1))
        past = np.r_[UNREAD, UNREAD, bases]
        for t, base in enumerate(bases):
            emission = np.concatenate([self.chain[past[t], past[t + 1]][None], self.emits])
            found[t] = belief @ emission
            belief = (belief * emission[:, base] / found[t, base]) @ self.moves
        return found


def generate(config: ProcessConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: `documents.parquet`, `kept.parquet` and, for the score, `states.parquet` (hidden state of each base)."""
    rng = np.random.default_rng([config.seed, 1])
    bases, states = Process(config).draw(rng, config.num_documents, config.longest)
    lengths = rng.integers(config.shortest, config.longest + 1, config.num_documents)
    letters = np.array(list(NUCLEOTIDES))
    texts = ["".join(letters[row[:length]]) for row, length in zip(bases, lengths)]
    uids = [f"{i:032x}" for i in range(len(texts))]
    splits = ["train" if i % config.heldout_every else "heldout" for i in range(len(texts))]
    documents = [
        (uid, "generated", "nucleotides", "", 0, len(text), len(text), hexdigest(text), text)
        for uid, text in zip(uids, texts)
    ]
    kept = [(uid, split, "bases", 4, "bases-q4") for uid, split in zip(uids, splits)]
    write_table(out / "documents.parquet", _table(documents, DOCUMENTS))
    write_table(out / "kept.parquet", _table(kept, KEPT))
    hidden = [row[:length].tolist() for row, length in zip(states, lengths)]
    write_table(out / "states.parquet", pa.table({"doc_uid": uids, "states": hidden}))
    return Artifact(facts={"documents": len(texts), "bytes": int(lengths.sum()), "heldout": splits.count("heldout")})


def score(config: ProcessConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: the held-out sequences as the model, the process and a counted chain predict them.

    Inputs: documents, store, run. Facts: bits per base of all three, and inside motifs, where the process is certain, the
    share of bases that each predicts right.
    """
    from noonsight.tokens.batches import heldout

    documents = heldout(inputs["store"])
    first = documents[0].tokens.min()
    states = dict(zip(*pq.read_table(inputs["documents"] / "states.parquet").to_pydict().values()))
    process, chain = Process(config), _counted_chain(inputs["documents"])
    bits, right = np.zeros(3), []
    for document, model in zip(documents, _model_predictions(inputs["run"], [each.tokens for each in documents])):
        bases = document.tokens - first
        truth = process.predict(bases)
        at = np.arange(len(bases)), bases
        predictions = model, truth, chain(bases)
        bits += [-np.log2(p[at]).sum() for p in predictions]
        state = np.array(states[document.doc_uid])
        sure = (state > 0) & ((state - 1) % config.motif_bases >= CERTAIN)
        right.append(np.stack([p.argmax(1) for p in predictions])[:, sure] == bases[sure])
    model, truth, counted = (bits / sum(len(each.tokens) for each in documents)).tolist()
    found, possible, by_chain = np.concatenate(right, axis=1).mean(axis=1).tolist()
    rows = [
        ["the process itself", truth, possible],
        ["the model", model, found],
        ["a counted chain", counted, by_chain],
    ]
    title = "Bits per base, and bases of motifs predicted right"
    text = f"The chain has order {CHAIN_ORDER}. Motifs count from their base {CERTAIN + 1} on."
    table = {"title": title, "columns": ["who", "bits per base", "right"], "rows": rows, "text": text}
    (out / "tables").mkdir(exist_ok=True)
    write_atomic(out / "tables" / "score.json", encode(table))
    return Artifact(
        facts={
            "bits_per_base": model,
            "known_entropy": truth,
            "excess_bits": model - truth,
            "chain_bits_per_base": counted,
            "motif_accuracy": found,
            "motif_accuracy_possible": possible,
            "motif_accuracy_chain": by_chain,
            "motif_bases_scored": int(sum(each.shape[1] for each in right)),
        }
    )


def experiment(name: str = Path(__file__).stem, seed: int = 0) -> Experiment:
    """The graph. Another seed is another process, other data and other initial weights."""
    process = ProcessConfig(seed=seed)
    documents = Stage(
        name="documents",
        version="1",
        function=generate,
        config=process,
        sentence="Generate sequences of known entropy.",
    )
    corpus = spell(documents, NUCLEOTIDES)
    run = pretrain(RUNG, corpus, model=nucleotide(RUNG.width, RUNG.num_layers), seed=seed, beta2=BETA2)
    judged = Stage(
        name="score",
        version="1",
        function=score,
        config=process,
        inputs={"documents": documents, "store": corpus.store, "run": run},
        sentence="Hold the model against the process that made the sequences.",
    )
    return Experiment(
        name=name,
        question="How near does the small hero come to the entropy of a process it has to discover?",
        expected="Within 0.05 bits per base, and motifs predicted as well as the process can, within three points.",
        stages=(*corpus.stages, run, judged),
    )


def _draw(rng: np.random.Generator, p: np.ndarray) -> np.ndarray:
    """One index for each row of probabilities."""
    return (p.cumsum(axis=1) < rng.random((len(p), 1))).sum(axis=1).clip(max=p.shape[1] - 1)


def _table(rows: list[tuple], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(column, field.type) for column, field in zip(zip(*rows), schema)], schema=schema)


def _counted_chain(documents: Path):
    """bases -> p[length, 5] by a chain of fixed order, counted on the training sequences, each count plus a tenth."""
    rows = zip(
        pq.read_table(documents / "documents.parquet", columns=["text"])["text"].to_pylist(),
        pq.read_table(documents / "kept.parquet", columns=["split"])["split"].to_pylist(),
    )
    counts = np.full(((UNREAD + 1) ** CHAIN_ORDER, UNREAD + 1), 0.1)
    for text in (text for text, split in rows if split == "train"):
        bases = np.array([NUCLEOTIDES.index(letter) for letter in text])
        np.add.at(counts, (_contexts(bases), bases), 1)
    return lambda bases: (counts / counts.sum(axis=1, keepdims=True))[_contexts(bases)]


def _contexts(bases: np.ndarray) -> np.ndarray:
    past = np.r_[np.full(CHAIN_ORDER, UNREAD), bases]
    return sum(past[i : i + len(bases)] * (UNREAD + 1) ** i for i in range(CHAIN_ORDER))


def _model_predictions(run: Path, sequences: list[np.ndarray]):
    """p[length, 5] of each base by the trained model, each sequence alone behind the control token that ends documents.

    What the model gives to control tokens is lost to it: p sums to less than 1.
    """
    import jax

    from noonsight.model.transformer import logits
    from noonsight.recipe.pretraining import load_run

    config, params, extra = load_run(run)
    size = config.sequence_length
    predict = jax.jit(lambda tokens, segments: jax.nn.softmax(logits(params, extra, tokens, segments, config.model)))
    for start in range(0, len(sequences), 8):
        group = sequences[start : start + 8]
        tokens, segments = np.zeros((8, size), np.int32), np.full((8, size), -1, np.int32)
        for row, sequence in enumerate(group):
            tokens[row, 1 : 1 + len(sequence)] = sequence
            segments[row, : 1 + len(sequence)] = np.r_[0, np.ones(len(sequence))]
        p = np.asarray(predict(tokens, segments), np.float64)
        yield from (p[row, : len(sequence), -len(NUCLEOTIDES) :] for row, sequence in enumerate(group))
