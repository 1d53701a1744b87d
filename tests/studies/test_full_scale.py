"""The paper's own zoos: specs that fit to models and data of their form, and costs that can be reckoned by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from quotient_manifolds.compare import read_spec
from quotient_manifolds.geometry import Adaptive, Quotient
from quotient_manifolds.sharpness import AverageCase, GradientNorm, WorstCase
from studies.__main__ import study
from studies.full_scale import cost as costs
from studies.full_scale.cost import OVERHEAD, Operations, cost, operations_of, passes_of
from studies.full_scale.experiments import EXPERIMENTS, write_specs
from studies.full_scale.page import PAGE, full_scale_page

ROOT = Path(__file__).parents[2]
CLIP, BERT = EXPERIMENTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the page says belongs beside the specs, as small as can be."""
    folder = tmp_path_factory.mktemp("full_scale")
    write_specs(folder)
    for part in ("train", "val"):
        for name in ("n01440764", "n01443537"):
            (folder / "imagenet" / part / name).mkdir(parents=True)
            Image.new("RGB", (30, 20)).save(folder / "imagenet" / part / name / "a.jpeg")
    (folder / "soups").mkdir()
    for k in range(72):
        (folder / "soups" / f"model_{k}.pt").touch()
    for k in range(100):
        (folder / "berts" / f"bert_{k:02}").mkdir(parents=True)
        for end in ("index", "data-00000-of-00001"):
            (folder / "berts" / f"bert_{k:02}" / f"model.ckpt-36815.{end}").touch()
    (folder / "mnli").mkdir()
    for name, columns in (("train", "label1"), ("dev_matched", "label1\tlabel2\tlabel3\tlabel4\tlabel5")):
        labels = "\t".join(["neutral"] * columns.count("label"))
        lines = [
            f"index\tpairID\tsentence1\tsentence2\t{columns}\tgold_label",
            f'0\t31193n\tShe said "no.\tShe said no.\t{labels}\tentailment',
            f"1\t101457e\tIt rains.\tIt does not.\t{labels}\tcontradiction",
        ]
        (folder / "mnli" / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def test_the_specs_fit_to_models_and_data_of_their_form(folder: Path) -> None:
    clip, bert = (read_spec(folder / each.spec) for each in EXPERIMENTS)
    assert [each.name for each in clip.checkpoints] == [f"model_{k}" for k in range(CLIP.models)]
    assert [each.name for each in bert.checkpoints] == [f"bert_{k:02}" for k in range(BERT.models)]
    assert (clip.data.batch_size * (clip.data.max_batches or 0), clip.data.batch_size) == (2048, 256)
    assert (bert.data.batch_size * (bert.data.max_batches or 0), bert.data.batch_size) == (1024, 128)
    assert bert.data.labels == {"contradiction": 0, "entailment": 1, "neutral": 2}
    for spec in (clip, bert):
        assert spec.dtype == "float32"
        assert spec.test is not None
        assert spec.test.max_batches is None
        labels = {each.label for each in spec.measures}
        for name in ("adaptive", "inv (second order)", "mix (second order)", "inv (first order)", "inv (exact)"):
            assert any(label.startswith(f"{name} worst-case sharpness") for label in labels), name
        geometries = [each.measure.geometry for each in spec.measures]
        assert {each.metric for each in geometries if isinstance(each, Quotient)} > {"inv", "mix", -0.5, 0.5, 1.5}
        assert {each.eps for each in spec.measures} == {0, 1e-4, 1e-3, 1e-2, 1e-1}


def test_the_data_are_read_as_the_models_want_them(folder: Path) -> None:
    clip, bert = (read_spec(folder / each.spec) for each in EXPERIMENTS)
    (batch,) = clip.data.batches(torch.nn.Identity())
    assert batch[0].shape == (2, 3, 224, 224)
    assert bert.test is not None
    bert.test.check(3)


@pytest.mark.parametrize(
    ("experiment", "size", "tokens", "extra"),
    [
        # patches by a convolution, features to 512, a head of 1000
        (CLIP, 256, 50, 2 * 49 * 3 * 32 * 32 * 768 + 2 * 768 * 512 + 2 * 512 * 1000),
        # pooler, a head of 3
        (BERT, 128, 128, 2 * 768 * 768 + 2 * 768 * 3),
    ],
)
def test_operations_are_those_of_the_matrix_products(
    experiment: costs.FullScale, size: int, tokens: int, extra: int
) -> None:
    """Per layer: queries, keys, values, output (4 w^2), the neurons (8 w^2), scores and their use (2 t w), a token."""
    width, layers = 768, 12
    forward = size * (layers * tokens * 2 * (12 * width**2 + 2 * tokens * width) + extra)
    found = operations_of(experiment, size)
    assert found.forward == forward
    assert 1.95 * forward < found.backward <= 2 * forward  # no gradient of the images is taken


def test_passes_are_those_of_a_run() -> None:
    model = torch.nn.TransformerEncoderLayer(8, 2, 8, batch_first=True).eval()
    calls = 0

    def loss(module: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out: torch.Tensor = module(batch).square().mean()
        return out

    batch = torch.randn(2, 3, 8)
    counted = []
    for steps in (5, 11):
        calls = 0
        WorstCase(Quotient("mix"), 0.1, steps=steps).of(model, loss, [batch])
        counted.append(calls)
    few, many = (passes_of(WorstCase(Adaptive(), 9.0, steps=steps)).forward for steps in (5, 11))
    assert counted[1] - counted[0] == many - few == 6
    assert passes_of(WorstCase(Adaptive(), 0.5)).backward == 20
    assert passes_of(AverageCase(Adaptive(), 0.5, samples=3)).backward == 0
    assert (passes_of(GradientNorm(Adaptive())).forward, passes_of(GradientNorm(Adaptive())).backward) == (1, 1)


def test_hours_are_reckoned_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 10 operations a second, all used, and passes of 1 and 2 operations."""
    monkeypatch.setattr(costs, "operations_of", lambda experiment, size: Operations(1, 2))
    monkeypatch.setattr(costs, "PEAK", 10.0)
    monkeypatch.setattr(costs, "UTILISATION", 1.0)
    found = cost(BERT)
    assert found.measures["adaptive worst-case sharpness, radius 0.5"] == pytest.approx(
        35 * 8 * (21 * 1 + 20 * 2) / 10 / 3600 * 1.08
    )
    ratio = found.measures["mix (second order) worst-case sharpness, radius 0.1"]
    assert ratio / found.measures["adaptive worst-case sharpness, radius 0.5"] == pytest.approx(1.15 / 1.08)
    assert found.scores == pytest.approx(35 * (8 + 9815 / 128) / 10 / 3600)
    assert found.passes == 35 * 8 * 41 * len(found.measures)
    assert found.hours == pytest.approx(sum(found.measures.values()) + found.scores)


def test_the_overhead_is_the_one_that_was_measured() -> None:
    text = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
    names = {"euclidean": "Euclidean", "adaptive": "adaptive", "inv": "`inv`", "mix": "`mix`"}
    for name, value in OVERHEAD.items():
        assert f"{names[name]} {value:.2f}" in text


def test_the_command_writes_specs_and_page(tmp_path: Path) -> None:
    done = CliRunner().invoke(study, ["full-scale", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"clip_soups.yaml", "bert_mnli.yaml", PAGE}
    with pytest.raises(ValueError, match="matches nothing"):
        read_spec(tmp_path / "out" / "clip_soups.yaml")


def test_the_committed_page_is_what_the_command_writes() -> None:
    assert full_scale_page() == (ROOT / "notebooks" / PAGE).read_text(encoding="utf-8"), "run `make study NAME=results`"
