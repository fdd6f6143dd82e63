"""A page that a user leaves open, looks at, selects from, hears read aloud and uses from a
keyboard."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from p2p_dtfm.web.state import DashboardState, Event
from tests.programs import skip_without
from tests.web import chromium as browser
from tests.web.chromium import Page
from tests.web.examples import Example, two
from tests.web.screens import screen
from tests.web.serving import served

pytestmark = skip_without(
    "browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium"
)
DRAWN = "document.querySelector('#map .peer') && document.querySelector('#answers dd')"
LOOK = """(() => {{
  Object.defineProperty(document, 'visibilityState', {{ configurable: true, get: () => {0!r} }});
  document.dispatchEvent(new Event('visibilitychange'));
}})()"""


@pytest.fixture(autouse=True)
def no_errors(page: Page) -> Iterator[None]:
    page.problems.clear()
    page.set_view(1440, 900)
    yield
    page.open("about:blank")
    assert not page.problems


@dataclass
class Counted(Example):
    """An example that counts how often it was asked."""

    count: int = 0

    def __call__(self) -> DashboardState:
        self.count += 1
        return self.state


def text_of(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({selector!r}).textContent")


def test_what_somebody_selects_stays_selected(page: Page) -> None:
    """All was drawn anew each second. Nobody could copy the line to type next, or a peer's id."""
    made = Example(screen(3, "done"))
    with served(made) as address:
        page.open(address)
        page.wait_for(f"{DRAWN} && document.querySelector('#next code')")
        page.evaluate("document.querySelector('.stage').click()")
        for selector in (
            "#next code",
            "#peer-facts dd:nth-of-type(2)",
            "#footer",
            ".neighbours th",
        ):
            page.wait_for(f"document.querySelector({selector!r})")
            page.evaluate(f"getSelection().selectAllChildren(document.querySelector({selector!r}))")
            words = text_of(page, selector)
            heard = tuple(it and it + 1 for it in made.state.live.heard_s_ago)
            made.change_live(reason=f"while {selector} is selected", heard_s_ago=heard)
            page.wait_for(f"document.querySelector('#reason').textContent.includes({selector!r})")
            page.wait_for("document.querySelector('#age').textContent === 'live'")
            assert page.evaluate("getSelection().toString()").strip() == words.strip() != ""


def test_a_page_that_stays_open_over_an_upgrade_loads_itself_anew(page: Page) -> None:
    """It went on with the script of the version before, whatever the new daemon says."""
    made = two()
    with served(made) as address:
        page.open(address)
        page.wait_for(DRAWN)
        page.evaluate("window.marked = true")
    port = int(address.rstrip("/").rpartition(":")[2])
    with served(made, port=port):
        page.wait_for("document.querySelector('#age').textContent === 'live'")
        assert page.evaluate("window.marked === true"), "it is the same program"
    made.change_live(version="0.2.0")
    with served(made, port=port):
        page.wait_for(f"window.marked === undefined && {DRAWN}")
        assert "0.2.0" in text_of(page, "#footer")
    page.problems.clear()  # that nobody answered meanwhile


def test_a_tab_that_nobody_looks_at_asks_for_nothing(page: Page) -> None:
    """Six hidden tabs kept a seventh from an answer: a browser keeps six connections to a host."""
    made = Counted(two().state)
    with served(made) as address:
        page.open(address)
        page.wait_for(DRAWN)
        page.evaluate(LOOK.format("hidden"))
        end_s, before = time.monotonic() + 20, -1
        while made.count != before:
            assert time.monotonic() < end_s, "its daemon goes on telling it"
            before = made.count
            time.sleep(1.0)
        time.sleep(5.5)
        assert page.evaluate("document.querySelector('#banner').hidden"), "nobody is to see it"
        made.change_live(reason="somebody looks again")
        page.evaluate(LOOK.format("visible"))
        assert page.evaluate("document.querySelector('#banner').hidden"), "it is asked just now"
        page.wait_for("document.querySelector('#reason').textContent.includes('looks again')")
        page.wait_for("document.querySelector('#age').textContent === 'live'")


