"""Commands about the daemon that runs here and its swarm: status, peers, leave, pause, resume."""

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from p2p_dtfm.cli.app import HomeOption, JsonOption, app
from p2p_dtfm.cli.commands.here.installed import is_of_service
from p2p_dtfm.cli.terminal.durations import seconds_of
from p2p_dtfm.cli.terminal.member_row import member_table
from p2p_dtfm.cli.terminal.plain import plain
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted, duration, given_text, share_text
from p2p_dtfm.daemon.machine.hours import LONGEST_PAUSE_S
from p2p_dtfm.daemon.machine.local_client import call_daemon, homes_here
from p2p_dtfm.daemon.telemetry.names import Names

AS_TEXT: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
WEAK_POINTS_TOLD = 6
IN_NO_VIEW = "the daemon is in no view now; p2p-dtfm status says why"
WATCH_EVERY_S = 2.0
LONG_CHARACTERS = 4096
"""Paths and addresses belong to the user, who must see them whole to copy them."""


IdsOption = Annotated[bool, typer.Option("--ids", help="Peers by their ids, not their names.")]


def how_to_call(names: Mapping[str, str], ids: bool = False) -> Callable[[str], str]:
    """A function that puts names in place of peers' ids in a text, unless ids are asked for.
    `names`: names of the peers that are known, by id."""
    return str if ids else Names(names).in_text


@app.command()
def status(
    home: HomeOption = None,
    as_json: JsonOption = False,
    ids: IdsOption = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew every two seconds, until Ctrl-C.")
    ] = False,
) -> None:
    """What the daemon of this machine is doing, and why."""
    console = Console()
    with contextlib.suppress(KeyboardInterrupt):
        _show_once(console, home, as_json, ids)
        while watch:
            time.sleep(WATCH_EVERY_S)
            if console.is_terminal and not as_json:
                console.clear()
            try:
                _show_once(console, home, as_json, ids)
            except UserError as error:  # the daemon may be started again, and is then shown again
                Console(stderr=True).print(error.cause, **AS_TEXT)


def _show_once(console: Console, home: Path | None, as_json: bool, ids: bool) -> None:
    first, *others = [call_daemon(each, "status") for each in homes_here(home)]
    if as_json:
        typer.echo(json.dumps({**first, **({"other_devices": others} if others else {})}))
        return
    _show_status(console, first, ids)
    for number, facts in enumerate(others, 2):
        console.print(f"\nand device {number} of this machine:", **AS_TEXT)
        _show_status(console, facts, ids)


def _show_status(console: Console, facts: dict[str, Any], ids: bool) -> None:
    named = how_to_call(facts["names"], ids)
    for_long, reason = duration(time.time() - facts["since_s"]), plain(named(facts["reason"]))
    headline = Text.assemble((facts["state"], "bold"), f" for {for_long}: {reason}")
    console.print(headline, highlight=False, soft_wrap=True)
    if (work := facts.get("work")) is not None and work["what"] not in facts["reason"]:
        left = "" if work["left_s"] is None else f", {duration(work['left_s'])} left"
        console.print(f"  {plain(work['what'])}: {share_text(work['share'])}{left}", **AS_TEXT)
    for name, value in _rows(facts, named):
        if value is not None:  # what is not known yet is left out
            console.print(f"  {name:<18} {plain(value, LONG_CHARACTERS)}", **AS_TEXT)
    waits_for = facts.get("waits_for") or []
    if waits_for:
        missing = ", ".join(plain(named(peer_id)) for peer_id in waits_for)
        console.print(f"  waits for Prepared of {missing}", **AS_TEXT)
    for problem in facts.get("problems") or ():
        console.print(Text(f"! {plain(problem['what'])}", style="red"), soft_wrap=True)
        console.print(f"  fix: {plain(problem['fix'])}", **AS_TEXT)


def _rows(facts: dict[str, Any], named: Callable[[str], str]) -> list[tuple[str, str | None]]:
    """The lines of `status` below its headline: a name, and what is known under it."""
    return [
        ("peer", f"{facts['name']} ({facts['peer_id']})" if facts["name"] else facts["peer_id"]),
        *_marks(facts),
        ("run", f"{facts['run']} ({facts['run_digest'][:16]})" if facts["run"] else None),
        ("trained on", facts["data"]),
        ("step", f"{facts['step']:,} of {facts['total_steps']:,}" if facts.get("step") else None),
        ("loss", _number(facts.get("loss"))),
        ("held-out loss", _number(facts.get("held_out_loss"))),
        ("tokens per second", _number(facts.get("tokens_per_s"), 0)),
        ("safe step", _safe(facts)),
        ("time left", duration(facts["eta_s"]) if facts.get("eta_s") is not None else None),
        ("given", _given(facts)),
        ("view", _view(facts)),
        ("agreement", named(_agreement(facts) or "") or None),
        ("layers", _layers(facts)),
        ("tensors go over", named(_carriers(facts) or "") or None),
        ("would cut it", named(_weak_points(facts) or "") or None),
        ("barred", named(_barred(facts) or "") or None),
        *_went_back(facts, named),
        ("checkpoints", facts["checkpoints"]),
        ("turned away", _turned_away(facts)),
        *(("others join with", each) for each in _ways_in(facts)),
        ("dashboard", f"{facts['dashboard'] or 'off'}"),
    ]


