"""The page in all that it may have to show: how many peers, what they do, how wide, which colours.

    python -m tests.web.screens --out DIRECTORY

writes a picture of each and says what is wrong with it. The states are of the page's own schema,
with plans of the planner's form and problems in the words that a daemon has for them.
"""

import argparse
import itertools
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2p_dtfm.daemon.dashboard.report_file import next_commands
from p2p_dtfm.daemon.machine.home import default_home
from p2p_dtfm.daemon.telemetry.problems import Sight, problems_in
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.web.state import DashboardState, Event, Live, MeasuredWorth, Timeline, ViewState
from tests.web.chromium import Page, chromium
from tests.web.examples import NOW_S, Example, example, sixty_four
from tests.web.serving import TOKEN, served

WIDTHS = {390: 844, 768: 1024, 1440: 900}
"""Widths of windows, and the height of each."""
PEERS = (1, 3, 64)
DRAWN = (
    "document.querySelector('#answers dd') && document.querySelector('#board li')"
    " && document.querySelector('.u-over') && document.querySelector('#actions button:enabled')"
)
NAMED_ROLES = ("button", "slider", "image", "img", "progressbar", "link", "textbox")
MIXED_UNITS = re.compile(r"\b[kKMGT]B\b")
ONE_OF_MANY = re.compile(
    r"(?<![\d.,–-])1 (peers|members|steps|tokens|microbatches|pipelines|layers|stages|spares)\b"
)


def screen(peers: int, situation: str) -> DashboardState:
    """The state is decoded again, so that it has the types that it declares."""
    made = _swarm(peers)
    SITUATIONS[situation](made)
    return msgspec.json.decode(msgspec.json.encode(made.state), type=DashboardState)


def _swarm(peers: int) -> Example:
    if peers == 64:
        return sixty_four()
    names = ("london-1", "london-2", "berlin-1")[:peers]
    made = example("two-cities", "tiny", min(2, peers), steps=120, step_ns=380_000_000, only=names)
    if peers > 1:
        made.change_live(worth=MeasuredWorth(2_700.0, 1, 4_042.0, peers))
    return made


def _live(made: Example) -> None:
    """Leave the example as it is."""


def _failure(made: Example) -> None:
    """Another peer is silent and the step does not end. A lone peer's disk is full."""
    live, view = made.state.live, made.state.view
    if len(view.peers) == 1:
        words = "the disk is full: the checkpoint of step 100 was not written"
        fix = "make room, or give another directory: --home DIR"
        made.change_live(problems=msgspec.convert([{"what": words, "fix": fix}], _PROBLEMS))
        return
    at = next(at for at in range(len(view.peers)) if at != view.me)
    lost, heard = view.peers[at], list(live.heard_s_ago)
    heard[at] = 26.0
    sight = Sight(
        State.WAITING, "", 26.0, 26.0, (live.step_ns or 0) / 1e9, is_failing=True, lost=(lost.name,)
    )
    made.change_live(
        state="waiting",
        reason="members agree on a new view",
        since_s=NOW_S - 26,
        heard_s_ago=tuple(heard),
        problems=tuple(problems_in(sight)),
        next=("the members are agreeing on a new view",),
        tokens_per_s=None,
        step_ns=None,
        eta_s=None,
        worth=None,
        waits_for=(lost.peer_id,),
    )
    _tell(made, Event(NOW_S - 20, "fault", f"{lost.name} was silent for 6 s"))


_PROBLEMS = Live.__annotations__["problems"]


def _paused(made: Example) -> None:
    made.state = msgspec.structs.replace(made.state, view=ViewState(), timeline=Timeline())
    made.change_live(
        state="paused",
        reason="until 18:00, as you asked",
        tokens_per_s=None,
        step_ns=None,
        eta_s=None,
        worth=None,
        next=("it joins again at 18:00",),
        heard_s_ago=(),
    )


def _done(made: Example) -> None:
    run = made.state.run
    assert run is not None
    given = made.state.contribution
    course = msgspec.structs.replace(given.course, ended_s=NOW_S - 60)
    given = msgspec.structs.replace(given, course=course)
    made.state = msgspec.structs.replace(made.state, contribution=given)
    made.change_live(
        state="done",
        reason="the run is complete",
        step=run.total_steps,
        eta_s=None,
        next=next_commands(default_home(), "def "),
    )


SITUATIONS: dict[str, Callable[[Example], None]] = {
    "live": _live,
    "failure": _failure,
    "paused": _paused,
    "done": _done,
}


def _tell(made: Example, event: Event) -> None:
    made.state = msgspec.structs.replace(made.state, events=(event, *made.state.events))


# what may be wrong with a page --------------------------------------------------------------------

TOO_PALE = """(() => {
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 1;
  const context = canvas.getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (ink, ground) => [0, 1, 2]
    .map((at) => ink[at] * ink[3] + ground[at] * (1 - ink[3])).concat(1);
  const luminance = (colour) => {
    const parts = colour.slice(0, 3).map((part) => part / 255)
      .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reverse().reduce((ground, layer) => over(layer, ground), [255, 255, 255, 1]);
  };
  const opacity = (node) => {
    let found = 1;
    for (let at = node; at; at = at.parentElement) found *= Number(getComputedStyle(at).opacity);
    return found;
  };
  return [...document.querySelectorAll('body *')].filter((node) =>
    !node.closest('.u-legend, :disabled, title, script, .dim') && node.getClientRects().length &&
    getComputedStyle(node).visibility !== 'hidden' &&
    [...node.childNodes].some(
      (child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim()))
    .map((node) => {
      const style = getComputedStyle(node);
      const ground = behind(node);
      const ink = rgba(node instanceof SVGElement ? style.fill : style.color);
      ink[3] *= opacity(node);
      const [a, b] = [luminance(over(ink, ground)), luminance(ground)];
      const large = parseFloat(style.fontSize) >= 24 ||
        (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), large ? 3 : 4.5, node];
    })
    .filter(([ratio, least]) => ratio < least)
    .map(([ratio, , node]) => `${ratio.toFixed(2)}: ${node.outerHTML.slice(0, 110)}`);
})()"""
"""Words with less contrast than WCAG's AA asks for, by the drawn colours. Opacities and transparent
grounds are counted."""

