"""From a folder of documents to nDCG@10, and from triplets to an encoder that loads anywhere."""

from __future__ import annotations

import dataclasses
import gzip
import json
import lzma
import math
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel
from typer.testing import CliRunner

from cable_attn import CableError, pretraining, recipe, study
from cable_attn.cli import app
from cable_attn.data import embedded_corpus, train_bpe
from cable_attn.retrieval import cell, evaluation, training
from cable_attn.retrieval import encoder as encoders
from cable_attn.retrieval.collection import Collection, find_collection, read_collection
from cable_attn.retrieval.embedded import write_embedded
from cable_attn.retrieval.search import read_library, search
from cable_attn.training import Stopped

BERT = [
    "overrides={hidden_size = 32, num_hidden_layers = 2, num_attention_heads = 2, hidden_dropout = 0.0}",
    "vocab_size=1000", "length=64", "micro_batch=8", "tokens_per_update=512", "steps=30", "warmup_steps=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedded")
    write_embedded(folder)
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A small encoder after a few updates of masked-token training on the embedded corpus."""
    folder = tmp_path_factory.mktemp("bert") / "run"
    pretraining.run(recipe.load("bert-embedded", BERT), folder)
    return folder


@pytest.fixture(scope="module")
def retriever(bert, embedded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("retriever") / "run"
    settings = training.Settings(batch_size=16, learning_rate=2e-3, max_length=64, epochs=4)
    training.train(str(bert), training.read_triplets(str(embedded / "triplets.jsonl"), 160), folder, settings)
    return folder


def test_the_embedded_set_is_fair(embedded):
    found = read_collection(embedded)
    assert len(found.documents) > 50 and len(found.queries) > 60 and not found.notes
    for query, documents in found.relevant.items():
        for document in documents:
            assert found.queries[query] not in found.documents[document]
    held_out = " ".join(found.documents.values())
    triplets = training.read_triplets(str(embedded / "triplets.jsonl"))
    assert not any(triplet.query in held_out for triplet in triplets[::10])


def test_training_finds_what_it_was_taught_and_longer_reading_works(bert, retriever, embedded):
    """From masked-token training to nDCG@10. So short a training learns its own pairs and nothing of other novels."""
    pairs = training.read_triplets(str(embedded / "triplets.jsonl"), 160)
    texts, queries = ({str(n): getattr(pair, what) for n, pair in enumerate(pairs)} for what in ("positive", "query"))
    taught = Collection("taught", texts, queries, {name: {name: 1} for name in queries}, [])
    [before], [after] = (evaluation.evaluate(taught, str(model), [64]) for model in (bert, retriever))
    assert after["ndcg@10"] > 2 * before["ndcg@10"] and after["ndcg@10"] > 0.3
    rows = evaluation.evaluate(read_collection(embedded), str(retriever), [64, 512])
    assert [row["max_length"] for row in rows] == [64, 512]
    assert all(0 < row["ndcg@10"] < 1 and row["documents_per_second"] > 0 for row in rows)
    log = json.loads((retriever / "fine_tuning.json").read_text())["log"]
    assert log[-1]["loss"] < log[0]["loss"]


def test_the_encoder_loads_in_plain_sentence_transformers_with_the_same_vectors(retriever):
    texts = ["She walked on.", "It was a very long evening, and nobody came. " * 30, "x"]
    ours = encoders.encode(encoders.load_encoder(str(retriever)), texts, 256, batch_tokens=300)
    code = f"""
