"""A stored number belongs to the code that made it: the user's files, edited under the same names, are other code."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from quotient_manifolds.compare import Comparison, Store, read_spec, run_comparison
from quotient_manifolds.compare.run import jobs_of
from quotient_manifolds.compare.worker import measure_checkpoint
from tests.nets.zoos import run, values, write_seeds, write_spec

HEAD = "checkpoints: {paths: models/*, loader: 'user_loader:load'}\ndata: {path: train.npz, batch_size: 4}"
LOSS = "loss: user_loss:loss"
ASCENT = "measure: worst-case, geometry: euclidean, radius: 0.5, steps: 2"
RADIUS = "measure: worst-case, geometry: euclidean, steps: 1"
TASKS = 2 * 2 * (1 + 1)  # of 2 models on 2 batches: the loss and a measure

FILES = {
    "user_loader": """
import torch
from user_help import gate
from user_pack import net
import user_other
def load(path):
    torch.manual_seed(int(path.read_text()))
    return net.Net(gate)
""",
    "user_help": """
def gate(x):
    return x.relu()
""",
    "user_pack/__init__": "",
    "user_pack/net": """
from pathlib import Path
import importlib
import importlib.metadata
from torch import nn
from . import deep
SIGN = 1
class Net(nn.Module):
    def __init__(self, gate):
        super().__init__()
        self.first, self.head, self.gate = nn.Linear(64, 8), nn.Linear(8, 3), gate
    def forward(self, x):
        from user_lazy import same
        x = same(deep.same(self.gate(self.first(x.flatten(1)))))
        x = importlib.import_module("user_dynamic").same(x)
        x = SIGN * x + (1 - SIGN) * x.detach()
        if Path(__file__).with_name("mode.txt").exists():
            x = x.detach() + 2 * (x - x.detach())
        return self.head(x)
""",
    "user_loss": """