STICKS_OUT = """[...document.querySelectorAll(
  '.card, .bar *, #map circle, svg text, body > table, body > pre, main > dl')]
  .filter((node) => { const box = node.getBoundingClientRect();
    const room = (node.ownerSVGElement ?? document.documentElement).getBoundingClientRect();
    return box.width && (box.left < room.left - 0.5 || box.right > room.right + 0.5); })
  .map((node) => `sticks out: ${node.outerHTML.slice(0, 110)}`)"""

SMALLEST_PIXELS = 11
TOO_SMALL = f"""[...document.querySelectorAll('svg text')]
  .map((node) => [parseFloat(getComputedStyle(node).fontSize) * node.getScreenCTM().a, node])
  .filter(([pixels]) => pixels < {SMALLEST_PIXELS})
  .map(([pixels, node]) => `${{pixels.toFixed(1)}} pixels: ${{node.outerHTML.slice(0, 110)}}`)"""
"""Words in drawings, in the size that they have where the drawing is scaled."""

CUT_SHORT = """[...document.querySelectorAll(
  '#answers dt, #answers dd, #answers span, #tiles dt, #tiles dd, #run, h1')]
  .filter((node) => node.scrollWidth > node.clientWidth + 1 &&
    getComputedStyle(node).display !== 'inline')
  .map((node) => `cut short: ${node.outerHTML.slice(0, 110)}`)"""

FOCUSED = """(() => {
  const node = document.activeElement;
  if (!node || node === document.body) return null;
  const style = getComputedStyle(node);
  const body = node.querySelector?.('.body');
  const ringed = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
  const painted = body && parseFloat(getComputedStyle(body).strokeWidth) >= 4;
  window.stops = window.stops ?? [];
  const before = window.stops.at(-1);
  const back = before && before.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_PRECEDING;
  const again = window.stops.includes(node);
  window.stops.push(node);
  const seen = Boolean(ringed || painted);
  return { name: node.outerHTML.slice(0, 80), seen, ordered: !back, again };
})()"""
MOST_STOPS = 60


def faults_of(page: Page, width: int) -> list[str]:
    """The faults of the page as it is shown now."""
    found = [f"too pale, {it}" for it in page.evaluate(TOO_PALE)]
    found += page.evaluate(STICKS_OUT) + page.evaluate(CUT_SHORT)
    found += [f"too small, {it}" for it in page.evaluate(TOO_SMALL)]
    wide = page.evaluate("document.documentElement.scrollWidth")
    found += [f"{wide} pixels wide"] if wide > width else []
    found += [f"a {role} without a name" for role in page.unnamed(NAMED_ROLES)]
    text = page.evaluate("document.body.innerText")
    found += [f"unit {it.group()}" for it in MIXED_UNITS.finditer(text)]
    found += [f"plural: {it.group()}" for it in ONE_OF_MANY.finditer(text)]
    low = page.evaluate("document.querySelector('#answers')?.getBoundingClientRect().bottom ?? 0")
    if low + page.evaluate("scrollY") > WIDTHS[width]:
        found.append(f"the answers end {low:.0f} pixels down, below the first screen")
    return found + [f"console: {it}" for it in page.problems]


def faults_of_keyboard(page: Page) -> list[str]:
    """All controls are reached by tabs, in the page's order, and show that they are."""
    found, stops = [], 0
    page.evaluate("(() => { window.stops = []; document.activeElement?.blur(); })()")
    while stops < MOST_STOPS:
        page.press("Tab")
        stop = page.evaluate(FOCUSED)
        if stop is None or stop["again"]:
            break
        stops += 1
        if not stop["seen"]:
            found.append(f"focus is not seen: {stop['name']}")
        if not stop["ordered"]:
            found.append(f"focus jumps back: {stop['name']}")
    if stops == MOST_STOPS:
        found.append(f"more than {MOST_STOPS} stops")
    missed = page.evaluate(
        "[...document.querySelectorAll('button:enabled, input, a[href], [tabindex=\"0\"]')]"
        ".filter((node) => node.tabIndex >= 0 && node.getClientRects().length"
        " && !window.stops.includes(node)).map((node) => node.outerHTML.slice(0, 80))"
    )
    return found + [f"not reached by tabs: {it}" for it in missed]


def show(page: Page, address: str, width: int, dark: bool) -> None:
    page.problems.clear()
    page.open("about:blank")
    page.set_view(width, WIDTHS[width], dark=dark, calm=True)
    page.open(f"{address}#token={TOKEN}")
    page.wait_for(DRAWN)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary, chromium(Path(temporary) / "profile") as page:
        for peers, situation in itertools.product(PEERS, SITUATIONS):
            with served(Example(screen(peers, situation))) as address:
                for width, dark in itertools.product(WIDTHS, (False, True)):
                    show(page, address, width, dark)
                    name = f"{peers}-{situation}-{width}-{'dark' if dark else 'light'}"
                    page.screenshot(options.out / f"{name}.png", whole=False)
                    faults = faults_of(page, width)
                    faults += faults_of_keyboard(page) if width == 390 else []
                    wrong += len(faults)
                    print(name, *faults or ["nothing is wrong"], sep="\n  ")
                page.open("about:blank")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
