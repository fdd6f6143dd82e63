"""What a daemon does, at the foot of the terminal that it runs in; its log scrolls above."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from p2p_dtfm.cli.swarm import duration
from p2p_dtfm.web.state import DashboardState, ViewState

REFRESH_S = 0.5
BAR_WIDTH = 40
COLOURS = {"training": "green", "done": "green", "waiting": "yellow", "leaving": "yellow"}


@contextlib.asynccontextmanager
async def live_view(
    state: Callable[[], DashboardState],
    console: Console,
    handler: "logging.StreamHandler[TextIO]",
) -> AsyncIterator[None]:
    """Shows `state()` until the end; what `handler` logs is printed above."""
    stdout_too = sys.stdout.isatty()
    with Live(
        console=console, auto_refresh=False, transient=True, redirect_stdout=stdout_too
    ) as live:
        console.show_cursor(True)  # a daemon that ends at once could not bring it back
        before = handler.setStream(sys.stderr)  # which now prints above the panel
        refreshing = asyncio.create_task(_refresh(live, state))
        try:
            yield
        finally:
            refreshing.cancel()
            if before is not None:
                handler.setStream(before)


async def _refresh(live: Live, state: Callable[[], DashboardState]) -> None:
    while True:
        live.update(panel(state(), time.time()), refresh=True)
        await asyncio.sleep(REFRESH_S)


def panel(state: DashboardState, now_s: float) -> RenderableType:
    """One state with its reason, progress, the swarm's figures, and what is wrong."""
    live, run = state.live, state.run
    headline = Text()
    headline.append(live.state, style=f"bold {COLOURS.get(live.state, 'cyan')}")
    headline.append(f" for {duration(now_s - live.since_s)}", style="dim")
    if live.reason:
        headline.append(f"  {live.reason}")
    rows: list[RenderableType] = [Text(""), headline]
    if run is not None and live.step:
        share = live.step / run.total_steps
        left = f"{duration(live.eta_s)} left" if live.eta_s is not None else ""
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=1.0, completed=share, width=BAR_WIDTH),
            f"step {live.step:,} of {run.total_steps:,} ({share:.0%})",
            left,
        )
        rows.append(bar)
    facts = [*_figures(state), *_place(state.view)]
    if facts:
        rows.append(Text(" · ".join(facts)))
    rows += [Text(f"next: {live.next[0]}", style="dim")] if live.next else []
    for problem in live.problems[:3]:
        rows.append(Text(f"! {problem.what}", style="yellow"))
    rows += [Text(mark, style="dim yellow") for mark in live.marks]
    return Group(*rows)


def _figures(state: DashboardState) -> list[str]:
    live, found = state.live, []
    if live.loss is not None:
        found.append(f"loss {live.loss:.4f}")
    if live.held_out_loss is not None:
        found.append(f"held-out {live.held_out_loss:.4f}")
    if live.tokens_per_s is not None:
        found.append(f"{live.tokens_per_s:,.0f} tokens/s")
    return found


def _place(view: ViewState) -> list[str]:
    if view.me is None:
        return []
    me, count = view.peers[view.me], len(view.peers)
    found = [f"{count} peer{'' if count == 1 else 's'}"]
    if me.pipeline is not None:
        stages = len(view.pipelines[me.pipeline].peers)
        found.append(
            f"this one: layers {me.first_layer}-{me.end_layer - 1}, pipeline {me.pipeline + 1} of "
            f"{len(view.pipelines)}, stage {(me.position or 0) + 1} of {stages}"
        )
    elif not view.no_plan:
        found.append("this one: spare")
    return found
