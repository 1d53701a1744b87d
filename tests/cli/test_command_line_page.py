"""The commands on the page of the command line are run as they stand there, on models that take no time."""

from __future__ import annotations

import json
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import transformers

from quotient_manifolds.symmetries import small_copy
from tests.command_line import FAST, call
from tests.nets import hugging_face
from tests.nets.lora_files import random_lora

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ quotient-manifolds (.+)$", PAGE, re.MULTILINE)
MORE = {"measure": FAST, "descend": FAST, "orbit": (*FAST, "--scale", 10)}
WRITTEN = {"moved", "merged", "smaller"}
ROWS = [("a very good film", "good"), ("not a good film", "bad"), ("very bad", "bad"), ("a film", "good")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    hugging_face.bert_classifier(folder / "bert", layers=1)
    hugging_face.bert_classifier(folder / "bert2", layers=1, seed=1)
    hugging_face.gpt2(folder / "gpt2")
    vocabulary = {token: i for i, token in enumerate(hugging_face.VOCABULARY)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder / "gpt2")
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    normal = {"image_mean": [0.5], "image_std": [0.5], "do_normalize": True, "do_rescale": True, "do_resize": True}
    vit = hugging_face.vit_classifier(folder / "vit")
    (vit / "preprocessor_config.json").write_text(json.dumps({**processor, **normal}))
    for seed, name in enumerate(("first", "second")):
        random_lora(folder / name, {"encoder.query": 2, "encoder.value": 3}, seed)
    return folder


@pytest.fixture
def home(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the page speaks of, in the working directory."""
    for model in models.iterdir():
        (tmp_path / model.name).symlink_to(model)
    lines = [{"text": text, "label": int(word == "good")} for text, word in ROWS]
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "story.txt").write_text("\n".join(text for text, _ in ROWS))
    (tmp_path / "reviews.csv").write_text("sentence,mood\n" + "".join(f"{text},{word}\n" for text, word in ROWS))
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(6) % 3)
    (written,) = re.findall(r"```python\n(# mine\.py\n.+?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(written)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    smaller = partial(small_copy, vocab_size=7, n_embd=4, n_inner=3)
    monkeypatch.setattr("quotient_manifolds.symmetries.certificate.small_copy", smaller)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_does_what_it_says(command: str, home: Path) -> None:
    before = {path.name for path in home.iterdir()}
    words = shlex.split(command)
    shown = call(*words, *MORE.get(words[0], ()))
    assert shown.exit_code == 0, shown.output
    named = {words[place + 1] for place, word in enumerate(words) if word in ("--out", "--figure")}
    made = {path.name for path in home.iterdir()} - before - {"__pycache__"}
    assert made == (WRITTEN & set(words) if words[0] in ("move", "merge") else named)
