"""Byte-level byte-pair encoding, trained here on the train split, exact for any text.

Every text is a sequence of UTF-8 bytes and every byte is a token, so nothing is unknown and `decode(encode(text))` is
`text`, without any normalisation. Merges never cross a digit (digits are single tokens) or the borders of GPT-2's
word pattern (Radford et al. 2019, section 2.2). Control tokens are ids that no text can produce: the string
`<|end|>` in a document is seven characters of text like any others.

Invariant: `b"".join(map(token_bytes, encode(text))) == text.encode()`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tokenizers
import xxhash
from tokenizers import decoders, models, pre_tokenizers, trainers

from noonsight.logbook.record import Artifact
from noonsight.logbook.write import write_atomic
from noonsight.tokens.kept import kept_documents

END = "<|end|>"  # ends every document; id 0
SPECIALS = (
    END,
    *(f"<|reserved_{i}|>" for i in range(1, 8)),
)  # reserved for chat formats
LONGEST_WORD = 256  # characters; training is quadratic in the length of one word
PIECE = 1 << 16  # characters; the library needs about 200 bytes of memory per byte it encodes at once
SAMPLE_BYTES = 1 << 20  # of training text, for the fact bytes_per_token


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """What the tokenizer is trained to be."""

    vocab_size: int = 4096  # control tokens and the 256 bytes included
    min_frequency: int = 2  # a pair seen less often is not merged
    max_token_length: int = 32  # bytes; keeps ruled lines (----) from filling the vocabulary


@dataclass(frozen=True, kw_only=True)
class AlphabetConfig:
    """A tokenizer of single characters, such as "ACGTN": nothing is learned."""

    characters: str

    def __post_init__(self) -> None:
        """Refuse what cannot be a vocabulary. Raises ValueError."""
        if not self.characters.isascii() or not self.characters or len(set(self.characters)) < len(self.characters):
            raise ValueError(f"AlphabetConfig: characters {self.characters!r} must be ASCII, each once, at least one")


class Tokenizer:
    """A loaded tokenizer; made by `load`."""

    def __init__(self, engine: tokenizers.Tokenizer, pieces: tuple[bytes, ...], eos: int, digest: str):
        self._engine = engine
        self._pieces = pieces
        self.vocab_size = len(pieces)
        self.eos = eos
        self.digest = digest  # xxh3-128 of tokenizer.json
        self.byte_lengths = np.array([len(piece) for piece in pieces], np.int32)  # i32[V], 0 for control tokens
        self._alphabet = None if _EVERY_BYTE <= set(pieces) else frozenset(b"".join(pieces).decode("ascii"))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without EOS. Raises ValueError on a lone surrogate, which has no bytes, and on a character
        outside the alphabet of a tokenizer that has one.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without EOS; equal to `encode` of each."""
        pieces, owner = [], []
        for index, text in enumerate(texts):
            _refuse_surrogates(text, index)
            if self._alphabet is not None:
                _refuse_foreign(text, index, self._alphabet)
            for piece in _pieces(text):
                pieces.append(piece)
                owner.append(index)
        ids: list[list[int]] = [[] for _ in texts]
        for index, encoding in zip(owner, self._engine.encode_batch_fast(pieces, add_special_tokens=False)):
            ids[index].extend(encoding.ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; control tokens give nothing, bytes that are no UTF-8 (a cut character) give U+FFFD."""
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that a token stands for: b"" for control tokens, perhaps a part of a character."""
        return self._pieces[token]

    def name(self, token: int) -> str:
        """A token for a reader's eyes: its text, `<|end|>` for control tokens, `<0xE2>` for bytes that are no text."""
        if not (piece := self._pieces[token]):
            return self._engine.id_to_token(token)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "".join(f"<0x{byte:02X}>" for byte in piece)


def train_tokenizer(config: TokenizerConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage: trains on the train split and writes `tokenizer.json`. The same inputs give the same bytes.

    Inputs: `documents` (documents.parquet), `select` (kept.parquet).
    Raises ValueError when the vocabulary cannot hold the bytes, or the text yields fewer merges than asked for.
    """
    smallest = len(SPECIALS) + 256
    if config.vocab_size < smallest:
        raise ValueError(
            f"vocab_size {config.vocab_size} is too small: 256 bytes and {len(SPECIALS)} control tokens need {smallest}"
        )
    engine = _byte_level_engine({})
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        max_token_length=config.max_token_length,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    sample = _Sample()
    engine.train_from_iterator(_training_text(inputs, sample), trainer)
    if engine.get_vocab_size() < config.vocab_size:
        raise ValueError(
            f"{inputs['select'] / 'kept.parquet'}: the train split has {sample.total_bytes} bytes of text, enough for "
            f"{engine.get_vocab_size()} tokens and not for vocab_size {config.vocab_size}. "
            "Add text, or ask for a smaller vocab_size."
        )
    write_atomic(out / "tokenizer.json", engine.to_str(pretty=True).encode("utf-8"))
    tokenizer = load(out)
    num_tokens = sum(map(len, tokenizer.encode_batch(sample.texts)))
    words = [name for name in map(tokenizer.name, range(tokenizer.vocab_size)) if name.strip().isalpha()]
    return Artifact(
        facts={
            "vocab_size": tokenizer.vocab_size,
            "digest": tokenizer.digest,
            "num_bytes": sample.total_bytes,
            "bytes_per_token": sample.sampled_bytes / max(1, num_tokens),
            "odd_token": max(words, key=len),  # the longest word that earned a token of its own
        }
    )


def write_alphabet(config: AlphabetConfig, inputs: Mapping[str, Path], out: Path) -> Artifact:
    """Stage without inputs: writes the `tokenizer.json` whose tokens are control tokens and the characters, in order."""
    engine = _byte_level_engine({name: i for i, name in enumerate((*SPECIALS, *config.characters))})
    engine.add_special_tokens(list(SPECIALS))
    write_atomic(out / "tokenizer.json", engine.to_str(pretty=True).encode("utf-8"))
    tokenizer = load(out)
    return Artifact(facts={"vocab_size": tokenizer.vocab_size, "digest": tokenizer.digest, "bytes_per_token": 1.0})


def load(path: Path) -> Tokenizer:
    """Loads `tokenizer.json`, or the one in a folder.

    Raises ValueError when the file is missing, is no byte-level tokenizer without normaliser (its round trip would
    not be exact), or has no `<|end|>`.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} is missing: train a tokenizer first (stage train_tokenizer), or check the path")
    content = file.read_bytes()
    try:
        form = json.loads(content)
        engine = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        specials = {token["id"]: token["content"] for token in form["added_tokens"]}
        byte_level = (form["decoder"] or {}).get("type") == "ByteLevel"
    except Exception as error:  # the library raises bare Exception for anything wrong in the file
        raise ValueError(f"{file} is no readable tokenizer: {error}. Train it again, or restore the file.") from error
    if not byte_level or form["normalizer"] is not None:
        raise ValueError(f"{file} is no byte-level tokenizer without normaliser: text would not survive the round trip")
    if engine.token_to_id(END) not in specials:
        raise ValueError(f"{file} has no control token {END}, which must end every document")
    engine.encode_special_tokens = True  # the text "<|end|>" is text
    byte_of = _byte_of_character()
    pieces = tuple(
        b"" if i in specials else bytes(byte_of[character] for character in engine.id_to_token(i))
        for i in range(engine.get_vocab_size())
    )
    return Tokenizer(engine, pieces, engine.token_to_id(END), xxhash.xxh3_128_hexdigest(content))


def _byte_level_engine(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """Byte-pair encoding over bytes, without merges."""
    engine = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    engine.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    engine.decoder = decoders.ByteLevel()
    return engine


@dataclass
class _Sample:
    """What was read while training: all bytes counted, the first megabyte kept."""

    total_bytes: int = 0
    sampled_bytes: int = 0
    texts: list[str] = field(default_factory=list)

    def see(self, text: str) -> None:
        num_bytes = len(text.encode("utf-8"))
        self.total_bytes += num_bytes
        if self.sampled_bytes < SAMPLE_BYTES:
            self.texts.append(text)
            self.sampled_bytes += num_bytes


def _training_text(inputs: Mapping[str, Path], sample: _Sample) -> Iterator[str]:
    for document in kept_documents(inputs["documents"], inputs["select"], "train"):
        sample.see(document.text)
        start = 0
        for run in _LONG_RUN.finditer(document.text):
            yield document.text[start : run.end()]
            start = run.end()
        yield document.text[start:]


_EVERY_BYTE = {bytes([byte]) for byte in range(256)}
_LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")
_WORD_END = re.compile(r"[A-Za-z](?=[ \n])")


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text where the word pattern cuts anyway (between a letter and a space), so the ids stay the same."""
    start = 0
    while len(text) - start > PIECE and (word := _WORD_END.search(text, start + PIECE)):
        yield text[start : word.end()]
        start = word.end()
    yield text[start:]


def _refuse_surrogates(text: str, index: int) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text {index} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}, which no "
            "UTF-8 file can hold. Read the source with errors='replace' or drop the document."
        ) from None


def _refuse_foreign(text: str, index: int, alphabet: frozenset[str]) -> None:
    if foreign := set(text) - alphabet:
        first = min(text.index(character) for character in foreign)
        raise ValueError(
            f"text {index} has {text[first]!r} at character {first}, and this tokenizer knows only "
            f"{''.join(sorted(alphabet))!r}. Change the text, or make a tokenizer with that character."
        )


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: each byte has one printable character, its own or, lacking that, one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
