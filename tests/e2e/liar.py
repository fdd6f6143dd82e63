"""The program, run as `python -m tests.e2e.liar`: the daemon whose environment says `LIES` lies.

All of them say that they are equal and near, so that plans give each all layers, or as many as
`MEMORY_BYTES` has room for.
`LIES` is a JSON object: what it lies about, from which step on, and to how many steps.
"""

import json
import os
from typing import Any

import msgspec
import numpy

from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.records import Device, LayerTiming, Link
from p2p_dtfm.daemon.machine import world
from p2p_dtfm.daemon.node import participant
from p2p_dtfm.daemon.node.background import Background
from p2p_dtfm.daemon.peers import self_record
from p2p_dtfm.daemon.step.microbatches import Microbatches
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.daemon.step.step_reduction import _Courses
from p2p_dtfm.daemon.trainer import audits, step_loop
from p2p_dtfm.daemon.trainer.audits import Audits
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage import finite, segment_reduction

LIES: dict[str, Any] = json.loads(os.environ.get("LIES", "{}"))
KIND = LIES.get("kind", "")


def lies(step: int) -> bool:
    first = LIES["step"]
    return first <= step < first + LIES.get("count", 1_000_000)


def be_equal_and_near() -> None:
    block, end = LayerTiming(20_000_000, 40_000_000), LayerTiming(500_000, 1_000_000)

    def device(*arguments: object, **more: object) -> Device:
        memory_bytes = int(os.environ.get("MEMORY_BYTES", 4 << 30))
        return Device("cpu", "equal", memory_bytes, end, block, end)

    world.Machine.measure_device = device  # type: ignore[method-assign]
    near = Link(50_000, 4 << 30)
    take = self_record.SelfRecord.make

    def make(self: Any, *arguments: Any) -> Any:
        self._links = dict.fromkeys(self._links, near)
        return take(self, *arguments)

    self_record.SelfRecord.make = make  # type: ignore[method-assign]


def lie_in_prepared() -> None:
    honest = step_loop.sign_prepared

    def sign(prepared: Prepared, signer: Any) -> Any:
        if lies(prepared.step):
            if KIND == "norm":
                norms = dict.fromkeys(prepared.squared_norms, LIES.get("value", 1e30))
                prepared = msgspec.structs.replace(prepared, squared_norms=norms)
            else:
                prepared = msgspec.structs.replace(prepared, loss_sum=LIES.get("value", 1e30))
        return honest(prepared, signer)

    step_loop.sign_prepared = sign  # type: ignore[attr-defined]


def say_each_another_norm() -> None:
    def say_prepared(self: Any, signed: Any, view: Any) -> None:
        prepared = decode(signed.payload, Prepared)
        for number, peer_id in enumerate(sorted(view.member_ids)):
            said = signed
            if lies(prepared.step):
                norms = {n: v * (1 + number) for n, v in prepared.squared_norms.items()}
                other = msgspec.structs.replace(prepared, squared_norms=norms)
                said = sign_prepared(other, self.network.host.identity.sign)
            self.network.messenger.tell(peer_id, participant.SignedPrepared(said))

    participant.Participant.say_prepared = say_prepared  # type: ignore[method-assign]


def send_each_another_sum() -> None:
    honest, seen = _Courses.send, {}

    async def send(self: Any, peer_id: str, kind: Any, chunk: int, elements: int, payload: Any):
        if kind is FrameKind.GRADIENT_SUM and lies(self._step):
            factor = numpy.float32(1.0 + 0.1 * seen.setdefault(peer_id, len(seen) + 1))
            payload = (numpy.frombuffer(bytes(payload), dtype="<f4") * factor).tobytes()
        await honest(self, peer_id, kind, chunk, elements, payload)

    _Courses.send = send  # type: ignore[method-assign]


def send_no_numbers() -> None:
    honest, begin = segment_reduction.SegmentReduction.fill, None
    begin = segment_reduction.SegmentReduction.__init__

    def init(self: Any, spec: Any, codec: Any, step: int, *arguments: Any) -> None:
        begin(self, spec, codec, step, *arguments)
        self.step = step

    def fill(self: Any, layer: int, gradient: Any) -> None:
        honest(self, layer, gradient)
        if lies(self.step):
            start, end = self._layers[layer]
            self.reduced[start:end].fill_(float("nan"))

    for module in (finite, segment_reduction):
        module.is_finite = lambda values: True  # type: ignore[attr-defined]
    segment_reduction.SegmentReduction.__init__ = init  # type: ignore[method-assign]
    segment_reduction.SegmentReduction.fill = fill  # type: ignore[method-assign]


