"""What a daemon does, at the foot of the terminal that it runs in; its log scrolls above."""

import asyncio
import contextlib
import io
import logging
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from typing import IO, TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.facts.in_words import (
    counted,
    duration,
    given_text,
    layers_text,
    share_text,
)
from p2p_dtfm.web.state import ContributionBoard, DashboardState, Samples, ViewState

REFRESH_S = 0.5
BAR_WIDTH = 30
LEAST_BAR_WIDTH = 6
PROBLEMS_SHOWN = 3
LINES_OF_A_PROBLEM = 3
TO_TYPE = "p2p-dtfm "
AFTER_THE_TIME = " " * len("00:00:00 ")
COLOURS = {"training": "green", "done": "green", "waiting": "yellow", "leaving": "yellow"}


@contextlib.asynccontextmanager
async def live_view(
    state: Callable[[], DashboardState],
    console: Console,
    handler: "logging.StreamHandler[TextIO]",
) -> AsyncIterator[None]:
    """Shows `state()` until the end; what `handler` logs, and what is printed, stands above it. If
    the terminal is closed meanwhile, the daemon goes on."""
    screen = _Screen(console.file)
    console.file = cast(TextIO, screen)
    with Live(
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        console.show_cursor(True)  # a daemon that ends at once could not show the cursor again
        above = _Above(console, screen)
        before = handler.setStream(cast(TextIO, above))
        stdout = contextlib.redirect_stdout(above if sys.stdout.isatty() else sys.stdout)
        refreshing = asyncio.create_task(_refresh(live, state, screen))
        try:
            with stdout:
                yield
        finally:
            refreshing.cancel()
            if before is not None:
                handler.setStream(before)


class _Screen(io.TextIOBase):
    """The terminal until it is closed, for example when its user logs out of ssh. After that
    nothing is shown, and writing to it raises nothing."""

    def __init__(self, terminal: IO[str]) -> None:
        self._terminal = terminal
        self.is_gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._terminal, "encoding", None) or "utf-8")

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def fileno(self) -> int:
        return self._terminal.fileno()

    def write(self, text: str) -> int:
        self._unless_it_fails(lambda: self._terminal.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_it_fails(self._terminal.flush)

    def _unless_it_fails(self, show: Callable[[], object]) -> None:
        if self.is_gone:
            return
        try:
            show()
        except BlockingIOError:
            pass  # the terminal takes no more now; the panel is drawn anew soon
        except OSError:
            self.is_gone = True


class _Above(io.TextIOBase):
    """Prints whole lines above the panel, broken between words where the terminal ends. A line to
    type, or a single word such as an address, is left for the terminal to wrap: it can be
    copied."""

    def __init__(self, console: Console, screen: _Screen) -> None:
        self._console = console
        self._screen = screen
        self._rest = ""

    def write(self, text: str) -> int:
        if self._screen.is_gone:
            return len(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._console.print(Text(_between_words(line, self._console.width)), soft_wrap=True)
        return len(text)


def _between_words(line: str, width: int) -> str:
    if len(line) < width or TO_TYPE in line:
        return line
    return textwrap.fill(
        line,
        max(1, width - 1),
        subsequent_indent=AFTER_THE_TIME,
        break_long_words=False,
        break_on_hyphens=False,
    )


async def _refresh(live: Live, state: Callable[[], DashboardState], screen: _Screen) -> None:
    while not screen.is_gone:
        live.update(panel(state(), time.time(), live.console.width), refresh=True)
        await asyncio.sleep(REFRESH_S)


def panel(state: DashboardState, now_s: float, width: int) -> Group:
    """One state with its reason, progress, the swarm's figures, and what is wrong.

    No line is wider than the terminal: a wrapped one would make the panel creep.
    """
    live = state.live
    headline = Text.assemble(
        (live.state, f"bold {COLOURS.get(live.state, 'cyan')}"),
        (f" for {duration(now_s - live.since_s)}", "dim"),
        f"  {plain(live.reason)}",
    )
    rows = [Text(""), headline, *_progress(state, width)]
    rows += [Text(" · ".join(facts)) for facts in (_figures(state), _place(state.view)) if facts]
    rows += _given(state.contribution)
    rows += _sample(state.samples)
    if live.next:
        rows.append(Text(f"next: {live.next[0]}", style="dim"))
    for each in live.problems[:PROBLEMS_SHOWN]:
        rows += _wrapped("! ", plain(each.what), "red", width)
        rows += _wrapped("  fix: ", plain(each.fix), "dim", width)
    rows += [Text(mark, style="dim yellow") for mark in live.marks]
    for row in rows:
        row.truncate(width - 1, overflow="ellipsis")
    return Group(*rows)


def _wrapped(before: str, text: str, style: str, width: int) -> list[Text]:
    """The text on as many lines as it needs: what a user must act on is not cut off."""
    lines = textwrap.wrap(
        text,
        max(1, width - 1),
        initial_indent=before,
        subsequent_indent="  ",
        max_lines=LINES_OF_A_PROBLEM,
        placeholder=" …",
    )
    return [Text(line, style=style) for line in lines]


def _progress(state: DashboardState, width: int) -> list[Text]:
    live, run = state.live, state.run
    rows = []
    if live.work_share is not None:
        what = "" if live.reason.startswith(live.work) else f"  {plain(live.work)}"
        rows.append(_bar(live.work_share, what, live.work_left_s, "cyan", width))
    if run is not None and live.step:
        share = min(1.0, live.step / run.total_steps)
        what = f"  step {live.step:,} of {run.total_steps:,}"
        rows.append(_bar(share, what, live.eta_s, "green", width))
    return rows


def _bar(share: float, what: str, left_s: float | None, colour: str, width: int) -> Text:
    """A progress bar with its words. Words, the percentage first of all, have room before the
    bar."""
    left = "" if left_s is None else f"  {duration(left_s)} left"
    words = f"  {share_text(share)}{what}{left}"
    room = min(BAR_WIDTH, max(LEAST_BAR_WIDTH, width - 1 - len(words)))
    done = round(room * share)
    return Text.assemble(("━" * done, colour), ("━" * (room - done), "bright_black"), words)


def _figures(state: DashboardState) -> list[str]:
    live, found = state.live, []
    if live.loss is not None:
        found.append(f"loss {live.loss:.4f}")
    if live.held_out_loss is not None:
        found.append(f"held-out {live.held_out_loss:.4f}")
    if live.tokens_per_s is not None:
        found.append(f"{live.tokens_per_s:,.0f} tokens/s")
    return found


def _given(contribution: ContributionBoard) -> list[Text]:
    today, ever = contribution.today.tokens, contribution.ever.tokens
    text = given_text(today, ever, contribution.repeated_tokens)
    return [] if text is None else [Text(f"given: {text}")]


def _sample(samples: Samples) -> list[Text]:
    """The newest text that the model wrote, on one line."""
    if not samples.written:
        return []
    newest = samples.written[-1]
    text = " ".join(f"{samples.prompt}{newest.text}".split())
    return [Text(f"after step {newest.step:,} it writes: {plain(text)}", style="italic")]


def _place(view: ViewState) -> list[str]:
    if view.me is None:
        return []
    me, peers = view.peers[view.me], counted(len(view.peers), "peer")
    name = f"{plain(me.name)} (this one)"
    if me.pipeline is not None:
        place = (
            f"pipeline {me.pipeline + 1} of {len(view.pipelines)}, stage {(me.position or 0) + 1} "
            f"of {len(view.pipelines[me.pipeline].peers)}, "
            + layers_text(me.first_layer, me.end_layer)
        )
        return [place, peers, name]
    return [peers, name] if view.no_plan else ["spare", peers, name]
