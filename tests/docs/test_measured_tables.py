"""The command under a table prints what the table shows: each is run on a smaller model, and names are compared."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from quotient_manifolds.geometry import Euclidean
from quotient_manifolds.sharpness import PreparedModel, cross_entropy
from studies.__main__ import STUDIES
from tests.benchmarks import ascent_bed, finding, merging, sharded, start_cost, test_optimizer_cost, whole_measures
from tests.benchmarks.pretrained import GEOMETRIES, Classifier
from tests.command_line import FAST, call
from tests.docs.test_pages import PAGES, ROOT
from tests.nets.hugging_face import bert_classifier

Table = list[list[str]]


def commands_under_tables() -> list[tuple[str, str, Table]]:
    """Return page, command and table (its heading first) of each command that stands under a table in its section."""
    found = []
    for page in (page for page in PAGES if page.is_relative_to(ROOT / "docs")):
        table: Table = []
        before = ""
        for line in page.read_text(encoding="utf-8").splitlines():
            if line.startswith("#"):
                table = []
            elif line.startswith("|"):
                cells = [cell.strip() for cell in line.strip("|").split("|")]
                table = table if before.startswith("|") else []
                table += [] if set("".join(cells)) <= {"-", " "} else [cells]
            elif line.startswith("$ ") and table:
                found.append((page.name, line.removeprefix("$ "), table))
            before = line
    return found


class Benchmark:
    """Stand in for the fixture of pytest-benchmark: every step is made once."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(self, run: Callable[[], object], **settings: object) -> None:
        run()

    @property
    def steps(self) -> set[str]:
        return {name.removesuffix(", ms") for name in self.extra_info if name.endswith(", ms")}


def column(table: Table, index: int = 0) -> list[str]:
    return [row[index] for row in table[1:]]