import torch
from torch.nn import functional as F
def loss(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits * logits.std(), batch[1])
""",
}
SAME = "def same(x):\n    return x\n"
FILES |= dict.fromkeys(("user_pack/deep", "user_lazy", "user_dynamic", "user_other"), SAME)
REVERSED = ("return x", "return 2 * x.detach() - x")

# The values of the loss in float64 are the same before and after each of these.
EDITS = {
    "a detach in the loss": ("user_loss", "logits.std()", "logits.std().detach()"),
    "autocast in the loss": (
        "user_loss",
        "    logits = model(batch[0])",
        "    with torch.autocast('cpu', torch.bfloat16):\n        logits = model(batch[0]).to(batch[0].dtype)",
    ),
    "a reversed gradient in the model": (
        "user_pack/net",
        "return self.head(x)",
        "return self.head(2 * x.detach() - x)",
    ),
    "a constant of the model": ("user_pack/net", "SIGN = 1", "SIGN = 2"),
    "a helper of the loader": ("user_help", "x.relu()", "x.relu().detach() + x - x.detach()"),
    "a helper of the model": ("user_pack/deep", *REVERSED),
    "a helper imported in the forward pass": ("user_lazy", *REVERSED),
    "a helper imported by import_module": ("user_dynamic", *REVERSED),
}


def forget() -> None:
    """Let the modules be imported anew, as a process does that starts."""
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A spec whose loader and loss lie in files beside it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    forget()
    write_seeds(tmp_path, 2)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    return write_spec(tmp_path, ASCENT, head=HEAD, tail=LOSS)


def edit(spec: Path, name: str, before: str, after: str) -> None:
    file = spec.parent / f"{name}.py"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def anew(spec: Path) -> Comparison:
    """Run as the first of a process."""
    forget()
    return run(spec)


def truth(spec: Path) -> dict[str, list[float | None]]:
    """What is measured where nothing is stored."""
    forget()
    return values(run_comparison(spec))


@pytest.mark.parametrize("kind", EDITS)
def test_edited_code_is_measured_anew(spec: Path, kind: str) -> None:
    before = values(run(spec))
    assert anew(spec).measured_now == 0
    edit(spec, *EDITS[kind])
    found = anew(spec)
    assert values(found) == truth(spec) != before
    assert found.measured_now == TASKS
    assert anew(spec).measured_now == 0


def test_what_the_code_reads_shows_in_the_gradient(spec: Path) -> None:
    """Of a file that decides how a gradient is computed, nothing else tells: the loss is the same, the code is too."""
    before = values(run(spec))
    (spec.parent / "user_pack" / "mode.txt").touch()
    found = anew(spec)
    assert found.measured_now == TASKS
    assert values(found) == truth(spec) != before


def test_a_module_whose_name_is_computed_may_be_any_beside_it(spec: Path) -> None:
    edit(spec, "user_pack/net", 'import_module("user_dynamic")', 'import_module("user" + "_dynamic")')
    run(spec)
    assert anew(spec).measured_now == 0
    edit(spec, "user_dynamic", *REVERSED)
    found = anew(spec)
    assert (found.measured_now, values(found)) == (TASKS, truth(spec))


def test_other_files_and_other_folders_are_no_other_code(spec: Path) -> None:
    run(spec)
    (spec.parent / "plots.py").write_text("nobody = 'imports this'\n")
    sys.modules["user_elsewhere"] = ModuleType("user_elsewhere")
    assert run(spec).measured_now == 0
    shutil.copytree(spec.parent, spec.parent / "copy")
    sys.path.remove(str(spec.parent))
    assert anew(spec.parent / "copy" / spec.name).measured_now == 0


def test_installed_packages_count_by_version(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(spec)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "torch" else version(name))
    assert anew(spec).measured_now == TASKS


def test_a_radius_is_suggested_anew_for_edited_code(spec: Path) -> None:
    write_spec(spec.parent, RADIUS, head=HEAD, tail=LOSS)
    run(spec)
    edit(spec, "user_loss", "logits * ", "3 * logits * ")
    found = anew(spec)
    forget()
    assert found.measures["radius"].tolist() == run_comparison(spec).measures["radius"].tolist()


# A process that has imported the code before.


def test_code_that_was_edited_after_its_import_is_not_measured(spec: Path) -> None:
    before = values(run(spec))
    edit(spec, *EDITS["a helper of the loader"])
    found = run(spec)
    assert values(found) == {name: [None] for name in before}
    ((_, _, why),) = found.failure_groups()
    assert "user_help was edited after it was imported" in why
    importlib.reload(sys.modules["user_help"])
    importlib.reload(sys.modules["user_loader"])
    found = run(spec)
    assert (found.measured_now, values(found)) == (TASKS, truth(spec))


def test_an_edit_amid_a_run_changes_nothing_in_it(spec: Path) -> None:
    """Where the process imported the code before; where it did not, it says so."""
    before, jobs = values(run(spec)), jobs_of(read_spec(spec), "cpu")
    edit(spec, *EDITS["a helper of the loader"])
    with Store(spec.parent / "out" / "store.sqlite") as store:
        assert measure_checkpoint(jobs[0], store) == (0, [])
        forget()
        measured, (failure, *_) = measure_checkpoint(jobs[0], store)
    assert measured == 0
    assert "user_help was edited after" in failure["message"]
    edit(spec, *reversed_edit("a helper of the loader"))
    found = anew(spec)
    assert (found.measured_now, values(found)) == (0, before)


def reversed_edit(kind: str) -> tuple[str, str, str]:
    name, before, after = EDITS[kind]
    return name, after, before


def test_code_imported_before_an_edit_that_nobody_saw_is_other_code(spec: Path) -> None:
    sys.path.insert(0, str(spec.parent))
    importlib.import_module("user_help")
    edit(spec, *EDITS["a helper of the loader"])
    old = values(run(spec))
    found = anew(spec)
    assert found.measured_now == TASKS
    assert values(found) == truth(spec) != old


def cell(source: str) -> Callable[..., object]:
    """What a notebook makes of a cell: functions without a file."""
    module = sys.modules.setdefault("user_notebook", ModuleType("user_notebook"))
    exec(compile(source, "<cell>", "exec"), vars(module))
    loss: Callable[..., object] = module.loss
    return loss


def test_functions_without_a_file_are_their_code(spec: Path) -> None:
    source = "SCALE = 1.0\ndef power(x):\n    return SCALE * x\n" + FILES["user_loss"].replace(
        "logits *", "power(logits) *"
    )
    write_spec(spec.parent, ASCENT, head=HEAD, tail=LOSS.replace("user_loss", "user_notebook"))
    cell(source)
    run(spec)
    for before, after, count in (
        ("    logits = model", "\n    # the same\n    logits = model", 0),
        ("logits.std()", "logits.std().detach()", TASKS),
        ("SCALE = 1.0", "SCALE = 3.0", TASKS),
        ("return SCALE * x", "return SCALE * (2 * x.detach() - x)", TASKS),
    ):
        forget()
        cell(source.replace(before, after))
        assert run(spec).measured_now == count, after
