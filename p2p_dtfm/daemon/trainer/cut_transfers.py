"""This peer's part of cuts: copies of its layers, sent to guardians that lag, and theirs kept here.

A stage-holder copies its layers beside the first microbatches after the cut's step, before they
are updated. The copies of layers that it alone holds go to their guardians, one after another, in
small pieces that take no more than a tenth of the line. `core.cost_model.cuts` says when.
"""

import asyncio
import logging

from p2p_dtfm.core.cost_model.cuts import LINE_SHARE, CutClock
from p2p_dtfm.core.cost_model.guardians import guarded_pairs
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import is_lineage
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import CutBegun, CutReceipt
from p2p_dtfm.daemon.state_transfer.cut_store import CutStore
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Tools, TrainerState
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.bulk import to_its_end
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.ports import now, rarely
from p2p_dtfm.train.model.layer_copy import PartialCopy, pieces_of
from p2p_dtfm.train.model.layer_state import LayerSnapshot, LayerState
from p2p_dtfm.train.stage.finite import is_finite
from p2p_dtfm.train.stage.tensor_bytes import tensor_from_bytes, tensor_to_bytes

RECEIPT_LIMIT_S = 10.0
"""How long after its last piece a guardian's receipt may take, before a layer is sent anew."""
RETRY_S = 1.0
LANE = "state"
MOST_STEPS_AHEAD = 64
"""How many steps ahead of this peer a copy may be: a guardian without a stage may be a few steps
behind its holder."""
LINEAGE_POLL_S = 0.05

BURST_BYTES = 2 << 20
"""What is sent at once: enough for a connection over a long way to get up to speed."""

log = logging.getLogger("p2p_dtfm.cuts")


def pause_s(took_s: float, sent_bytes: int, bytes_per_s: int) -> float:
    """How long to pause after a burst, so that cuts take no more than a tenth of the line: of its
    time, or of its bytes as far as the rate is known. Probes of long lines often find too low a
    rate."""
    by_time_s = (LINE_SHARE - 1) * took_s
    tenth_s = LINE_SHARE * sent_bytes / max(1, bytes_per_s)
    is_as_known = took_s <= tenth_s / 2  # else others share the line, or it carries less
    return min(by_time_s, tenth_s - took_s) if is_as_known else by_time_s


