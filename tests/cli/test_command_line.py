"""The command line on models and data of every kind, what it writes, and what it says when something is wrong."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from PIL import Image

from quotient_manifolds import Adaptive, Euclidean, Geometry, Quotient, SharpnessRecord
from quotient_manifolds.cli.app import cli
from quotient_manifolds.cli.balls import balls
from quotient_manifolds.geometry import geometry_from_dict
from tests import hugging_face

TEXTS = [("a very good film", "POS"), ("not a good film", "NEG"), ("very bad", "NEG"), ("a film", "POS")]
FAST = ("--steps", 2)

MINE = """
import sys
import torch
from torch import nn

def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 3))

def inputs():
    torch.manual_seed(1)
    return torch.randn(4, 5, 8)

def batches():
    torch.manual_seed(1)
    return [(torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0])) for _ in range(2)]

def one_batch():
    return batches()[0]

def no_batch():
    return []

def squares(model, batch):
    return model(batch[0]).pow(2).mean()

def leaves():
    sys.exit(0)

class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
    def forward(self, x):
        return self.layer(x).no_such_method()

def broken_forward():
    return Broken()

class Leaving(Broken):
    def forward(self, x):
        sys.exit(0)

class Writing(nn.Sequential):
    def forward(self, x):
        self[0].weight.data.mul_(0.5)
        return super().forward(x.mul_(0.5).flatten(1))

def writing():
    torch.manual_seed(0)
    return Writing(nn.Linear(40, 3))

class Outcome(BaseException):
    pass

def base_exception():
    raise Outcome("not an Exception")

def leaving_forward():
    return Leaving()

class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
        self.config = {"hidden_size": 8}
    def forward(self, x):
        return self.layer(x)

def dict_config():
    return Configured()

def meta():
    with torch.device("meta"):
        return encoder()

def inference():
    with torch.inference_mode():
        return encoder()

def swapped(model):
    import quotient_manifolds as qm
    return qm.find_symmetries(model)

def undeclared(model):
    return 3

def crooked_loss(model, batch):
    raise KeyError("weights")
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def run(*arguments: object, **settings: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as a shell runs it."""
    command = [sys.executable, "-m", "quotient_manifolds", *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, **settings)  # type: ignore[call-overload, no-any-return]


def refused(shown: Result, *words: str) -> None:
    assert shown.exit_code == 2, shown.output
    sentence = shown.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in sentence
    assert "Traceback" not in shown.output
    assert isinstance(shown.exception, SystemExit)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hugging_face.bert_classifier(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"text": text, "label": int(word == "POS")}) + "\n" for text, word in TEXTS))
    return file


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of a user in the working directory; its name is new each time, for modules are imported once."""
    name = f"mine_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return name


# ---- help comes at once


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["measure", "--help"], ["inspect", "--help"]])
def test_help_needs_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv[1:] = {arguments}\nimport quotient_manifolds.cli as c\n"
        "try: c.main()\nexcept SystemExit as left: code = left.code\n"
        "print(code, 'torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "0 False"


# ---- balls


def test_radii_repeat_and_belong_to_geometries() -> None:
    found = balls(["inv:0.2,0.1", "adaptive", "0.5:3", "t=1.5:1"], [0.5, 0.4], {}, None)
    expected: list[tuple[Geometry, float]] = [
        *((Quotient("inv"), radius) for radius in (0.1, 0.2)),
        *((Adaptive(), radius) for radius in (0.4, 0.5)),
        (Quotient(0.5), 3.0),
        (Quotient(1.5), 1.0),
    ]
    assert found == expected


def test_options_go_to_the_geometries_that_have_them() -> None:
    options = {"norm": "linf", "eta": 0.01, "biases": "paper", "geodesic": "first", "eps": None}
    found = [geometry for geometry, _ in balls(["euclidean", "adaptive", "mix"], [1.0], options, None)]
    assert found == [
        Euclidean("linf"),
        Adaptive(0.01, "linf"),
        Quotient("mix", geodesic="first", biases="paper"),
    ]
    assert balls(["inv"], [1.0], {"norm": "adaptive"}, None)[0][0] == Quotient("inv", norm="adaptive")


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
        balls(words, radii, options, None)


