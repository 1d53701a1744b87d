"""A page to test reports with, which has every kind of block, and the contrast of colours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from quotient_manifolds.plots import Colour, Panel, agreement_figure, orbit_figure, radius_figure, scatter_figure
from quotient_manifolds.report import Block, Code, Fact, Figure, Gallery, Listing, Note, Page, Section, Table, Text
from quotient_manifolds.statistics import agreement, correlation

# The sharpness of a zoo in which two checkpoints failed; as it stands in a table, and the number meant.
SHARPNESS = {
    "run 1": ("0.25 ± 0.01", 0.25),
    "run 2": ("−1.5e-03", -1.5e-3),
    "run 10": ("failed", None),
    "run 3": ("1,250", 1250.0),
    "run 20": ("9", 9.0),
    "run 4": ("0.25 ± 0.5", 0.25),
    "run 5": ("inf", float("inf")),
    "run 6": ("no loss", None),
}
COMMAND = "quotient-manifolds compare a-spec-with-a-very-long-name-that-no-phone-can-hold.toml --out results"
REASON = (
    "run-10/pytorch_model.bin holds no weights: expected a dictionary of tensors, found an empty file of 0 bytes; "
    "copy it again from where it was trained, and run the same command once more."
)


@cache
def zoo_page() -> Page:
    """Every kind of block, failures, a table wider than any phone, and every kind of figure."""
    return Page(
        "A zoo of eight checkpoints, of which two failed",
        "Every kind of block of a page.",
        [Fact("+0.42", "is Kendall’s tau of something."), Fact("2 of 8", "checkpoints failed.")],
        [
            Section("failures", "What failed", failures()),
            Section(
                "results", "Results", [Text("A paragraph."), Listing(["One.", "Another."]), Code(COMMAND), *tables()]
            ),
            Section("figures", "Figures", galleries()),
        ],
    )


def failures() -> list[Block]:
    rows = [["run 10", REASON], ["run 6", "no loss"]]
    return [
        Note("2 of 8 checkpoints could not be measured", [f"run 10: {REASON}", "run 6: no loss."]),
        Table("fails", "Checkpoints that failed", ["Checkpoint", "Reason"], rows, [False, False]),
    ]


def tables() -> list[Table]:
    """One of texts and numbers, one that is wide, and small ones."""
    rows = [[name, text, str(place)] for place, (name, (text, _)) in enumerate(SHARPNESS.items())]
    wide = [[f"run-{n}-of-a-sweep-of-many/checkpoint-{n}000", *(str(n * k % 11) for k in range(14))] for n in range(5)]
    pair = [["1", "2"], ["3", "4"]]
    rounded = [["a", "0.1"], ["b", "0.1"], ["c", "0.1"]]
    return [
        Table("sharp", "Sharpness of each model", ["Model", "Sharpness", "Order"], rows, [False, True, True]),
        Table("wide", "Wide", ["Checkpoint", *(f"Measure {k}" for k in range(14))], wide, [False] + [True] * 14),
        Table("one", "A single row", ["A", "B"], pair[:1], [True, True]),
        Table("fixed", "Two rows", ["A", "B"], pair, [True, True]),
        Table("exact", "What was rounded", ["Model", "Value"], rounded, [False, True]),
    ]


def galleries() -> list[Gallery]:
    x, y = [value for _, value in SHARPNESS.values()], [5.0, 3.0, 1.0, 2.0, 8.0, 9.0, 7.0, 6.0]
    x[6] = 40.0
    panel = Panel("Adaptive sharpness", x, y, correlation(x, y, permutations=99), x_errors=[0.1] * 8)
    radii = [0.01, 0.1, 1.0]
    measures = {f"A measure called {k}": [(3 * n + k) % 7 for n in range(8)] for k in range(8)}
    plots = {
        "scatter": scatter_figure([panel], y_label="gap, %", colour=Colour("optimizer", ["adam", "sgd"] * 4)),
        "scale": scatter_figure([panel], y_label="gap, %", colour=Colour("rate", [1e-5 * 2**k for k in range(8)])),
        "orbit": orbit_figure([0.1, 1.0, 10.0], {"Adaptive": [1.5, 1.0, 3.0], "Quotient inv": [1.0, 1.0, 1.0]}),
        "radius": radius_figure(radii, {"Adaptive": [[r, 2 * r, 3 * r] for r in radii]}, show="band"),
    }
    heat = agreement_figure(agreement(measures)).html()
    return [
        Gallery([Figure(plot.html(), f"The figure called {name}.") for name, plot in plots.items()]),
        Gallery([Figure(heat, "How measures agree.", wide=True)]),
    ]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    """The ratio of two colours in sRGB, channels from 0 to 1, as WCAG 2 defines it."""

    def luminance(colour: Sequence[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)