def _ways_in(facts: dict[str, Any]) -> list[str]:
    """What others type to join, or how to get it. Nobody joins a complete run."""
    if facts.get("state") == "done":
        return []
    if facts.get("admission") == "invited" and facts["addresses"]:
        return ["a line that p2p-dtfm invite prints"]
    return [f"--initial-peers {address}" for address in facts["addresses"]]


def _safe(facts: dict[str, Any]) -> str | None:
    """The last step that no crash of one peer can set back; left out if that is every step."""
    safe, step = facts.get("safe_step"), facts.get("step")
    if not step or safe == step or facts.get("view") is None:
        return None
    if safe is None and len(facts.get("members") or ()) > 1:  # a newcomer: others may know
        return "not known yet: this peer knows of no copies that two members have"
    return f"{safe or 0}: a crash of one peer may set training back to it"


def _turned_away(facts: dict[str, Any]) -> str | None:
    """How often the gate has refused something, by the kind of sender."""
    counts: Counter[str] = Counter()
    for sender, _, _, count in facts.get("refused") or ():
        counts[sender] += count
    words = [f"{count} of {sender}s" for sender, count in counts.most_common()]
    return ", ".join(words) or None


def _marks(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Settings that make the figures below those of a laboratory."""
    marks = []
    if facts.get("shaped_links"):
        marks.append(("shaped links", facts["shaped_links"]))
    if facts.get("emulated_device"):
        marks.append(("emulated device", "it computes nothing, so losses mean nothing"))
    return marks


def _number(value: float | None, digits: int = 4) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def _given(facts: dict[str, Any]) -> str | None:
    """What this peer has computed for the run. (The dashboard's page shows all peers.)"""
    found = facts.get("given")
    return given_text(found["today"], found["ever"], found["repeated"]) if found else None


def _view(facts: dict[str, Any]) -> str | None:
    count = len(facts["members"])
    return f"{facts['view']}, {counted(count, 'member')}" if count else None


def _agreement(facts: dict[str, Any]) -> str | None:
    """Where this peer stands in agreeing on a view, and what it waits for."""
    found = facts.get("agreement")
    return f"{found['phase']}: {found['reason']}" if found is not None else None


def _weak_points(facts: dict[str, Any]) -> str | None:
    """Peers and links whose loss alone would leave members that no measured link joins."""
    found = facts.get("weak_points") or {"peers": [], "links": []}
    words = [f"the loss of {peer_id}" for peer_id in found["peers"]]
    words += [f"of the link {a} to {b}" for a, b in found["links"]]
    more = f", and {len(words) - WEAK_POINTS_TOLD} more" if len(words) > WEAK_POINTS_TOLD else ""
    return ", ".join(words[:WEAK_POINTS_TOLD]) + more if words else None


def _barred(facts: dict[str, Any]) -> str | None:
    """The peers that a verdict has cost their place."""
    found = facts.get("barred") or []
    words = [f"{it['peer_id']} until step {it['until_step']}: it {it['reason']}" for it in found]
    more = f"; and {len(words) - WEAK_POINTS_TOLD} more" if len(words) > WEAK_POINTS_TOLD else ""
    return "; ".join(words[:WEAK_POINTS_TOLD]) + more if words else None


def _went_back(facts: dict[str, Any], named: Callable[[str], str]) -> list[tuple[str, str]]:
    """Steps that were taken back lately when a member was barred."""
    return [("went back", named(str(it["text"]))) for it in facts.get("went_back") or ()]


def _layers(facts: dict[str, Any]) -> str | None:
    """The layers that this peer computes, and those that it keeps to guard or for a coming view."""
    kept = [layer for layer in facts["layers"] if layer not in facts["stage"]]
    stage = f"{_ranges(facts['stage'])} computed" if facts["stage"] else ""
    also = f"{_ranges(kept)} kept for others" if kept else ""
    return ", ".join(filter(None, (stage, also))) or None


def _carriers(facts: dict[str, Any]) -> str | None:
    """What carries tensors to each neighbour at present."""
    by_carrier: dict[str, list[str]] = {}
    for peer_id, lanes in sorted((facts.get("tensors_over") or {}).items()):
        ways = sorted(set(lanes.values()), reverse=True)
        by_carrier.setdefault(" and ".join(_CARRIERS[way] for way in ways), []).append(peer_id)
    parts = [f"{carrier} to {', '.join(peers)}" for carrier, peers in sorted(by_carrier.items())]
    return "; ".join(parts) or None


_CARRIERS = {"line": "direct lines", "libp2p": "libp2p"}


def _ranges(layers: list[int]) -> str:
    """ "0-3, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@app.command()
def peers(
    home: HomeOption = None,
    initial_peers: Annotated[
        list[str] | None,
        typer.Option("--initial-peers", help="Of the swarm there, without joining it."),
    ] = None,
    run_digest: Annotated[
        str, typer.Option(help="With --initial-peers: of this run, whatever that peer trains.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list; with --initial-peers an object.")
    ] = False,
    ids: IdsOption = False,
) -> None:
    """The members of the view: devices, links, layers."""
    if initial_peers:
        from p2p_dtfm.cli.terminal.swarm_view import show_swarm

        show_swarm(tuple(initial_peers), run_digest, as_json, ids)
        return
    if run_digest:
        raise UserError(
            "--run-digest goes with --initial-peers",
            "name a peer of that run: --initial-peers ADDRESS; without one the run is the daemon's",
        )
    members = call_daemon(home, "peers")
    if as_json:
        typer.echo(json.dumps(members))
        return
    if not members:
        typer.echo(IN_NO_VIEW)
        return
    console = Console()
    console.print(member_table(members, ("heard", _heard), ids, console.width))


def _heard(member: dict[str, Any]) -> str:
    """When the member was heard last. In a large view a member hears its neighbours only. A daemon
    of an older program does not say which member it is."""
    heard = member["heard_s_ago"]
    if member.get("is_this_peer", heard is None):
        return "this peer"
    return "by others" if heard is None else f"{heard:.0f} s ago"


def _tell(homes: Iterable[Path], what: str) -> None:
    """Tells each daemon that computes on this machine for one home, whatever the others answer.
    Raises `UserError` if a daemon has refused."""
    refused = list[UserError]()
    for each in homes:
        try:
            call_daemon(each, what, "POST")
        except UserError as error:
            refused.append(error)
    if refused:
        raise refused[0]


@app.command()
def leave(home: HomeOption = None) -> None:
    """Finish the step, hand the layers to the others, and end the daemon."""
    _tell(homes_here(home), "leave")
    typer.echo("the daemon hands its layers over and leaves; p2p-dtfm status shows how far it is")
    _tell_of_service(home, "the service begins it again when you log in")


def _tell_of_service(home: Path | None, what: str) -> None:
    """Says that the service starts the daemon again: leave and pause end only what runs now."""
    if is_of_service(home):
        typer.echo(f"{what}, or the machine starts; p2p-dtfm service uninstall ends that")


@app.command()
def pause(
    home: HomeOption = None,
    length: Annotated[
        str | None, typer.Option("--for", help="Come back by itself after 45m, 2h, 1h30m, 3d.")
    ] = None,
) -> None:
    """Hand the layers to the others and free the memory; the daemon stays, and can come back."""
    if length is not None:
        seconds = seconds_of(length)
        if seconds > LONGEST_PAUSE_S:
            most = counted(LONGEST_PAUSE_S / 86_400, "day")
            raise UserError(
                f"a pause that ends by itself lasts {most} at most",
                "leave out --for: it then lasts until p2p-dtfm resume",
            )
        _tell(homes_here(home), f"pause-for?seconds={seconds}")
        typer.echo(
            f"the daemon hands its layers over and is away for {duration(seconds)}; "
            "p2p-dtfm resume makes it take part before"
        )
    else:
        _tell(homes_here(home), "pause")
        typer.echo("the daemon hands its layers over; p2p-dtfm resume makes it take part again")
    _tell_of_service(home, "the service ends the pause when you log in")


@app.command()
def resume(home: HomeOption = None) -> None:
    """Take part again after a pause."""
    states = {each: call_daemon(each, "status")["state"] for each in homes_here(home)}
    paused = [each for each, state in states.items() if state in ("paused", "leaving")]
    if not paused:
        raise UserError("the daemon is not paused", "see what it does: p2p-dtfm status")
    _tell(paused, "resume")
    is_leaving = "leaving" in states.values()
    when = "again, once it has handed its layers over" if is_leaving else "again"
    typer.echo(f"the daemon joins the others {when}; p2p-dtfm status shows how far it is")
