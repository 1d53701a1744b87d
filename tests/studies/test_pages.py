"""Pages of studies: every table is that of a committed record, and every number in the prose stands in one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from quotient_manifolds.load import load_model
from studies import mnist, sentiment
from studies.__main__ import STUDIES, recorded
from studies.common import (
    CSV,
    MARK,
    RECORDS,
    csv_files,
    fill_page,
    load,
    markdown,
    pretrained_encoder,
    resume,
    write_record,
)
from studies.diagonal.networks import DIMENSION, SPARSITY, TARGET
from studies.diagonal.study import LARGE
from studies.mnist import ARCHITECTURE, FACTORS
from studies.mnist import TARGET as LOW
from studies.sentiment import TESTS, TRAINING
from studies.zoos.data import load_mnist
from studies.zoos.ranks import MAIN
from studies.zoos.zoo import Zoo

# ---- tables and what studies have in common

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.md")) if MARK.search(path.read_text())
)
TAU = re.compile(r"[+−]\d\.\d\d\b")


@cache
def numbers_of(*studies: str) -> set[str]:
    return {
        number
        for study in studies
        for table in recorded(study).values()
        for cell in table.to_numpy().ravel()
        for number in TAU.findall(str(cell))
    }


def test_pages_are_found() -> None:
    assert {path.name for path in PAGES} >= {"results.md", "fibres.md", "invariance.md", "benchmarks.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_table_is_that_of_its_record(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_page(page, recorded) == text, "run `PYTHONPATH=notebooks python -m studies pages`"
    assert text.count("<!-- table ") == len(MARK.findall(text)), "a mark is not closed, or not on a line of its own"
    for file, rows in csv_files(page, recorded).items():
        assert file.read_text(encoding="utf-8") == rows


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_correlations_in_the_prose_stand_in_the_tables(page: str) -> None:
    assert set(TAU.findall((ROOT / page).read_text(encoding="utf-8"))) <= numbers_of("mnist", "sentiment", "diagonal")


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_every_study_has_a_record_and_tables(name: str) -> None:
    tables = recorded(name)
    assert tables
    assert all(len(table) for table in tables.values())


# ---- what studies have in common


def test_a_table_between_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table toy x -->\nold\n<!-- end -->\nb\n")
    shown = pd.DataFrame({"m": ["1"], "|t|": ["+0.10"]})
    assert markdown(shown) == "| m | \\|t\\| |\n| --- | --- |\n| 1 | +0.10 |\n"
    assert fill_page(page, lambda study: {"x": shown}) == f"a\n<!-- table toy x -->\n{markdown(shown)}<!-- end -->\nb\n"
    with pytest.raises(ValueError, match=r"must have a table 'x'\. Found y"):
        fill_page(page, lambda study: {"y": shown})


def test_an_interrupted_study_continues(tmp_path: Path) -> None:
    made: list[str] = []

    def study(*names: str, fail: bool = False) -> list[int]:
        def cell(name: str) -> dict[str, int]:
            if fail and name == names[-1]:
                raise KeyboardInterrupt
            made.append(name)
            return {"length": len(name)}

        return [each["length"] for each in resume(tmp_path, {n: partial(cell, n) for n in names}, what="study")]

    with pytest.raises(KeyboardInterrupt):
        study("A a", "rate 1e-01", "rate 1e+01", fail=True)
    assert (
        study("A a", "rate 1e-01", "rate 1e+01") == study("A a", "rate 1e-01", "rate 1e+01", fail=True) == [3, 10, 10]
    )
    assert made == ["A a", "rate 1e-01", "rate 1e+01"]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda out: resume(out, {}, what="study", settings=2), "must hold cells of the same settings"),
        (lambda out: resume(out, {"a": list, "A": list}, what="study", settings=1), "must differ in letters or digits"),
        (lambda out: write_record(out / "y.json", {"rows": [float("nan")]}), "Out of range float"),
    ],
)
def test_what_a_record_cannot_hold_is_refused(tmp_path: Path, make: Callable[[Path], Any], word: str) -> None:
    assert resume(tmp_path, {"rows": lambda: {"rows": [{"a": 1.5, "b": None}]}}, what="study", settings=1)
    assert load("rows", tmp_path) == {"rows": [{"a": 1.5, "b": None}]}
    with pytest.raises(ValueError, match=word):
        make(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"rows.json", "settings.json"}


# ---- the sentences of results.md

PAGE = Path("notebooks/results.md")
THEIRS = (  # the paper's numbers, and the zoos that were withdrawn
    *("| −0.68 | −0.83 | −0.86 |", "| −0.41 | −0.71 | −0.70 |", "MNLI, 35 BERTs", "| +0.06 | +0.28 | +0.38 |"),
    *("Within ±0.1", "(48 vision transformers, 25 BERTs)"),
)
PLACES = re.compile(  # links, code, places in the paper, names, and 0 as a bound
    r"\[[^\]]*\]\([^)]*\)|`[^`]*`|make study .*?(?=make|Each)|\((?:Sec\. |Jiang)[^)]*\)|\[(?:Fig|App)\. [^\]]*\]"
    r"|(?:Fig|Eq|App)\. [A-Z\d]\S*(?: (?:and|to) \d)?|Table 1|ViT-B/32|MiniLM-L6-v2|\bl2\b"
    r"|(?:eps|exclude|include|below|above|exactly|close to|t =|Hessian is) 0\b|t = 1|\(95 %\)"
)


def first(cells: list[str]) -> list[str]:
    """The taus, without their intervals."""
    return [cell.split()[0] for cell in cells]


def of_spec(study: str, setting: str) -> str:
    (found,) = set(re.findall(rf"{setting}: (\d+)", (PAGE.parent / f"studies/zoos/{study}.yaml").read_text("utf-8")))
    return str(found)


def again(zoo: Zoo) -> str:
    return f"that of longer ascents, in {len({each['model'] for each in zoo.record['climbs']})} models"


def of_mnist() -> Iterator[str]:
    from transformers import ViTConfig, ViTForImageClassification

    zoo, tables = mnist.load(RECORDS), recorded("mnist")
    models, rows = len(zoo.comparison.scores), tables["ranking"].set_index("Measure")
    error, loss = ([*rows.loc[[*MAIN], column]] for column in ("Within cells", "Within cells, gap in loss"))
    primary, paired, _ = tables["comparisons"]["Here"]
    bounds = [re.findall("[+−]", cell.split(maxsplit=1)[1]) for cell in error]
    yield f"**MNIST, {models} vision transformers.**"
    yield "{} (euclidean), {} (adaptive), {} (inv) and {} (mix)".format(*first(error))
    yield f"{('No', 'One', 'Two')[sum(low == high for low, high in bounds)]} of the four intervals exclude 0"
    yield "negative: {}, {}, {} and {}. ".format(*first(loss))
    yield f"The norm of the weights has {rows.iloc[:, -1]['norm of the weights'].split()[0]} and"
    yield f"minus \\|Psi\\| of adaptive sharpness: {primary}. "
    yield f"changes \\|tau\\| of inv by {paired}. "
    heads, layers = ARCHITECTURE["num_attention_heads"], ARCHITECTURE["num_hidden_layers"]
    size = ViTForImageClassification(ViTConfig(**ARCHITECTURE)).num_parameters()
    width = ARCHITECTURE["hidden_size"] // heads
    yield f"{models} vision transformers ({layers} layers, {heads} heads of {width}, {size:,} parameters)"
    yield "{} or {} training images".format(*FACTORS["points"])
    yield "{:.0f}, {:.0f} or {:.0f} % label noise".format(*(100 * share for share in FACTORS["noise"]))
    yield "weight decay {:g} or {:g}".format(*FACTORS["weight_decay"])
    yield f"below {LOW:g} nats"
    yield f"on {len(load_mnist()[1].labels)} other images"
    yield f"the first {of_spec('mnist', 'batch_size')} training images, by ascents of {of_spec('mnist', 'steps')} steps"
    yield again(zoo)


def of_sentiment() -> Iterator[str]:
    zoo, tables = sentiment.load(RECORDS), recorded("sentiment")
    groups, rows = zoo.comparison.scores["group"].value_counts(), tables["settings"].set_index("Measure").iloc[:, 0]
    million = f"{load_model(pretrained_encoder()).num_parameters() / 1e6:.1f} million parameters"
    inv, mix, loss = first([*rows[["inv", "mix", "training loss"]]])
    yield f"**Film reviews, {groups['seeds']} BERTs that differ by seed alone.**"
    yield f"The primary comparison is {tables['comparisons']['Here'].item()}, inconclusive"
    yield f"**Film reviews, {groups['settings']} BERTs of a factorial design.** inv and mix have {inv} and {mix}, "
    yield f"training loss alone has {loss}. "
    yield f"on {TRAINING} film reviews. {groups['seeds']} models differ by their seed alone, as the paper’s do; "
    yield f"{groups['settings']} by learning rate"
    yield f"on {TESTS['films']} other film reviews, and on {TESTS['products']} sentences on products"
    yield f"{TESTS['editorials']} from editorials and {TESTS['tweets']} tweets"
    steps = of_spec("sentiment", "steps")
    yield f"the first {of_spec('sentiment', 'batch_size')} training sentences, by ascents of {steps} steps"
    yield again(zoo)
    yield f"BERTs of {million}"
    yield f"a BERT of {million}"


def of_diagonal() -> Iterator[str]:
    plan, tables = load("diagonal")["plan"], recorded("diagonal")
    settings, reproduced = len(plan["settings"]), (tables["settings"].iloc[:, -1] == "yes").sum()
    yield f"is reproduced in {reproduced} of {settings} settings by the paper’s closed forms"
    yield f"dimension {DIMENSION}, {SPARSITY:.0%} zeros, {plan['networks']} networks".replace("%", " %")
    yield f"to a loss of {TARGET:.0e}".replace("e-05", "e-5")
    yield f"a grid of {settings} settings with {plan['seeds']} seeds each"
    yield f"at radius {plan['radii'][len(plan['radii']) // 2]:g}: the mean over {plan['seeds']} seeds"
    yield f"{plan['thorough_steps']} steps from the network, from {plan['thorough_restarts']} random points"
    yield f"plain ascents of {plan['steps']} steps"
    yield f"over {LARGE:.0%} of the increase".replace("%", " %")


def test_every_number_in_the_sentences_follows_from_a_record() -> None:
    text = re.sub(r"\s+", " ", CSV.sub("", MARK.sub("", PAGE.read_text(encoding="utf-8"))))
    for claim in (*of_mnist(), *of_sentiment(), *of_diagonal(), *THEIRS):
        assert claim in text, claim
        text = text.replace(claim, "")
    assert not re.findall(r".{30}\d.{10}", PLACES.sub("", text))