def change_own_gradients() -> None:
    """In its buffers, so that all it claims and sends agrees: flipped, scaled, or bent a little."""
    honest = Microbatches.train

    async def train(self: Any, step: int, replay: Any, on_final: Any = None) -> None:
        def final(layer: int) -> None:
            if lies(step):
                gradient = self._runner.layer_states[layer].gradient_vector()
                if KIND == "bend":
                    gradient[: max(1, len(gradient) // 1000)] += 1e-4
                else:
                    gradient.mul_(
                        {
                            "flip": -1.0,
                            "loud": -10.0,
                            "alien": -1.0,
                            "mute": -1.0,
                            "weak": 0.9,
                            "zeros": 0.0,
                        }[KIND]
                    )
            on_final(layer)

        await honest(self, step, replay, final)

    Microbatches.train = train  # type: ignore[method-assign]


def send_other_activations() -> None:
    """To the next stage, or gradients to the one before, and claim them as well."""
    honest = Microbatches._outgoing

    def outgoing(self: Any, kind: Any, number: int, values: Any) -> Any:
        trains = number < self._spec.microbatches_per_step
        return honest(self, kind, number, values * 1.01 if trains and now_lies(self) else values)

    Microbatches._outgoing = outgoing  # type: ignore[method-assign]


def now_lies(microbatches: Any) -> bool:
    step = microbatches._work.step
    return step is not None and lies(step)


def claim_other_tensors() -> None:
    """Than it has sent its neighbours, or than have come from them."""
    honest, field = audits.edges_of, {"edge": (1, 3), "edgein": (0, 2)}[KIND]

    def edges_of(plan: Any, me: str, work: Any) -> Any:
        edges = honest(plan, me, work)
        if lies(work.step):
            edges = {
                number: type(edge)(
                    *(bytes(len(it)) if n in field else it for n, it in enumerate(edge))
                )
                for number, edge in edges.items()
            }
        return edges

    audits.edges_of = edges_of  # type: ignore[attr-defined]


def send_other_parts() -> None:
    """Others than it claims."""
    honest = _Courses.send

    async def send(self: Any, peer_id: str, kind: Any, chunk: int, elements: int, payload: Any):
        if kind is FrameKind.GRADIENT_PART and lies(self._step):
            payload = (-numpy.frombuffer(bytes(payload), dtype="<f4")).tobytes()
        await honest(self, peer_id, kind, chunk, elements, payload)

    _Courses.send = send  # type: ignore[method-assign]


def add_up_wrongly() -> None:
    """And tell all holders the same."""
    honest, begin = segment_reduction.SegmentReduction.add_parts, None
    begin = segment_reduction.SegmentReduction.__init__

    def init(self: Any, spec: Any, codec: Any, step: int, *arguments: Any) -> None:
        begin(self, spec, codec, step, *arguments)
        self.step = step

    def add_parts(self: Any, chunk: int, parts: Any) -> Any:
        honest(self, chunk, parts)
        mine = self._of(self.reduced, chunk)
        if lies(self.step):
            mine.mul_(-1.0)
        return self._codec.encode(mine, self._turns[chunk])

    segment_reduction.SegmentReduction.__init__ = init  # type: ignore[method-assign]
    segment_reduction.SegmentReduction.add_parts = add_parts  # type: ignore[method-assign]


def find_fault_with_all() -> None:
    """Of each work that it is drawn to compute again."""
    honest = Judge.work_of

    async def work_of(
        self: Any, peer_id: str, microbatches: Any, batch: Any, step: int, *rest: Any, adds: bool
    ):
        found = await honest(self, peer_id, microbatches, batch, step, *rest, adds=adds)
        return bytes(32) if lies(step) else found

    Judge.work_of = work_of  # type: ignore[method-assign]


def say_that_nobody_computes_so() -> None:
    """And flip its gradients."""
    audits.arithmetic_name = lambda device: "cpu-of-its-own"  # type: ignore[attr-defined]
    change_own_gradients()


def open_another_thing() -> None:
    """Than it has committed itself to."""
    honest = Audits._claim

    async def claim(self: Any, here: Any, local: Any):
        said = await honest(self, here, local)
        return msgspec.structs.replace(said, opening=bytes(32)) if lies(here.step) else said

    Audits._claim = claim  # type: ignore[method-assign]


def withhold_prepared() -> None:
    """Once an auditor has found its flipped gradients: then nothing that it says proves them."""
    honest = Audits.account

    async def account(self: Any, view: Any, plan: Any, step: int, *rest: Any):
        made = await honest(self, view, plan, step, *rest)
        while lies(step) and self._tools.me in made.disputed and not self._state.is_over(view):
            await self._state.wait()
        return made

    Audits.account = account  # type: ignore[method-assign]
    change_own_gradients()


def give_noise() -> None:
    honest = LayerState.to_bytes

    def to_bytes(self: LayerState) -> bytes:
        payload = bytearray(honest(self))
        count = self.parameter_count
        noise = numpy.random.default_rng(0).standard_normal(count).astype("<f4").tobytes()
        payload[-3 * 4 * count : -2 * 4 * count] = noise
        return bytes(payload)

    LayerState.to_bytes = to_bytes  # type: ignore[method-assign]


def accuse_everybody() -> None:
    """Of silence, again and again."""
    honest = Background._beat

    def beat(self: Any, now_ns: int) -> None:
        honest(self, now_ns)
        agreement = self._agreement
        if agreement.view is not None and lies(agreement.step):
            for peer_id in set(agreement.view.member_ids) - {self._me}:
                self._do(agreement.suspect(peer_id, "so I say", now_ns))

    Background._beat = beat  # type: ignore[method-assign]


be_equal_and_near()
if KIND in ("norm", "loss"):
    lie_in_prepared()
elif KIND:
    {
        "flip": change_own_gradients,
        "loud": change_own_gradients,
        "weak": change_own_gradients,
        "zeros": change_own_gradients,
        "bend": change_own_gradients,
        "activation": send_other_activations,
        "edge": claim_other_tensors,
        "edgein": claim_other_tensors,
        "part": send_other_parts,
        "sum": add_up_wrongly,
        "accuse": find_fault_with_all,
        "alien": say_that_nobody_computes_so,
        "opening": open_another_thing,
        "mute": withhold_prepared,
        "silence": accuse_everybody,
        "equivnorm": say_each_another_norm,
        "equivsum": send_each_another_sum,
        "nan": send_no_numbers,
        "state": give_noise,
    }[KIND]()

if __name__ == "__main__":
    from p2p_dtfm.cli import main

    main()
