"""The page in all situations that it may have to show: a few of them each time, the rest at
night."""

from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.web.public_facts import public_facts
from p2p_dtfm.web.public_page import public_html
from tests.programs import skip_without
from tests.web import chromium as browser
from tests.web.chromium import Page
from tests.web.examples import Example
from tests.web.screens import (
    PEERS,
    SITUATIONS,
    WIDTHS,
    faults_of,
    faults_of_keyboard,
    screen,
    show,
)
from tests.web.serving import served

pytestmark = skip_without(
    "browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium"
)
SHOWN = ((3, "live"), (3, "failure"), (1, "paused"), (3, "done"))


@pytest.mark.parametrize(("peers", "situation"), SHOWN)
def test_phone_and_desk_by_day_and_by_night(page: Page, peers: int, situation: str) -> None:
    look(page, peers, situation, (390, 1440))


@pytest.mark.nightly
@pytest.mark.parametrize("peers", PEERS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_screen(page: Page, peers: int, situation: str) -> None:
    look(page, peers, situation, tuple(WIDTHS))


def look(page: Page, peers: int, situation: str, widths: tuple[int, ...]) -> None:
    with served(Example(screen(peers, situation))) as address:
        for width in widths:
            for dark in (False, True):
                show(page, address, width, dark)
                assert not faults_of(page, width), (width, dark)
        page.open("about:blank")


@pytest.mark.parametrize("kind", ["report", "public"])
def test_the_pages_that_are_passed_on(page: Page, kind: str, tmp_path: Path) -> None:
    """Users read these pages on phones as well."""
    state = screen(3, "done" if kind == "report" else "live")
    public = tmp_path / "public.html"
    public.write_text(public_html(public_facts(state)), encoding="utf-8")
    with served(Example(state)) as address:
        for width in WIDTHS:
            for dark in (False, True):
                page.problems.clear()
                page.set_view(width, WIDTHS[width], dark=dark)
                page.open(f"{address}report.html" if kind == "report" else public.as_uri())
                page.wait_for("document.querySelector('svg polyline')")
                assert page.evaluate("document.querySelectorAll('svg text').length") == 4
                assert not faults_of(page, width), (width, dark)
                if kind == "report":
                    labels = "[...document.querySelectorAll('td:first-child')]"
                    widths = page.evaluate(f"{labels}.map(each => each.offsetWidth)")
                    assert min(widths) > 80, "no word of a label is broken"
                drawn = page.evaluate("getComputedStyle(document.body).maxWidth")
                assert drawn == "800px", "the page's own style is let through"
        page.open("about:blank")


def test_all_is_reached_and_seen_from_a_keyboard(page: Page) -> None:
    with served(Example(screen(64, "live"))) as address:
        show(page, address, 1440, dark=False)
        assert not faults_of_keyboard(page)
        names = "document.activeElement.getAttribute('aria-label')"
        page.evaluate("document.querySelector('#map .peer[tabindex=\"0\"]').focus()")
        first = page.evaluate(names)
        page.press("ArrowRight")
        assert page.evaluate(names) != first and "peer" in page.evaluate(names)
        page.open("about:blank")


def test_what_is_wrong_with_a_page_is_found(page: Page) -> None:
    """Each check finds the fault that it is for."""
    with served(Example(screen(3, "live"))) as address:
        show(page, address, 390, dark=False)
        page.evaluate(
            """(() => {
          document.querySelector('#reason').style.color = '#bbb';
          document.querySelector('#actions button').style.outline = 'none';
          const more = document.createElement('p');
          more.textContent = '1 peers sent 5 MB';
          more.style.width = '500px';
          document.body.append(more);
          document.querySelector('.headline').style.height = '600px';
          document.querySelector('#samples-step').tabIndex = 3;
          document.querySelector('#samples-step').removeAttribute('aria-label');
          // a rule, not one word's own style: the map is drawn again when its size changes
          document.styleSheets[0].insertRule('#map text { font-size: 6px !important }');
        })()"""
        )
        text = "\n".join(faults_of(page, 390) + faults_of_keyboard(page))
        for fault in (
            "too pale", "a slider without a name", "plural: 1 peers", "unit MB", " pixels wide",
            "below the first screen", "too small, 6.0 pixels", "focus is not seen",
            "focus jumps back",
        ):  # fmt: skip
            assert fault in text, text
        page.open("about:blank")


def test_whether_it_learns_is_told_by_more_than_chance(page: Page) -> None:
    made = Example(screen(3, "live"))
    noise = [0.05 * (-1) ** at for at in range(80)]
    cases = {
        "Yes": [4.0 - 0.01 * at + noise[at] for at in range(80)],
        "No: it rises": [4.0 + 0.01 * at + noise[at] for at in range(80)],
        "Hardly of late": [4.0 + noise[at] for at in range(80)],
        "Too early to say": [4.0, 3.0, 2.0],
    }
    with served(made) as address:
        for answer, losses in cases.items():
            history = msgspec.structs.replace(
                made.state.history,
                generation=made.state.history.generation + 1,
                step=tuple(range(len(losses))),
                loss=tuple(losses),
                tokens_per_s=(1.0,) * len(losses),
            )
            made.state = msgspec.structs.replace(made.state, history=history)
            show(page, address, 390, dark=True)
            text = page.evaluate("document.querySelectorAll('#answers dd')[2].textContent")
            assert text == answer, losses
        page.open("about:blank")
