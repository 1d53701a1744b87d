"""Formulas of notebooks are part of the page: MathML, without a script, from nowhere else."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import nbformat
import pytest
import yaml
from mkdocs_jupyter import convert

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HOOK = "docs/formulas.py"


def hook() -> Any:
    spec = importlib.util.spec_from_file_location("formulas", ROOT / HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages() -> dict[str, tuple[str, str]]:
    """What the site has of notebooks with formulas, as their plugin makes it, and what becomes of it."""
    change, found = hook().on_page_content, {}
    for path in (NOTEBOOKS[1], NOTEBOOKS[7]):
        made = convert.nb2html(str(path))
        found[path.stem] = made, change(made, page=SimpleNamespace(file=SimpleNamespace(src_uri=path.name)))
    return found


def test_the_site_uses_it() -> None:
    assert HOOK in yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), yaml.BaseLoader)["hooks"]


def test_pages_load_nothing_from_elsewhere(pages: dict[str, tuple[str, str]]) -> None:
    for before, after in pages.values():
        assert re.search(r"<script[^>]*//", before)
        assert not re.search(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//", after)
        assert not re.search("mathjax", after, re.IGNORECASE)


def test_every_formula_of_a_page_is_mathml_and_code_stays(pages: dict[str, tuple[str, str]]) -> None:
    for name, (before, after) in pages.items():
        text = re.sub(r"<(pre|code|script|style|svg)\b.*?</\1>|<[^>]*>", "", after, flags=re.DOTALL)
        assert "$" not in text
        cells = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells
        said = re.sub(r"^```.*?^```|`[^`\n]+`", "", "\n\n".join(c.source for c in cells if c.cell_type == "markdown"),
                      flags=re.DOTALL | re.MULTILINE)  # fmt: skip
        assert after.count("<math") == len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", said, re.DOTALL)) > 0
        codes = [re.findall(r"<pre.*?</pre>", page, re.DOTALL) for page in (before, after)]
        assert codes[0] == codes[1] != []


def test_every_formula_of_every_notebook_is_known() -> None:
    formulas, seen = hook(), 0
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                for found in formulas.FORMULA.finditer(
                    re.sub(r"```.*?```|`[^`\n]+`", "", cell.source, flags=re.DOTALL)
                ):
                    ET.fromstring(formulas.mathml(found[1] or found[2]))
                    seen += 1
    assert seen > 300
    for wrong in (r"\nonsense", r"\frac{1}", "{x"):
        with pytest.raises(ValueError, match=r"commands that docs/formulas\.py knows\. Found"):
            formulas.mathml(wrong)


@pytest.mark.parametrize(
    ("tex", "wanted"),
    [
        ("x_1^2", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
        ("x^2_1", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
        ("f''", "<msup><mi>f</mi><mo>′′</mo></msup>"),
        (r"\sqrt{1-t}", "<msqrt><mrow><mn>1</mn><mo>−</mo><mi>t</mi></mrow></msqrt>"),
        (r"\dot{x} < 0.5", '<mover accent="true"><mi>x</mi><mo>˙</mo></mover><mo>&lt;</mo><mn>0.5</mn>'),
        (
            r"\mathrm{GL}(h)",
            '<mi mathvariant="normal">GL</mi><mo stretchy="false">(</mo><mi>h</mi><mo stretchy="false">)</mo>',
        ),
        (r"\max_t", '<munder><mo movablelimits="true" lspace="0" rspace="0.17em">max</mo><mi>t</mi></munder>'),
        (r"A^{-1}", "<msup><mi>A</mi><mrow><mo>−</mo><mn>1</mn></mrow></msup>"),
    ],
)
def test_formulas_become_what_they_say(tex: str, wanted: str) -> None:
    assert re.sub(r"^<math[^>]*>|</math>$", "", hook().mathml(tex)) == wanted
