"""The panel at the foot of a daemon's terminal."""

import asyncio
import io
import logging
import sys

from rich.console import Console

from p2p_dtfm.cli.terminal.live_view import live_view, panel
from tests.web.examples import NOW_S, sixty_four, two

ADDRESS = "p2p-dtfm --initial-peers /ip4/192.0.2.7/tcp/41234/p2p/12D3KooW" + 44 * "x"


def drawn(state, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(panel(state, NOW_S, width))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_one_state_with_its_reason_and_the_figures() -> None:
    text = "\n".join(drawn(sixty_four().state, 160))
    assert "training for 1 h 6 min  step 700 of 100000" in text
    assert "step 700 of 100,000 (1%)" in text and "left" in text
    assert "loss 3.4" in text and "tokens/s" in text and "64 peers" in text
    assert "pipeline 1 of 8, stage 2 of 8" in text
    assert "next: a held-out evaluation after step 750" in text


def test_what_is_wrong_is_there() -> None:
    assert any(
        line.startswith(f"! waits for {two().state.view.peers[0].name} ")
        for line in drawn(two().state, 120)
    )


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (20, 40, 80):
        lines = drawn(sixty_four().state, width)
        assert lines and all(len(line) < width for line in lines)


def test_what_is_printed_stands_above_and_can_be_copied(monkeypatch) -> None:
    """An address that is wider than the terminal stays one line."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    console = Console(file=screen, width=60, force_terminal=True)
    handler = logging.StreamHandler(screen)
    log = logging.getLogger("test of the live view")
    log.addHandler(handler)

    async def show() -> None:
        async with live_view(lambda: two().state, console, handler):
            await asyncio.sleep(0)
            print(ADDRESS)
            log.warning("something [bold]happened[/bold]")
        log.warning("afterwards")

    asyncio.run(show())
    log.removeHandler(handler)
    text = screen.getvalue()
    assert ADDRESS in text
    assert "something [bold]happened[/bold]" in text, "what is logged is not markup"
    assert text.rstrip().endswith("afterwards")
    assert sys.stdout is screen
