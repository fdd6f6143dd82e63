"""The page in a real headless Chromium, with two peers and with sixty-four."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.protocol.invited.line import open_line
from p2p_dtfm.web.qr import qr_picture
from p2p_dtfm.web.state import (
    ContributionBoard,
    Event,
    MeasuredWorth,
    Samples,
    Span,
    Timeline,
    TimelineLane,
    ViewState,
)
from tests.e2e.helpers import wait_until
from tests.programs import skip_without
from tests.web import chromium as browser
from tests.web.chromium import Page
from tests.web.examples import Example, sixty_four, two
from tests.web.screens import screen
from tests.web.serving import TOKEN, served

pytestmark = skip_without(
    "browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium"
)
DRAWN = "document.querySelector('#map .peer') && document.querySelector('#timeline .span')"


@pytest.fixture(autouse=True)
def no_errors(page: Page) -> Iterator[None]:
    page.problems.clear()
    yield
    assert not page.problems


@pytest.mark.parametrize("swarm", [two, sixty_four], ids=["2 peers", "64 peers"])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_shown_and_nothing_sticks_out(
    page: Page, swarm, width: int, dark: bool
) -> None:
    example: Example = swarm()
    view = example.state.view
    page.set_view(width, 900, dark=dark)
    with served(example) as address:
        page.open(address)
        page.wait_for(f"{DRAWN} && document.querySelector('.u-over')")
        assert count(page, "#map .peer") == len(view.peers)
        assert count(page, "#map .peer.me") == 1
        assert count(page, ".stage") == sum(len(p.peers) for p in view.pipelines)
        assert count(page, ".stage.me") == 1
        assert count(page, "#timeline .lane") == len(example.state.timeline.lanes)
        assert count(page, "#history li") == len(example.state.events)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not sticking_out(page, width)
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (luminance(background) < 60) == dark
        assert not page.evaluate(TOO_PALE)
        page.open("about:blank")


def test_texts_are_gone_through_with_a_slider(page: Page) -> None:
    example = two()
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        shown = "document.querySelector('#samples-text').textContent"
        assert page.evaluate(shown).startswith("def set(self, name):"), "the newest"
        page.evaluate(
            "(() => { const it = document.querySelector('#samples-step'); it.value = 0;"
            " it.dispatchEvent(new Event('input')); })()"
        )
        assert "<b>&amp;</b>" in page.evaluate(shown), "as text"
        assert count(page, "#samples-text b") == 1, "the prompt alone stands out"
        assert "after 0 steps" in page.evaluate(
            "document.querySelector('#samples-when').textContent"
        )
        page.open("about:blank")


def test_the_invitation_is_a_line_to_copy_and_a_code_for_a_camera(page: Page) -> None:
    example = two()
    line = f"p2p-dtfm --invite {open_line('ab' * 32, ('/ip4/192.0.2.7/tcp/1/p2p/x',)).text()}"
    view = msgspec.structs.replace(example.state.view, join_line=line)
    example.state = msgspec.structs.replace(example.state, view=view)
    page.set_view(390, 900, dark=True)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('#invite-code svg')")
        assert page.evaluate("document.querySelector('#invite-line').textContent") == line
        drawn = page.evaluate("document.querySelector('#invite-code path').getAttribute('d')")
        assert drawn == qr_picture(line).path
        page.evaluate("document.querySelector('#invite-copy').click()")
        page.wait_for("document.querySelector('#invite-copy').textContent !== 'Copy'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert example.state.run is not None
        example.change_live(step=example.state.run.total_steps)
        page.wait_for("document.querySelector('#invite').hidden")
        example.change_live(step=example.state.run.total_steps - 1)  # a failure cost the last one
        page.wait_for("document.querySelector('#invite:not([hidden]) #invite-code svg')")
        page.open("about:blank")


TOO_PALE = """(() => {
  const luminance = (colour) => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (colour.startsWith("rgb(")) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("p, h1, h2, small, dt, dd, td, th, li, time, li > span")]
    .filter((node) => node.getClientRects().length && [...node.childNodes].some(
      (child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim()))
    .filter((node) => {
      const ink = luminance(getComputedStyle(node).color), ground = luminance(behind(node));
      return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05) < 4.5;
    })
    .map((node) => node.outerHTML.slice(0, 120));
})()"""
"""Words with less contrast than WCAG's 4.5, in nodes with one plain background."""


def count(page: Page, selector: str) -> int:
    return page.evaluate(f"document.querySelectorAll({selector!r}).length")


