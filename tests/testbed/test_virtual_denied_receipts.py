"""Real daemons in virtual time: a holder says again and again that it lacks its guardian's receipt,
which it has. Nobody else sees receipts. All others took its side against one guardian after the
other, and each was out: of six members five, until all layers were lost. Nor does it help a
guardian to give none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.testbed.virtual import worlds
from p2p_dtfm.testbed.virtual.lies.lying import Lying
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun
from tests.testbed.test_virtual_guardians_that_ask_again import two_stages_and_a_spare
from tests.testbed.test_virtual_speed import view_of

STEPS = 4000
SEED = 1
NAMES = "abcd"
PLAYED_S = 45.0
"""It is back after ten seconds, and waited for, and in doubt with another one."""
FEWEST_STEPS = 20
"""A step takes 0.6 s; there were twelve."""


def denies_receipts(patch: pytest.MonkeyPatch, lying: Lying) -> None:
    """The liar takes each guardian's first receipt of a view, and no other."""
    honest = Receipts.receipt

    def receipt(self: Any, sender: str, of: Any, step: int, layers: Any) -> None:
        if lying.here() in lying.ids and any(self._received.get(it, -1) >= 0 for it in layers):
            lying.tell()
        else:
            honest(self, sender, of, step, layers)

    patch.setattr(Receipts, "receipt", receipt)


def gives_no_receipts(patch: pytest.MonkeyPatch, lying: Lying) -> None:
    """The liar gives the first receipt of a view, and no other."""
    honest, begun_in = Followers._guarded, set[Any]()

    def guarded(self: Any, holder: str, layer: int, step: int, gradient: Any) -> None:
        key = self.guardian.view.id if self.guardian is not None else None, holder, layer
        if lying.here() in lying.ids and key in begun_in:
            lying.tell()
        else:
            begun_in.update({key} if lying.here() in lying.ids else ())
            honest(self, holder, layer, step, gradient)

    patch.setattr(Followers, "_guarded", guarded)


def _members_seen(peers: list[Peer], since: int) -> list[set[str]]:
    views = (it for peer in peers for it in peer.events() if it["event"] == "view")
    return [set(it["members"]) for it in views if it["step"] >= since]


@pytest.mark.parametrize(
    ("lies", "is_holder"),
    [
        (denies_receipts, True),
        pytest.param(gives_no_receipts, False, marks=pytest.mark.nightly),
    ],
)
def test_a_holder_and_its_guardian_settle_it_and_the_liar_goes_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: Callable[..., None], is_holder: bool
) -> None:
    monkeypatch.setattr(worlds, "compute_plan", two_stages_and_a_spare)
    run, lying = make_run(tmp_path, STEPS, saves_every_steps=1000), Lying({}, together=False)
    lies(monkeypatch, lying)

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, run, NAMES)
        await swarm.until(lambda: min(it.step() for it in peers) >= 20, "steps", 120)
        view, since = view_of(peers[0]), peers[0].step()
        assert view.cut_pace is None, "guardians keep up"
        liar = view.guards[0] if not is_holder else min(it.peer_id for it in peers)
        assert is_holder == bool(view.layers_of(liar)), "the plan is by the order of names"
        lying.ids |= {it.name: liar for it in peers if it.peer_id == liar}
        honest = [it for it in peers if it.peer_id != liar]
        ids = {it.peer_id for it in honest}

        ends_s = swarm.now_s + PLAYED_S
        await swarm.until(lambda: swarm.now_s > ends_s, "it comes back, and goes", 2 * PLAYED_S)
        seen = _members_seen(honest, since)
        missed = set().union(*(ids - members for members in seen))
        assert lying.count and len(missed) <= 1, seen
        assert ids in seen or not is_holder, "the liar was out, and nobody else"
        assert max(it.step() for it in honest) >= since + FEWEST_STEPS

    play(SEED, tmp_path / "world", scene)