import cable_attn, json
from sentence_transformers import SentenceTransformer
model = SentenceTransformer({str(retriever)!r})
model.max_seq_length = 256
print(json.dumps(model.encode({texts!r}, normalize_embeddings=True).tolist()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert np.allclose(ours, json.loads(done.stdout.splitlines()[-1]), atol=1e-5)


def test_nothing_is_encoded_twice(retriever, tmp_path, monkeypatch):
    model = encoders.load_encoder(str(retriever))
    texts = ["one", "two", "", "one"]
    first = encoders.encode(model, texts, 32, cache=tmp_path)
    assert np.array_equal(first[0], first[3]) and not first[2].any()
    read = []
    vectors = encoders._vectors
    monkeypatch.setattr(encoders, "_vectors", lambda model, ids: read.extend(ids) or vectors(model, ids))
    again = encoders.encode(model, [*texts, "three"], 32, cache=tmp_path)
    assert len(read) == 1 and np.array_equal(again[:4], first)
    assert encoders.cache_folder(tmp_path, str(retriever), 32) != encoders.cache_folder(tmp_path, str(retriever), 64)
    (tmp_path / ".0123.npz.1.partial").write_bytes(b"cut off")
    assert np.array_equal(encoders.encode(model, texts, 32, cache=tmp_path), first)


def test_an_encoder_with_learned_positions_reads_what_it_can(tmp_path):
    """A table that ends is an error with its size, not a crash; a search takes as much as there is."""
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.max_position_embeddings = 24
    BertModel(config).save_pretrained(tmp_path)
    train_bpe(embedded_corpus("test"), 300).save_pretrained(tmp_path)
    model = encoders.load_encoder(str(tmp_path))
    with pytest.raises(CableError, match="the model has 24 learned positions, 32 tokens need more"):
        encoders.encode(model, ["word " * 100], 32)
    assert encoders.readable(model, 8192) == 24
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CableError, match="weights must be safetensors"):
        encoders.load_encoder(str(tmp_path))


def test_only_what_was_encoded_counts_as_speed(retriever, embedded, tmp_path):
    collection = find_collection(str(embedded), "test")
    first, second = (evaluation.evaluate(collection, str(retriever), [16], cache=tmp_path)[0] for _ in range(2))
    assert first.pop("documents_per_second") > 0 and first == second


def test_words_that_say_nothing_find_nothing():
    collection = Collection("x", {"d": "the of and"}, {"q": "the"}, {"q": {"d": 1}}, [])
    assert evaluation.by_bm25(collection) == {"q": {}}


def test_no_answer_is_a_negative_in_its_batch():
    triplets = [training.Triplet(f"q{n}", f"p{n // 5}", (f"p{n // 5 + 1}", "unused")) for n in range(200)]
    sampler = training.NoRepeats(triplets, 16, negatives=1, seed=0)
    order = list(sampler)
    assert len(order) == 200 and len(set(order)) > 160 and order == list(sampler)
    for at in range(0, len(order), 16):
        batch = [triplets[n] for n in order[at : at + 16]]
        for one in batch:
            others = [other for other in batch if other is not one]
            assert all(one.positive not in (other.positive, other.negatives[0]) for other in others)
    sampler.set_epoch(1)
    assert list(sampler) != order


def test_few_queries_with_many_negatives_train_all_their_steps(bert, tmp_path):
    """One row for each hard negative is how many sets come."""
    triplets = [training.Triplet(f"q{n // 10}", f"p{n // 10}", (f"n{n}",)) for n in range(40)]
    steps = []
    settings = training.Settings(batch_size=4, max_length=8)
    training.train(str(bert), triplets, tmp_path / "out", settings, watch=lambda step, loss: steps.append(step))
    assert max(steps) == 10
    with pytest.raises(CableError, match=r"no batch of 8 .*: 4 of the 40 triplets is what fits together"):
        training.train(str(bert), triplets, tmp_path / "more", training.Settings(batch_size=8, max_length=8))
    assert not (tmp_path / "more").exists()


def test_a_batch_that_one_order_does_not_give_is_looked_for_in_others():
    """Eight fit together if the one that stands against all others is passed over first."""
    others = [training.Triplet(f"q{n}", f"p{n}") for n in range(8)]
    alone = training.Triplet("q", "p", tuple(other.positive for other in others))
    for epoch in range(20):
        sampler = training.NoRepeats([*others, alone], 8, negatives=8, seed=0)
        sampler.set_epoch(epoch)
        assert set(list(sampler)[:8]) == set(range(8))


def test_a_query_without_a_hard_negative_gets_one_of_its_batch():
    read = []
    batch = [training.Triplet("a", "b", ("c", "d")), training.Triplet("e", "f"), training.Triplet("g", "h", ("i",))]
    tokenizer = lambda texts, **options: read.append(texts) or {}  # noqa: E731
    training._Collate(tokenizer, training.Settings(), 3)(batch)
    assert read == [["a", "e", "g"], ["b", "f", "h"], ["c", "i", "i"], ["d", "d", "d"]]


def test_an_encoder_is_never_written_over(bert, embedded):
    triplets = training.read_triplets(str(embedded / "triplets.jsonl"), 8)
    with pytest.raises(CableError, match="holds a model already"):
        training.train(str(bert), triplets, bert, training.Settings(batch_size=2))


def test_training_takes_its_batches_from_there(bert, monkeypatch, tmp_path):
    monkeypatch.setattr(training.NoRepeats, "_batch", lambda self, left, size: ([left.popleft(), left.popleft()], []))
    seen = []
    collate = training._Collate.__call__
    monkeypatch.setattr(training._Collate, "__call__", lambda self, batch: seen.append(batch) or collate(self, batch))
    triplets = [training.Triplet(f"q{n}", f"p{n}") for n in range(6)]
    training.train(str(bert), triplets, tmp_path / "out", training.Settings(batch_size=2, max_length=8))
    order = list(training.NoRepeats(triplets, 2, 0, seed=0))
    assert [triplet for batch in seen for triplet in batch][:6] == [triplets[n] for n in order]


def test_a_batch_holds_no_more_than_its_budget():
    ids = [[0] * n for n in (9, 8, 8, 3, 2, 1)]
    batches = list(encoders._batches(list(range(6)), ids, 16))
    assert batches == [[0], [1, 2], [3, 4, 5]]


def test_metrics_equal_their_definition():
    found = Collection(
        "c", dict.fromkeys("abcd", "x"), {"q": "x", "r": "x"}, {"q": {"a": 1, "b": 1}, "r": {"d": 1}}, []
    )
    ranking = {"q": {"c": 0.9, "a": 0.8, "b": 0.7}, "r": {"a": 0.9}}
    measured = evaluation.measure(found, ranking)
    ideal = 1 + 1 / math.log2(3)
    assert measured["ndcg@10"] == pytest.approx((1 / math.log2(3) + 1 / math.log2(4)) / ideal / 2)
    assert measured["mrr"] == pytest.approx(0.25) and measured["recall@100"] == pytest.approx(0.5)


@pytest.mark.parametrize("search", ["product", "faiss"])
def test_search_is_exact_and_passes_over_the_empty(search, monkeypatch):
    if search == "faiss":
        pytest.importorskip("faiss")
    monkeypatch.setattr(evaluation, "QUERIES", 2)
    rng = np.random.default_rng(0)
    documents, queries = rng.normal(size=(7, 5)).astype("f"), rng.normal(size=(3, 5)).astype("f")
    documents[2] = 0
    found = Collection("c", dict.fromkeys("abcdefg", "x"), dict.fromkeys("pqr", "x"), {}, [])
    ranking = evaluation.by_vectors(found, documents, queries, search)
    for query, vector in zip("pqr", queries):
        scores = {name: float(documents[n] @ vector) for n, name in enumerate("abcdefg") if name != "c"}
        assert ranking[query] == pytest.approx(scores)


def write(folder, corpus, queries, judged):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl.xz").write_bytes(lzma.compress(corpus))
    (folder / "queries.jsonl").write_bytes(queries)
    (folder / "qrels" / "test.tsv").write_bytes(b"query-id\tcorpus-id\tscore\n" + judged)


DOCUMENT, QUERY = b'{"_id": "a", "title": "T", "text": "x"}\n', b'{"_id": "q", "text": "y"}\n'


def test_odd_collections_are_told(tmp_path):
    corpus = DOCUMENT + b'{"_id": "empty", "text": " "}\n'
    write(tmp_path / "c", corpus, QUERY, b"q\ta\t1\nq\tnowhere\t1\nnobody\ta\t1\n")
    found = read_collection(tmp_path / "c")
    assert found.documents == {"a": "T x", "empty": ""} and list(found.queries) == ["q"]
    told = " ".join(found.notes)
    assert "empty documents, which cannot be found: 1 ('empty')" in told and "'nowhere'" in told and "'nobody'" in told


def test_judgements_need_no_header_and_queries_must_count(tmp_path):
    queries = QUERY + b'{"_id": "empty", "text": " "}\n{"_id": "none", "text": "x"}\n'
    write(tmp_path / "c", DOCUMENT, queries, b"empty\ta\t1\nnone\ta\t-1\n")
    judged = tmp_path / "c/qrels/test.tsv"
    judged.write_text("q\ta\t1\n" + "".join(judged.read_text().splitlines(keepends=True)[1:]))
    found = read_collection(tmp_path / "c")
    assert list(found.queries) == ["q"]
    assert "judged queries that are empty, which are left out: 1" in " ".join(found.notes)


MLDR = {
    "corpus": b'{"docid": "a", "text": "long"}\n{"docid": "b", "text": "longer"}\n',
    "test": b'{"query_id": "q", "query": "what", "positive_passages": [{"docid": "b", "text": "longer"}]}\n',
}


def test_mldr_from_its_own_files(tmp_path):
    for name, lines in MLDR.items():
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    found = find_collection(str(tmp_path))
    assert found.documents == {"a": "long", "b": "longer"}
    assert found.queries == {"q": "what"} and found.relevant == {"q": {"b": 1}}
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(b'{"query_id": 1}\n'))
    with pytest.raises(CableError, match=r"test.jsonl.gz, line 1: wanted an object with the text query_id"):
        find_collection(str(tmp_path))


