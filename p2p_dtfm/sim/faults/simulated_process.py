"""The process of a simulated peer: its memory, its disk, its events and what it sends."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.consensus.actions import Actions
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.consensus.agreement_state import RunConstants
from p2p_dtfm.core.consensus.views.reminders import Signatures
from p2p_dtfm.core.liveness.liveness import Liveness
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    Gather,
    KnownView,
    SavedState,
)
from p2p_dtfm.core.messages.prepared import SignedPrepared, Statement
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent, Link, PeerRecord, sign_record
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Bar, Member, ViewId
from p2p_dtfm.core.recovery.receipts import Receipts
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.sim.faults.hash_training import (
    GENESIS_VALUE,
    Gradient,
    HashState,
    Partial,
    Tensor,
    applied,
)
from p2p_dtfm.sim.faults.world import SimulatedWorld

Key = tuple[ViewId, int]

RESEND_NS = SECOND_NS
LINGER_NS = 20 * SECOND_NS
"""How long a peer that has left gives state to those that took its place."""
CHECKPOINT_STEPS = 3
PREPARED_KEPT = 2
LINK = Link(round_trip_ns=20_000_000, bytes_per_s=10_000_000)
UNMEASURED = 0.05
"""The share of links that could not be measured. Their peers wait for others that can measure."""


TERMS = StepTerms(
    microbatch_tokens=1,
    evaluation_microbatches=0,
    evaluation_every=1,
    states_every=CHECKPOINT_STEPS,
    total_steps=1 << 40,
    loss_limit=2.0,
)


def sign_for(peer_id: str) -> Callable[[bytes], bytes]:
    """A stand-in for Ed25519: fast, and a changed byte shows."""
    return lambda payload: digest_bytes(peer_id.encode() + payload).encode()


def verify(peer_id: str, payload: bytes, signature: bytes) -> bool:
    return signature == sign_for(peer_id)(payload)


@dataclass(frozen=True)
class SimulatedCheckpoint:
    step: int
    lineage: str
    states: dict[int, HashState]


@dataclass
class SimulatedProcess:
    """`start` begins a process of this peer. The world sets `alive` and `stopped`."""

    name: str
    record: PeerRecord
    world: SimulatedWorld
    alive: bool = True
    stopped: bool = False
    left: bool = False
    gone: bool = False
    slowness: float = 1.0
    clock_rate: float = 1.0
    clock_offset_ns: int = 0
    process: int = 0
    disk: list[SimulatedCheckpoint] = field(default_factory=list)
    view_history: tuple[KnownView, ...] = ()
    """The views that the peer was in. They are on the disk as well."""
    bars: tuple[Bar, ...] = ()
    signatures: tuple[Signatures, ...] = ()
    signed: View | None = None
    """The newest view with the signatures of all its members."""
    views: list[View] = field(default_factory=list)
    taken_over_ns: list[int] = field(default_factory=list)

    def do(self, actions: Actions) -> None:
        """Carry out what the agreement asks."""
        raise NotImplementedError

    def _tick(self) -> None:
        raise NotImplementedError

    def start(self) -> None:
        """Begin a new process, with what is on the disk."""
        self.process += 1
        self.alive, self.stopped = True, False
        self.backlog: list[Callable[[], None]] = []
        self.states: dict[int, HashState] = {}
        self.gradients: dict[Key, dict[int, Gradient]] = {}
        self.partials: dict[Key, dict[str, Partial]] = {}
        self.prepared: dict[Key, dict[str, Statement]] = {}
        self.heard_records: dict[str, tuple[int, int]] = {}
        self.gathered_number = 0
        self.said: set[Key] = set()
        self.last_said: deque[Signed] = deque(maxlen=PREPARED_KEPT)
        self.computing: Key | None = None
        self.receipts: Receipts | None = None
        self.progress = 0
        self.given: Counter[str] = Counter()
        self.resent_ns = self.asked_ns = 0
        self.liveness = Liveness(self.world.liveness_timing)
        constants = RunConstants(
            self.record.run_digest,
            self.world.workload,
            sign_for(self.name),
            verify,
            TERMS,
            self.world.timing,
        )
        me = Member(self.name, self.record.life)
        self.agreement = Agreement(me, constants, self.view_history)
        self.agreement.recall_bars(self.bars)
        self.agreement.recall_signatures(self.signatures)
        self.set_record(links=self._measured_links())
        if self.disk:
            newest = self.disk[-1]
            self.states = dict(newest.states)
            self.agreement.resume(newest.step, self._held(), newest.lineage)
            self.say_saved()
        else:
            genesis = HashState(0, GENESIS_VALUE)
            self.states = {layer: genesis for layer in range(self.world.workload.layer_count)}
            self.agreement.held = self._held()
        self.later(self.world.chance.randrange(self.world.tick_ns), self._tick)

    def set_record(self, **changes: object) -> Signed:
        self.record = msgspec.structs.replace(self.record, **changes)
        signed = sign_record(self.record, sign_for(self.name))
        if self.record.life == self.agreement.me.life:
            self.agreement.set_record(self.record, signed)
        return signed

    def _measured_links(self) -> dict[str, Link]:
        """Links to all that are there when the process starts, as a daemon measures before it asks
        to be let in. Now and then one is left out."""
        chance = random.Random(f"{self.name}{self.record.life}")
        others = sorted(set(self.world.peers) - {self.name})
        return {name: LINK for name in others if chance.random() > UNMEASURED}

    def restart(self) -> None:
        """Start after a crash: a new process in a higher life."""
        life = self.record.life + 1
        self.record = msgspec.structs.replace(self.record, life=life, intent=Intent.TRAIN)
        self.start()
        self.agreement.wants_view()

    def later(self, delay_ns: int, event: Callable[[], None]) -> None:
        process = self.process
        self.world.after(delay_ns, lambda: self.run(process, event))

    def run(self, process: int, event: Callable[[], None]) -> None:
        """Run an event of one process. A stopped process gets it when it goes on."""
        if process != self.process or not self.alive or self.gone:
            return
        if self.stopped:
            self.backlog.append(event)
        else:
            event()

    @property
    def now_ns(self) -> int:
        """The time by this peer's own clock, which is off and runs at its own rate."""
        return self.clock_offset_ns + int(self.world.now_ns * self.clock_rate)

    @property
    def view(self) -> View | None:
        return self.agreement.view

    def _held(self) -> dict[int, int]:
        return {layer: state.version for layer, state in self.states.items()}

    def say(self, text: str) -> None:
        self.world.tell(self.name, text)

    def _enters_gather(self, message: Gather) -> None:
        for signed in message.contributions:
            if signed.peer_id == self.name:
                mine = decode(signed.payload, Contribution)
                joiners = mine.joiners if mine.present is not None else ()
                invariants, heard = self.world.invariants, self.heard_records
                invariants.enters_gather(mine.member, message.number, heard, joiners)

    def send(self, receiver: str, message: AgreementMessage | SignedPrepared | Tensor) -> None:
        if isinstance(message, Gather) and message.number != self.gathered_number:
            self.gathered_number = message.number
            self._enters_gather(message)
        self.liveness.said(receiver, self.now_ns)
        self.world.send(self.name, receiver, message)

    def broadcast(self, signed: Signed) -> None:
        view, next_view = self.agreement.view, self.agreement.next_view
        receivers = set(view.member_ids) if view is not None else set()
        if view is not None and view.snapshot.planned:
            receivers |= {member.peer_id for member in view.snapshot.contributors}
        if next_view is not None:
            receivers |= set(next_view.member_ids)
        for receiver in sorted(receivers - {self.name}):
            self.send(receiver, SignedPrepared(signed))

    def in_training(self) -> tuple[View | None, Plan | None]:
        view = self.agreement.view
        if view is None or self.agreement.frozen or self.left or not isinstance(view.plan, Plan):
            return None, None
        return view, view.plan

    def tensor_key(self, view: ViewId, step: int) -> Key:
        """The key of tensors: each belongs to the step of one view."""
        return view, step

    def wanted(self, view: View) -> set[int]:
        guarded = view.guarded_by(self.name) if view.cut_pace is None else set()
        return set(view.layers_of(self.name)) | guarded

    def apply(self, layer: int, gradient: Gradient | None) -> None:
        state = self.states[layer]
        self.world.invariants.applies(self.name, layer, state, gradient)
        assert gradient is not None
        self.states[layer] = applied(state, gradient)

    def keep_history(self) -> None:
        self.view_history, self.bars = self.agreement.history, self.agreement.bars
        self.signatures = self.agreement.signatures

    def keep_signatures(self) -> None:
        """Keep a view's signatures once all have said that they are in it. The view itself was
        written before."""
        view = self.agreement.view
        if view is not None and view is not self.signed and self.agreement.is_taken_over_by_all:
            self.signed = view
            self.keep_history()

    def sync_held(self) -> None:
        self.world.invariants.holds(self.name, self.states)
        self.agreement.held = self._held()

    def checkpoint(self, step: int, lineage: str) -> None:
        states = {n: state for n, state in self.states.items() if state.version == step}
        if states:
            self.disk = [*self.disk, SimulatedCheckpoint(step, lineage, states)][-2:]
            self.say_saved()

    def say_saved(self) -> None:
        self.agreement.set_saved(
            tuple(SavedState(it.step, it.lineage, tuple(sorted(it.states))) for it in self.disk)
        )

    def is_up_to_date(self, layer: int) -> bool:
        return self.has(layer, self.agreement.step)

    def has(self, layer: int, step: int) -> bool:
        return layer in self.states and self.states[layer].version == step

    def knows_outcome(self, step: int) -> bool:
        """Whether this peer knows the outcome of the last step committed here. One without a stage
        may have learnt of the step late."""
        retained = self.agreement.recovery_evidence.retained
        return retained is not None and retained.step == step and retained.outcome is not None

    def reaches(self, layer: int, step: int, lineage: str | None, before: str | None) -> bool:
        """Whether the state of a layer at `step` of a lineage is here, or one gradient away.

        `before` is the lineage's digest one step earlier. The gradient must be of the view that
        committed the step on this lineage. A state that the present view does not ask for goes with
        the next commit.
        """
        view = self.agreement.view
        if view is None or not (self.agreement.frozen or layer in self.wanted(view)):
            return False
        state, mine = self.states.get(layer), self.agreement.recovery_evidence.lineage
        if state is None:
            return False
        if state.version == step:
            return mine.at(step) == lineage
        return (
            state.version == step - 1
            and before is not None
            and mine.at(step - 1) == before
            and any(
                key[1] == step - 1
                and layer in held
                and self.world.invariants.lineage_after(*key) == lineage
                for key, held in self.gradients.items()
            )
        )
