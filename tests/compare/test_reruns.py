"""What a second run measures again, what a stored number belongs to, and what fails without spoiling the rest."""

from __future__ import annotations

import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from quotient_manifolds.compare import Store, StoreError, analysis, read_spec, worker
from quotient_manifolds.compare.identity import files_fingerprint, model_hash
from quotient_manifolds.compare.run import jobs_of
from tests.counters import recorded_runs
from tests.nets import zoos
from tests.nets.zoos import CLASSES, MARK, run, save, values, vit, write_seeds, write_spec, write_zoo

HEAD = "checkpoints: {paths: models/*, loader: tests.nets.zoos:LOADER}\ndata: {path: train.npz, batch_size: 4}"
SMALL = HEAD.replace("LOADER", "small")
SLOPE = "measure: gradient-norm, geometry: euclidean"
WORST = "measure: worst-case, geometry: adaptive, radius: 0.05, steps: 2"
VITS = "checkpoints: {paths: models/*}\ndata: {path: train.npz, batch_size: 8}"


@pytest.fixture
def zoo(tmp_path: Path) -> Path:
    """Four files that name the seeds of linear classifiers, and two batches of images."""
    return write_seeds(tmp_path, 4)


@pytest.fixture
def vits(tmp_path: Path) -> Path:
    """Two vision transformers, which are known again by their files."""
    return write_zoo(tmp_path / "vits", models=2)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checkpoints that are loaded."""
    names: list[str] = []
    load = worker.load_checkpoint

    def noted(checkpoint: Any) -> nn.Module:
        names.append(checkpoint.name)
        return load(checkpoint)

    monkeypatch.setattr(worker, "load_checkpoint", noted)
    return names


def table(spec: Path) -> list[tuple[Any, ...]]:
    """All that was measured, read without the package."""
    with sqlite3.connect(spec.parent / "out" / "store.sqlite") as connection:
        found = connection.execute("SELECT key, batch, payload FROM results ORDER BY key").fetchall()
    connection.close()
    return found


# What is measured again.


def test_a_rerun_measures_nothing_and_loads_nothing(vits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(vits, SLOPE, head=VITS)
    assert run(spec).measured_now == 2 * 2 * (1 + 1)
    before, kept = table(spec), (vits / "out" / "comparison.json").read_bytes()

    def never(*what: Any) -> None:
        raise AssertionError(what)

    monkeypatch.setattr(worker, "load_checkpoint", never)
    monkeypatch.setattr(analysis, "correlation", never)
    assert run(spec).measured_now == 0
    assert table(spec) == before
    assert (vits / "out" / "comparison.json").read_bytes() == kept


def test_only_what_is_new_is_measured(zoo: Path) -> None:
    first = SMALL.replace("size: 4", "size: 4, max_batches: 1")
    run(write_spec(zoo, WORST, head=first))
    before = set(table(zoo / "zoo.yaml"))
    more = WORST.replace("0.05", "[0.02, 0.05]")
    for measures, head, count in (
        ([more], first, 4),
        ([more, SLOPE], first, 4),
        ([more.replace("steps: 2", "steps: 3")], first, 8),
        ([more], SMALL, 4 * (1 + 2)),  # the second batch: scores and two radii
        ([WORST], first, 0),
    ):
        found = run(write_spec(zoo, *measures, head=head))
        assert found.measured_now == count
    assert found.measures["radius"].tolist() == [0.05]
    assert before < set(table(zoo / "zoo.yaml"))


def test_weights_decide_not_files_or_names(vits: Path, loads: list[str]) -> None:
    spec = write_spec(vits, SLOPE, head=VITS)
    before, kept = values(run(spec)), table(spec)

    def again() -> tuple[int, list[str]]:
        loads.clear()
        return run(spec).measured_now, loads

    os.utime(vits / "models" / "m_1" / "model.safetensors")
    assert again() == (0, ["m_1"])
    (vits / "models" / "m_0").rename(vits / "models" / "renamed")
    assert again() == (0, ["renamed"])
    assert values(run(spec)) == {"m_1": before["m_1"], "renamed": before["m_0"]}
    shutil.copytree(vits / "models" / "m_1", vits / "models" / "twin")
    assert again() == (0, ["twin"])
    (vits / "models" / "m_1" / "below").mkdir()  # what a loader writes below a checkpoint is not part of it
    assert again() == (0, [])
    assert table(spec) == kept
    model = vit(1)
    with torch.no_grad():
        next(model.parameters())[:] += 1e-3
    save(model, vits / "models" / "m_1")
    assert again() == (4, ["m_1"])
    assert values(run(spec))["m_1"] != before["m_1"]


def test_data_and_version_decide(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, SLOPE, head=SMALL.replace("*", "m_1"))
    assert run(spec).measured_now == 4
    with np.load(zoo / "train.npz") as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"].copy()
    images[6, 0, 3, 3] += 1.0
    np.savez(zoo / "train.npz", images=images, labels=labels)
    assert run(spec).measured_now == 2  # the second batch alone: scores and measure
    labels[0] = (labels[0] + 1) % CLASSES
    np.savez(zoo / "train.npz", images=images, labels=labels)
    assert run(spec).measured_now == 2
    for name in ("VERSION", "MEANING"):
        monkeypatch.setattr(worker, name, 99)
        assert run(spec).measured_now == 4


def test_symmetries_are_found_once_for_each_model_and_loss(vits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = recorded_runs(monkeypatch)
    ascent = "measure: worst-case, geometry: [inv, mix], radius: 0.05, steps: 1"
    run(write_spec(vits, ascent, head=VITS.replace("*", "m_1")))
    assert len(runs) == 1


# What a stored number belongs to.


def test_models_that_compute_different_things_do_not_share_a_number(zoo: Path) -> None:
    """Of equal weights, whatever decides what they compute: an attribute, a function, a hook."""
    factors = (1, 2, 5)
    shutil.rmtree(zoo / "models")
    (zoo / "models").mkdir()
    for kind in zoos.SCALED:
        for factor in factors:
            (zoo / "models" / f"{kind}-{factor}").write_text("")
    spec = write_spec(zoo, SLOPE, head=HEAD.replace("LOADER", "scaled"))
    found = values(run(spec))
    shared = [kind for kind in zoos.SCALED if len({found[f"{kind}-{factor}"][0] for factor in factors}) < len(factors)]
    assert shared == []
    (zoo / "models" / "hook-2.0").write_text("")  # a twin, with any number of threads
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - threads if threads < 3 else 1)
        assert run(spec).measured_now == 0
    finally:
        torch.set_num_threads(threads)


def test_a_model_is_its_classes_settings_and_state() -> None:
    linear = nn.Linear(3, 3)
    different: list[nn.Module] = [nn.Sequential(linear, act) for act in (nn.ReLU(), nn.ELU(0.5), nn.ELU(0.6))]
    for change in (
        lambda model: None,
        lambda model: model.classifier.bias.requires_grad_(False),
        lambda model: model.classifier.double(),
        lambda model: model.register_buffer("shift", torch.zeros(())),
    ):
        change(model := vit(0))
        different.append(model)
    assert len(set(map(model_hash, different))) == len(different)


def test_a_file_replaced_with_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    file = tmp_path / "m"
    seen = set()
    for text in ("1", "2"):  # in place: the same inode, another time of change
        file.write_text(text)
        os.utime(file, ns=(0, 0))
        seen.add(files_fingerprint(file))
    (tmp_path / "beside").write_text("3")
    os.utime(tmp_path / "beside", ns=(0, 0))
    os.replace(tmp_path / "beside", file)
    assert len(seen | {files_fingerprint(file)}) == 3


def test_checkpoints_of_another_group_are_named(zoo: Path) -> None:
    (zoo / "models" / "m_3").unlink()
    found = run(write_spec(zoo, SLOPE, SLOPE.replace("euclidean", "inv"), head=HEAD.replace("LOADER", "neurons")))
    (note,) = found.notes
    assert note.startswith("m_2, inv (second order): another group (")
    assert ") than m_0, m_1 (" in note


# What fails.


def test_where_no_checkpoint_loads_each_is_a_failure(zoo: Path) -> None:
    for path in (zoo / "models").iterdir():
        path.write_text("exit load")
    found = run(write_spec(zoo, SLOPE, head=SMALL, tail="against: error\ngiven: loss"))
    assert len(set(found.failures["checkpoint"])) == len([*(zoo / "models").iterdir()])
    assert found.rankings.empty


@pytest.mark.parametrize(
    ("trouble", "words", "what"),
    [
        ("exit load", "SystemExit: 0", ""),
        ("exit forward", "SystemExit: 0", ""),
        ("raise", "IndexError: no such row", "loss and error on data, batch 0, 1"),
        ("nan", "must be finite to be kept", "loss and error on data, batch 0, 1"),
    ],
)
def test_whatever_a_checkpoint_does_is_its_failure_and_the_rest_goes_on(
    zoo: Path, trouble: str, words: str, what: str
) -> None:
    (zoo / "models" / "m_1").write_text(trouble)
    spec = write_spec(zoo, SLOPE, WORST, head=SMALL)
    found = run(spec)
    assert found.known == (6, 8)
    assert set(found.failures["checkpoint"]) == {"m_1"}
    assert words in " ".join(found.failures["message"])
    assert found.failures["what"][0] == what
    assert len(found.failure_groups()) == found.failures["message"].nunique()  # one reason is said once
    assert trouble != "raise" or all("(at zoos.py, line " in message for message in found.failures["message"])
    (zoo / "models" / "m_1").write_text("9")
    assert run(spec).failures.empty
    assert run(spec).known == (8, 8)


def test_a_failure_on_one_batch_leaves_the_others(zoo: Path) -> None:
    with np.load(zoo / "train.npz") as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"].copy()
    images[6, 0, 0, 0] = MARK  # in the second batch
    np.savez(zoo / "train.npz", images=images, labels=labels)
    (zoo / "models" / "m_1").write_text("nan at mark")
    spec = write_spec(zoo, SLOPE, head=SMALL)
    found = run(spec)
    assert found.known == (3, 4)  # a mean of the other batches is another measure
    assert found.failures["what"].tolist() == ["loss and error on data, batch 1", "euclidean gradient norm, batch 1"]
    again = run(spec)
    assert again.measured_now == 0
    pd.testing.assert_frame_equal(again.failures, found.failures)
    (zoo / "models" / "m_1").write_text("7")
    assert run(spec).measured_now == 4
    assert run(spec).failures.empty


def test_a_checkpoint_that_does_not_load_is_loaded_by_the_next_run(vits: Path, loads: list[str]) -> None:
    spec = write_spec(vits, SLOPE, head=VITS)
    weights = vits / "models" / "m_1" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    (vits / "models" / "empty").mkdir()
    found = run(spec)
    assert found.failures["checkpoint"].tolist() == ["empty", "m_1"]
    assert found.failures["what"].tolist() == ["", ""]
    assert found.known == (1, 3)
    weights.write_bytes(whole)
    (vits / "models" / "empty").rmdir()
    loads.clear()
    assert run(spec).failures.empty
    assert loads == ["m_1"]
    weights.rename(vits / "away")  # and a failure ends when the files are back
    assert len(run(spec).failures) == 1
    (vits / "away").rename(weights)
    assert (run(spec).failures.empty, run(spec).measured_now) == (True, 0)


def test_what_fails_alike_on_all_is_said_once(zoo: Path) -> None:
    found = run(write_spec(zoo, SLOPE, SLOPE.replace("euclidean", "inv"), head=SMALL))
    ((names, what, why),) = found.failure_groups()
    assert names == "m_0, m_1, m_2 and 1 more"
    assert what == "inv (second order) gradient norm, batch 0, 1"
    assert "needs at least one symmetric pair" in why


def test_an_interruption_interrupts(zoo: Path) -> None:
    (zoo / "models" / "m_1").write_text("interrupt")
    with pytest.raises(KeyboardInterrupt):
        run(write_spec(zoo, SLOPE, head=SMALL))
    assert len(table(zoo / "zoo.yaml")) == 2 * 2


def test_a_function_that_no_longer_loads_has_no_values_of_before(zoo: Path) -> None:
    """Its files are as they were, so nothing else tells that it may be another model."""
    spec = write_spec(zoo, SLOPE, head=HEAD.replace("LOADER", "fickle"))
    before = values(run(spec))
    (zoo / "broken").touch()
    assert values(run(spec)) == {name: [None] for name in before}
    (zoo / "broken").unlink()
    assert values(run(spec)) == before
    assert run(spec).measured_now == 0


def test_a_folder_of_many_files_is_listed_once(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, listed, iterdir = read_spec(write_spec(zoo, SLOPE, head=SMALL)), list[Path](), Path.iterdir

    def noted(folder: Path) -> Any:
        listed.append(folder)
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", noted)
    assert len({job.fingerprint for job in jobs_of(spec, "cpu")}) == 4
    assert listed == [zoo / "models"]


# The store.


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(zoo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_spec(zoo, WORST, SLOPE, head=SMALL)
    opened = Store.__init__

    def on_a_full_disk(self: Store, *arguments: Any, **options: Any) -> None:
        opened(self, *arguments, **options)
        assert self._connection is not None
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        self._connection.execute(f"PRAGMA max_page_count = {pages + 1}")

    with monkeypatch.context() as patched:
        patched.setattr(Store, "__init__", on_a_full_disk)
        with pytest.raises(StoreError, match=r"disk is full\. What was finished before is kept"):
            run(spec)
    kept = table(spec)
    assert 0 < len(kept) < 24
    found = run(spec)
    assert (found.measured_now, found.failures.empty) == (24 - len(kept), True)
    assert set(kept) < set(table(spec))
