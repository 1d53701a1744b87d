"""Reports in a real browser: sorting, narrow screens, dark mode, print, and what a screen reader gets."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quotient_manifolds.report import Gallery, Page, Table, render
from tests.pages import SHARPNESS, contrast, zoo_page

webdriver = pytest.importorskip(
    "selenium.webdriver", reason="The browser is driven by selenium, which is not installed."
)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    BROWSER is None or DRIVER is None, reason="Needs Chromium or Chrome, and chromedriver, on the PATH."
)

PAGES: dict[str, Callable[[], Page]] = {"zoo": zoo_page}
PHONE, DESK = 360, 1200

# Every element with text of its own: its text, colour, and the first opaque background behind it.
TEXTS = """
const opaque = (element) => {
  for (; element; element = element.parentElement) {
    const colour = getComputedStyle(element).backgroundColor;
    if (!/^rgba\\(.*, 0\\)$/.test(colour)) return colour;
  }
  return "rgb(255, 255, 255)";
};
const found = [];
for (const element of document.body.querySelectorAll("*")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const style = getComputedStyle(element);
  if (!own || ["SCRIPT", "title", "style"].includes(element.tagName) || style.fontSize === "8.5px") continue;
  const svg = element.closest("svg");
  found.push([element.textContent, svg ? style.fill : style.color, opaque(svg ? svg.parentElement : element)]);
}
for (const button of document.querySelectorAll("button"))
  found.push(["the arrow of " + button.textContent, getComputedStyle(button, "::after").color, opaque(button)]);