def test_what_is_lost_is_read_aloud_once(page: Page) -> None:
    with served(two()) as address:
        page.open(address)
        page.wait_for("document.querySelector('#age')?.textContent === 'live'")
        page.evaluate(
            "(() => { window.told = []; const it = document.querySelector('[role=alert]');"
            " new MutationObserver(() => window.told.push(it.textContent))"
            ".observe(it, { childList: true, characterData: true, subtree: true }); })()"
        )
    page.wait_for("document.body.classList.contains('stale')", deadline_s=15)
    time.sleep(2.5)
    told = page.evaluate("window.told")
    assert len(told) == 1 and "lost" in told[0], told
    assert "old" in text_of(page, "#banner-age") and "old" in text_of(page, "#age")
    assert page.evaluate("!document.querySelector('#age').closest('[role=status], [aria-live]')")
    page.problems.clear()  # the browser notes each attempt that found no daemon


def test_who_is_silent_is_told_without_colours(page: Page) -> None:
    made = Example(screen(3, "failure"))
    with served(made) as address:
        page.open(address)
        page.wait_for("document.querySelector('#map .peer.silent')")
        assert page.evaluate(
            "document.querySelector('.peer.silent').getAttribute('aria-label')"
        ).endswith(", silent")
        assert page.evaluate(
            "getComputedStyle(document.querySelector('.peer.silent .body')).strokeDasharray"
        ) not in ("none", "")
        assert "silent" in text_of(page, "#map-legend")
        made.change_live(heard_s_ago=(0.5,) * len(made.state.live.heard_s_ago))
        page.wait_for("!document.querySelector('#map .peer.silent')")
        assert "silent" not in text_of(page, "#map-legend")


def test_the_space_bar_chooses_a_peer_as_it_presses_a_button(page: Page) -> None:
    with served(two()) as address:
        page.open(address)
        page.wait_for(DRAWN)
        pressed = page.evaluate(
            "document.querySelector('#map .peer').dispatchEvent("
            "new KeyboardEvent('keydown', { key: ' ', bubbles: true, cancelable: true }))"
        )
        assert not pressed, "the page does not scroll"
        page.wait_for("document.querySelector('#peer-facts dl')")


def test_at_midnight_what_was_today_gets_its_date(page: Page) -> None:
    made = two()
    made.state = msgspec.structs.replace(made.state, events=(Event(time.time(), "note", "x"),))
    with served(made) as address:
        page.open(address)
        page.wait_for("document.querySelector('#history time')")
        assert ":" in text_of(page, "#history time") and text_of(page, "#history time")[-3] == ":"
        today = text_of(page, "#history time")
        page.evaluate(
            "(() => { const Real = Date; window.Date = class extends Real {"
            " constructor(...given) { super(...(given.length ? given : [Real.now() + 864e5])); } };"
            " })()"
        )
        page.wait_for(f"document.querySelector('#history time').textContent !== {today!r}")
        assert text_of(page, "#history time")[0].isdigit() and " " in text_of(page, "#history time")


def test_all_is_said_of_nothing_less(page: Page) -> None:
    with served(two()) as address:
        page.open(address)
        page.wait_for(DRAWN)
        shares = [0.9949, 0.995, 0.9999, 1, 1.4, 0.0004, 0]
        told = page.evaluate(f"import('/static/format.js').then((it) => {shares}.map(it.percent))")
    assert told == ["99%", "99%", "99%", "100%", "140%", "< 0.1%", "0%"]


def test_shares_of_the_board_are_of_all_that_computed(page: Page) -> None:
    """Of 400 peers a hundred are listed, and ten are shown."""
    made = Example(screen(3, "live"))
    given = made.state.contribution
    given = msgspec.structs.replace(
        given, board_peers=400, board_tokens=given.board[0].tokens * 4, board_steps=7
    )
    made.state = msgspec.structs.replace(made.state, contribution=given)
    with served(made) as address:
        page.open(address)
        page.wait_for("document.querySelector('.board-figure')")
        assert text_of(page, ".board-figure").endswith("25%")
        assert f"and {400 - len(given.board)} more" in text_of(page, "#board")