def sticking_out(page: Page, width: int) -> list[str]:
    """Circles and labels of the map, and cards, that are not wholly on the page or on the map."""
    return page.evaluate(
        "(() => { const map = document.querySelector('#map svg').getBoundingClientRect();"
        " return [...document.querySelectorAll('#map text')].filter((node) => {"
        " const box = node.getBoundingClientRect();"
        " return box.left < map.left - 0.5 || box.right > map.right + 0.5; })"
        ".map((node) => node.outerHTML.slice(0, 200)); })()"
    ) + page.evaluate(
        "[...document.querySelectorAll('.card, #map circle, #map text, #timeline text')]"
        ".filter((node) => { const box = node.getBoundingClientRect();"
        f" return box.left < -0.5 || box.right > {width} + 0.5; }})"
        ".map((node) => node.outerHTML.slice(0, 200))"
    )


def luminance(colour: str) -> float:
    red, green, blue = (float(part) for part in colour[4:-1].split(",")[:3])
    return 0.3 * red + 0.59 * green + 0.11 * blue


def test_what_is_wrong_comes_first_and_goes_when_it_is_over(page: Page) -> None:
    example = two()
    page.set_view(390, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('.problems.bad li')")
        assert "waits for" in page.evaluate("document.querySelector('#problems').textContent")
        below = "document.querySelector('.part').getBoundingClientRect().top"
        above = "document.querySelector('.problems').getBoundingClientRect().bottom"
        assert page.evaluate(f"{above} <= {below}")
        example.change_live(problems=())
        page.wait_for("!document.querySelector('.problems.bad')")
        page.open("about:blank")


def test_text_of_strangers_stays_text(page: Page) -> None:
    example = two()
    evil = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
    view = example.state.view
    peers = tuple(msgspec.structs.replace(peer, device=evil) for peer in view.peers)
    example.state = msgspec.structs.replace(
        example.state,
        view=msgspec.structs.replace(view, peers=peers),
        events=(Event(0.0, "fault", evil),),
    )
    example.change_live(reason=evil)
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        page.evaluate("document.querySelector('.stage').click()")
        page.wait_for("document.querySelector('#peer-facts dl')")
        assert evil in page.evaluate("document.querySelector('#peer-facts').textContent")
        assert evil in page.evaluate("document.querySelector('#reason').textContent")
        assert count(page, "main img") == 0 and count(page, "main script") == 0
        assert "owned" not in page.evaluate("document.title")
        page.open("about:blank")


def test_old_data_look_old_and_a_daemon_that_returns_is_found_again(page: Page) -> None:
    example = two()
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('#age')?.textContent === 'live'")
        assert page.evaluate("document.querySelector('#banner').hidden")
    page.wait_for("!document.querySelector('#banner').hidden")
    assert "lost" in page.evaluate("document.querySelector('#banner').textContent")
    page.wait_for("document.body.classList.contains('stale')", deadline_s=15)
    assert page.evaluate("getComputedStyle(document.querySelector('main')).opacity") < "1"
    port = int(address.rsplit(":", 1)[1].strip("/"))
    with served(example, port=port):
        page.wait_for("document.querySelector('#banner').hidden", deadline_s=15)
        page.wait_for("document.querySelector('#age')?.textContent === 'live'")
        page.open("about:blank")
    page.problems.clear()  # the browser notes each attempt that found no daemon


def test_the_token_lets_act_and_leaves_the_address_bar(page: Page) -> None:
    example = two()
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('#actions button')")
        assert page.evaluate("document.querySelector('#actions button').disabled")
        page.open("about:blank")
        page.open(f"{address}#token={TOKEN}")
        page.wait_for("document.querySelector('#actions button:enabled')")
        assert page.evaluate("location.href") == address
        buttons = "[...document.querySelectorAll('#actions button')].map((b) => b.textContent)"
        assert page.evaluate(buttons) == ["Pause", "Leave"]
        page.accept_dialogs()
        for button, state in [("Pause", "paused"), ("Resume", "training"), ("Leave", "leaving")]:
            page.wait_for(f"{buttons}.includes({button!r})")
            page.evaluate(
                "[...document.querySelectorAll('#actions button')]"
                f".find((button) => button.textContent === {button!r}).click()"
            )
            asked = button.lower()
            wait_until(lambda asked=asked: asked in example.asked, f"{button} is asked for")
            example.change_live(state=state)
        assert example.asked == ["pause", "resume", "leave"]
        page.open("about:blank")


def test_an_open_page_takes_the_token_that_is_put_behind_its_address(page: Page) -> None:
    """The button's tooltip says to open the address with the token. In the same tab that loads
    nothing anew: the buttons stayed dead, and the token stayed in the address bar."""
    with served(two()) as address:
        page.open(address)
        page.wait_for("document.querySelector('#actions button:disabled')")
        page.open(f"{address}#token={TOKEN}")
        page.wait_for("document.querySelector('#actions button:enabled')")
        assert page.evaluate("location.href") == address
        page.open("about:blank")


def test_what_a_daemon_refuses_its_button_says(page: Page) -> None:
    """A refusal is no HTTP error, so the page took the order for done."""
    example = two()
    example.refusal = {"error": "the daemon ends just now", "fixes": ["start it again"]}
    with served(example) as address:
        page.open(f"{address}#token={TOKEN}")
        page.wait_for("document.querySelector('#actions button:enabled')")
        page.accept_dialogs()
        page.evaluate("window.alert = (text) => { window.told = text; }")
        page.evaluate("document.querySelector('#actions button').click()")
        page.wait_for("window.told")
        assert page.evaluate("window.told") == "the daemon ends just now\n\nstart it again"
        example.refusal = None
        page.evaluate("window.told = ''; document.querySelector('#actions button').click()")
        wait_until(lambda: len(example.asked) == 2, "it is asked again")
        page.evaluate("new Promise((done) => setTimeout(done, 200))")
        assert page.evaluate("window.told") == ""
        page.open("about:blank")


def test_a_paused_page_says_so_everywhere(page: Page) -> None:
    example = two()
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        example.state = msgspec.structs.replace(
            example.state, view=ViewState(), timeline=Timeline()
        )
        example.change_live(state="paused", problems=())
        for room in ("map", "pipelines", "part", "timeline"):
            page.wait_for(f"/[Pp]aused/.test(document.querySelector('#{room}').textContent)")
        page.open("about:blank")


def test_who_leaves_or_is_out_again_is_not_told_that_it_is_to_begin(page: Page) -> None:
    """After days the page said "no part in a view yet", and a peer that had left was told to
    compute "once it goes on"."""
    example = two()
    answer = "(document.querySelector('#answers dd')?.textContent ?? '')"
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        example.change_live(state="leaving")
        page.wait_for(f"{answer} === 'It leaves'")
        example.state = msgspec.structs.replace(example.state, view=ViewState())
        example.change_live(state="joining", committed_here=40)
        page.wait_for(f"{answer} === 'Not now'")
        never = msgspec.structs.replace(example.state, contribution=ContributionBoard())
        example.state = never
        example.change_live(committed_here=0)
        page.wait_for(f"{answer} === 'Not yet'")
        page.open("about:blank")


def test_no_text_is_promised_where_none_will_be_written(page: Page) -> None:
    example = two()
    shown = "document.querySelector('#samples-text').textContent"
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        example.state = msgspec.structs.replace(example.state, samples=Samples())
        page.wait_for(f"{shown}.includes('after each held-out evaluation')")
        note = "none is written here: its owner wants none (--no-samples)"
        example.state = msgspec.structs.replace(example.state, samples=Samples(note=note))
        page.wait_for(f"{shown} === 'Nothing so far.'")
        assert page.evaluate("document.querySelector('#samples-note').textContent") == note
        page.open("about:blank")


def test_a_complete_run_says_what_became_of_it(page: Page) -> None:
    example = Example(screen(3, "live"))
    page.set_view(390, 900)
    texts = "[...document.querySelectorAll({!r})].map((it) => it.textContent)"
    with served(example) as address:
        page.open(f"{address}#token={TOKEN}")
        page.wait_for(f"{DRAWN} && document.querySelector('#actions button')")
        assert page.evaluate("document.querySelector('#report').hidden")
        assert "of each step is computed here" in page.evaluate(texts.format(".verdict"))[0]
        example.state = screen(3, "done")
        page.wait_for("document.querySelector('#state').textContent === 'done'")
        page.wait_for("document.querySelectorAll('#actions button').length === 1")
        assert page.evaluate(texts.format("#actions button")) == ["Leave"]
        assert page.evaluate(texts.format("#next code")) == list(example.state.live.next)
        assert "of each step was computed here" in page.evaluate(texts.format(".verdict"))[0]
        part = page.evaluate("document.querySelector('#part').textContent")
        assert "; at the end 3 peers did 4,042: 50% more." in part
        link = "document.querySelector('#report:not([hidden])')"
        assert page.evaluate(f"{link}.closest('.now') !== null")
        page.open(page.evaluate(f"{link}.href"))
        page.wait_for("document.querySelector('h1')")
        assert "peers lost" in page.evaluate("document.body.textContent")
        page.open("about:blank")


def test_choosing_a_peer_shows_its_facts(page: Page, tmp_path: Path) -> None:
    example = sixty_four()
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        page.evaluate(
            "document.querySelector('#map .peer')"
            ".dispatchEvent(new MouseEvent('click', { bubbles: true }))"
        )
        page.wait_for("document.querySelector('#peer-facts dl')")
        facts = page.evaluate("document.querySelector('#peer-facts').textContent")
        assert example.state.view.peers[0].peer_id in facts and "scenario, " in facts
        assert count(page, "#map .peer.dim") == 56, "all but its own pipeline step back"
        page.open("about:blank")


def test_whether_this_peer_is_useful_is_said_once_it_is_measured(page: Page) -> None:
    example = two()
    page.set_view(1440, 900)
    part = "(document.querySelector('#part')?.textContent ?? '')"

    def measured(now: float | None) -> MeasuredWorth:
        return MeasuredWorth(
            before_tokens_per_s=2000.0, before_members=1, now_tokens_per_s=now, now_members=2
        )

    example.change_live(worth=measured(None))
    with served(example) as address:
        page.open(address)
        page.wait_for(f"{part}.includes('Not known yet: ')")
        assert "1 peer did 2,000 tokens a second" in page.evaluate(part)
        for now, answer, change in (
            (3000.0, "Yes: ", "50% more"),
            (1000.0, "No: ", "50% less"),
            (2020.0, "Hardly: ", "about the same"),
        ):
            example.change_live(worth=measured(now))
            page.wait_for(f"{part}.includes({answer!r})")
            assert change in page.evaluate(part) and "Not known" not in page.evaluate(part)
        example.change_live(worth=None)
        page.wait_for(f"!{part}.includes('Before it came')")
        page.open("about:blank")


def test_no_link_is_busier_than_always(page: Page) -> None:
    example = two()
    view = example.state.view
    flows = tuple(
        msgspec.structs.replace(flow, bytes_per_s=1000, there_bytes=1 << 30, use=44.37)
        for flow in view.flows
    )
    example.state = msgspec.structs.replace(
        example.state, view=msgspec.structs.replace(view, flows=flows)
    )
    page.set_view(1440, 900)
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('.neighbours tbody tr')")
        cells = "document.querySelector('.neighbours tbody tr').children[3].textContent"
        assert page.evaluate(cells) == "100%"
        page.open("about:blank")


@pytest.mark.parametrize("length_ns", [0, 1, 2**62])
def test_a_step_of_any_length_has_an_axis_that_ends(page: Page, length_ns: int) -> None:
    """A step of no time at all was drawn for ever: the tab hung for good."""
    example = two()
    lane = TimelineLane("liar", (Span("wait", 0, 0, length_ns),), 0)
    example.state = msgspec.structs.replace(example.state, timeline=Timeline(7, length_ns, (lane,)))
    with served(example) as address:
        page.open(address)
        page.wait_for("document.querySelector('#timeline .lane')")
        assert count(page, "#timeline .axis line") <= 9
        page.open("about:blank")


def test_all_is_said_of_nothing_less(page: Page) -> None:
    example = two()
    assert example.state.run is not None
    total = example.state.run.total_steps
    note, last = "(document.querySelectorAll('#answers .note')[2]?.textContent ?? '')", total - 1
    assert last / total > 0.995
    example.change_live(step=last, work="fetches data", work_share=0.9999)
    with served(example) as address:
        page.open(address)
        page.wait_for(f"{note}.endsWith('of {total:,}, 99%')")
        assert "fetches data: 99%" in page.evaluate("document.querySelector('#work').textContent")
        bar = "document.querySelector('#progress').getAttribute('aria-valuenow')"
        assert page.evaluate(bar) == "99"
        example.change_live(step=total, work="", work_share=None)
        page.wait_for(f"{note}.endsWith('of {total:,}, 100%')")
        page.open("about:blank")


def test_what_this_peer_sends_moves_while_it_computes(page: Page) -> None:
    example = sixty_four()
    page.set_view(1440, 900)
    moved = "document.querySelector('#map .moving.pipeline').style.strokeDashoffset"
    with served(example) as address:
        page.open(address)
        page.wait_for(DRAWN)
        mine = [
            flow
            for flow in example.state.view.flows
            if example.state.view.me in (flow.here, flow.there)
        ]
        assert count(page, "#map .moving") == len(mine) < len(example.state.view.flows)
        before = page.evaluate(moved)
        example.change_live(step=701)
        page.wait_for(f"{moved} !== {before!r}")
        example.change_live(state="waiting")
        page.wait_for("!document.body.classList.contains('computing')")
        dots = "getComputedStyle(document.querySelector('#map .moving')).opacity"
        assert page.evaluate(dots) == "0"
        page.open("about:blank")