class Cuts:
    """`begin` and `copied` are called around a step's computing, `committed` after each commit."""

    def __init__(self, tools: Tools, outlet: Outlet, state: TrainerState) -> None:
        self.whole_step: int | None = None
        """Step of the newest whole cut; None where there is none, or guardians do not lag."""
        self.is_twice = False
        """Whether nobody has gone since that cut was whole: then two members have each of its
        copies."""
        self.guardians_have_all = True
        """Where guardians keep up: whether two members had each layer of the last step, as far as
        is known."""
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._workload = workload_of(tools.spec)
        self._store = CutStore(outlet.set_cuts)
        self._view: View | None = None
        self._members: tuple[Member, ...] = ()
        """The members of the last view."""
        self._first_step = 0
        self._clock: CutClock | None = None
        self._lineage = ""
        """The lineage of the newest cut, which may be on its way for longer than lineages are
        remembered."""
        self._copying: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._coming: dict[int, PartialCopy] = {}
        self._begun: dict[str, CutBegun] = {}
        """The newest message of each holder."""
        self._digests: dict[int, str] = {}
        """Digests of the copies that are sent, by layer."""
        self._checking: dict[int, tuple[PartialCopy, asyncio.Task[None]]] = {}
        """By layer: one copy is hashed at a time, however often its last piece comes."""
        self._received = asyncio.Event()

    @property
    def safe_step(self) -> int | None:
        """The step of the newest whole cut, as long as two members have each of its copies."""
        return self.whole_step if self.is_twice else None

    # views --------------------------------------------------------------------------------------

    def take_over(self, view: View, step: int) -> None:
        """From `step` on steps happen in `view`; copies that do not lie on its lineage are gone."""
        before, clock, pace = self._view, self._clock, view.cut_pace
        self.is_twice &= set(self._members) <= set(view.members)
        self._members = view.members
        goes_on = before is not None and view.goes_on_with_cuts_of(before)
        if goes_on and clock is not None and pace is not None:
            self._go_on(view, clock, pace.every_steps)
            return
        self.stop()
        self._view, self._first_step = view, step
        have_all = view.guards.keys() <= view.guarded_at_once and view.starts_with_two_copies
        if view.snapshot.planned and step > 0:  # guardians that lagged may lack steps
            have_all &= before is not None and before.cut_pace is None
        self.guardians_have_all = pace is not None or have_all
        guarded, has_stage = view.guardians_of(self._tools.me), bool(view.layers_of(self._tools.me))
        self._clock = None
        if pace is not None:
            self._clock = CutClock(step, pace.every_steps, guarded, has_stage)
        if self.whole_step is not None:
            self.whole_step = min(self.whole_step, step)
        self._store.name_anew(step, self._outlet.lineage_at(step))
        self._store.keep_from(self.whole_step or 0, self._is_on_lineage)

    def _go_on(self, view: View, clock: CutClock, every_steps: int) -> None:
        """Go on with the cut under way; pieces that are on their way in the view before are
        lost."""
        self._view, clock.every_steps = view, every_steps
        self._stop_sending()
        if clock.travels:
            send = self._send(view, clock, clock.newest, self._lineage)
            self._sending = self._state.watched(send)

    def _stop_sending(self) -> None:
        """Sending may still pause after the last piece of a cut that is whole."""
        if self._sending is not None:
            self._sending.cancel()

    def stop(self) -> None:
        """Nothing more of the view's cuts is sent or taken; what is here stays."""
        checking = [task for _, task in self._checking.values()]
        for task in (self._copying, self._sending, *checking):
            if task is not None:
                task.cancel()
        self._view = self._clock = self._copying = self._sending = None
        self._coming, self._digests, self._begun, self._checking = {}, {}, {}, {}

    def clear(self) -> None:
        """None of the copies here lies on the lineage that counts."""
        self._store.clear()
        self.whole_step = None

    def find(self, layer: int, step: int) -> LayerSnapshot | None:
        """A layer's copy as of a step of the present lineage."""
        return self._store.find(layer, step, self._outlet.lineage_at(step))

    @property
    def kept(self) -> int:
        """What this peer's Prepared says of cuts."""
        return self._clock.kept if self._clock is not None else -1

    def committed(self, view: View, outcome: StepOutcome) -> None:
        """Call it before the takeover that may follow."""
        clock = self._clock
        if self._view is not view:
            return
        if clock is None:
            self._store.clear()  # guardians here have every step
            self.whole_step = None
            self.guardians_have_all = outcome.kept == outcome.step
        elif clock.committed(outcome.step, outcome.kept):
            # one that was begun before this peer came may have been whole before somebody went
            self.whole_step, self.is_twice = clock.safe, clock.safe >= self._first_step
            assert isinstance(view.plan, Plan)
            if view.plan.stage_holders() == (self._tools.me,):
                self._store.clear()  # if this peer is lost, so are its copies
            else:
                self._store.keep_from(clock.safe, self._is_on_lineage)

    def _is_on_lineage(self, step: int, lineage: str) -> bool:
        """Whether a copy may lie on the present lineage. Of steps so long ago that their lineage is
        forgotten nothing is known."""
        present = self._view is not None and step <= self._state.step
        return present and self._outlet.lineage_at(step) in (lineage, "")

    # a stage-holder's part ----------------------------------------------------------------------

    def begin(self, step: int, states: dict[int, LayerState]) -> None:
        """A step begins: where it is time, copy the states from which it starts."""
        clock = self._clock
        if clock is not None and self._copying is None and clock.is_due(step):
            self._copying = asyncio.create_task(self._copy(clock, step, list(states.values())))

    async def copied(self) -> None:
        """The states are about to change: wait until the copies of them are made."""
        copying = self._copying
        if copying is not None:
            await asyncio.wait({copying})
            if not copying.cancelled():
                copying.result()
            self._copying = None

    async def _copy(self, clock: CutClock, step: int, states: list[LayerState]) -> None:
        lineage = self._outlet.lineage_at(step)
        here = self._store.layers(step, lineage)
        missing = [state for state in states if state.layer not in here]
        await rarely.lingers("copy late")
        copies = await asyncio.to_thread(lambda: [state.snapshot() for state in missing])
        if self._clock is clock and self._view is not None:
            self._store.put(lineage, copies)
            self._lineage = lineage
            clock.taken()
            if clock.missing:
                self._stop_sending()
                self._sending = self._state.watched(self._send(self._view, clock, step, lineage))

    async def _send(self, view: View, clock: CutClock, step: int, lineage: str) -> None:
        """Send to one guardian after another, until all have said that they have their layers."""
        assert isinstance(view.plan, Plan)
        pairs = guarded_pairs(view.snapshot, view.plan, view.guards)
        mine = [pair for pair in pairs if pair.holder == self._tools.me]
        self._digests = {}

        def missing_layers() -> set[int]:
            """Layers without a receipt. The last receipts may come while other layers are sent
            anew, and the next cut may begin meanwhile."""
            is_under_way = clock.newest == step and self._view is view
            return set(clock.missing) if is_under_way else set()

        while missing_layers():
            for pair in mine:
                self._tools.net.messenger.tell(pair.guardian, CutBegun(view.id, step, lineage))
                for layer in pair.layers:
                    if layer in missing_layers():
                        copy = self._store.layers(step, lineage)[layer]
                        self._digests[layer] = await asyncio.to_thread(copy.digest)
                        await self._send_layer(view, pair.guardian, pair.bytes_per_s, copy)
            self._received.clear()
            try:
                async with asyncio.timeout(RECEIPT_LIMIT_S):
                    while missing_layers():
                        await self._received.wait()
                        self._received.clear()
            except TimeoutError:
                if late := missing_layers():
                    log.info("sends layers of step %d anew: %s", step, sorted(late))

    async def _send_layer(
        self, view: View, guardian: str, bytes_per_s: int, copy: LayerSnapshot
    ) -> None:
        bulk, began_s, sent_bytes = self._tools.net.bulk, now.monotonic_s(), 0
        pieces = list(pieces_of(copy))
        last_index = len(pieces) - 1
        for index, piece in enumerate(pieces):
            header = FrameHeader(
                view_number=view.id.number,
                view_digest=view.id.snapshot,
                step=copy.version,
                kind=FrameKind.LAYER_STATE,
                index=index,
                layer=copy.layer,
                codec="fp32",
                dtype="float32",
                shape=tuple(piece.shape),
            )
            try:
                await to_its_end(bulk.send(guardian, LANE, header, tensor_to_bytes(piece)))
                sent_bytes += piece.nbytes
                if sent_bytes < BURST_BYTES and index < last_index:
                    continue
                await bulk.flush(guardian, LANE)
            except (Unreachable, Refused) as error:
                log.debug("a copy of layer %d: %s", copy.layer, error)
                await asyncio.sleep(RETRY_S)
                return
            took_s = now.monotonic_s() - began_s
            await asyncio.sleep(pause_s(took_s, sent_bytes, bytes_per_s))
            began_s, sent_bytes = now.monotonic_s(), 0

    def receipt(self, sender: str, message: CutReceipt) -> None:
        """A guardian has a layer's copy. If it got other bytes than were sent, it gets the layer
        anew."""
        clock, view = self._clock, self._view
        if clock is None or view is None or message.view != view.id:
            return
        if self._digests.get(message.layer) == message.digest:
            clock.receipt(sender, message.step, (message.layer,))
            self._received.set()

    # a guardian's part --------------------------------------------------------------------------

    def frame(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """A piece of a copy of a layer that this peer guards. Raises `PeerFault`."""
        view, clock = self._view, self._clock
        if view is None or clock is None or header.view_digest != view.id.snapshot:
            return  # of a view that has not taken over here, or is over: it comes anew if need be
        if view.guardians_of(sender).get(header.layer) != self._tools.me:
            raise PeerFault(f"a copy of layer {header.layer}, which it does not guard", sender)
        layer, step = header.layer, header.step
        coming = self._coming.get(layer)
        form = header.codec, header.dtype
        if step < max(clock.safe, self._first_step, coming.step if coming else 0):
            return
        self._require_near(sender, step, clock)
        if coming is None or coming.step != step:
            count = self._workload.cost(layer).parameter_count
            coming = self._coming[layer] = PartialCopy(layer, step, count)
        if form != ("fp32", "float32") or header.shape != (coming.length(header.index),):
            raise PeerFault(
                f"piece {header.index} of layer {layer} in a form it cannot have", sender
            )
        piece = tensor_from_bytes(payload, header.shape)
        if not is_finite(piece):
            raise PeerFault(f"a copy of layer {layer} that is not finite", sender)
        is_news = coming.take(header.index, piece)
        if coming.is_whole and (is_news or header.index == coming.last_index):
            self._check(sender, coming)

    def _check(self, holder: str, coming: PartialCopy) -> None:
        before, task = self._checking.get(coming.layer, (None, None))
        if task is not None and not task.done():
            if before is coming:
                return  # its receipt is about to be said
            task.cancel()
        self._checking[coming.layer] = (
            coming,
            self._state.watched(self._keep(holder, coming)),
        )

    async def _keep(self, holder: str, coming: PartialCopy) -> None:
        """All of a layer's copy is here: keep it once its lineage is known, and what is frozen of
        the layer is here, and say so. The next view may go on with the cut meanwhile."""
        copy = coming.snapshot(self._tools.spec)
        digest = await asyncio.to_thread(copy.digest)
        await self._tools.stores.initial.keep(coming.layer)
        await rarely.lingers("receipt late")
        end_s = now.monotonic_s() + RECEIPT_LIMIT_S
        while self._lineage_of(holder, coming.step) is None and now.monotonic_s() < end_s:
            await asyncio.sleep(LINEAGE_POLL_S)  # this peer is a step or so behind
        lineage = self._lineage_of(holder, coming.step)
        view, is_wanted = self._view, self._coming.get(coming.layer) is coming
        if view is not None and is_wanted and lineage is not None:
            self._store.put(lineage, [copy])
            receipt = CutReceipt(view.id, coming.step, coming.layer, digest)
            self._tools.net.messenger.tell(holder, receipt)

    def begun(self, sender: str, message: CutBegun) -> None:
        """Note on which lineage the copies lie that `sender` sends. Raises `PeerFault`."""
        view = self._view
        if view is not None and self._clock is not None and message.view == view.id:
            if not view.layers_of(sender):
                raise PeerFault("begins a cut without a stage", sender)
            if not is_lineage(message.lineage):
                raise PeerFault("a cut of a lineage that is no digest", sender)
            self._require_near(sender, message.step, self._clock)
            before = self._begun.get(sender)
            if before is None or before.step <= message.step:  # the last cut's may be late
                self._begun[sender] = message

    def _require_near(self, sender: str, step: int, clock: CutClock) -> None:
        """Raises `PeerFault` for a cut of a step to which its holder cannot have come."""
        if not 0 <= step <= self._state.step + max(1, clock.every_steps) + MOST_STEPS_AHEAD:
            raise PeerFault(f"a copy of step {step}, far from now", sender)

    def _lineage_of(self, holder: str, step: int) -> str | None:
        """None until this peer has come to the step. Then the lineage as this peer knows it; where
        it does not, as the holder says."""
        told = self._begun.get(holder)
        if self._state.step < step or step == 0:
            return None if step else ""
        known = self._outlet.lineage_at(step)
        return known or (told.lineage if told is not None and told.step == step else None)

    def outlives(self, state: LayerState) -> None:
        """Keep a state that is not wanted here any more, if it may be of this view's first cut."""
        clock, view = self._clock, self._view
        if clock is None or view is None or clock.safe >= 0 or state.version != self._first_step:
            return
        self._store.put(self._outlet.lineage_at(state.version), [state.seen_from_cpu()])
