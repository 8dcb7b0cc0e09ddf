"""The report in a browser: no fault on the console, nothing fetched, cards that show, text that can be read."""

import json
from collections.abc import Iterator
from typing import Any

import browser
import evaluation_data
import pytest

from sharpi_jax.evaluate.report import write_report

pytestmark = pytest.mark.skipif(
    not (browser.CHROMIUM and browser.DRIVER),
    reason="Chromium is not installed: apt-get install chromium chromium-driver",
)
THEMES, WIDTHS = ("light", "dark"), (1280, 400)

# Every element that itself holds text: its contrast with the nearest background below it, by WCAG 2.
CONTRASTS = """
const rgb = (c) => c.match(/[\\d.]+/g).map(Number);
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const luminance = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const found = [];
for (const node of document.querySelectorAll("body *")) {
  if (!node.checkVisibility() || ["SCRIPT", "NOSCRIPT"].includes(node.tagName)) continue;
  if (![...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim())) continue;
  let below = node;
  while (rgb(getComputedStyle(below).backgroundColor)[3] === 0) below = below.parentElement;
  const svg = node.closest("svg");
  const ink = luminance(rgb(svg ? getComputedStyle(node).fill : getComputedStyle(node).color));
  const paper = luminance(rgb(getComputedStyle(below).backgroundColor));
  const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  found.push([node.tagName + "." + node.getAttribute("class"), contrast]);
}
return found;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(tmp_path_factory.mktemp("page"), evaluation_data.evaluation(prompts=6)).as_uri()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser.chromium() as driver:
        yield driver


def _find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def _hover(driver: Any, node: Any) -> None:
    from selenium.webdriver import ActionChains

    driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", node)
    ActionChains(driver).move_to_element(node).perform()


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_loads_clean_and_fits(driver: Any, page: str, width: int, theme: str) -> None:
    browser.look(driver, width, 800, theme)
    driver.get_log("performance")
    driver.get(page)
    assert driver.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    asked = {e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"}
    assert asked == {page}
    assert driver.execute_script("return document.documentElement.scrollWidth") == width  # nothing hangs out
    background = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(246, 247, 249)") == (theme == "light")
    _hover(driver, _find(driver, "#text .token.p-min"))
    contrasts = driver.execute_script(CONTRASTS)
    assert len(contrasts) > 400
    assert {c[0].split(".")[0] for c in contrasts} >= {"text", "TD", "P", "SPAN", "H1"}
    assert [(name, contrast) for name, contrast in contrasts if contrast < 4.5] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_a_hover_shows_the_card_of_its_step(driver: Any, page: str, width: int) -> None:
    browser.look(driver, width, 800, "light")
    driver.get(page)
    card = _find(driver, "#card")
    assert not card.is_displayed()
    view = json.loads(driver.execute_script("return document.getElementById('view').textContent"))
    run = view["prompts"][0]["runs"][str(view["start"])]
    kinds = {"C": "certain", "A": "argmax", "P": "p-min", "X": "correction"}
    for letter, kind in kinds.items():
        tokens = driver.find_elements("css selector", f"#text .token.{kind}")
        assert len(tokens) == "".join(step[0] for step in run["steps"]).count(letter)
        _hover(driver, tokens[-1])
        assert card.is_displayed()
        step, index = (int(tokens[-1].get_attribute(f"data-{name}")) for name in ("step", "index"))
        letters, ids, probabilities, choices = run["steps"][step]
        assert letters[index] == letter
        rows = card.find_elements("css selector", "tbody tr")
        assert len(rows) == len(ids) - 1
        for row, verdict, draft, p, choice in zip(rows, letters[1:], ids[1:], probabilities, choices, strict=False):
            cells = [cell.get_attribute("textContent") for cell in row.find_elements("css selector", "td")]
            assert cells[1] == f"{p:.4f}"
            assert verdict != "-" or cells[2:] == ["not reached", "–"]
            for cell, token in ((cells[0], draft), (cells[3], choice))[: 1 if verdict == "-" else 2]:
                assert cell == "“" + view["texts"][token].replace("\n", "↵").replace("\t", "⇥") + "”"
        box = card.rect
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    _hover(driver, _find(driver, "h2#tokens"))
    assert not card.is_displayed()
    assert driver.get_log("browser") == []


def test_the_keyboard_reaches_every_token(driver: Any, page: str) -> None:
    from selenium.webdriver import Keys

    browser.look(driver, 1280, 800, "light")
    driver.get(page)
    tokens = driver.find_elements("css selector", "#text .token")
    assert [t.get_attribute("tabindex") for t in tokens].count("0") == 1
    _find(driver, "#setting").send_keys(Keys.TAB)
    assert driver.switch_to.active_element == tokens[0]
    assert _find(driver, "#card").is_displayed()
    tokens[0].send_keys(Keys.ARROW_RIGHT)
    tokens[1].send_keys(Keys.ARROW_RIGHT)
    assert driver.switch_to.active_element == tokens[2]
    tokens[2].send_keys(Keys.END)
    assert driver.switch_to.active_element == tokens[-1]
    tokens[-1].send_keys(Keys.ESCAPE)
    assert not _find(driver, "#card").is_displayed()
    tokens[-1].send_keys(Keys.HOME)
    assert driver.switch_to.active_element == tokens[0]
    assert _find(driver, "#card").is_displayed()


def test_every_run_can_be_chosen(driver: Any, page: str) -> None:
    from selenium.webdriver.support.select import Select

    browser.look(driver, 1280, 800, "light")
    driver.get(page)
    view = json.loads(driver.execute_script("return document.getElementById('view').textContent"))
    prompts, settings = (Select(_find(driver, f"#{name}")) for name in ("prompt", "setting"))
    assert [o.text for o in settings.options] == view["settings"]
    for number, setting in ((1, 0), (3, 7), (5, 20)):
        prompts.select_by_index(number)
        settings.select_by_index(setting)
        assert prompts.first_selected_option.text.startswith(view["prompts"][number]["id"])
        run = view["prompts"][number]["runs"][str(setting)]
        produced = [
            view["texts"][token]
            for letters, tokens, *_ in run["steps"]
            for letter, token in zip(letters, tokens, strict=True)
            if letter in "CAPX"
        ]
        shown = [t.get_attribute("textContent") for t in driver.find_elements("css selector", "#text .token")]
        assert [text.replace("↵\n", "\n").replace("⇥\t", "\t") for text in shown] == produced
        assert len(driver.find_elements("css selector", "#text .leaves")) == (run["diverges"] is not None)
    prompts.select_by_index(0)  # the setting stays
    assert settings.first_selected_option.text == view["settings"][20]
    assert driver.get_log("browser") == []


def test_a_tap_shows_the_card(driver: Any, page: str) -> None:
    browser.look(driver, 400, 800, "dark", touch=True)
    driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    try:
        driver.get(page)
        token = _find(driver, "#text .token.correction")
        driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", token)
        box = driver.execute_script("const b = arguments[0].getClientRects()[0]; return [b.x + 3, b.y + 5]", token)
        point = {"touchPoints": [{"x": box[0], "y": box[1]}]}
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchStart", **point})
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
        driver.execute_async_script("setTimeout(arguments[0], 100)")
        assert _find(driver, "#card").is_displayed()
        assert "In place of the draft" in _find(driver, "#card").text
    finally:
        driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_without_scripts_all_but_the_token_view_is_there(page: str, driver: Any) -> None:
    browser.look(driver, 1280, 800, "light")
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(page)
        assert "switched off" in _find(driver, "noscript").text
        assert len(driver.find_elements("css selector", "table tbody tr")) >= 21
        assert _find(driver, "figure svg").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
