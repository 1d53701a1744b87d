"""The figure of charges shows what the page says: blocks of heads and the skew part of the stream vanish, no more."""

from __future__ import annotations

from pathlib import Path

import torch

from studies.charges import HEADS, WIDTH, figure, ratios

ROOT = Path(__file__).parents[2]


def test_what_the_figure_shows_as_zero_is_rounding_and_the_rest_is_not() -> None:
    queries, values, stream, skew = ratios().values()
    head = torch.arange(WIDTH) // (WIDTH // HEADS)
    own = head[:, None] == head
    assert max(float(each[own].max()) for each in (queries, values)) < 1e-14 > float(skew.max())
    assert min(float(each.min()) for each in (queries[~own], values[~own], stream)) > 1e-5


def test_the_figure_names_its_panels() -> None:
    panels = [axes.get_title() for axes in figure().figure.axes if axes.get_title()]
    assert panels == list(ratios())


def test_the_page_shows_the_figure_with_its_text_alternative() -> None:
    page = (ROOT / "docs" / "charges.md").read_text(encoding="utf-8")
    assert f"![{figure().alt}](images/charges.svg)" in page
    assert (ROOT / "docs" / "images" / "charges.svg").is_file()
