"""What must hold for honest peers, whatever the others say (decision 72).

The promise needs a stage with three that can compute its work again, fewer than half of which lie.
Then wrong work that is drawn and given to an honest auditor does not commit, and its maker is
barred. No honest peer is barred, and all honest peers have the same. Work that was not drawn, or
was given to a colluder, stays: in these runs nothing is undone.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.judge import Broken
from p2p_dtfm.testbed.virtual.seeds.saved import saved_at
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule

MISSED_LIMIT = 16
"""Audits of half of all steps draw nobody for so many steps in a row once in 65,536 times."""
SETTLES_S = 1.0
"""Time until a bar is on the disk of the peer that bars, before it may lose power."""
Views = dict[tuple[int, str], tuple[float, list[str]]]
NAMED = re.compile(r"leaves out (?!one of )(\w+): ")


def own_steps(lying: Lying, steps: int) -> int:
    """How many of the first steps are like an honest run's: none of them committed a lie about
    work."""
    return min(lying.stayed(), default=steps)


def require(
    peers: Sequence[Peer], lying: Lying, steps: int, schedule: Schedule, disturbed_s: float
) -> None:
    """`disturbed_s` is when the first fault began that is more than a lie. Raises `Broken`."""
    _require_nothing_found_commits(lying, schedule.audit_rate)
    _require_one_lineage(lying)
    _require_one_end(peers, steps)
    _require_no_honest_blame(lying)
    _require_bars(peers, lying, disturbed_s)


def _require_nothing_found_commits(lying: Lying, rate: float) -> None:
    """Asked only where an honest peer can compute a liar's work again at all."""
    missed = Counter[str]()
    for deed, committed in lying.committed.items():
        for liar, kind in lying.told.get(deed, {}).items():
            auditor, name = committed.drawn.get(liar, ""), lying.names[liar]
            if not committed.judges.get(liar):
                continue
            what = (
                f"step {deed.step} of view {deed.view.number} is committed, in which {name} lies "
                f"({kind}), and"
            )
            if auditor and not (lying.together and auditor in lying.names):
                raise Broken(f"{what} an honest peer was to compute that again")
            missed[liar] += 1
            if (not auditor and rate == 1.0) or missed[liar] > MISSED_LIMIT:
                raise Broken(f"{what} nobody honest was to compute that again")


def _require_one_lineage(lying: Lying) -> None:
    for deed, committed in lying.committed.items():
        if len(set(committed.digests.values())) > 1:
            raise Broken(
                f"honest peers have committed step {deed.step} of view {deed.view.number} "
                f"unlike: {committed.digests}"
            )


def _require_one_end(peers: Sequence[Peer], steps: int) -> None:
    ends: dict[str, str] = {}
    for peer in peers:
        for checkpoint in saved_at(peer, steps):
            for name, file in checkpoint.manifest.layers.items():
                if ends.setdefault(name, file.digest) != file.digest:
                    raise Broken(f"{peer.name} has saved another layer {name} of the last step")


def _require_no_honest_blame(lying: Lying) -> None:
    """Nobody calls an honest peer a liar. A report of two in doubt may name honest peers, too."""
    for report in lying.reports:
        named = NAMED.match(report)
        if named is not None and named[1] not in lying.names:
            raise Broken(f"an honest peer is called a liar: {report}")


def _require_bars(peers: Sequence[Peer], lying: Lying, disturbed_s: float) -> None:
    """A liar that was found out before anything else happened is barred by all members of a view
    that then went on without it. It stays barred, whoever is killed later. A peer that was left out
    before has not heard of that."""
    found = lying.found_out()
    until_s = disturbed_s - SETTLES_S
    views = {peer.name: _views_of(peer, until_s) for peer in peers}
    is_undisturbed = math.isinf(disturbed_s)
    everywhere = {view for of in views.values() for view in of} if is_undisturbed else set()
    for peer in peers:
        told = peer.daemon.status_json() if peer.daemon is not None else {}
        if not peer.takes_part:  # it came back after the end
            continue
        barred = {bar["peer_id"]: bar["reason"] for bar in told.get("barred", ())}
        for peer_id in sorted(barred.keys() - lying.names.keys()):
            raise Broken(f"{peer.name} has barred an honest peer: {barred[peer_id]}")
        for peer_id in sorted(found.keys() - barred.keys()):
            without = _went_on_without(peer_id, found[peer_id], views.values())
            if views[peer.name].keys() & (without or everywhere):
                name = lying.names[peer_id]
                raise Broken(f"{name} was found out by most, and {peer.name} has not barred it")


def _views_of(peer: Peer, until_s: float) -> Views:
    """The views that it came to: when, and with which members."""
    told = (it for it in peer.events() if it["event"] == "view" and it["at_s"] <= until_s)
    return {(it["view"], it["snapshot"]): (it["at_s"], it["members"]) for it in told}


def _went_on_without(liar: str, found_s: float, views: Iterable[Views]) -> set[tuple[int, str]]:
    """Views without the liar since it was found out; empty where no view left it out."""
    told = (item for each in views for item in each.items())
    return {view for view, (at_s, members) in told if at_s >= found_s and liar not in members}