def test_every_ball_is_measured(bert: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    geometries = ("--geometry", "inv:0.1,0.2", "--geometry", "adaptive", "--geometry", "0.5:0.3")
    shown = call("measure", bert, "--data", texts, *geometries, "--radius", 0.1, "--radius", 0.05, *FAST, "--out", out)
    assert shown.exit_code == 0, shown.output
    found = SharpnessRecord.load(out)
    assert [(each.geometry.partition(" (")[0], each.settings["radius"]) for each in found] == [
        ("inv", 0.1),
        ("inv", 0.2),
        ("adaptive", 0.05),
        ("adaptive", 0.1),
        ("t = 0.5", 0.3),
    ]
    assert [geometry_from_dict(each.geometry_settings or {}).name for each in found] == [
        each.geometry for each in found
    ]


# ---- data of every kind


def test_labels_by_name_columns_and_a_cap(bert: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "data.csv", tmp_path / "out.json"
    file.write_text("sentence,mood\n" + "".join(f"{text},{word}\n" for text, word in TEXTS))
    options = ("--columns", "text=sentence,label=mood", "--labels", "POS=1,NEG=0", "--examples", 3, "--batch-size", 2)
    shown = call("measure", bert, "--data", file, "--geometry", "adaptive:0.1", *options, *FAST, "--out", out)
    assert shown.exit_code == 0, shown.output
    found = SharpnessRecord.load(out)
    assert found.settings["examples"] == 3
    assert len(found[0].batches) == 2


def test_images_and_arrays(tmp_path: Path) -> None:
    vit = hugging_face.vit_classifier(tmp_path / "vit")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", images=pixels, labels=np.arange(6) % 3)
    for place, image in enumerate(pixels):
        folder = tmp_path / "folders" / "abc"[place % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{place}.png")
    how = ("--mean", 0.5, "--std", 0.5, "--geometry", "inv:0.1", *FAST)
    for data, options in (("data.npz", ()), ("folders", ("--channels", 1, "--draw", 0))):
        out = tmp_path / f"{data}.json"
        shown = call("measure", vit, "--data", tmp_path / data, *how, *options, "--out", out)
        assert shown.exit_code == 0, shown.output
        assert SharpnessRecord.load(out).settings["examples"] == 6


def test_functions_for_model_data_and_loss(mine: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    what = (f"{mine}:encoder", "--data", f"{mine}:batches", "--radius", 0.1, *FAST, "--out", out)
    shown = call("measure", *what, "--dtype", "float64", "--symmetries", f"{mine}:swapped")
    assert shown.exit_code == 0, shown.output
    found = SharpnessRecord.load(out)
    assert [(each.geometry_settings or {}).get("symmetries") for each in found] == [None, "given", "given"]
    assert call("measure", *what, "--loss", f"{mine}:squares").exit_code == 0
    assert SharpnessRecord.load(out)[0].base_losses != found[0].base_losses
    refused(call("measure", *what, "--batch-size", 3), "--batch-size means nothing")
    data = ("--data", f"{mine}:one_batch", "--radius", 0.1)
    refused(call("measure", f"{mine}:encoder", *data), "must return a list of batches")
    refused(call("measure", f"{mine}:encoder", "--data", f"{mine}:no_batch", "--radius", 0.1), "at least one batch")
    refused(call("measure", *what, "--symmetries", f"{mine}:undeclared"), "must return quotient_manifolds.Symmetries")


def test_causal_models_are_told_their_loss(tmp_path: Path) -> None:
    gpt2 = hugging_face.gpt2(tmp_path / "gpt2")
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": 0}\n')
    shown = call("measure", gpt2, "--data", tmp_path / "data.jsonl", "--radius", 0.1)
    refused(shown, "causal language model", "next_token_cross_entropy", "--loss")


def test_an_adapter_is_named_with_its_base(bert: Path, texts: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = transformers.AutoModelForSequenceClassification.from_pretrained(bert)
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft's own
        peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
        shown = call("inspect", tmp_path / "adapter")
        measured = call("measure", tmp_path / "adapter", "--data", texts, "--geometry", "inv:0.1", *FAST)
    for each in (shown, measured):
        assert each.exit_code == 0, each.output
        assert f"is an adapter of peft: default (LORA) on {bert}" in "".join(each.stdout.splitlines())


def test_other_models_need_a_loss(tmp_path: Path, bert: Path, texts: Path) -> None:
    encoder = tmp_path / "encoder"
    transformers.BertModel.from_pretrained(bert).save_pretrained(encoder)
    refused(call("measure", encoder, "--data", texts, "--radius", 0.1), "Expected a classifier", "--loss")


# ---- what is written


def test_results_are_kept_as_they_are_finished(
    bert: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quotient_manifolds import sharpness

    out, ascend, seen = tmp_path / "out.json", sharpness.worst_case_sharpness, []

    def interrupted(*args: object, **settings: object) -> object:
        seen.append(len(SharpnessRecord.load(out)) if out.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return ascend(*args, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(sharpness, "worst_case_sharpness", interrupted)
    shown = call("measure", bert, "--data", texts, "--radius", "0.1,0.2", *FAST, "--out", out)
    assert shown.exit_code == 130
    assert "2 of 6 results" in shown.stderr
    assert seen == [0, 1, 2]
    found = SharpnessRecord.load(out)
    assert (len(found), found.asked, found.complete) == (2, 6, False)


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


def test_a_pipe_stays_a_pipe(bert: Path, texts: Path, tmp_path: Path) -> None:
    """As a device does; a device of the machine would be in danger where the code is wrong."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    shown = call("measure", bert, "--data", texts, "--geometry", "adaptive:0.1", *FAST, "--out", pipe)
    assert shown.exit_code == 0, shown.output
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert len(SharpnessRecord.from_dict(json.loads(os.read(reader, 10**6)))) == 1
    os.close(reader)


def test_a_model_that_writes_its_weights_and_inputs_is_measured_as_in_python(mine: str, tmp_path: Path) -> None:
    import quotient_manifolds as qm

    out = tmp_path / "out.json"
    wanted = ("--data", f"{mine}:batches", "--geometry", "adaptive:0.1", *FAST, "--quiet", "--out", out)
    assert call("measure", f"{mine}:writing", *wanted).exit_code == 0
    own = importlib.import_module(mine)
    expected = qm.worst_case_sharpness(
        own.writing().eval(), qm.cross_entropy, own.batches(), geometry="adaptive", radius=0.1, steps=2
    )
    assert SharpnessRecord.load(out)[0].values == expected.values


def test_a_pipe_gets_all_results_at_once(mine: str, tmp_path: Path) -> None:
    """One document, however many results: nobody reads half of them, and nothing waits for a second reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    wanted = ("--geometry", "adaptive:0.1,0.2", "--geometry", "euclidean:0.1")
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        done = call("measure", f"{mine}:encoder", "--data", f"{mine}:batches", *wanted, *FAST, "--quiet", "--out", pipe)
        assert done.exit_code == 0, done.output
        read, _ = reader.communicate(timeout=60)
    assert len(SharpnessRecord.from_dict(json.loads(read))) == 3


def test_what_is_measured_is_printed_also_if_another_geometry_fails(mine: str) -> None:
    wanted = ("--geometry", "adaptive:0.1", "--geometry", "inv:1e-30")
    done = call("measure", f"{mine}:encoder", "--data", f"{mine}:batches", *wanted, *FAST)
    assert done.exit_code == 2
    assert "adaptive" in done.stdout


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


def test_pages_for_people_who_would_rather_look(bert: Path, texts: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    balls = ("--geometry", "inv:0.1,0.2", "--geometry", "adaptive:0.1")
    assert call("measure", bert, "--data", texts, *balls, *FAST, "--report", page, "--quiet").exit_code == 0
    shown = page.read_text()
    for words in ("Sharpness of", "The ascent", "Sharpness against radius", "<svg", "Every batch"):
        assert words in shown
    assert call("orbit", bert, *FAST, "--length", 4, "--scale", 10, "--report", page, "--quiet").exit_code == 0
    assert "along its symmetry orbit" in page.read_text()
    assert call("inspect", bert, "--report", page).exit_code == 0
    assert "bert.encoder.layer.1.attention query/key" in page.read_text()


# ---- orbit and inspect of functions


def test_orbit_of_a_function_takes_inputs(mine: str, tmp_path: Path) -> None:
    shown = call("orbit", f"{mine}:encoder")
    refused(shown, "No example inputs can be made for Sequential", "--inputs")
    refused(call("inspect", f"{mine}:encoder"), "No example inputs can be made for Sequential", "--inputs")
    refused(call("inspect", f"{mine}:dict_config"), "config is of type dict", "--inputs")
    how = ("--inputs", f"{mine}:inputs", "--symmetries", f"{mine}:swapped")
    shown = call("orbit", f"{mine}:encoder", *how, *FAST, "--scale", 10, "--out", tmp_path / "orbit.json")
    assert shown.exit_code == 0, shown.output
    assert len(SharpnessRecord.load(tmp_path / "orbit.json")) == 2 * 3 * 2
    assert call("inspect", f"{mine}:encoder", *how).exit_code == 0


# ---- what goes wrong in code of the user's


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
        ("has no attention",),
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


def test_a_defect_of_ours_is_no_bad_input(monkeypatch: pytest.MonkeyPatch, bert: Path) -> None:
    from quotient_manifolds import symmetries

    monkeypatch.setattr(symmetries, "count_symmetries", lambda *_: (_ for _ in ()).throw(ZeroDivisionError("a defect")))
    monkeypatch.setattr("quotient_manifolds.cli.errors._OURS", Path(__file__).parents[2])
    shown = call("inspect", bert)
    assert isinstance(shown.exception, ZeroDivisionError)


# ---- texts at the edges


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


# ---- terminals, pipes and Ctrl-C


def test_a_reader_who_leaves(bert: Path) -> None:
    for arguments in (["--help"], ["measure", "--help"], ["inspect", str(bert)], ["inspect", str(bert), "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "quotient_manifolds", *arguments]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("settings", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_terminals_that_know_ascii_alone(bert: Path, texts: Path, tmp_path: Path, settings: dict[str, str]) -> None:
    model = tmp_path / "modèle"
    shutil.copytree(bert, model)
    how = ("--data", texts, "--geometry", "mix:0.1", *FAST)
    done = run("measure", model, *how, env={**os.environ, **settings})
    assert done.returncode == 0, done.stderr
    assert "mix" in done.stdout
    done = run("measure", tmp_path / "où", *how, env={**os.environ, **settings})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: ")


def test_ctrl_c_while_importing(tmp_path: Path) -> None:
    """A module that stands for torch interrupts its own import."""
    (tmp_path / "torch.py").write_text(
        f"import os; os.kill(os.getpid(), {int(signal.SIGINT)})\nimport time; time.sleep(9)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = run("measure", "m", "--data", "d", "--radius", "1", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