return found;
"""


class Browser:
    """One page after another, in a window of a given width, in light or dark, on screen or on paper."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int = DESK, scheme: str = "light", media: str = "screen") -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        self.driver.get(path.as_uri())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def column(self, table: str, place: int = 0) -> list[str]:
        """The texts of a column, from top to bottom as they stand now."""
        rows = f"document.getElementById('{table}').closest('table').tBodies[0].rows"
        return list(self.run(f"return Array.from({rows}, (row) => row.cells[{place}].textContent)"))

    def header(self, table: str, place: int) -> Any:
        return self.find(f'[aria-labelledby="{table}"] thead th:nth-child({place + 1})')

    def accessible(self, *roles: str) -> list[dict[str, Any]]:
        """What a screen reader gets, in order: role, name, and properties, of nodes that are not ignored."""
        self.driver.execute_cdp_cmd("Accessibility.enable", {})
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                **{one["name"]: one["value"].get("value") for one in node.get("properties", [])},
            }
            for node in nodes
            if not node["ignored"] and node["role"]["value"] in roles
        ]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # The driver's place is given, so that none is looked for or downloaded.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, page in PAGES.items():
        (folder / f"{name}.html").write_text(render(page()), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


# ---- sorting

UP = [
    "run 2",
    "run 1",
    "run 4",
    "run 20",
    "run 3",
    "run 5",
    "run 10",
    "run 6",
]  # equal and missing ones keep their order
DOWN = ["run 5", "run 3", "run 20", "run 1", "run 4", "run 2", "run 10", "run 6"]


def press(browser: Browser, header: Any, how: str) -> None:
    button = header.find_element("css selector", "button")
    if how == "click":
        button.click()
    else:
        button.send_keys(how)


@pytest.mark.parametrize("how", ["click", "\ue007", " "], ids=["click", "enter", "space"])
def test_a_numeric_column_sorts_both_ways_and_keeps_missing_ones_last(
    browser: Browser, files: dict[str, Path], how: str
) -> None:
    browser.open(files["zoo"])
    header = browser.header("sharp", 1)
    assert browser.column("sharp") == list(SHARPNESS)
    assert header.get_attribute("aria-sort") is None
    for order, expected in (("ascending", UP), ("descending", DOWN), ("ascending", UP)):
        press(browser, header, how)
        assert browser.column("sharp") == expected
        assert header.get_attribute("aria-sort") == order
        assert browser.find("#heard").get_attribute("textContent") == f"Sorted by Sharpness, {order}."
    sorted_columns = browser.run("return document.querySelectorAll('[aria-sort]').length")
    press(browser, browser.header("sharp", 2), how)
    assert sorted_columns == browser.run("return document.querySelectorAll('[aria-sort]').length") == 1
    assert browser.column("sharp") == list(SHARPNESS)
    # rows move whole
    assert browser.column("sharp", 1) == [text for text, _ in SHARPNESS.values()]


def test_text_sorts_with_its_numbers_in_order(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["zoo"])
    press(browser, browser.header("sharp", 0), "click")
    assert browser.column("sharp") == [f"run {number}" for number in (1, 2, 3, 4, 5, 6, 10, 20)]


def test_what_was_rounded_sorts_by_what_it_was(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["zoo"])
    press(browser, browser.header("exact", 1), "click")
    assert browser.column("exact") == ["c", "a", "b"]


def test_tables_with_nothing_to_sort_have_no_buttons(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["zoo"])
    for name, count in (("sharp", 3), ("wide", 15), ("one", 0), ("fixed", 0)):
        shown = browser.run(f"return document.querySelectorAll('[aria-labelledby=\"{name}\"] button').length")
        assert shown == count, name


def test_without_scripts_the_page_is_whole_and_still(browser: Browser, files: dict[str, Path]) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(files["zoo"])
        root = browser.driver.execute_cdp_cmd("DOM.getDocument", {})["root"]["nodeId"]
        html = browser.driver.execute_cdp_cmd("DOM.getOuterHTML", {"nodeId": root})["outerHTML"]
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "<button" not in html
    for text, _ in SHARPNESS.values():
        assert f">{text}</td>" in html


# ---- one file, any screen


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_asked_of_the_network_and_nothing_complains(
    browser: Browser, files: dict[str, Path], name: str
) -> None:
    browser.driver.get_log("performance")
    browser.driver.get_log("browser")
    browser.open(files[name])
    for header in range(2):
        browser.run("document.querySelectorAll('button')[arguments[0]].click()", header)
    events = [json.loads(entry["message"])["message"] for entry in browser.driver.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [files[name].as_uri()]
    assert browser.driver.get_log("browser") == []


def test_a_script_that_is_not_ours_does_not_run(browser: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    page = files["zoo"].read_text(encoding="utf-8")
    changed = tmp_path / "changed.html"
    changed.write_text(page.replace("</main>", "</main><script>document.title = 'changed'</script>"), encoding="utf-8")
    browser.open(changed)
    assert browser.driver.title == zoo_page().title
    assert browser.column("sharp") == list(SHARPNESS)
    assert any("Content Security Policy" in entry["message"] for entry in browser.driver.get_log("browser"))


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_scrolls_tables_but_not_the_page(browser: Browser, files: dict[str, Path], name: str) -> None:
    browser.open(files[name], PHONE)
    widths = browser.run("return [innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]")
    assert widths == [PHONE] * 3
    measured = "(one) => [one.clientWidth, one.scrollWidth, one.tabIndex]"
    regions = browser.run(f"return [...document.querySelectorAll('.scroll')].map({measured})")
    assert any(inside > outside for outside, inside, _ in regions)
    assert all(tab == 0 and outside <= PHONE for outside, _, tab in regions)
    assert browser.run("return [...document.querySelectorAll('button')].every((b) => b.offsetHeight >= 24)")


@pytest.mark.parametrize("name", PAGES)
def test_paper_cuts_nothing_off(browser: Browser, files: dict[str, Path], name: str) -> None:
    browser.open(files[name], 718, media="print")  # A4 within its margins
    wide, there = browser.run("return [document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide == there
    assert browser.run("return getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"


def test_a_wide_table_scrolls_with_the_keyboard(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["zoo"], PHONE)
    region = browser.find('[aria-labelledby="wide"]')
    assert browser.run("return arguments[0].scrollLeft", region) == 0
    region.send_keys("\ue014" * 3)  # arrow to the right
    wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait(browser.driver, 10)
    wait.until(lambda _: browser.run("return arguments[0].scrollLeft", region) > 0)
    # the names of the models stay in sight
    browser.run("arguments[0].scrollLeft = 300", region)
    assert browser.run("return arguments[0].scrollLeft", region) == 300
    assert 0 <= browser.run("return arguments[0].querySelector('tbody th').getBoundingClientRect().left", region) < 40


def seen(colour: str, behind: str) -> float:
    """The contrast of two colours `rgb(r, g, b)`."""
    one, other = (re.findall(r"[\d.]+", each)[:3] for each in (colour, behind))
    return contrast([float(part) / 255 for part in one], [float(part) / 255 for part in other])


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("scheme", "media"), [("light", "screen"), ("dark", "screen"), ("dark", "print")])
def test_text_stands_out(browser: Browser, files: dict[str, Path], name: str, scheme: str, media: str) -> None:
    browser.open(files[name], scheme=scheme, media=media)
    dark = (scheme, media) == ("dark", "screen")
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (seen(paper, "rgb(255, 255, 255)") > 10) == dark
    texts = browser.run(TEXTS)
    assert len(texts) > 100
    weak = [(text, seen(colour, behind)) for text, colour, behind in texts if seen(colour, behind) < 4.5]
    assert weak == []


# ---- what a screen reader gets


@pytest.mark.parametrize("name", PAGES)
def test_everything_has_a_name(browser: Browser, files: dict[str, Path], name: str) -> None:
    browser.open(files[name])
    page = PAGES[name]()
    named = browser.accessible("button", "link", "image", "img", "table", "region", "navigation", "heading", "note")
    assert [node for node in named if not node["name"] and node["role"] != "note"] == []
    tables = [node["name"] for node in named if node["role"] == "table"]
    blocks = [block for section in page.sections for block in section.blocks]
    assert tables == [block.caption for block in blocks if isinstance(block, Table)]
    images = [node["name"] for node in named if node["role"] in ("image", "img")]
    assert len(images) == sum(len(block.figures) for block in blocks if isinstance(block, Gallery))
    assert min(map(len, images)) > 40
    regions = [node["name"] for node in named if node["role"] == "region"]
    assert len(regions) == len(set(regions))


@pytest.mark.parametrize("name", PAGES)
def test_headings_and_landmarks(browser: Browser, files: dict[str, Path], name: str) -> None:
    browser.open(files[name])
    page = PAGES[name]()
    headings = [(node["level"], node["name"]) for node in browser.accessible("heading")]
    assert headings == [(1, page.title), *((2, section.title) for section in page.sections)]
    assert len(browser.accessible("main")) == len(browser.accessible("navigation")) == 1
    headers = browser.accessible("columnheader")
    assert all(node["name"] for node in headers)
    rows = sum(len(b.rows) for section in page.sections for b in section.blocks if isinstance(b, Table))
    assert len(browser.accessible("rowheader")) == rows


def test_arrows_are_seen_and_not_read(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["zoo"])
    press(browser, browser.header("sharp", 1), "click")
    drawn = "return getComputedStyle(document.querySelector('[aria-sort] button'), '::after').content"
    assert "▲" in browser.run(drawn)
    names = [node["name"] for node in browser.accessible("button")]
    assert "Sharpness" in [name.strip() for name in names]
    assert not any(arrow in name for name in names for arrow in "↕▲▼")


def test_the_first_tab_skips_to_the_content(browser: Browser, files: dict[str, Path]) -> None:
    browser.open(files["zoo"])
    browser.find("body").send_keys("\ue004")
    skip = browser.driver.switch_to.active_element
    assert skip.text == "Skip to the content"
    assert skip.rect["x"] >= 0
    skip.send_keys("\ue007")
    assert browser.driver.switch_to.active_element.get_attribute("id") == "content"
