"""The store: tokens in are tokens out, and a damaged folder is refused by the name of its file."""

import json
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest

from noonsight.tokens.batches import heldout
from noonsight.tokens.store import open_store
from noonsight.tokens.tokenizer import load
from tests.tokens.voyage import run_store, run_tokenizer, sentence, store_facts, write_corpus

CELLS = ["seaq0", "land/../q4", "seaq2"]


@pytest.fixture(scope="module")
def voyage(tmp_path_factory):
    root = tmp_path_factory.mktemp("voyage")
    rng = np.random.default_rng(0)
    texts = [sentence(rng, int(n)) for n in rng.integers(1, 80, size=90)] + ["", "<|end|> is text", "é\0\r\n👩‍🚀"]
    cells = [CELLS[i % 3] for i in range(len(texts))]
    splits = ["heldout" if i % 10 == 0 else "train" for i in range(len(texts))]
    write_corpus(root, texts, cells, splits)
    run_store(root, run_tokenizer(root))
    return root


def documents(root):
    table = pq.read_table(root / "documents/documents.parquet").to_pylist()
    kept = {row["doc_uid"]: row for row in pq.read_table(root / "select/kept.parquet").to_pylist()}
    return {row["doc_uid"]: row | kept[row["doc_uid"]] for row in table}


def test_tokens_in_are_tokens_out(voyage):
    store, tokenizer, rows = open_store(voyage / "store", verify=True), load(voyage / "tokenizer"), documents(voyage)
    seen = []
    for split in ("train", "heldout"):
        tokens, end = store.tokens(split), 0
        for span in store.spans(split).read().to_pylist():
            row = rows[span["doc_uid"]]
            assert span["start"] == end and row["split"] == split and row["cell"] == span["cell"]
            ids = tokens.read(span["start"], span["length"]).tolist()
            assert ids == [*tokenizer.encode(row["text"]), tokenizer.eos]
            assert (span["num_bytes"], span["source"], span["file"]) == (row["num_bytes"], row["source"], row["file"])
            assert (span["text_start"], span["text_end"], span["domain"]) == (row["start"], row["end"], row["domain"])
            end += span["length"]
            seen.append(span["doc_uid"])
        assert end == store.manifest.splits[split].num_tokens
    assert sorted(seen) == sorted(rows)


def test_cells_are_contiguous_and_counted(voyage):
    store = open_store(voyage / "store")
    entry = store.manifest.splits["train"]
    spans = store.spans("train").read().to_pylist()
    assert [cell.name for cell in entry.cells] == sorted(CELLS)
    for cell in entry.cells:
        inside = [span for span in spans if span["cell"] == cell.name]
        assert [span["doc_uid"] for span in inside] == sorted(span["doc_uid"] for span in inside)
        assert inside[0]["start"] == cell.start
        assert sum(span["length"] for span in inside) == cell.num_tokens == sum(cell.sources.values())
        assert (len(inside), sum(span["num_bytes"] for span in inside)) == (cell.num_documents, cell.num_bytes)


def test_the_same_inputs_give_the_same_bytes_and_six_files(voyage, tmp_path):
    for folder in ("documents", "select", "tokenizer"):
        shutil.copytree(voyage / folder, tmp_path / folder)
    again = run_store(tmp_path, tmp_path / "tokenizer")
    names = sorted(path.name for path in again.iterdir() if path.is_file())
    assert names == sorted(
        ["heldout.bin", "heldout.spans.parquet", "manifest.json", "tokenizer.json", "train.bin", "train.spans.parquet"]
    )
    for name in [*names, "tables/cells.json"]:
        assert (again / name).read_bytes() == (voyage / "store" / name).read_bytes()


def test_heldout_documents_stand_for_exactly_their_bytes(voyage):
    tokenizer, rows = load(voyage / "tokenizer"), documents(voyage)
    found = heldout(voyage / "store")
    assert {document.doc_uid for document in found} == {uid for uid, row in rows.items() if row["split"] == "heldout"}
    for document in found:
        assert tokenizer.decode(document.tokens.tolist()) == rows[document.doc_uid]["text"]
        assert document.num_bytes == tokenizer.byte_lengths[document.tokens].sum()
        assert document.tokens.dtype == np.int32 and tokenizer.eos not in document.tokens


def test_no_heldout_document_is_an_empty_list(tmp_path):
    rng = np.random.default_rng(0)
    write_corpus(tmp_path, [sentence(rng, 40) for _ in range(20)])
    assert heldout(run_store(tmp_path, run_tokenizer(tmp_path))) == []


