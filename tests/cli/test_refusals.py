"""Bad input of every kind: one sentence, exit code 2, nothing changed; and faults in code of the user's."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quotient_manifolds.cli.balls import balls
from tests import hugging_face
from tests.command_line import FAST, call, digest, refused


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("words", "radii", "options", "message"),
    [
        (["inv:x"], [], {}, "inv:0.1,0.2"),
        (["inv:"], [], {}, "radii after the colon"),
        (["inv"], [], {}, "has no radius"),
        (["inv"], [1.0], {"eta": 0.1}, "--eta 0.1 means nothing for inv"),
        (["inv"], [1.0], {"norm": "linf"}, "--norm linf means nothing"),
        (["adaptive"], [1.0], {"norm": "l7"}, "norm must be"),
        (["bent"], [1.0], {}, "geometry must be one of"),
    ],
)
def test_balls_that_are_none(words: list[str], radii: list[float], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balls(words, radii, options)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0, 0] = math.nan


def flatten(tensors: dict[str, torch.Tensor]) -> None:
    """The first head's queries lose a dimension, weight and bias."""
    tensors["bert.encoder.layer.0.attention.self.query.weight"][0] = 0
    tensors["bert.encoder.layer.0.attention.self.query.bias"][0] = 0


def explode(tensors: dict[str, torch.Tensor]) -> None:
    bias = tensors["classifier.bias"]
    bias.copy_(torch.where(torch.arange(len(bias)) % 2 == 0, 3e38, -3e38))


MEASURE = ("--radius", 0.1, "--steps", 2)
BAD_DATA = {
    "empty data": ("", "is empty"),
    "label out of range": ('{"text": "good", "label": 2}\n', "line 1: the label must be in 0 ... 1"),
    "no label": ('{"text": "good"}\n', "line 1: no 'label'"),
    "no JSON": ("good,1\n", "line 1: not valid JSON"),
}
BAD_MODELS = {
    "NaN weights": (lambda d: rewrite(d, poison), "query.weight"),
    "rank-deficient pair": (lambda d: rewrite(d, flatten), "bert.encoder.layer.0.attention query/key"),
    "loss not finite": (lambda d: rewrite(d, explode), "finite"),
    "no tokenizer": (lambda d: [file.unlink() for file in d.glob("token*")], "no tokenizer"),
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
}
BAD_OPTIONS = {
    "unknown metric": (
        ("--metric", "manhattan", "--radius", 1),
        "geometry must be one of euclidean, adaptive, inv, mix",
    ),
    "unknown geodesic": (("--geodesic", "third", "--radius", 1), "geodesic must be one of first, second, exact"),
    "no radius": ((), "has no radius"),
    "negative radius": (("--radius", -1), "radius"),
    "radius not finite": (("--radius", "nan"), "radius"),
    "no steps": (("--radius", 1, "--steps", 0), "--steps"),
    "texts longer than the model": (("--radius", 1, "--max-length", 65), "3 ... 64"),
    "no such device": (("--radius", 1, "--device", "abacus"), "abacus"),
    "a device that is not here": (("--radius", 1, "--device", "cuda:99"), "cuda:99"),
    "half precision": (("--radius", 1, "--dtype", "float16"), "'float16' is not one of"),
    "no place for the result": (("--radius", 1, "--out", "nowhere/result.json"), "Cannot write nowhere"),
}


@pytest.mark.parametrize(("content", "words"), BAD_DATA.values(), ids=list(BAD_DATA))
def test_bad_data(content: str, words: str, bert: Path, texts: Path) -> None:
    before = digest(bert)
    texts.write_text(content)
    refused(call("measure", bert, "--data", texts, *MEASURE), words)
    assert digest(bert) == before


@pytest.mark.parametrize(("spoil", "words"), BAD_MODELS.values(), ids=list(BAD_MODELS))
def test_bad_models(spoil: Callable[[Path], object], words: str, spoilable: Path, texts: Path) -> None:
    spoil(spoilable)
    before = digest(spoilable)
    refused(call("measure", spoilable, "--data", texts, *MEASURE, "--metric", "inv"), words)
    assert digest(spoilable) == before


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=list(BAD_OPTIONS))
def test_bad_options(options: tuple[object, ...], words: str, bert: Path, texts: Path) -> None:
    refused(call("measure", bert, "--data", texts, *options), words)


