"""The pictures of docs/screenshots: real daemons on this machine, in Chromium and in the terminal.

    python -m tests.web.screenshots

Needs Chromium (`apt-get install chromium`). The 64 peers are the example of the tests: a real plan,
made-up progress.
"""

import argparse
import re
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
from rich.console import Console

from p2p_dtfm.cli.terminal.live_view import panel
from p2p_dtfm.core.protocol.invited.line import open_line
from p2p_dtfm.daemon.machine.local_client import ask_daemon, call_daemon
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.web.public_facts import public_facts
from p2p_dtfm.web.public_page import public_html
from p2p_dtfm.web.state import DashboardState
from tests.e2e.helpers import step_of, wait_until
from tests.web.chromium import Page, chromium
from tests.web.examples import Example, sixty_four, two
from tests.web.screens import screen, show
from tests.web.serving import TOKEN, served

ROOT = Path(__file__).parents[2]
WIDE, NARROW, HEIGHT = 1200, 390, 844
SHORT, TALL = 720, 960
"""A picture shows the window, not all that can be scrolled to, as people look at it."""
DRAWN = (
    "document.querySelector('#map .peer') && document.querySelector('#timeline .span')"
    " && document.querySelector('.u-over') && document.querySelector('#actions button:enabled')"
)
EXAMPLE_ADDRESS = (
    "/ip4/203.0.113.5/tcp/31330/p2p/12D3KooWEAEpB8hov1K9AVM92VHHvVQLyVSHeLftnMNXYA8PAiqq"
)
PLANNED_GIB = "0.012"
"""Each daemon has memory for less than the whole model: a pipeline, and a spare."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "screenshots")
    parser.add_argument("--examples-only", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, chromium(Path(temporary) / "profile") as page:
        _take_examples(page, options.out, Path(temporary))
        _take_states(page, options.out)
        _take_public(page, options.out, Path(temporary))
        if not options.examples_only:
            _take_daemons(page, options.out, Path(temporary))


def _take_examples(page: Page, out: Path, rest: Path) -> None:
    """All sizes and colours are for the developer to look at; one is for the documentation."""
    for name, made in (("two", two), ("sixty-four", sixty_four)):
        with served(made()) as address:
            for width in (WIDE, NARROW):
                for dark in (False, True):
                    _open(page, f"{address}#token={TOKEN}", width, dark)
                    colour = "dark" if dark else "light"
                    page.screenshot(rest / f"{name}-{width}-{colour}.png")
                    print(f"{name}, {width} wide, {colour}")
            _open(page, f"{address}#token={TOKEN}", WIDE, True, SHORT)
            directory = out if name == "sixty-four" else rest
            page.screenshot(directory / f"{name}-peers.png", whole=False)
            page.open("about:blank")


def _take_daemons(page: Page, out: Path, directory: Path) -> None:
    spec = (ROOT / "configs" / "tiny.toml").read_text()
    (directory / "tiny.toml").write_text(spec.replace("total_steps = 250", "total_steps = 2000"))
    own = ["--threads", "1", "--memory-gib", PLANNED_GIB]
    with LocalSwarm(directory, own) as swarm:
        _, address = swarm.found(["--run", str(directory / "tiny.toml"), "--expect-peers", "2"])
        shown = swarm.join(address, ["--no-ids"])
        wait_until(lambda: step_of(shown) >= 30, "two train")
        swarm.join(address)
        wait_until(lambda: len((shown.status() or {}).get("members", ())) == 3, "a third one")
        there = step_of(shown)
        wait_until(lambda: step_of(shown) >= there + 60, "three train")
        link = ask_daemon(shown.home, "dashboard")["address_with_token"]
        _open(page, link, WIDE, False, TALL)
        page.screenshot(out / "three-daemons.png", whole=False)
        _open(page, link, NARROW, True)
        page.screenshot(out / "phone.png", whole=False)
        _take_terminal(shown, link, out / "terminal.svg")
        _open(page, link, WIDE, False)
        call_daemon(shown.home, "pause", "POST")
        wait_until(lambda: (shown.status() or {}).get("state") == "paused", "it pauses")
        page.wait_for("document.querySelector('#state').textContent === 'paused'")
        time.sleep(2)  # for the page to draw
        page.screenshot(out / "paused.png", whole=False)
    assert not page.problems, page.problems


def _take_states(page: Page, out: Path) -> None:
    """A phone's page when something is wrong, and at the end: states of `screens.py`."""
    for peers, situation, dark in ((3, "failure", False), (64, "done", True)):
        with served(Example(screen(peers, situation))) as address:
            show(page, address, NARROW, dark)
            page.screenshot(out / f"phone-{situation}.png", whole=False)
            page.open("about:blank")


def _take_public(page: Page, out: Path, rest: Path) -> None:
    """The page of a member that others can call, in a run without invitations."""
    state = screen(64, "live")
    run = state.run
    assert run is not None
    line = f"p2p-dtfm --invite {open_line(run.digest, (EXAMPLE_ADDRESS,)).text()}"
    state = msgspec.structs.replace(
        state, view=msgspec.structs.replace(state.view, own_join_line=line)
    )
    path = rest / "public.html"
    path.write_text(public_html(public_facts(state)), encoding="utf-8")
    page.set_view(NARROW, HEIGHT, dark=True)
    page.open(path.as_uri())
    page.wait_for("document.querySelector('svg polyline')")
    page.screenshot(out / "public.png")
    page.open("about:blank")


def _open(page: Page, link: str, width: int, dark: bool, height: int = HEIGHT) -> None:
    page.open("about:blank")
    page.set_view(width, height, dark=dark)
    page.open(link)
    page.wait_for(DRAWN)
    time.sleep(1)


def _take_terminal(child: Child, link: str, path: Path) -> None:
    """The last lines of the daemon's log, and below them its view in the terminal."""
    with urllib.request.urlopen(link.split("#")[0] + "api/state", timeout=10) as reply:
        state = msgspec.json.decode(reply.read(), type=DashboardState)
    console = Console(
        record=True, width=100, force_terminal=True, file=(child.home / "x").open("w")
    )
    for line in child.log_tail().splitlines()[-10:]:
        console.print(line, highlight=False, markup=False)
    console.print(panel(state, time.time(), console.width))
    svg = console.export_svg(title="p2p-dtfm --initial-peers ADDRESS")
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # of another site


if __name__ == "__main__":
    main()
