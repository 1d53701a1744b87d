"""Level sets in the lessons: as many points of the plane between any two, and no level of mere rounding."""

from __future__ import annotations

import numpy as np

from quotient_manifolds.plots import level_sets

AXIS = np.linspace(-1, 1, 12)
FIELDS = {"one": AXIS + np.pi * AXIS[:, None], "two": np.full((12, 12), -4.0), "three": AXIS[:, None] * AXIS}


def test_level_sets_have_as_many_points_between_any_two() -> None:
    axes = level_sets(AXIS, FIELDS, ("a", "b"), [(AXIS, np.where(AXIS < 0, np.nan, AXIS))]).axes
    panels = [one for one in axes if one.get_xlabel() == "a"]
    assert [one.get_title() for one in panels] == list(FIELDS)
    assert [text.get_text() for text in panels[1].texts] == ["−4 everywhere"]
    assert len(axes) == 3 + 2  # a color bar for each that is not constant
    (filled,) = panels[0].collections
    counts = np.histogram(FIELDS["one"], [-np.inf, *filled.levels, np.inf])[0]
    assert counts.sum() == 144
    assert counts.max() <= 2 * counts.min()
    np.testing.assert_array_equal(panels[0].get_lines()[0].get_ydata()[:6], np.nan)


def test_a_level_of_rounding_noise_is_zero() -> None:
    odd = np.outer(np.linspace(-3, 3, 48), np.linspace(-3, 3, 48)) + 1e-17
    labels = [text.get_text() for text in level_sets(np.arange(48.0), {"f": odd}, ("", "")).axes[1].get_yticklabels()]
    assert "0" in labels
    assert not any("e" in label or "-" in label for label in labels), labels
