"""Records of several measurements: frames, geometries that can be made from them."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from quotient_manifolds import Adaptive, Euclidean, Quotient, Result, cross_entropy
from quotient_manifolds.files import write_text
from quotient_manifolds.geometry import Geometry
from quotient_manifolds.sharpness import WorstCase
from quotient_manifolds.symmetries import Symmetries

NORMS = st.sampled_from(["l2", "linf"])
GEOMETRIES: st.SearchStrategy[Geometry] = st.one_of(
    st.builds(Euclidean, norm=NORMS),
    st.builds(Adaptive, eta=st.floats(0, 10), norm=NORMS),
    st.builds(
        Quotient,
        metric=st.one_of(st.sampled_from(["inv", "mix"]), st.floats(-2, 2)),
        geodesic=st.sampled_from(["first", "second", "exact"]),
        eps=st.floats(0, 1),
        symmetries=st.sampled_from(["all", "pairs", "paper"]),
        verify=st.sampled_from(["gradient", "full", "none"]),
    ),
)


ADAPTIVE = Adaptive()


def measured(geometry: Geometry = ADAPTIVE, radius: float = 0.1) -> Result:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double().eval()
    batches = [(torch.randn(4, 3).double(), torch.tensor([0, 1, 0, 1])) for _ in range(2)]
    return WorstCase(geometry, radius, steps=2).of(model, cross_entropy, batches)


@given(GEOMETRIES)
def test_a_geometry_is_made_again_from_its_record(geometry: Geometry) -> None:
    record = json.loads(json.dumps(geometry.to_dict()))
    assert record.pop("kind") == type(geometry).__name__.lower()
    assert type(geometry)(**record) == geometry


def test_a_measurement_keeps_its_geometry() -> None:
    assert Quotient("mix", symmetries=Symmetries((), (), (), ())).to_dict()["symmetries"] == "given"
    found = measured(Adaptive(eta=0.01, norm="linf"))
    assert found.geometry_settings == Adaptive(eta=0.01, norm="linf").to_dict()


def test_a_result_makes_a_frame_with_a_row_a_batch() -> None:
    found = measured(Adaptive(eta=0.5))
    frame = found.to_frame()
    assert tuple(frame["value"]) == found.values
    assert list(frame["batch"]) == [0, 1]
    assert set(frame["geometry.eta"]) == {0.5}
    assert set(frame["settings.radius"]) == {0.1}


def test_absent_pandas_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="A data frame needs pandas: pip install"):
        measured().to_frame()


# ---- what is written where


def test_a_full_disk_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "result.json"
    write_text(file, "old")
    before = file.read_bytes()

    def full(self: Path, *_: object, **__: object) -> int:
        self.write_bytes(b"{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(file, "new")
    assert file.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]


def test_links_stay_and_modes_are_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real" / "file.txt", tmp_path / "link.txt"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert (real.read_text(), stat.S_IMODE(real.stat().st_mode)) == ("new", 0o640)
