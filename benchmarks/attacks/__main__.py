"""Attacks on a swarm of real daemons on this machine, each on a swarm of its own.

    python -m benchmarks.attacks [NAME ...] [--seconds 10] [--json] [--list]

First a few that strangers try (`by_strangers.py`: everybody with an address can) and newcomers
(`by_newcomers.py`), on three members; then members that lie (`p2p_dtfm/testbed/lies/`: the second
of four, from step 30 on). Reported of the honest members: the longest time without a commit from
the attack's beginning on, beside the longest before it; how many ended; steps whose losses they
tell differently; how much resident memory the one that grew most had taken at most; and seconds
until an honest newcomer was let in afterwards.
Nothing leaves loopback. Exit code 1 if a limit was passed.
"""

import argparse
import asyncio
import inspect
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.attacks.by_newcomers import BY_NEWCOMERS
from benchmarks.attacks.by_strangers import BY_STRANGERS, Attack, Notes
from benchmarks.attacks.stranger import Stranger
from benchmarks.attacks.watched import AFTERMATH_S, POLL_S, Seen, Watched, swarm_of
from p2p_dtfm.testbed.lies.lie import Lie

SPAN_LIMIT_S = 10.0
MEMORY_LIMIT_MIB = 300
CONNECTIONS_LIMIT = 10
ATTACK_LIMIT_S = 120.0
FROM_STEP = 30
LARGE = 1e30
"""A large norm or loss."""
BY_OTHERS = BY_STRANGERS | BY_NEWCOMERS
BY_MEMBERS = {
    "nan": "gradients that are no numbers",
    "norm": "a norm that is 1e30 times as large",
    "loss": "a loss that is 1e30 times as large",
    "unlike-sums": "other sums of gradients to each holder",
    "unlike-norms": "another norm to each member",
    "silence": "accuses all others of silence, ten times a second",
    "part": "other gradients than it computed; found out by audits alone",
    "state": "noise in place of a layer's state, to a newcomer",
}


def attacked_by_stranger(attack: Attack, directory: Path, seconds: float) -> Seen:
    with swarm_of(directory, 3) as watched:
        facts = watched.honest[0].status() or {}
        watched.begin()
        over = threading.Event()
        notes: Notes = {}

        async def act() -> Notes:
            view = (facts["view"], facts["snapshot"])
            one = await Stranger.start(directory, watched.address, view)
            try:
                return await asyncio.wait_for(attack(one, seconds), ATTACK_LIMIT_S)
            finally:
                await one.host.close()

        def run() -> None:
            try:
                notes.update(asyncio.run(act()))
            finally:
                over.set()

        thread = threading.Thread(target=run)
        thread.start()
        while not over.wait(POLL_S):
            watched.look()
        thread.join()
        return _afterwards(watched, notes)


def attacked_by_member(kind: str, directory: Path, seconds: float) -> Seen:
    first = 0 if kind == "state" else FROM_STEP
    with swarm_of(directory, 4, Lie(kind, first, LARGE)) as watched:
        watched.begin()
        time.sleep(seconds)
        return _afterwards(watched, {})


def _afterwards(watched: Watched, notes: Notes) -> Seen:
    join_s = watched.let_in()
    end_s = time.monotonic() + AFTERMATH_S
    while time.monotonic() < end_s:
        watched.look()
        time.sleep(POLL_S)
    return watched.end(notes, join_s)


def passed(seen: Seen) -> list[str]:
    """The limits that were passed."""
    found = []
    if seen.longest_span_s > SPAN_LIMIT_S:
        found.append(f"no commit for {seen.longest_span_s:.1f} s")
    if seen.ended:
        found.append(f"{seen.ended} ended")
    if seen.forked_steps:
        found.append(f"{seen.forked_steps} steps with unequal losses")
    if seen.grown_mib > MEMORY_LIMIT_MIB:
        found.append(f"{seen.grown_mib} MiB more")
    if seen.join_s is None:
        found.append("nobody was let in")
    if seen.notes.get("connections_to_victim", 0) > CONNECTIONS_LIMIT:
        found.append(f"{seen.notes['connections_to_victim']} connections to the victim")
    if seen.notes.get("bytes_of_manifest"):
        found.append("data was given")
    return found


def show(name: str, seen: Seen) -> None:
    joined = "-" if seen.join_s is None else f"{seen.join_s:.1f}"
    print(
        f"{name:<18}{seen.longest_span_s:8.1f}{seen.usual_span_s:8.1f}{seen.ended:8d}"
        f"{seen.forked_steps:8d}{seen.grown_mib:8d}{joined:>8}  {seen.notes or ''}"
        f"{'  PASSED A LIMIT: ' + ', '.join(passed(seen)) if passed(seen) else ''}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks; default: all")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long each goes on")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="say what there is")
    options = parser.parse_args(arguments)
    known = {name: inspect.getdoc(attack) or "" for name, attack in BY_OTHERS.items()}
    known |= {name: f"A member: {what}." for name, what in BY_MEMBERS.items()}
    if options.list:
        print("\n".join(f"{name:<18}{' '.join(what.split())}" for name, what in known.items()))
        return 0
    if unknown := set(options.names) - set(known):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}; --list names them")
    if not options.json:
        titles = ("span s", "before", "ended", "forked", "MiB", "join s")
        print(f"{'attack':<18}" + "".join(f"{title:>8}" for title in titles))
    rows = {}
    for name in options.names or known:
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            if name in BY_OTHERS:
                seen = attacked_by_stranger(BY_OTHERS[name], Path(folder), options.seconds)
            else:
                seen = attacked_by_member(name, Path(folder), options.seconds)
        rows[name] = {
            **{key: getattr(seen, key) for key in seen.__dataclass_fields__},
            "limits_passed": passed(seen),
        }
        if not options.json:
            show(name, seen)
    if options.json:
        print(json.dumps(rows))
    return int(any(row["limits_passed"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
