"""The zoo of BERTs fine-tuned on rated sentences: what is read, the design, and one small run on invented sentences."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from studies.__main__ import study
from studies.common import pretrained_encoder
from studies.sentiment import zoo
from studies.sentiment.sentences import SOURCES, read_sentences
from studies.sentiment.zoo import FULL, pilots
from studies.zoos.measuring import load_zoo
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


def test_an_archive_of_another_hash_is_not_opened(archive: Path) -> None:
    archive.write_bytes(archive.read_bytes() + b"0")
    with pytest.raises(ValueError, match=r"to have the SHA-256 \w{64}\. Found \w{64}: fetch it again"):
        read_sentences(archive, pretrained_encoder())
    with pytest.raises(ValueError, match=r"There is no .*make study NAME=sentiment fetches it"):
        read_sentences(archive.with_name("none.tar.gz"), pretrained_encoder())


def test_the_design_has_a_group_that_differs_by_seed_alone() -> None:
    groups = Counter(each.group for each in FULL.recipes.values())
    assert groups == {"seeds": 30, "settings": 32}
    seeds = [each for each in FULL.recipes.values() if each.group == "seeds"]
    assert len({each.seed for each in seeds}) == 30
    assert len({(each.learning_rate, each.batch_size, each.dropout, each.epochs) for each in seeds}) == 1
    used = {each.seed for each in FULL.recipes.values()}
    assert len(used) == 62
    assert not used & {each.seed for each in pilots().values()}


def test_a_small_run_from_start_to_end(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "TRAINING", 32)
    monkeypatch.setattr(zoo, "fetched", lambda: archive)
    out = tmp_path / "out"
    done = CliRunner().invoke(study, ["sentiment", "--fast", "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = load_zoo(out / "sentiment")
    comparison = found.comparison
    assert comparison.known == (8, 8)
    for _, row in comparison.scores.iterrows():
        for prefix in ("", "products_", "editorials_", "tweets_"):
            test, train = row[f"{prefix}test_error"], row["train_error"]
            assert row[f"{prefix}error_gap"] == pytest.approx(test - train)
        assert row["weight_norm"] > 0
    assert len(set(comparison.column("weight_norm"))) == 4  # four seeds are four models
    before = {file: file.stat().st_mtime_ns for file in out.glob("*/models/*/*")}
    monkeypatch.setattr(zoo, "fine_tune", None)  # calling it would fail
    again = CliRunner().invoke(study, ["sentiment", "--fast", "--out", str(out), "--quiet"])
    assert (again.exit_code, again.output) == (0, "")
    assert {file: file.stat().st_mtime_ns for file in out.glob("*/models/*/*")} == before
    assert load_zoo(out / "sentiment") == found
    values = np.array([comparison.column(label) for label in comparison.labels], dtype=float)
    assert (values > 0).all()
