"""Sources, token shards and the order of samples."""

from __future__ import annotations

import json
import lzma
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cable_attn.cli import app
from cable_attn.data import embedded_corpus, train_bpe
from cable_attn.data.shards import Request, Tokens, import_tokens, prepare, read_manifest, verify
from cable_attn.data.sources import HUB, join_lines, open_source
from cable_attn.data.tokenizers import find_tokenizer
from cable_attn.data.windows import Masked, Order, TokenWindows
from cable_attn.errors import CableError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for n in range(7):
        (folder / f"{n}.txt").write_text(f"Document {n} says: " + "it is a truth universally acknowledged. " * (n + 2))
    return folder


def made(folder: Path, source: Path, tokenizer=None, shard_tokens: int = 100, **options) -> dict:
    streams = open_source(str(source), held_out=0.25)
    tokenizer = tokenizer or find_tokenizer("bpe:300", streams["train"](0))
    return prepare(folder, Request(str(source), "bpe:300", None, shard_tokens), streams, tokenizer, **options)


class Words:
    """One token a word; fails after so many batches."""

    vocab_size, separator = 70000, 0

    def __init__(self, batches: int = 10**9):
        self.left = batches

    def encode(self, texts):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return [np.asarray([len(word) for word in text.split()], dtype=np.uint32) for text in texts]

    def save(self, folder): ...


def test_shards_hold_the_documents_in_order(tmp_path, texts):
    manifest = made(tmp_path / "shards", texts)
    assert len(manifest["splits"]["train"]["shards"]) > 1
    assert sum(manifest["splits"][split]["documents"] for split in ("train", "validation")) == 7
    tokens = Tokens(tmp_path / "shards", "train")
    tokenizer = find_tokenizer(str(tmp_path / "shards/tokenizer"), [])
    everything = tokens.slice(0, len(tokens))
    assert "".join(tokenizer.tokenizer.batch_decode(everything)).startswith("<|endoftext|>Document 0 says: it is")
    starts = tokens.document_starts
    assert (everything[starts] == tokenizer.separator).all() and len(starts) == 6
    assert np.array_equal(tokens.document_ids(0, len(tokens))[starts], np.arange(6))
    assert np.array_equal(pickle.loads(pickle.dumps(tokens)).slice(0, 9), everything[:9])
    for start, stop in ((0, 5), (95, 130), (3, len(tokens))):  # also across shards
        assert np.array_equal(tokens.slice(start, stop), everything[start:stop])


def test_a_cut_off_preparation_goes_on_to_the_same_bytes(tmp_path, texts, monkeypatch):
    monkeypatch.setattr("cable_attn.data.shards.BATCH", 2)
    made(tmp_path / "whole", texts, Words(), 30)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "cut", texts, Words(2), 30)
    assert not read_manifest(tmp_path / "cut")["splits"]["train"]["complete"]
    assert verify(tmp_path / "cut") != []
    with pytest.raises(CableError, match="not complete"):
        Tokens(tmp_path / "cut", "train")
    made(tmp_path / "cut", texts, Words(), 30)
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cut").iterdir())
    for name in files:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name
    assert read_manifest(tmp_path / "cut")["dtype"] == "uint32"


def test_damaged_shards_are_named(tmp_path, texts):
    folder = tmp_path / "shards"
    made(folder, texts)
    first, second = folder / "train-00000.bin", folder / "train-00001.bin"
    content = bytearray(first.read_bytes())
    content[7] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-2])
    problems = verify(folder)
    assert any("train-00000.bin: altered" in line for line in problems)
    assert any("train-00001.bin: has" in line for line in problems)
    with pytest.raises(CableError, match=r"train-00001\.bin"):
        Tokens(folder, "train")
    result = CliRunner().invoke(app, ["data", "verify", str(folder)])
    assert isinstance(result.exception, CableError) and "altered" in str(result.exception)


def test_another_request_never_mixes(tmp_path, texts):
    made(tmp_path / "shards", texts)
    with pytest.raises(CableError, match=r"of another request: shard_tokens was \d+ and is 50\. Choose another"):
        made(tmp_path / "shards", texts, shard_tokens=50)
    with pytest.raises(CableError, match="not empty"):
        made(texts, texts)
    made(tmp_path / "shards", texts)  # nothing to do
    (texts / "0.txt").write_text("Something else.")
    with pytest.raises(CableError, match="has changed since its tokens were made"):
        made(tmp_path / "shards", texts)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.4, 0.9])
def test_the_share_that_is_asked_for_is_held_out(tmp_path, share):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 500)
    streams = open_source(str(tmp_path / "rows.jsonl"), held_out=share)
    assert [len(list(streams[split](0))) for split in ("train", "validation")] == [500 - 500 * share, 500 * share]


