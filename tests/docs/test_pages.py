"""What the pages show is run or checked, and the page of concepts names every room of the code."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import click
import griffe
import pytest
import yaml

import quotient_manifolds
from quotient_manifolds.cli.app import cli

ROOT = Path(__file__).parents[2]
PACKAGE = Path(quotient_manifolds.__file__).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of every block of code."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def rooms() -> set[str]:
    """Return the modules and the folders of modules directly under the package."""
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    return folders | {path.stem for path in PACKAGE.glob("*.py")}


def test_the_page_of_concepts_names_every_room_and_no_other() -> None:
    text = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = text.partition("## Modules")[2].partition("\n## ")[0]
    first_column = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    assert {name for cell in first_column for name in re.findall(r"`(\w+)`", cell)} == rooms()


def test_the_files_to_read_first_are_five_and_short() -> None:
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("## Five files")[2]
    files = [ROOT / name for name in re.findall(r"^\| `(\S+\.py)` \|", text, re.MULTILINE)]
    assert len(files) == 5
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 150 for file in files)


def test_the_reference_has_every_room() -> None:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    shown = {name for page in pages for name in re.findall(r"^::: \w+\.(\w+)$", page.read_text("utf-8"), re.MULTILINE)}
    assert shown == rooms() - {"__init__", "__main__", "version", "cli", "demo"}


def test_the_reference_lists_the_names_of_the_package() -> None:
    text = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    assert {name for name in quotient_manifolds.__all__ if f"`{name}`" not in text} == {"__version__"}


def test_reference_pages_show_calls_with_all_their_arguments() -> None:
    """griffe reads the source and runs nothing, so an assigned function would have no arguments there."""
    package = griffe.load("quotient_manifolds", search_paths=[str(ROOT)], resolve_aliases=True)
    functions = {n for n in quotient_manifolds.__all__ if inspect.isroutine(getattr(quotient_manifolds, n))}
    assert {"worst_case_sharpness", "top_eigenvalue"} <= functions
    for name in functions:
        function = getattr(quotient_manifolds, name)
        shown = package[function.__module__.removeprefix("quotient_manifolds.")][name]
        assert [each.name for each in shown.parameters] == [*inspect.signature(function).parameters], name
        assert shown.docstring.value == inspect.getdoc(function), name


def test_a_command_says_what_to_type_and_no_placeholder() -> None:
    for page in PAGES:
        for language, code in blocks(page):
            assert language != "console" or not re.search(r"<[a-z ]+>", code), code


def test_a_metric_of_ones_own_stands_on_a_how_to_page() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text("utf-8"), yaml.BaseLoader)
    (how_to,) = (pages["How to"] for pages in site["nav"] if "How to" in pages)
    assert any("qm.Recipe(" in (ROOT / page).read_text("utf-8") for page in how_to)
    assert "metric of your own" in (ROOT / "docs" / "index.md").read_text("utf-8")


@every_page
def test_its_code_is_of_a_kind_that_is_run_or_checked(page: Path) -> None:
    """Examples run as doctests; commands are checked below; what `text` shows is no code."""
    written_out = {"python"} if page.name == "command_line.md" else set()  # a file, which the tests of the page make
    for language, code in blocks(page):
        assert language in {"pycon", "console", "text"} | written_out, code
        if language == "pycon":
            assert code.startswith(">>> ")
        if language == "console":
            assert all(line.startswith("$ ") for line in code.splitlines()), code
    assert not re.search(r"^\n {4}\w", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)


@every_page
def test_its_files_exist(page: Path) -> None:
    """Files are named from the top of the repository, or from that of the package."""
    named = set(re.findall(r"`([\w/]+/\w+\.(?:py|md|ipynb|json))`", page.read_text(encoding="utf-8")))
    assert not {name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()}


@every_page
def test_its_commands_exist_with_their_options(page: Path) -> None:
    targets = set(re.findall(r"^(\w+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = [line for language, code in blocks(page) if language == "console" for line in code.splitlines()]
    for words in (shlex.split(line.removeprefix("$ "), comments=True) for line in lines):
        if words[0] == "make":
            assert words[1] in targets
        if words[0] == "quotient-manifolds":
            command = cli.get_command(click.Context(cli), words[1])
            assert command is not None, words[1]
            known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            assert {word for word in words if word.startswith("--")} <= known | {"--help"}, words
