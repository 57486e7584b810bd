"""Tasks of lm-evaluation-harness, judged by a plain loop over the model."""

from __future__ import annotations

import bz2
import json
import math
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cable_attn import CableBertForMaskedLM, CableError, CableGPTForCausalLM, harness
from cable_attn.data import Document, train_bpe
from cable_attn.harness import run_tasks

from .conftest import small_bert, small_gpt, stir

WORDS = "a man sits on the roof and then he walks home with her dog . They say : Look ! é é ééé éé "
TOKENIZER = train_bpe([Document("words", WORDS * 200)], 340)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]

HELLASWAG = [  # the line of the file, the prompt that the harness makes of it, the endings, as the harness cleans them
    (
        "Roof work: A man sits on the roof. he",
        "Roof work: A man sits on the roof. He",
        ["walks home.", "is on the dog and then he is on the man.", "sits with her.", "then walks."],
    ),
    (
        "Health: How to rest [title] Sleep. [step] Go to bed early.",
        "Health: How to rest. Sleep. Go to bed early.",
        ["Take [substeps] a nap.", "Then walk home and sit.", "Look at the dog!", "Say it."],
    ),
    (
        "Songs: They say something. the man",
        "Songs: They say something. The man",
        ["ééé ééé ééé ééé", "sits on the roof and then walks home", "xq zj vk", "Qx jZ"],
    ),
    (
        'Camping: "Look!" she said. then they all',
        'Camping: "Look!" she said. Then they all',
        ["sit down.", "walk home, the dog and the man.", "say nothing at all, not a word.", "look."],
    ),
]
LAMBADA = [
    "They say the man walks home with her dog",
    "Look! A man\n\nsits on the roof, and he sits, and then he walks home and home and home with a small dog",
    "Then he walks on the roof",
]


@pytest.fixture
def model() -> CableGPTForCausalLM:
    return make_model()


def make_model(**overrides: object) -> CableGPTForCausalLM:
    torch.manual_seed(0)
    config = small_gpt(**{"vocab_size": len(TOKENIZER), "max_position_embeddings": 256, **overrides})
    return stir(CableGPTForCausalLM(config)).eval()


def write_hellaswag(folder: Path, gold: list[int]) -> None:
    lines = [[line, str(index), *endings] for (line, _, endings), index in zip(HELLASWAG, gold)]
    (folder / "hellaswag_val_full.txt").write_text("".join(f"{text}\n" for item in lines for text in item))


