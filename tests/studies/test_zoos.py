"""What the studies of zoos share: finding measures by what they are, the record, and what is committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats

from quotient_manifolds.compare import Comparison
from quotient_manifolds.geometry import Quotient
from studies.zoos.measures import METRICS, PLAIN, ZooMeasures
from studies.zoos.study import load_record

RECORDS = Path(__file__).parents[2] / "notebooks" / "records" / "earlier"

both = pytest.mark.parametrize("key", ["vit", "bert"])


def record(key: str) -> Comparison:
    return load_record(RECORDS / key)[0]


@both
def test_a_measure_is_found_by_geometry_and_radius(key: str) -> None:
    measures = ZooMeasures(record(key))
    for name, geometry in PLAIN.items():
        middle = measures.middle(name)
        assert measures.label(geometry, middle) is not None
        assert middle == sorted(measures.radii(geometry))[len(measures.radii(geometry)) // 2]
    for metric in METRICS:
        labels = [measures.label(Quotient(metric, order), measures.middle(metric)) for order in ("first", "second")]
        assert None not in labels
        assert labels[0] != labels[1]
    assert measures.label(Quotient("inv"), 12.0) is None
    assert measures.label(Quotient("inv"), None, "gradient norm") == "inv (second order) gradient norm"


@both
def test_the_committed_record_is_whole_and_its_taus_are_its_values(key: str) -> None:
    folder = RECORDS / key
    comparison, costs = load_record(folder)
    assert len(comparison.rows) == {"vit": 48, "bert": 25}[key]
    assert comparison.known[0] + len(comparison.failures) == comparison.known[1]  # what is missing is accounted for
    assert all("normalised logits" in (failure.what or "") for failure in comparison.failures)
    assert len(comparison.failures) == 0 or key == "bert"
    assert [each.measure for each in costs] == list(comparison.labels)
    rankings = [each for each in comparison.rankings if each.against == "error_gap" and not each.given]
    assert {each.measure for each in rankings} == set(comparison.labels)
    for each in rankings:
        pairs = zip(comparison.column(each.measure), comparison.column("error_gap"), strict=True)
        known = [(value, gap) for value, gap in pairs if value is not None]
        if each.correlation.kind == "kendall-b":
            assert each.correlation.models == len(known)
            assert each.correlation.value == pytest.approx(stats.kendalltau(*zip(*known, strict=True)).statistic)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2e6