@pytest.mark.parametrize("files", [1, 2, 3, 7, 150])
def test_of_few_texts_something_is_held_out(tmp_path, files):
    for n in range(files):
        (tmp_path / f"{n:03}.TXT").write_text(f"{n:03} " * 200)
    streams = open_source(str(tmp_path))
    train, validation = ([document.text for document in streams[name](0)] for name in ("train", "validation"))
    assert validation and train and "".join(train + validation).count(" ") == files * 200
    assert len(validation) == 1 and len(train) == max(files - 1, 1)
    assert list(open_source(str(tmp_path), held_out=0.0)) == ["train"]


def test_what_lies_in_a_folder_is_neither_deleted_nor_written_over(texts, tmp_path):
    mine = tmp_path / "mine" / "tokenizer"
    mine.mkdir(parents=True)
    (mine / "tokenizer.json").write_text("mine")
    with pytest.raises(CableError, match="is not empty"):
        made(tmp_path / "mine", texts)
    assert (mine / "tokenizer.json").read_text() == "mine"


def test_the_name_of_a_special_token_in_a_text_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("and so on <|endoftext|> and on " * 50)
    made(tmp_path / "shards", tmp_path / "a.txt")
    found = Tokens(tmp_path / "shards", "train")
    assert int((found.slice(0, len(found)) == 0).sum()) == 1  # before the document


def test_a_manifest_that_is_none_is_told(tmp_path):
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(CableError, match=r"manifest.json' holds no dict, but \[\]"):
        Tokens(tmp_path, "train")


def test_tables_that_are_no_texts_are_refused(tmp_path):
    (tmp_path / "a.CSV").write_text("a,b")
    with pytest.raises(CableError, match="holds rows, not a text"):
        list(open_source(str(tmp_path / "a.CSV"))["train"](0))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": 3}\n', "line 2: no text in column 'text'"),
        ('{"text": "a"}\nnot json\n', "line 2: is not JSON"),
        ('{"text": "caf\xe9"}\n', "line 1: is not UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, words):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode("latin-1"))
    (tmp_path / "rows.parquet").write_bytes(b"not parquet")
    with pytest.raises(CableError, match="is no parquet file"):
        list(open_source(str(tmp_path / "rows.parquet"), held_out=0.0)["train"](0))
    with pytest.raises(CableError, match=words):
        list(open_source(str(path), held_out=0.0)["train"](0))


def test_parquet_and_markdown(tmp_path):
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pydict({"body": ["one", "two"]}), tmp_path / "a.parquet")
    (tmp_path / "b.md").write_text("three")
    documents = list(open_source(str(tmp_path), column="body", held_out=0.0)["train"](1))
    assert [document.text for document in documents] == ["two", "three"]


def test_sources_that_cannot_be_had_say_what_to_do(tmp_path):
    with pytest.raises(CableError, match="Allowed: embedded, fineweb-edu"):
        open_source("no-such-thing")
    with pytest.raises(CableError, match="Without a network, fetch its parquet files from"):
        next(open_source("wikitext-103")["train"](0))
    with pytest.raises(CableError, match="cable data prepare SOURCE"):
        Tokens(tmp_path, "train")
    with pytest.raises(CableError, match="bpe:4096"):
        find_tokenizer("bpe:many", [])


def test_lines_become_articles():
    lines = ["", " = One = \n", "", " text \n", " = = Part = = \n", " more with \n", " = 1 henry and C = \n", ""]
    lines += [" = Two = \n", "", " end \n"]
    documents = list(join_lines(lines, HUB["wikitext-103"].heading, "w"))
    assert [document.text.count("\n") for document in documents] == [5, 2], "a formula begins no article"
    assert documents[1].text.startswith(" = Two =")


def test_a_folder_that_was_hardly_begun_is_begun_again(tmp_path, texts):
    (tmp_path / "shards/tokenizer.partial").mkdir(parents=True)
    (tmp_path / "shards/.manifest.json.1.partial").write_text("{")
    made(tmp_path / "shards", texts)
    assert verify(tmp_path / "shards") == []
    (tmp_path / "shards/train-00000.documents.npy").write_bytes(b"x")
    assert "documents.npy: altered" in verify(tmp_path / "shards")[0]


def test_a_limit_on_tokens(tmp_path, texts):
    request = Request(str(texts), "bpe:300", tokens=50, shard_tokens=20)
    streams = open_source(str(texts), held_out=0.0)
    manifest = prepare(tmp_path / "shards", request, streams, Words())
    assert manifest["splits"]["train"]["tokens"] == 50


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 2**31))
def test_every_window_once_an_epoch(count, epochs, seed):
    order = Order(list(range(count)), seed, count * (epochs + 1))
    seen = [order.window(place) for place in range(len(order))]
    for epoch in range(epochs + 1):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))
    again = Order(list(range(count)), seed, count * (epochs + 1))
    assert [again.window(place) for place in reversed(range(len(order)))] == seen[::-1]