@pytest.mark.parametrize("name", ["train.bin", "heldout.spans.parquet", "tokenizer.json", "manifest.json"])
def test_a_missing_file_is_named(voyage, tmp_path, name):
    store = shutil.copytree(voyage / "store", tmp_path / "store")
    (store / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        open_store(store)


def test_a_cut_or_changed_file_is_named(voyage, tmp_path):
    store = shutil.copytree(voyage / "store", tmp_path / "store")
    content = (store / "train.bin").read_bytes()
    (store / "train.bin").write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"train.bin has \d+ bytes, its manifest says \d+"):
        open_store(store)
    (store / "train.bin").write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))
    open_store(store)
    with pytest.raises(ValueError, match=r"train.bin does not have the hash"):
        open_store(store, verify=True)


def test_a_manifest_that_lacks_a_count_is_refused_and_not_read_as_zero(voyage, tmp_path):
    store = shutil.copytree(voyage / "store", tmp_path / "store")
    manifest = json.loads((store / "manifest.json").read_text())
    del manifest["splits"]["train"]["num_tokens"]
    (store / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"manifest.json is no store manifest .*num_tokens"):
        open_store(store)


def test_golden_store_of_schema_1_can_be_read(tmp_path):
    """A store as version 1 wrote it, byte for byte; it must stay readable, in 16 and in 32 bits."""
    cell = (
        '{"domain":"sea","level":0,"name":"seaq0","num_bytes":4,"num_documents":1,"num_tokens":3,'
        '"sources":{"a":3},"start":0}'
    )
    for dtype, content in [("<u2", b"\x41\x00\xff\xff\x00\x00"), ("<u4", b"\x41\0\0\0\xff\xff\x01\0\0\0\0\0")]:
        folder = tmp_path / dtype[1:]
        folder.mkdir()
        (folder / "train.bin").write_bytes(content)
        (folder / "manifest.json").write_text(
            f'{{"dtype":"{dtype}","eos":0,"files":{{"train.bin":{{"bytes":{len(content)},"xxh3":""}}}},"schema":1,'
            f'"splits":{{"train":{{"cells":[{cell}],"num_bytes":4,"num_documents":1,"num_tokens":3}}}},'
            '"tokenizer_digest":"","vocab_size":131072}'
        )
        expected = [0x41, 0xFFFF if dtype == "<u2" else 0x1FFFF, 0]
        assert open_store(folder).tokens("train").read(0, 3).tolist() == expected


def test_documents_out_of_order_twice_or_missing_stop_the_stage(voyage, tmp_path):
    for folder in ("documents", "select", "tokenizer"):
        shutil.copytree(voyage / folder, tmp_path / folder)
    file = tmp_path / "documents/documents.parquet"
    table = pq.read_table(file)

    def refuse(rows, message):
        pq.write_table(table.take(rows), file)
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        with pytest.raises(ValueError, match=message):
            run_store(tmp_path, tmp_path / "tokenizer")
        assert not (tmp_path / "store/manifest.json").exists()

    rows = list(range(table.num_rows))
    refuse([1, 0, *rows[2:]], r"documents.parquet: document \w+ follows \w+; uids must ascend")
    refuse([0, *rows], r"uids must ascend without repetition")
    refuse(rows[1:], r"kept.parquet chooses 1 documents that .*documents.parquet does not hold")
    file.write_bytes(b"PAR1 torn")
    with pytest.raises(ValueError, match=r"documents.parquet is no readable parquet"):
        run_tokenizer(
            shutil.copytree(tmp_path, tmp_path / "again", ignore=shutil.ignore_patterns("tokenizer", "store"))
        )


def test_a_cell_of_two_levels_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    write_corpus(tmp_path, [sentence(rng, 40) for _ in range(20)])
    tokenizer = run_tokenizer(tmp_path)
    file = tmp_path / "select/kept.parquet"
    table = pq.read_table(file)
    levels = [0] * (table.num_rows - 1) + [3]
    pq.write_table(table.set_column(table.column_names.index("level"), "level", [levels]), file)
    with pytest.raises(ValueError, match="cell 'seaq0' holds domain and level"):
        run_store(tmp_path, tokenizer)


def test_facts_count_tokens_and_the_control_strings_that_text_spells(tmp_path):
    rng = np.random.default_rng(0)
    write_corpus(tmp_path, [sentence(rng, 40) + "<|end|> <|reserved_1|>" for _ in range(20)])
    facts = store_facts(tmp_path, run_tokenizer(tmp_path))
    store = open_store(tmp_path / "store")
    assert facts["num_control_strings"] == 40 and facts["digest"] == store.digest
    total = store.manifest.splits["train"].num_tokens
    assert facts["num_tokens"] == {"heldout": 0, "train": total}
    assert (store.tokens("train").read(0, total) == store.manifest.eos).sum() == 20
