"""What must hold for those who do not lie, whatever the others say (decision 56).

Promised is, where a stage has three that can compute its work again and less than half lie: what is
drawn and given to an honest auditor does not commit if it is wrong, its maker is barred, nobody
honest is, and all honest ones have the same. What was not drawn, or given to a fellow, stays: there
is no undo.
"""

from collections.abc import Sequence

from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.judge import Broken, saved_at


def own_steps(lying: Lying, steps: int) -> int:
    """How many of the first steps are like those of an honest run: no lie about a work was
    committed in any of them."""
    lied = (deed.step for deed in lying.committed if lying.told.get(deed))
    return min(lied, default=steps)


def require(peers: Sequence[Peer], lying: Lying, steps: int) -> None:
    """Raises `Broken`."""
    _require_nothing_found_commits(lying)
    _require_one_lineage(lying)
    _require_one_end(peers, steps)
    _require_no_honest_bar(peers, lying)


def _require_nothing_found_commits(lying: Lying) -> None:
    for deed, committed in lying.committed.items():
        for liar, kind in lying.told.get(deed, {}).items():
            auditor = committed.drawn.get(liar, "")
            is_fellow = lying.together and auditor in lying.names
            if auditor and not is_fellow:
                name = lying.names[liar]
                raise Broken(
                    f"step {deed.step} of view {deed.view.number} is committed, in which {name} "
                    f"lies ({kind}), and an honest peer was to compute that again"
                )


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


def _require_no_honest_bar(peers: Sequence[Peer], lying: Lying) -> None:
    for peer in peers:
        told = peer.daemon.status_json() if peer.daemon is not None else {}
        for bar in told.get("barred", ()):
            if bar["peer_id"] not in lying.names:
                raise Broken(f"{peer.name} has barred an honest peer: {bar['reason']}")
