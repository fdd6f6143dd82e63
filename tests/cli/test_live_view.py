"""The panel at the foot of a daemon's terminal."""

import asyncio
import contextlib
import errno
import fcntl
import io
import logging
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest
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
    assert "training for 1 h 6 min  step 700 of 100,000" in text
    assert "1%  step 700 of 100,000" in text and "left" in text
    assert "loss 3.4" in text and "tokens/s" in text and "64 peers" in text
    assert "pipeline 1 of 8, stage 2 of 8" in text
    assert "next: a held-out evaluation after step 750" in text
    assert "given: 61,200 tokens today, 61,200 ever, of which 1,200 repeated" in text


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
            log.warning("12:00:00 guardians get copies every 31 steps or more, beside training")
            log.warning("12:00:01 dashboard http://127.0.0.1:31380/" + 40 * "x")
        log.warning("afterwards")

    asyncio.run(show())
    log.removeHandler(handler)
    text = screen.getvalue()
    assert ADDRESS in text
    assert "something [bold]happened[/bold]" in text, "what is logged is not markup"
    assert "every 31 steps or more,\n         beside training\n" in text, "no word is broken"
    assert "http://127.0.0.1:31380/" + 40 * "x" in text, "an address is one word"
    assert text.rstrip().endswith("afterwards")
    assert sys.stdout is screen


def test_who_logs_out_of_a_daemons_terminal_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon was started with & over ssh. Its first pause said that it has a bug, as the view
    could not be wiped off, and kept what could not be shown."""

    class Terminal(io.StringIO):
        is_gone = False

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            if self.is_gone:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr("p2p_dtfm.cli.terminal.live_view.REFRESH_S", 0.01)
    monkeypatch.setattr(logging, "raiseExceptions", False)
    console = Console(file=screen, width=60, force_terminal=True)
    handler = logging.StreamHandler(screen)

    class Pause(Exception):
        pass

    async def show() -> None:
        async with live_view(lambda: two().state, console, handler):
            await asyncio.sleep(0.05)
            screen.is_gone = True
            await asyncio.sleep(0.05)
            print(ADDRESS)
            handler.emit(logging.makeLogRecord({"msg": "something happened"}))
            raise Pause

    with pytest.raises(Pause):
        asyncio.run(show())
    assert handler.stream is screen and sys.stdout is screen
    assert not console._buffer, "what was not shown is not kept"


def test_a_terminal_that_takes_no_more_for_a_moment_is_not_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another program had made the terminal non-blocking, and nothing was shown any more."""

    class Terminal(io.StringIO):
        is_full = False

        def write(self, text: str) -> int:
            if self.is_full:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return super().write(text)

    screen = Terminal()
    monkeypatch.setattr("p2p_dtfm.cli.terminal.live_view.REFRESH_S", 0.01)
    console = Console(file=screen, width=60, force_terminal=True)
    handler = logging.StreamHandler(screen)

    async def show() -> None:
        async with live_view(lambda: two().state, console, handler):
            screen.is_full = True
            await asyncio.sleep(0.05)
            screen.is_full = False
            handler.emit(logging.makeLogRecord({"msg": "something happened"}))

    asyncio.run(show())
    assert "something happened" in screen.getvalue()


SHOWS = """
import asyncio, logging, sys
from rich.console import Console
from p2p_dtfm.cli.terminal.live_view import live_view
from tests.web.screens import screen

async def show():
    for situation in ("live", "failure"):
        state = screen(3, situation)
        async with live_view(lambda: state, Console(), logging.StreamHandler()):
            await asyncio.sleep(0.2)

asyncio.run(show())
"""


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_keeps_percentage_stage_and_what_to_do(width: int) -> None:
    """The view is shown in a real pseudo-terminal of so many columns."""
    lines = shown_in_a_terminal(width)
    assert max(map(len, lines)) < width
    text = "\n".join(lines)
    assert re.search(r"━{6,30}  48%  step 120 of 250  49 s left", text)
    assert "pipeline 1 of 1, stage 2 of 2, layers 3-5 · 3 peers" in text
    assert "loss 4.9" in text and "held-out 5.2" in text and "4,042 tokens/s" in text
    whole = " ".join(text.split())
    assert "the step is stopped until the members agree on how to go on" in whole
    assert "if that computer was switched off: the others go on without it" in whole


def shown_in_a_terminal(width: int) -> list[str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWS], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # how Linux says that the other end is closed
        while select.select([ours], [], [], 60)[0] and (chunk := os.read(ours, 1 << 16)):
            said += chunk
    os.close(ours)
    assert process.wait(10) == 0, said.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    return [line for line in re.split(r"[\r\n]+", plain) if line]