def test_a_geodesic_that_cannot_be_followed(bert: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quotient_manifolds.manifolds.runge_kutta.MAX_STEPS", 0)
    options = ("--geometry", "mix", "--geodesic", "exact", "--radius", 0.1)
    refused(call("measure", bert, "--data", texts, *options), "a geodesic must end within")


def test_measure_wants_a_text_classifier(tmp_path: Path, texts: Path) -> None:
    refused(
        call("measure", hugging_face.vit_classifier(tmp_path / "vit"), "--data", texts, *MEASURE),
        "takes pixel_values, but",
    )
    single = hugging_face.bert_classifier(tmp_path / "one", num_labels=1)
    refused(call("measure", single, "--data", texts, *MEASURE), "at least 2 classes")


def test_causal_models_are_told_their_loss(tmp_path: Path) -> None:
    gpt2 = hugging_face.gpt2(tmp_path / "gpt2")
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": 0}\n')
    shown = call("measure", gpt2, "--data", tmp_path / "data.jsonl", "--radius", 0.1)
    refused(shown, "causal language model", "next_token_cross_entropy", "--loss")


def test_other_models_need_a_loss(tmp_path: Path, bert: Path, texts: Path) -> None:
    encoder = tmp_path / "encoder"
    transformers.BertModel.from_pretrained(bert).save_pretrained(encoder)
    refused(call("measure", encoder, "--data", texts, "--radius", 0.1), "Expected a classifier", "--loss")


def test_inspect_of_bad_models(spoilable: Path) -> None:
    refused(call("inspect", spoilable / "nowhere"), "No model at")
    refused(call("inspect", "torch.nn:Identity"), "torch.nn:Identity (Identity) has no parameters")
    rewrite(spoilable, poison)
    before = digest(spoilable)
    refused(call("inspect", spoilable), "NaN")
    assert digest(spoilable) == before


def test_quiet_without_a_file_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    refused(call("measure", tmp_path, "--data", tmp_path, "--radius", 1, "--quiet"), "--out")
    refused(call("orbit", tmp_path, "--quiet"), "--out")


def test_no_input_is_overwritten(bert: Path, texts: Path, tmp_path: Path) -> None:
    measure = ("measure", bert, "--data", texts, "--radius", 0.1)
    link = tmp_path / "link.jsonl"
    link.symlink_to(texts)
    before = texts.read_bytes()
    for out in (texts, link):
        refused(call(*measure, "--out", out), "the input")
        refused(call(*measure, "--report", out), "the input")
    for command in (measure, ("inspect", bert), ("orbit", bert)):
        refused(call(*command, "--out", bert / "config.json"), "part of the input")
    refused(call(*measure, "--out", tmp_path / "x", "--report", tmp_path / "x"), "the same file")
    assert texts.read_bytes() == before


def test_figures_are_of_known_kinds(bert: Path, tmp_path: Path) -> None:
    refused(call("orbit", bert, "--figure", tmp_path / "orbit.gif"), "A figure is written as .svg, .pdf, .png")


def test_a_figure_that_cannot_be_drawn_leaves_nothing(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def full(self: Figure, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"<svg")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    settings = (*FAST, "--length", 4, "--scale", 10)
    refused(call("orbit", bert, *settings, "--figure", tmp_path / "orbit.svg"), "No space left")
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_moved(tmp_path: Path) -> None:
    result = call("orbit", "torch.nn:ReLU")
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    result = call("orbit", hugging_face.bert_classifier(tmp_path / "bert"), "--radius", -1)
    assert result.exit_code == 2
    assert "radius" in result.output.lower()


CROOKED = {
    "an unknown name at import": ("nowhere_to_be_found = no_such_name", ("line 1", "at import", "no_such_name")),
    "a missing package": ("import no_such_package", ("no_such_package", "line 1")),
    "no Python": ("def broken(:", ("line 1",)),
    "sys.exit at import": ("import sys; sys.exit(0)", ("SystemExit", "line 1")),
}


@pytest.mark.parametrize(("text", "words"), CROOKED.values(), ids=list(CROOKED))
def test_modules_that_do_not_import(
    text: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"crooked_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(text + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    refused(call("inspect", f"{name}:model"), f"{name}.py" if "Python" not in text else name, *words)


FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "the function leaves": (("inspect", "M:leaves"), ("SystemExit", "in leaves")),
    "the function raises no Exception": (("inspect", "M:base_exception"), ("Outcome", "in base_exception")),
    "the model leaves": (
        ("inspect", "M:leaving_forward", "--inputs", "M:inputs", "--symmetries", "M:swapped"),
        ("raised SystemExit: 0", "in forward"),
    ),
    "the forward fails": (
        ("measure", "M:broken_forward", "--data", "M:batches", "--geometry", "adaptive:0.1"),
        ("no_such_method", "in forward", ".py, line"),
    ),
    "the forward leaves": (
        ("measure", "M:leaving_forward", "--data", "M:batches", "--geometry", "adaptive:0.1"),
        ("sys.exit(0)", "in forward"),
    ),
    "the loss fails": (
        ("measure", "M:encoder", "--data", "M:batches", "--loss", "M:crooked_loss", "--geometry", "adaptive:0.1"),
        ("KeyError", "in crooked_loss"),
    ),
    "a model without numbers": (("inspect", "M:meta", "--inputs", "M:inputs"), ("meta", "no numbers")),
    "a model of inference mode": (("inspect", "M:inference", "--inputs", "M:inputs"), ("inference_mode",)),
    "a user that is not there": (
        ("measure", "M:encoder", "--data", "~nosuchuser/data.jsonl", "--radius", "1"),
        ("~nosuchuser",),
    ),
    "a home that is not there": (("inspect", "~nosuchuser/model"), ("~nosuchuser",)),
    "another device": (("inspect", "M:encoder", "--device", "hpu"), ("hpu",)),
    "the device without numbers": (("inspect", "M:encoder", "--device", "meta"), ("meta", "cannot be used here")),
}


@pytest.mark.parametrize(("arguments", "words"), FAULTS.values(), ids=list(FAULTS))
def test_faults_are_one_sentence(arguments: tuple[str, ...], words: tuple[str, ...], mine: str) -> None:
    refused(call(*(argument.replace("M:", f"{mine}:") for argument in arguments)), *words)


def roberta(directory: Path) -> Path:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=20, type_vocab_size=1, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    transformers.RobertaForSequenceClassification(config).save_pretrained(directory)
    words = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=words).save_pretrained(directory)
    return directory


def test_the_end_of_the_table_of_positions(tmp_path: Path) -> None:
    model = roberta(tmp_path / "roberta")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": "good " * 50, "label": 1}) + "\n")
    how = ("--data", tmp_path / "long.jsonl", "--geometry", "adaptive:0.1", *FAST)
    shown = call("measure", model, *how, "--max-length", 20)
    assert shown.exit_code in (0, 2), shown.output
    assert "Traceback" not in shown.output
    assert call("measure", model, *how).exit_code == 0


@pytest.mark.parametrize(
    "line", [{"text": "", "label": 1}, {"text": "a", "text_pair": "good", "label": 1}, {"text": "\u0000", "label": 0}]
)
def test_texts_at_the_edges(line: dict[str, object], tmp_path: Path) -> None:
    """An empty text, a pair for a model with one type of token, a text of nothing: measured, or one sentence."""
    model = roberta(tmp_path / "roberta")
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    shown = call("measure", model, "--data", tmp_path / "data.jsonl", "--geometry", "adaptive:0.1", *FAST)
    assert shown.exit_code in (0, 2), shown.output
    assert "Traceback" not in shown.output
    if shown.exit_code:
        refused(shown, "text" if line["text"] == "" else "token")
