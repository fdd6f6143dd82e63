"""`p2p-dtfm trace`: what all peers did in the last steps, as a file for Perfetto."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from p2p_dtfm.cli.app import HomeOption, app
from p2p_dtfm.cli.commands.swarm import how_to_call
from p2p_dtfm.cli.terminal.output_files import write_text
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.sim.step_time.trace import complete_event, name_event

COLLECT_S = 60.0
STEPS_LIMIT = 16


@app.command()
def trace(
    out: Annotated[Path, typer.Option(help="File to write; open it at ui.perfetto.dev.")],
    steps: Annotated[int, typer.Option(min=1, max=STEPS_LIMIT, help="The last so many.")] = 1,
    home: HomeOption = None,
) -> None:
    """Write what each peer did in the last steps, and when, by one common clock."""
    answer = call_daemon(home, f"trace?steps={steps}", timeout_s=COLLECT_S)
    if not any(peer["steps"] for peer in answer["peers"]):
        raise UserError(
            "no step has been recorded yet",
            ("wait until the swarm has committed one: p2p-dtfm status",),
            exit_code=1,
        )
    named = how_to_call(answer["names"])
    write_text(out, json.dumps(trace_events(answer["peers"], named)), "--out")
    worst_ms = max(peer["clock_error_ns"] for peer in answer["peers"]) / 1e6
    numbers = sorted({int(step) for peer in answer["peers"] for step in peer["steps"]})
    typer.echo(
        f"steps {numbers[0]} to {numbers[-1]} of {counted(len(answer['peers']), 'peer')} in {out}; "
        f"their clocks agree to {worst_ms:.1f} ms"
    )
    if answer["missing"]:
        missing = ", ".join(plain(named(peer_id)) for peer_id in answer["missing"])
        typer.echo(f"no answer from {missing}", err=True)


def trace_events(peers: list[dict[str, Any]], named: Callable[[str], str] = str) -> dict[str, Any]:
    """The Trace Event Format's JSON object: a process is a pipeline, a thread a peer.

    Times begin with the first span. `peers` as the daemon's `trace` answers.
    """
    spans = [each for peer in peers for held in peer["steps"].values() for each in held]
    origin_ns = min(start_ns for _, _, start_ns, _ in spans)
    events = []
    for peer in peers:
        process, thread = peer["pipeline"], peer["position"]
        first, end = peer["layers"]
        events.append(name_event("process_name", process, 0, f"pipeline {process + 1}"))
        events.append(
            name_event(
                "thread_name", process, thread, f"{named(peer['peer_id'])} layers {first}-{end - 1}"
            )
        )
        for step, held in peer["steps"].items():
            for kind, number, start_ns, end_ns in held:
                event = complete_event(
                    _title(kind, number),
                    kind,
                    process,
                    thread,
                    start_ns - origin_ns,
                    end_ns - origin_ns,
                )
                event["args"] = {"step": int(step)}
                events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _title(kind: str, number: int) -> str:
    if kind in ("forward", "backward", "evaluate"):
        return f"{kind} {number}"
    return f"reduce from layer {number}" if kind == "reduce" else kind