def write_lambada(folder: Path) -> None:
    (folder / "lambada_test.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in LAMBADA))


def write_both(folder: Path) -> Path:
    write_hellaswag(folder, [0, 1, 2, 3])
    write_lambada(folder)
    return folder


def answer(model, context: str, continuation: str, max_length: int = 10_000) -> tuple[float, bool]:
    """The log-likelihood of the continuation, and whether it is what the model would have said."""
    whole = TOKENIZER.encode(context + continuation)
    count = len(whole) - len(TOKENIZER.encode(context))
    ids = torch.tensor(whole)[-(max_length + 1) :]
    with torch.no_grad():
        logits = model(ids[None, :-1]).logits[0, -count:].double()
    targets = ids[-count:]
    chosen = logits.log_softmax(-1)[torch.arange(count), targets]
    return chosen.sum().item(), bool((logits.argmax(-1) == targets).all())


def choices(model) -> dict[str, list[int]]:
    """Which ending wins, item by item: by likelihood, per character (the harness's acc_norm), and per byte."""
    chosen: dict[str, list[int]] = {"acc": [], "acc_norm": [], "bytes": []}
    for _, prompt, endings in HELLASWAG:
        cleaned = [ending.replace(" [substeps]", "") for ending in endings]
        scores = np.array([answer(model, prompt, f" {ending}")[0] for ending in cleaned])
        chosen["acc"].append(int(scores.argmax()))
        chosen["acc_norm"].append(int((scores / [len(ending) for ending in cleaned]).argmax()))
        chosen["bytes"].append(int((scores / [len(ending.encode()) for ending in cleaned]).argmax()))
    return chosen


@pytest.mark.parametrize("metric", ["acc", "acc_norm"])
def test_hellaswag_equals_a_plain_loop(model, metric, tmp_path):
    """The true endings are set to the winners of the plain loop, so one other choice in the harness would show."""
    winners = choices(model)
    assert winners["acc_norm"] != winners["acc"] and winners["acc_norm"] != winners["bytes"]
    write_hellaswag(tmp_path, winners[metric])
    expected = {name: np.mean([a == b for a, b in zip(winners[name], winners[metric])]) for name in ("acc", "acc_norm")}
    assert expected[metric] == 1
    assert run_tasks(model, TOKENIZER, ["hellaswag"], tmp_path) == {"hellaswag": expected}


def test_lambada_equals_a_plain_loop(model, tmp_path):
    """The model is made to say "dog" always, which is right twice out of three."""
    (dog,) = TOKENIZER.encode(" dog")
    with torch.no_grad():
        model.transformer.ln_f.bias += 50 * model.transformer.wte.weight[dog]
    answers = [answer(model, *text_and_last_word(text)) for text in LAMBADA]
    assert [right for _, right in answers] == [True, True, False]
    write_lambada(tmp_path)
    result = run_tasks(model, TOKENIZER, ["lambada"], tmp_path)["lambada"]
    assert result.keys() == {"acc", "perplexity"}
    assert result["acc"] == pytest.approx(2 / 3)
    assert result["perplexity"] == pytest.approx(math.exp(-np.mean([score for score, _ in answers])), rel=1e-4)


def text_and_last_word(text: str) -> tuple[str, str]:
    context, _, word = text.rpartition(" ")
    return context, f" {word}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("encoding", ["cable", "rope"])
def test_scores_do_not_depend_on_the_batch(encoding, device, tmp_path):
    model = make_model(encoding=encoding).to(device)
    folder = write_both(tmp_path)
    alone, together = (run_tasks(model, TOKENIZER, ["hellaswag", "lambada"], folder, batch_size=n) for n in (1, 8))
    assert alone.keys() == together.keys() == {"hellaswag", "lambada"}
    for task in alone:
        assert together[task] == pytest.approx(alone[task], rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_generation_in_left_padded_batches(model, batch_size, tmp_path, monkeypatch):
    """A task that is not one of the local ones comes from the harness's list, beside one that is."""
    prompts = ["They say", "A man sits on the roof and", "Look"]
    rows = [{"prompt": prompt, "answer": say(model, prompt)} for prompt in prompts]
    assert len({row["answer"] for row in rows}) == 3
    (tmp_path / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "say",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(tmp_path / "say.jsonl")},
            "cache_dir": str(tmp_path / f"cache{batch_size}"),
        },
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n\n\n\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "say.yaml").write_text(json.dumps(task))
    write_lambada(tmp_path)
    list_only(tmp_path, monkeypatch)
    result = run_tasks(model, TOKENIZER, ["say", "lambada"], tmp_path, batch_size=batch_size)
    assert result["say"] == {"exact_match": 1.0}
    assert "perplexity" in result["lambada"]


def say(model, prompt: str) -> str:
    ids = torch.tensor([TOKENIZER.encode(prompt)])
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return TOKENIZER.decode(ids[0, -6:])


def list_only(folder: Path, monkeypatch) -> None:
    """The harness's own list takes a quarter of a minute to read."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    monkeypatch.setattr(harness, "_harness_tasks", lambda: manager)


def test_max_length_goes_past_the_training_length(tmp_path):
    model = make_model(max_position_embeddings=16)
    write_lambada(tmp_path)
    for asked, used in ((None, 16), (200, 200)):
        scores = [answer(model, *text_and_last_word(text), used)[0] for text in LAMBADA]
        result = run_tasks(model, TOKENIZER, ["lambada"], tmp_path, max_length=asked)["lambada"]
        assert result["perplexity"] == pytest.approx(math.exp(-np.mean(scores)), rel=1e-4)
    with pytest.raises(CableError, match=r"an answer has \d+ tokens, more than max_length=1\. Raise it"):
        run_tasks(model, TOKENIZER, ["hellaswag"], write_both(tmp_path), max_length=1)


def test_half_precision_and_a_limit(model, tmp_path):
    folder = write_both(tmp_path)
    full = run_tasks(model, TOKENIZER, ["lambada"], folder, limit=1)["lambada"]["perplexity"]
    half = run_tasks(model.bfloat16(), TOKENIZER, ["lambada"], folder, limit=1)["lambada"]["perplexity"]
    assert math.log(half) == pytest.approx(math.log(full), rel=0.05)
    score, _ = answer(model.float(), *text_and_last_word(LAMBADA[0]))
    assert math.log(full) == pytest.approx(-score, rel=0.05)


def test_the_layouts_of_hellaswag_agree(tmp_path):
    """Text, the same packed, and the official JSON lines, from which the text was made."""
    write_hellaswag(tmp_path, [0, 1, 2, 3])
    text = tmp_path / "hellaswag_val_full.txt"
    packed = tmp_path / "hellaswag_val_full.txt.bz2"
    packed.write_bytes(bz2.compress(text.read_bytes()))
    rows = harness._read_hellaswag(text)
    assert (rows[0]["activity_label"], rows[0]["ctx_a"], rows[0]["ctx_b"]) == (
        "Roof work",
        "A man sits on the roof.",
        "he",
    )
    assert [row["ctx_b"] for row in rows] == ["he", "", "the man", "then they all"]
    official = tmp_path / "hellaswag_val.jsonl"
    official.write_text("".join(json.dumps({**row, "label": int(row["label"]), "ind": 1}) + "\n" for row in rows))
    assert rows == harness._read_hellaswag(packed) == harness._read_hellaswag(official)
    assert harness._find(tmp_path, harness.LOCAL_TASKS["hellaswag"].files, "hellaswag") == text


def test_everything_is_left_as_it_was(model, tmp_path, monkeypatch, capfd):
    """No files, no noise, and the caller's seeds, training mode and tokenizer."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    tokenizer = train_bpe([Document("words", WORDS)], 260)
    tokenizer.pad_token = None
    model.train()
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    run_tasks(model, tokenizer, ["hellaswag", "lambada"], write_both(tmp_path))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert model.training and tokenizer.pad_token is None
    assert not list(scratch.iterdir())
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_task_that_nobody_knows(model, monkeypatch):
    from lm_eval import tasks

    list_only(Path(tasks.__file__).parent / "arc", monkeypatch)
    with pytest.raises(CableError, match=r"unknown task 'arc_esy'\. Did you mean 'arc_easy'\?"):
        run_tasks(model, TOKENIZER, ["arc_esy"])


