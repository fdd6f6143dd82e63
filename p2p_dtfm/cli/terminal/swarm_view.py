"""A swarm that this machine does not take part in, as its members publish it."""

import asyncio
import json
from typing import Any

import typer
from rich.console import Console

from p2p_dtfm.cli.terminal.member_row import member_table
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.facts.in_words import counted


def show_swarm(initial_peers: tuple[str, ...], run_digest: str, as_json: bool, ids: bool) -> None:
    """Look, print, and leave nothing behind. Raises `UserError`."""
    from p2p_dtfm.daemon.peers.facts.swarm_seen import as_json as facts_of
    from p2p_dtfm.daemon.peers.facts.swarm_seen import looking_on, see

    async def look() -> dict[str, Any]:
        async with looking_on(initial_peers) as onlooker:
            return facts_of(await see(onlooker, initial_peers, run_digest))

    seen = asyncio.run(look())
    if as_json:
        typer.echo(json.dumps(seen))
        return
    console = Console()
    console.print(member_table(seen["members"], ("float32", _speed), ids, console.width))
    for line in _lines(seen):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _speed(member: dict[str, Any]) -> str:
    facts = member["device"].get("facts")
    return f"{facts[3] / 1e6:.2f} TFLOP/s" if facts else "not said"


def _lines(seen: dict[str, Any]) -> list[str]:
    plan, links = seen["plan"], seen["links"]
    told = ", ".join(f"{count} {source}" for source, count in links.items()) or "none"
    lines = [f"run {plain(seen['run'])} ({seen['run_digest'][:16]}); links: {told}"]
    if seen["silent"]:
        lines.append(f"{len(seen['silent'])} more are there and publish nothing of themselves")
    if plan is None:
        return [*lines, "nobody is in a view"]
    rate = f"{plan['tokens_per_s']:,.0f} tokens/s" if plan["tokens_per_s"] else "no steps"
    counts = [len(each["stages"]) for each in plan["pipelines"]]
    shape = " + ".join(map(str, counts)) or "none"
    stages = "stage" if counts == [1] else "stages"
    return [
        *lines,
        f"view {plan['view']}, step {plan['step']}: {counted(len(counts), 'pipeline')} of "
        f"{shape} {stages}, {counted(len(plan['spares']), 'spare')}, {rate} predicted",
    ]
