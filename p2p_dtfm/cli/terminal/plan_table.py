"""A plan as a table: a column for each stage where there is room, else a line for each peer."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.facts.in_words import layers_text, span_text
from p2p_dtfm.core.protocol.plan import Plan

STAGE_WIDTH = 26
"""Width for a name of the usual length and the stage's layers."""
BEFORE_STAGES = 26
"""Columns of a terminal that the pipeline's name and its microbatches take."""


def plan_table(made: Plan, named: Callable[[str], str], width: int) -> Table:
    """`width`: columns of the terminal."""
    depth = max(len(pipeline.stages) for pipeline in made.pipelines)
    is_wide = BEFORE_STAGES + STAGE_WIDTH * depth <= width
    return _wide(made, named, depth) if is_wide else _narrow(made, named)


def _wide(made: Plan, named: Callable[[str], str], depth: int) -> Table:
    table = Table("pipeline", "microbatches", *(f"stage {n + 1}" for n in range(depth)))
    for number, pipeline in enumerate(made.pipelines):
        cells: list[Any] = [
            Text(f"{plain(named(at.peer_id))}: {layers_text(at.first_layer, at.end_layer)}")
            for at in pipeline.stages
        ]
        cells += [""] * (depth - len(cells))
        table.add_row(str(number + 1), str(pipeline.microbatch_count), *cells)
    if made.spares:
        spares = Text(", ".join(plain(named(peer_id)) for peer_id in made.spares))
        table.add_row("spares", "", spares, *[""] * (depth - 1))
    return table


def _narrow(made: Plan, named: Callable[[str], str]) -> Table:
    """A line for each peer. No word is cut: a longer name goes on in the next line."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("pipeline", "stage", "peer", "layers", "micro-\nbatches"):
        table.add_column(heading, no_wrap=heading != "peer", overflow="fold")
    for number, pipeline in enumerate(made.pipelines):
        for place, at in enumerate(pipeline.stages):
            layers = span_text(at.first_layer, at.end_layer)
            peer, count = Text(plain(named(at.peer_id))), str(pipeline.microbatch_count)
            table.add_row(str(number + 1), str(place + 1), peer, layers, count)
    for peer_id in made.spares:
        table.add_row("spare", "", Text(plain(named(peer_id))), "", "")
    return table