def test_mldr_from_the_hub_through_mteb(monkeypatch):
    mteb = pytest.importorskip("mteb")
    with pytest.raises(CableError, match=r"the hub cannot give 'mteb/MultiLongDocRetrieval'.*give the folder"):
        find_collection("mldr")
    split = {
        "corpus": [{"id": "a", "text": "long", "title": "Title"}],
        "queries": [{"id": "q", "text": "what"}],
        "relevant_docs": {"q": {"a": 1}},
    }

    def load(task):
        assert task.hf_subsets == ["en"]
        task.dataset = {"en": {"test": split}}

    monkeypatch.setattr(mteb.get_task("MultiLongDocRetrieval").__class__, "load_data", load)
    found = find_collection("mldr")
    assert found.documents == {"a": "Title long"} and found.queries == {"q": "what"}
    assert found.relevant == {"q": {"a": 1}}


@pytest.mark.parametrize(
    ("corpus", "queries", "judged", "words"),
    [
        (DOCUMENT * 2, QUERY, b"q\ta\t1\n", "line 2: the id 'a' was there before"),
        (b'{"_id": "a"}\n', QUERY, b"q\ta\t1\n", "line 1: wanted an object with the strings _id and text"),
        (b"{\n", QUERY, b"q\ta\t1\n", "line 1: is not JSON"),
        (DOCUMENT, b'{"_id": "q", "text": "\xff"}\n', b"q\ta\t1\n", "queries.jsonl, line 1: is not UTF-8 (byte 22)"),
        (DOCUMENT, QUERY, b"q a 1\n", "test.tsv, line 2: wanted query, document"),
        (DOCUMENT, QUERY, b"q\ta\t0\n", "none of its queries has a relevant document"),
        (b"", QUERY, b"q\ta\t1\n", "has no document"),
    ],
)
def test_bad_collections_are_named_before_anything_is_encoded(corpus, queries, judged, words, tmp_path):
    write(tmp_path / "c", corpus, queries, judged)
    with pytest.raises(CableError) as error:
        read_collection(tmp_path / "c")
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"query": "a"}', "wanted a query and a positive text"),
        ('{"query": "a", "positive": 3}', "positive must be a text"),
        ("", "has no triplet"),
    ],
)
def test_bad_triplets_are_named(text, words, tmp_path):
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(CableError, match=words):
        training.read_triplets(str(tmp_path / "t.jsonl"))


