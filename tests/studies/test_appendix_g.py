"""Appendix G: relative flatness against its definition, and the command on a small zoo. The norm: tests/geometry."""

from __future__ import annotations

import copy
import csv
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from quotient_manifolds import cross_entropy, normalised_logits
from studies.__main__ import study
from studies.appendix_g import RelativeFlatness
from tests.classifiers import Batch, Classifier, moved, shaken
from tests.zoos import write_spec, write_zoo


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return shaken(Classifier(), 0.5)


@pytest.fixture
def batches() -> list[Batch]:
    return [(torch.randn(4, 3, 4, dtype=torch.float64), torch.randint(0, 3, (4,))) for _ in range(3)]


def test_relative_flatness_closed_form_is_the_loop_and_the_definition(model: Classifier, batches: list[Batch]) -> None:
    closed, loop = (RelativeFlatness("head", method).of(model, cross_entropy, batches) for method in ("closed", "loop"))
    assert closed.values == pytest.approx(loop.values, rel=1e-10)
    assert closed.base_losses == pytest.approx(loop.base_losses, rel=1e-12)
    assert (loop.backward_passes, closed.backward_passes) == (3 * 13, 0)
    x, labels = batches[0]
    phi = model.attention(x, x, x)[0].mean(1).detach()
    w, b = model.head.weight.detach(), model.head.bias.detach()
    hessian = torch.func.hessian(lambda w: nn.functional.cross_entropy(phi @ w.mT + b, labels))(w)
    definition = torch.einsum("sk, tk, sjtj ->", w, w, hessian)
    assert closed.values[0] == pytest.approx(float(definition), rel=1e-10)


def test_relative_flatness_of_a_head_is_invariant_under_attention_and_under_its_own_scaling(
    model: Classifier, batches: list[Batch]
) -> None:
    here = RelativeFlatness("head").of(model, cross_entropy, batches)
    assert here.mean > 0.01
    there = RelativeFlatness("head").of(moved(model, batches[0][0], 1.0, seed=5), cross_entropy, batches)
    assert there.values == pytest.approx(here.values, rel=1e-10)
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.head.weight.mul_(4)
        for w in scaled.attention.out_proj.parameters():
            w.div_(4)
    assert RelativeFlatness("head").of(scaled, cross_entropy, batches).values == pytest.approx(here.values)


def test_relative_flatness_skips_ignored_labels_and_loops_over_any_layer_and_loss(
    model: Classifier, batches: list[Batch]
) -> None:
    x, labels = batches[0]
    ignored = (x, torch.where(torch.arange(4) == 1, -100, labels))
    kept = (x[[0, 2, 3]], labels[[0, 2, 3]])
    results = [RelativeFlatness("head").of(model, cross_entropy, [batch]) for batch in (ignored, kept)]
    assert results[0].mean == pytest.approx(results[1].mean, rel=1e-12)

    def bowl(model: nn.Module, batch: Batch) -> Tensor:
        w = model.attention.out_proj.weight  # type: ignore[union-attr]
        return (w**2).sum() / 2  # type: ignore[operator]

    loop = RelativeFlatness("attention.out_proj", "loop").of(model, bowl, batches[:1])
    assert loop.mean == pytest.approx(4 * float((model.attention.out_proj.weight.detach() ** 2).sum()))
    with pytest.raises(ValueError, match=r"cross-entropy of the layer's output\. Found .*use method='loop'"):
        RelativeFlatness("head").of(model, normalised_logits(cross_entropy), batches)
    with pytest.raises(ValueError, match=r"must name an nn\.Linear of the model\. Found 'attention'"):
        RelativeFlatness("attention").of(model, cross_entropy, batches)
    with pytest.raises(ValueError, match="method must be one of closed, loop"):
        RelativeFlatness("head", "fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="called once in a forward pass"):
        RelativeFlatness("unused").of(model, cross_entropy, batches)
    model.unused = nn.Linear(4, 3).double().eval()
    model.unused.weight = model.head.weight
    with pytest.raises(ValueError, match=r"must be its own\. It is shared by head, unused"):
        RelativeFlatness("head").of(model, cross_entropy, batches)


def test_the_command_measures_a_zoo_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    zoo = write_zoo(tmp_path, models=2)
    write_spec(zoo, "measure: gradient-norm, geometry: inv")
    arguments = ["appendix-g", "--zoo", str(zoo), "--out", str(tmp_path / "out"), "--radius", "0.1", "--steps", "2"]
    for _ in range(2):
        done = CliRunner().invoke(study, [*arguments, "--quiet"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        rows = list(csv.DictReader((tmp_path / "out" / "appendix_g.csv").read_text().splitlines()))
        assert [row["checkpoint"] for row in rows] == ["m_0", "m_1"]
    assert all(float(value) > 0 for row in rows for name, value in row.items() if "," in name or "flat" in name)
