"""Lies of a liar about others, and about what it is itself and has."""

from typing import Any

import msgspec
import numpy

from p2p_dtfm.core.protocol.records import Device, LayerTiming, Link, PeerRecord
from p2p_dtfm.daemon.machine import world
from p2p_dtfm.daemon.node.background import Background
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.daemon.telemetry.device_pace import DevicePace
from p2p_dtfm.daemon.telemetry.seen_paces import SeenPaces
from p2p_dtfm.testbed.lies.lie import Lie, put
from p2p_dtfm.train.model.layer_state import LayerState

WRONG = bytes(32)
SLOWEST_NS = 1 << 50
_FLOAT_BYTES = 4
_MOMENTS = 2


def find_what_suits(lie: Lie) -> None:
    """Of a fellow's work what it claims; of others', where that is the lie, something else, or
    what they claim as well."""
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
        if lie.is_told(step) and (peer_id in lie.fellows or lie.kind == "lazy"):
            work: bytes = claims[peer_id].work
            return work
        found = await honest(self, peer_id, microbatches, batch, step, claims, *rest, **more)
        return WRONG if lie.is_told(step) and lie.kind == "accuse" else found

    put(Judge, "work_of", work_of)


def accuse_of_silence(lie: Lie) -> None:
    """All others, again and again."""
    honest = Background._beat

    def beat(self: Any, now_ns: int) -> None:
        honest(self, now_ns)
        agreement = self._agreement
        if agreement.view is not None and lie.is_told(agreement.step):
            for peer_id in sorted(set(agreement.view.member_ids) - {self._me}):
                self._do(agreement.suspect(peer_id, "so I say", now_ns))

    put(Background, "_beat", beat)


def be_fast(lie: Lie) -> None:
    """By its record, however slow its steps show it to be."""
    honest = world.Machine.measure_device

    def faster(timing: LayerTiming) -> LayerTiming:
        factor = lie.strength
        return LayerTiming(
            max(1, round(timing.forward_ns / factor)), max(1, round(timing.backward_ns / factor))
        )

    def measure(*arguments: Any, **more: Any) -> Device:
        found: Device = honest(*arguments, **more)
        return msgspec.structs.replace(
            found,
            embedding=faster(found.embedding),
            block=faster(found.block),
            head=faster(found.head),
        )

    put(world.Machine, "measure_device", measure)
    put(DevicePace, "seen", lambda *arguments: None)


def call_others_slow(lie: Lie) -> None:
    """All whom it has seen work, by its record."""

    def told(self: SeenPaces) -> dict[str, int]:
        return dict.fromkeys(sorted(self._seen), SLOWEST_NS)

    put(SeenPaces, "told", told)


def have_other_lines(lie: Lie) -> None:
    """By its record, to everybody."""
    honest = SelfRecord._record

    def slower(link: Link) -> Link:
        return Link(link.round_trip_ns, max(1, round(link.bytes_per_s * lie.strength)))

    def record(self: Any, is_brief: bool) -> PeerRecord:
        made = honest(self, is_brief)
        links = {peer: slower(link) for peer, link in made.links.items()}
        return msgspec.structs.replace(made, links=links)

    put(SelfRecord, "_record", record)


def give_noise(lie: Lie) -> None:
    """In place of the parameters."""
    honest = LayerState.to_bytes

    def to_bytes(self: LayerState) -> bytes:
        payload = bytearray(honest(self))
        size = _FLOAT_BYTES * self.parameter_count
        chance = numpy.random.default_rng(0)
        noise = chance.standard_normal(self.parameter_count).astype("<f4").tobytes()
        end = len(payload) - _MOMENTS * size
        payload[end - size : end] = noise
        return bytes(payload)

    put(LayerState, "to_bytes", to_bytes)


OF_PEERS = {
    "silence": accuse_of_silence,
    "speed": be_fast,
    "slander": call_others_slow,
    "links": have_other_lines,
    "state": give_noise,
}
"""Of auditors there is `find_what_suits`, which every liar has."""