def test_triplets_have_many_names(tmp_path):
    rows = ['{"query": "a", "pos": ["b"], "neg": ["c", "d"]}', '{"anchor": "a", "positive": "b", "negative": "c"}']
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    first, second = training.read_triplets(str(tmp_path / "t.jsonl"))
    assert first == training.Triplet("a", "b", ("c", "d")) and second == training.Triplet("a", "b", ("c",))


def test_every_positive_counts_and_no_negative_is_one(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"query": "a", "positive": ["b", "c"], "negative": ["b", " ", "d"]}')
    found = training.read_triplets(str(tmp_path / "t.jsonl"))
    assert found == [training.Triplet("a", "b", ("d",)), training.Triplet("a", "c", ("d",))]
    assert training.read_triplets(str(tmp_path / "t.jsonl"), 1) == found[:1]


def test_the_baseline_of_words_is_of_the_collection_as_it_is(tmp_path):
    write(tmp_path / "c", DOCUMENT, QUERY, b"q\ta\t1\n")
    name = str(tmp_path / "c")
    known = cell.baseline(name)
    stale = {**known, "ndcg@10": -1.0}
    assert cell.baseline(name, stale) == stale and cell.baseline(name, {**stale, "sha256": ""}) == known


def test_an_encoder_that_cannot_be_loaded_leaves_nothing_behind(embedded, tmp_path):
    triplets = training.read_triplets(str(embedded / "triplets.jsonl"), 8)
    for _ in range(2):  # the same words again, not that a run was cut off
        with pytest.raises(CableError, match="nowhere"):
            training.train(str(tmp_path / "nowhere"), triplets, tmp_path / "out", training.Settings(batch_size=4))
    assert not (tmp_path / "out").exists()