def test_separate_documents_never_predict_the_next(tmp_path, texts):
    made(tmp_path / "shards", texts)
    windows = TokenWindows(Tokens(tmp_path / "shards", "train"), 64, separate=True)
    sample = windows[0]
    documents = sample["document_ids"]
    assert documents[0] != documents[-1]
    change = torch.nonzero(documents[1:] != documents[:-1])[:, 0] + 1
    assert (sample["labels"][change] == -100).all()
    assert (sample["labels"] != -100).sum() == 64 - 1 - len(change)


def test_masks_depend_on_the_place_alone():
    tokenizer = train_bpe(embedded_corpus("test"), 400)
    rows = [{"input_ids": torch.randint(5, 400, (2000,))} for _ in range(3)]
    masked = Masked(rows, tokenizer, 0.15, seed=1)
    first, other = masked[1], masked[2]
    assert all(torch.equal(a, b) for a, b in zip(masked[1].values(), first.values()))
    chosen = first["labels"] != -100
    assert 0.10 < chosen.float().mean() < 0.20 and not torch.equal(chosen, other["labels"] != -100)
    replaced = first["input_ids"][chosen] == tokenizer.mask_token_id
    assert 0.7 < replaced.float().mean() < 0.9
    assert torch.equal(first["labels"][chosen], rows[1]["input_ids"][chosen])
    assert torch.equal(first["input_ids"][~chosen], rows[1]["input_ids"][~chosen])


def test_a_window_has_something_to_predict():
    tokenizer = train_bpe(embedded_corpus("test"), 400)
    masked = Masked([{"input_ids": torch.randint(5, 400, (20,))} for _ in range(50)], tokenizer, 0.01, seed=1)
    assert all((masked[place]["labels"] >= 0).any() for place in range(50))


def test_the_command_prepares_the_embedded_corpus(tmp_path):
    arguments = ["data", "prepare", "embedded", str(tmp_path / "d"), "--tokenizer", "bpe:300", "--tokens", "5000"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    assert {split: entry["tokens"] for split, entry in manifest["splits"].items()} == dict.fromkeys(
        ("train", "validation", "test"), 5000
    )


def test_tokens_made_elsewhere(tmp_path):
    tokens = np.asarray([9, 1, 2, 9, 3, 9, 4, 5, 6, 7], dtype="<u2")
    (tmp_path / "a.bin.xz").write_bytes(lzma.compress(tokens.tobytes()))
    manifest = import_tokens(tmp_path / "d", {"train": tmp_path / "a.bin.xz"}, 10, 9, shard_tokens=4)
    assert [shard["tokens"] for shard in manifest["splits"]["train"]["shards"]] == [5, 5]
    found = Tokens(tmp_path / "d", "train")
    assert found.slice(0, 10).tolist() == tokens.tolist() and found.document_starts.tolist() == [0, 3, 5]
    assert verify(tmp_path / "d") == []
    tokenizer = find_tokenizer("bpe:300", embedded_corpus("test"))
    import_tokens(tmp_path / "d", {"train": tmp_path / "a.bin.xz"}, 10, 9, tokenizer, shard_tokens=4)
    assert (tmp_path / "d/tokenizer/tokenizer.json").is_file()  # one that comes later is kept as well
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.bin.xz").write_bytes(lzma.compress(tokens[:6].tobytes()))
    with pytest.raises(CableError, match=r"is not what .* holds for train"):
        import_tokens(tmp_path / "d", {"train": tmp_path / "other/a.bin.xz"}, 10, 9, shard_tokens=4)
    result = CliRunner().invoke(app, ["data", "import", "../evil=a.bin", "--out", str(tmp_path / "g")])
    assert "the name of a split" in str(result.exception)
    (tmp_path / "b.bin").write_bytes(tokens[1:].tobytes())
    with pytest.raises(CableError, match="does not begin with the separator 9"):
        import_tokens(tmp_path / "e", {"train": tmp_path / "a.bin.xz", "test": tmp_path / "b.bin"}, 10, 9)
    assert not (tmp_path / "e").exists()
    with pytest.raises(CableError, match="has the token 9; the vocabulary has 8"):
        import_tokens(tmp_path / "f", {"train": tmp_path / "a.bin.xz"}, 8, 7)
    result = CliRunner().invoke(app, ["data", "import", "train=/nowhere.bin", "--out", str(tmp_path / "g")])
    assert str(result.exception) == "cannot read '/nowhere.bin': No such file or directory."
    result = CliRunner().invoke(app, ["data", "import", "books.bin", "--out", str(tmp_path / "g")])
    assert isinstance(result.exception, CableError) and "SPLIT=FILE" in str(result.exception)
    result = CliRunner().invoke(app, ["data", "import", "train=a.bin", "train=b.bin", "--out", str(tmp_path / "g")])
    assert isinstance(result.exception, CableError) and "split 'train' is given twice" in str(result.exception)