def test_a_dataset_that_cannot_be_fetched(model, monkeypatch):
    from lm_eval import tasks

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach 'allenai/ai2_arc' on the Hub (OfflineModeIsEnabled)")

    list_only(Path(tasks.__file__).parent / "arc", monkeypatch)
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(CableError, match=r"'arc_easy' cannot be loaded.*Fetch dataset 'allenai/ai2_arc'.*`folder`"):
        run_tasks(model, TOKENIZER, ["arc_easy"])


def test_without_the_harness(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(CableError, match=r"pip install 'cable-attn\[eval\]'"):
        run_tasks(model, TOKENIZER, ["hellaswag"])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (None, "", "needs a file that folder .* lacks: hellaswag_val_full.txt or .*jsonl"),
        ("hellaswag_val_full.txt", "Roof: A man. he\n1\na\nb\nc\n", "six lines for each item, but has 5"),
        ("hellaswag_val_full.txt", "Roof\n1\na\nb\nc\nd\n", "line 1: an item begins with 'activity: context'"),
        ("hellaswag_val_full.txt", "Roof: A man. he\n4\na\nb\nc\nd\n", "the true ending is 4, but there are 4"),
        ("hellaswag_val_full.txt.bz2", "not packed", "cannot read .*bz2"),
        ("hellaswag_val.jsonl", '{"label": 1}\n', "line 1: not an item of HellaSwag .KeyError: 'endings'"),
        ("hellaswag_val.jsonl", "{\n", "line 1: is not JSON"),
        ("hellaswag_val.jsonl", "\n", "is empty"),
    ],
)
def test_files_that_are_missing_or_broken(model, name, content, words, tmp_path):
    if name is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CableError, match=words):
        run_tasks(model, TOKENIZER, ["hellaswag"], tmp_path)


def test_a_folder_without_lambada_or_with_two_hellaswags(model, tmp_path):
    with pytest.raises(CableError, match=r"task 'lambada' needs a file that folder .* lacks: lambada_test\.jsonl"):
        run_tasks(model, TOKENIZER, ["lambada"], tmp_path)
    (tmp_path / "lambada_test.jsonl").write_text('{"words": "a b"}\n')
    with pytest.raises(CableError, match=r"line 1: no text in column 'text' \(found: words\)"):
        run_tasks(model, TOKENIZER, ["lambada"], tmp_path)
    for name in ("hellaswag_a.jsonl", "hellaswag_b.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(CableError, match=r"needs one file, .* has hellaswag_a\.jsonl, hellaswag_b\.jsonl"):
        run_tasks(model, TOKENIZER, ["hellaswag"], tmp_path)


def test_requests_that_make_no_sense(model, tmp_path):
    with pytest.raises(CableError, match="limit must be at least 1, got 0"):
        run_tasks(model, TOKENIZER, ["hellaswag"], tmp_path, limit=0)
    with pytest.raises(CableError, match="no task is named"):
        run_tasks(model, TOKENIZER, [], tmp_path)
    with pytest.raises(CableError, match="need a causal language model, got CableBertForMaskedLM"):
        run_tasks(CableBertForMaskedLM(small_bert()), TOKENIZER, ["hellaswag"], tmp_path)