def test_another_fine_tuning_is_never_taken_for_the_one_that_was_asked_for(bert, embedded, tmp_path):
    asked = cell.Retrieval(
        triplets=str(embedded / "triplets.jsonl"), collections=[str(embedded)], limit=8, batch_size=4, max_length=16
    )
    told = cell.run(bert, tmp_path, asked, [16], 0)
    again = cell.run(bert, tmp_path, asked, [16], 0)
    assert told["fine_tuning"] == again["fine_tuning"] and told["fine_tuning"]["triplets"] == 8
    with pytest.raises(CableError, match="holds the fine-tuning of other settings: triplets_sha256 was"):
        cell.run(bert, tmp_path, dataclasses.replace(asked, limit=12), [16], 0)


def test_a_cut_off_fine_tuning_goes_on_and_ends_the_same(bert, embedded, tmp_path, monkeypatch):
    settings = training.Settings(batch_size=8, learning_rate=1e-3, max_length=32, save_every=2, cached_batch=4)

    def cut_off():
        raise KeyboardInterrupt

    def run(folder, resume=False, cut=None):
        def watch(step, loss):
            if step == cut == 2:  # the step in hand is still done
                signal.raise_signal(signal.SIGTERM)
            elif step == cut:
                cut_off()

        triplets = training.read_triplets(str(embedded / "triplets.jsonl"), 48)
        training.train(str(bert), triplets, folder, settings, resume, watch)

    run(tmp_path / "whole")
    with pytest.raises(Stopped, match="stopped at step 3, saved"):
        run(tmp_path / "cut", cut=2)
    assert (tmp_path / "cut/.training/checkpoint-3/modules.json").is_file()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", resume=True, cut=5)
    with pytest.raises(CableError, match="Add --resume"):
        run(tmp_path / "cut")
    right, settings = settings, dataclasses.replace(settings, learning_rate=1e-2)
    with pytest.raises(CableError, match=r"other settings: learning_rate was 0.001 and is 0.01\."):
        run(tmp_path / "cut", resume=True)
    settings, move = right, shutil.move
    monkeypatch.setattr(shutil, "move", lambda path, to: move(path, to) if to.name != "modules.json" else cut_off())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", resume=True)
    assert (tmp_path / "cut/config.json").exists()
    monkeypatch.undo()
    run(tmp_path / "cut", resume=True)
    a, b = (SentenceTransformer(str(tmp_path / name)).encode("a text") for name in ("whole", "cut"))
    assert np.allclose(a, b, atol=1e-6)
    with pytest.raises(CableError, match="holds a model already, and no run to resume"):
        run(tmp_path / "cut", resume=True)


