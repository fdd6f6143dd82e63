"""Lies about others, and about the liar's own machine, lines and states."""

from typing import Any

import msgspec
import numpy

from p2p_dtfm.core.audit.believed_speeds import scaled
from p2p_dtfm.core.audit.work import signed_audit
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Audited
from p2p_dtfm.core.protocol.facts.seen_paces import PACES_LIMIT
from p2p_dtfm.core.protocol.records import Link, PeerRecord
from p2p_dtfm.daemon.node.background.heartbeats import Heartbeats
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.state_transfer.donor import Donor
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.daemon.telemetry.seen_paces import SeenPaces
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies.lie import Lie, put
from p2p_dtfm.train.model.layer_state import LayerState

WRONG = bytes(32)
SLOWEST_NS = 1 << 50
ACCUSES_EVERY_NS = 1_000_000_000
FINE = 1 << 10
"""A strength is counted in so many parts."""
_FLOAT_BYTES = 4
_MOMENTS = 2


def find_what_suits(lie: Lie) -> None:
    """Audits as suits the liar. A colluder's work it finds as claimed. Another's work it finds
    wrong if it lies so (`accuse`), or as claimed without a look (`lazy`)."""
    honest = Judge.work_of

    async def work_of(
        self: Any,
        peer_id: str,
        microbatches: Any,
        batch: Any,
        step: int,
        claims: Any,
        *rest: Any,
        **more: Any,
    ) -> bytes:
        if lie.is_told(step) and (peer_id in lie.colluders or lie.kind == "lazy"):
            work: bytes = claims[peer_id].work
            return work
        found = await honest(self, peer_id, microbatches, batch, step, claims, *rest, **more)
        return WRONG if lie.is_told(step) and lie.kind == "accuse" else found

    put(Judge, "work_of", work_of)


def judge_one_thing_for_some(lie: Lie) -> None:
    """Tells the peer that would be drawn in its place that all is as claimed, and the others that
    it could not audit. The others wait for that peer, which waits for them."""
    honest = Audits._say

    def say(self: Any, here: Any, said: Any) -> None:
        if not isinstance(said, Audited) or not lie.is_told(here.step):
            honest(self, here, said)
            return
        said = with_work(self, said, here.book.claims[said.peer_id].work)
        here.book.record(self._tools.me, said)
        other, chosen = with_work(self, said, COULD_NOT), in_its_place(self._tools.me, here, said)
        for peer_id in here.plan.stage_holders():
            is_told_so = peer_id in (chosen, *lie.colluders) or not chosen
            self._tools.net.messenger.tell(peer_id, said if is_told_so else other)

    put(Audits, "_say", say)


def with_work(audits: Any, said: Audited, work: bytes) -> Audited:
    """The audit with another result, signed anew."""
    tools = audits._tools
    return signed_audit(msgspec.structs.replace(said, work=work), tools.me, tools.net.sign)


def in_its_place(me: str, here: Any, said: Audited) -> str:
    """Who would audit the work if this peer had said that it could not; empty: nobody."""
    book = here.book
    audited = book._at(book._step).audited
    kept, mine = dict(audited), (me, said.peer_id)
    drawn = {(by, peer) for each in book.rounds() for peer, by in each.items()}
    audited.update({it: COULD_NOT if it == mine else kept.get(it, b"?") for it in drawn})
    places = (each.get(said.peer_id, "") for each in book.drawn_instead())
    found = next(filter(None, places), "")
    audited.clear()
    audited.update(kept)
    return found


def accuse_of_silence(lie: Lie) -> None:
    """Accuses all others of silence, again and again."""
    honest = Heartbeats._beat

    def beat(self: Any, now_ns: int) -> None:
        honest(self, now_ns)
        agreement = self._agreement
        if agreement.view is not None and lie.is_told(agreement.step):
            for peer_id in sorted(set(agreement.view.member_ids) - {self._me}):
                self._do(agreement.suspect(peer_id, "so I say", now_ns))

    put(Heartbeats, "_beat", beat)


def accuse_one_of_silence(lie: Lie) -> None:
    """Accuses the same peer as its colluders do. That peer has a link in doubt to each of them, and
    each of them only one. As soon as it is out, they accuse the next one."""
    honest, said_ns = Heartbeats._beat, [0]

    def beat(self: Any, now_ns: int) -> None:
        honest(self, now_ns)
        agreement = self._agreement
        if agreement.view is None or now_ns - said_ns[0] < ACCUSES_EVERY_NS:
            return
        others = sorted(set(agreement.view.member_ids) - {self._me, *lie.colluders})
        if others and lie.is_told(agreement.step):
            said_ns[0] = now_ns
            self._do(agreement.suspect(others[0], "so I say", now_ns))

    put(Heartbeats, "_beat", beat)


def be_fast(lie: Lie) -> None:
    """States a faster device in its record, whatever pace its steps show."""
    honest = SelfRecord._record

    def record(self: Any, is_brief: bool) -> PeerRecord:
        made = honest(self, is_brief)
        if not lie.is_told(0):
            return made
        whole = round(FINE * lie.strength)
        return msgspec.structs.replace(made, device=scaled(made.device, FINE, whole))

    put(SelfRecord, "_record", record)


def call_others_slow(lie: Lie) -> None:
    """States in its record that all whom it has seen work are slow."""

    honest = SeenPaces.told

    def told(self: SeenPaces) -> dict[str, int]:
        if not lie.is_told(0):
            return honest(self)
        victims = sorted(self._seen.keys() - set(lie.colluders))
        return dict.fromkeys(victims[:PACES_LIMIT], SLOWEST_NS)

    put(SeenPaces, "told", told)


def have_other_lines(lie: Lie) -> None:
    """States other lines in its record, to everybody."""
    honest = SelfRecord._record

    def slower(link: Link) -> Link:
        return Link(link.round_trip_ns, max(1, round(link.bytes_per_s * lie.strength)))

    def record(self: Any, is_brief: bool) -> PeerRecord:
        made = honest(self, is_brief)
        links = {peer: slower(link) for peer, link in made.links.items()}
        return msgspec.structs.replace(made, links=links)

    put(SelfRecord, "_record", record)


def give_noise(lie: Lie) -> None:
    """Gives noise in the place of the parameters."""
    honest = LayerState.to_bytes

    def to_bytes(self: LayerState) -> memoryview:
        payload = bytearray(honest(self))
        size = _FLOAT_BYTES * self.parameter_count
        chance = numpy.random.default_rng(0)
        noise = chance.standard_normal(self.parameter_count).astype("<f4").tobytes()
        end = len(payload) - _MOMENTS * size
        payload[end - size : end] = noise
        return memoryview(payload).toreadonly()

    put(LayerState, "to_bytes", to_bytes)


def give_other_gradients(lie: Lie) -> None:
    """Sends other gradients to a peer that follows the steps from a right state, until its place
    begins."""
    honest = Donor._send_gradient

    async def send(self: Any, peer_id: str, view: Any, step: int, layer: int, values: Any) -> None:
        await honest(self, peer_id, view, step, layer, 2 * values if lie.is_told(step) else values)

    put(Donor, "_send_gradient", send)


OF_PEERS = {
    "unlike-audits": judge_one_thing_for_some,
    "silence": accuse_of_silence,
    "silence-of-one": accuse_one_of_silence,
    "speed": be_fast,
    "slander": call_others_slow,
    "links": have_other_lines,
    "state": give_noise,
    "followed": give_other_gradients,
}
"""Lies about audits are not here: every liar has `find_what_suits`."""