def orbit(words: list[str], table: Table, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = words[words.index("orbit") + 2 :]
    scales = [options[i + 1] for i, word in enumerate(options) if word == "--scale"]
    assert len(scales) == 5
    small = ["--scale", scales[0], *FAST, "--figure", str(folder / "orbit.svg")]
    options = [*options[: options.index("--scale")], *small]
    shown = call("orbit", bert_classifier(folder / "bert", layers=1), *options)
    assert shown.exit_code == 0, shown.output
    assert "<svg" in (folder / "orbit.svg").read_text("utf-8")
    assert f"at radius {options[options.index('--radius') + 1]}, " in shown.stdout
    lines = [re.split(r"  +", line.strip()) for line in shown.stdout.splitlines() if ", float" in line]
    printed = {tuple(re.sub(r" \(.*?\)", "", line[0]).split(", ")) for line in lines}
    assert printed == {(name, heading.rpartition(" ")[2]) for name in column(table) for heading in table[0][1:]}


def optimizers(words: list[str], table: Table, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = test_optimizer_cost.adapters
    monkeypatch.setattr(test_optimizer_cost, "adapters", lambda count: full(1))
    pairs, sam = Benchmark(), Benchmark()
    test_optimizer_cost.test_step_of_24_adapters(pairs)  # type: ignore[arg-type]
    assert pairs.steps == {re.split(r",| with", name)[0].strip("`") for name in column(table)[:3]}
    test_optimizer_cost.test_sam_beside_its_passes(sam, "euclidean")  # type: ignore[arg-type]
    assert sam.steps == {"two passes and a step", "SAM"}
    assert [name.strip("`").startswith(("two passes", "SAM")) for name in column(table)[3:]] == [True] * 3


def geoopts(words: list[str], table: Table, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = test_optimizer_cost.SIZES
    assert [re.findall(r"\d+", each) for each in column(table)] == [re.findall(r"\d+", each) for each in sizes]
    monkeypatch.setattr(test_optimizer_cost, "SIZES", dict.fromkeys(sizes, ((2,), 16, 2)))
    run = Benchmark()
    test_optimizer_cost.test_step_of_geoopts_optimizers(run, "RiemannianAdam", next(iter(sizes)))  # type: ignore[arg-type]
    assert {"RiemannianAdam", "Adam", "AdamW"} <= run.steps
    assert [name.removeprefix("torch.optim.") for name in table[0][1:]] == [
        *("RiemannianSGD", "with momentum", "RiemannianAdam", "Adam", "AdamW")
    ]


def find(words: list[str], table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    size, kind, tokens = words[-3:]
    assert [kind, tokens] in [row[1:3] for row in table[1:]]
    config = LlamaConfig(**finding.SIZES[size], num_key_value_heads=4, vocab_size=32000, tie_word_embeddings=False)
    with torch.device("meta"):
        count = sum(w.numel() for w in LlamaForCausalLM(config).parameters())
    assert f"{count / 1e6:.0f} million" in column(table)
    finding.main("tiny", kind, int(tokens))
    assert {"parameters", "weights", "forward", "find", "extra"} <= ast.literal_eval(capsys.readouterr().out).keys()
    assert table[0][3:] == ["seconds", "forward passes", "extra memory", "extra memory / weights"]


def merge(words: list[str], table: Table, capsys: pytest.CaptureFixture[str]) -> None:
    kind, method = words[-4:-2]
    merging.main(kind, method, 32, 1)
    found = ast.literal_eval(capsys.readouterr().out)
    assert found.keys() == {"seconds", "extra", "update", "function"}
    assert method in table[0]
    assert kind in column(table)
    assert {name.lower() for name in column(table)[:4]} == merging.KINDS.keys()


def start(words: list[str], table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(start_cost, monkeypatch, capsys) == set(column(table))


def measures(
    words: list[str], table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = {f"{name}, {heading}" for name in column(table) for heading in table[0][1:]}
    assert printed(whole_measures, monkeypatch, capsys) == expected


def printed(module: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return what a benchmark of the pretrained BERT gives costs of, on a small one."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    monkeypatch.setattr(module, "pretrained", lambda: Classifier(BertModel(BertConfig(**sizes, vocab_size=9))).eval())
    monkeypatch.setattr(module, "batch_of", lambda rows, tokens: (torch.arange(8).view(2, 4), torch.arange(2)))
    module.main(2, 4, 1)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "2 x 4 tokens, passes"
    return {line.rpartition(": ")[0] for line in lines}


def ascents(
    words: list[str], table: Table, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one small problem."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()
    batch = torch.eye(2, 3, dtype=torch.float64), torch.arange(2)
    prepared = PreparedModel.of(model, cross_entropy, [batch], Euclidean())
    monkeypatch.setattr(ascent_bed, "problems", lambda: [ascent_bed.Problem("small", prepared.objective(0))])
    monkeypatch.setattr(ascent_bed, "LONG", 30)
    ascent_bed.main(*sorted({int(steps) for steps in column(table, 1)}))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == table[0]
    assert [row[:3] for row in cells] == [row[:3] for row in table]


def study(words: list[str], table: Table) -> None:
    """Its tables are compared with its record elsewhere (tests/studies)."""
    assert words[-1].removeprefix("NAME=") in STUDIES


def shards(words: list[str], table: Table) -> None:
    """Two processes run it in tests/sharded."""
    kind, what = words[words.index("tests.benchmarks.sharded") + 1 :][:2]
    assert kind in table[0]
    assert hasattr(sharded, what)
    assert ("time" if what == "cost" else what) in column(table)


def memory(words: list[str], table: Table) -> None:
    names = {each.name.removesuffix(" (second order)").replace(" (eta 0.01)", ", eta 0.01") for each in GEOMETRIES}
    assert {name.replace("E", "e") for name in table[0][1:]} == names
    text = (ROOT / words[words.index("0") + 1]).read_text("utf-8")
    assert f"def {words[-1]}" in text


def exists(words: list[str], table: Table) -> None:
    """It needs a GPU, or is all benchmarks together."""
    assert words[:2] == ["make", "bench"] or (ROOT / words[words.index("0") + 1]).is_file()


WITH_FOLDER = {"quotient-manifolds orbit": orbit, "-k geoopts": geoopts, "test_optimizer_cost.py --": optimizers}
PRINTING = {"tests.benchmarks.finding": find, "tests.benchmarks.merging": merge}
PATCHED = {
    "tests.benchmarks.start_cost": start,
    "tests.benchmarks.whole_measures": measures,
    "tests.benchmarks.ascent_bed": ascents,
}
WORDS = {"make study": study, "torchrun": shards, "-k test_peak_memory": memory}
WORDS |= {"test_accelerator": exists, "make bench": exists}

FOUND = commands_under_tables()


@pytest.mark.parametrize(
    ("page", "command", "table"), FOUND, ids=[f"{page}: {command[:50]}" for page, command, _ in FOUND]
)
@pytest.mark.filterwarnings("ignore")
def test_a_command_under_a_table_prints_it(
    page: str,
    command: str,
    table: Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs: dict[str, Callable[[list[str], Table], None]] = {
        **{part: partial(run, folder=tmp_path, monkeypatch=monkeypatch) for part, run in WITH_FOLDER.items()},
        **{part: partial(run, capsys=capsys) for part, run in PRINTING.items()},
        **{part: partial(run, monkeypatch=monkeypatch, capsys=capsys) for part, run in PATCHED.items()},
        **WORDS,
    }
    (run,) = (run for part, run in runs.items() if part in command)
    run(shlex.split(re.sub(r"\$\(.*\)", "MODEL", command)), table)


def test_there_are_such_commands() -> None:
    assert len(FOUND) >= 15