def test_the_command_line(retriever, tmp_path):
    arguments = [
        "retrieve",
        "eval",
        "embedded",
        str(retriever),
        "bm25",
        "--lengths",
        "64",
        "--cache",
        str(tmp_path / "c"),
    ]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "r.json")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [row["max_length"] for row in rows] == [64, None] and rows[1]["ndcg@10"] > 0.3
    assert "bm25" in result.output and list((tmp_path / "c").glob("*/*.npz"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("She walked along the quiet river and thought of nothing. " * 20)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("The council raised the price of bread again, and the town was angry. " * 20)
    (tmp_path / "c.jsonl").write_text('{"text": "A short note on sheep."}\n\n{"title": "T", "text": "Ships at sea."}\n')
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "photo.png").write_bytes(b"no text")
    return tmp_path


def test_a_folder_is_searched_and_only_what_changed_is_read_again(folder, retriever, monkeypatch, tmp_path_factory):
    library = read_library(folder)
    assert list(library.texts) == ["a.txt", "c.jsonl:1", "c.jsonl:3", "sub/b.md"]
    told = " ".join(library.notes)
    assert "bad.txt: is not UTF-8 (byte 3)" in told and "empty.txt: is empty" in told and "broken.jsonl" in told
    cache = tmp_path_factory.mktemp("cache")
    query = "A short note on sheep."
    hits = search(library, query, str(retriever), count=2, max_length=64, cache=cache)
    assert hits[0].where == "c.jsonl:1" and hits[0].score == pytest.approx(1, abs=1e-5) and hits[0].passage == query
    assert len(hits) == 2 and hits[1].score <= hits[0].score
    read = []
    vectors = encoders._vectors
    monkeypatch.setattr(encoders, "_vectors", lambda model, ids: read.extend(ids) or vectors(model, ids))
    (folder / "a.txt").write_text("Quite another text.")
    search(read_library(folder), query, str(retriever), count=1, max_length=64, cache=cache)
    assert len(read) == 2, "the changed file and the query"


def test_a_search_that_cannot_be_done_is_told(folder, retriever, tmp_path):
    with pytest.raises(CableError, match="is no folder"):
        read_library(tmp_path / "nowhere")
    (tmp_path / "none").mkdir()
    with pytest.raises(CableError, match="has no text to search"):
        read_library(tmp_path / "none")
    with pytest.raises(CableError, match="query is empty"):
        search(read_library(folder), " ", str(retriever))
    with pytest.raises(CableError, match="is not an encoder"):
        encoders.load_encoder(str(folder))


def test_a_study_pre_trains_fine_tunes_and_searches(bert, embedded, tmp_path, monkeypatch):
    """Masked tokens, triplets, documents at two lengths, BM25 beside; what is done is not done again."""
    own = tmp_path / "study" / "cable-0"
    shutil.copytree(bert, own)
    (tmp_path / "small.toml").write_text(f"""
title = "A test"
recipe = "bert-embedded"
encodings = ["cable"]
lengths = [64, 256]
overrides = [{", ".join(json.dumps(setting) for setting in BERT)}]

[retrieval]
triplets = "{embedded / "triplets.jsonl"}"
collections = ["embedded"]
limit = 64
batch_size = 16
max_length = 64
""")
    command = ["study", "run", str(tmp_path / "small.toml"), "--out", str(tmp_path / "study")]
    monkeypatch.setattr(cell, "run", watched := Watched(cell.run))
    for _ in range(2):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    assert watched.calls == 1
    found = json.loads((own / "evaluation.json").read_text())
    rows = found["retrieval"]["embedded"]["rows"]
    assert [row["max_length"] for row in rows] == [64, 256] and found["fine_tuning"]["triplets"] == 64
    again = evaluation.evaluate(find_collection("embedded"), str(own / "retriever"), [256])
    assert again[0]["ndcg@10"] == pytest.approx(rows[1]["ndcg@10"])
    assert not (own / "embeddings").exists()
    (own / "evaluation.json").unlink()  # as if it had been cut off while it searched
    monkeypatch.setattr(training, "train", None)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads((own / "evaluation.json").read_text())["fine_tuning"] == found["fine_tuning"]
    (own / "evaluation.json").unlink()
    text = (tmp_path / "small.toml").read_text()
    (tmp_path / "small.toml").write_text(text.replace("batch_size = 16", "batch_size = 8"))
    done = CliRunner().invoke(app, command)
    assert "other settings: batch_size was 16 and is 8" in str(done.exception)
    table = (tmp_path / "study" / "table.md").read_text()
    assert f"{100 * rows[1]['ndcg@10']:.2f}" in table and "bm25" in table
    assert (tmp_path / "study" / "contrastive.png").exists()
    page = (tmp_path / "study" / "report.html").read_text()
    assert (
        f"{100 * rows[1]['ndcg@10']:.2f}" in page and "bm25, whole documents" in page and "Loss in fine-tuning" in page
    )


class Watched:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("recipe_name", "section", "words"),
    [
        ("gpt-embedded", "", "[retrieval] is for encoders, and cable-0 is a GPT"),
        ("bert-embedded", "triplet = 1", "unknown key of [retrieval] 'triplet'"),
    ],
)
def test_bad_retrieval_studies_are_named(recipe_name, section, words, tmp_path):
    text = f'recipe = "{recipe_name}"\nencodings = ["cable"]\nlengths = [64]\n[retrieval]\n{section}\n'
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(CableError) as error:
        study.load(str(tmp_path / "bad.toml"))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"collections": "embedded"}, "collections (a list)"),
        ({"collections": ["/nope"]}, "'/nope' has no corpus.jsonl"),
        ({"batch_size": 0}, "batch_size must be above 0, got 0"),
        ({"triplets": "/nope"}, "'/nope' is no file"),
    ],
)
def test_what_a_retrieval_study_needs_is_checked_before_training(embedded, change, words):
    right = {"triplets": str(embedded / "triplets.jsonl"), "collections": ["embedded"]}
    cell.check(cell.Retrieval(**right))
    with pytest.raises(CableError) as error:
        cell.check(cell.Retrieval(**{**right, **change}))
    assert words in str(error.value)


def test_vectors_that_are_not_finite_are_told_and_empty_documents_find_nothing():
    found = Collection("c", {"a": "", "b": ""}, {"q": "x"}, {}, [])
    query, nothing = np.ones((1, 3), np.float32), np.zeros((2, 3), np.float32)
    assert evaluation.by_vectors(found, nothing, query) == {"q": {}}
    with pytest.raises(CableError, match="not finite"):
        evaluation.by_vectors(found, nothing + 1, query * np.nan)
