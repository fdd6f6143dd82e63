"""A stage-holder's work of a step as digests, and another's computed once more."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from p2p_dtfm.core.audit.boundaries import TRAINING, Due, beside, boundary_bytes
from p2p_dtfm.core.audit.judging import states_parameters
from p2p_dtfm.core.audit.told_losses import losses_digest, tellers
from p2p_dtfm.core.audit.work import (
    OWN_BYTES,
    WORK_BYTES,
    NormsAlone,
    made_in,
    norms_alone,
    norms_made,
    own_digest,
    sums_digest,
)
from p2p_dtfm.core.messages.audit_messages import Boundary, Claimed, Edges, Got, Parts, Share
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.core.planner.wire_plan import Chunks, WirePlan
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.core.schedule.tied_ends import states_ends, tied_ends
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.lent_parameters import BegunWith, begun_with
from p2p_dtfm.daemon.step.mailbox import Mailbox, segments_of
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork
from p2p_dtfm.daemon.step.reduction.segment_exchange import sum_digest, together
from p2p_dtfm.daemon.step.reduction.step_reduction import Arrived
from p2p_dtfm.daemon.step.stage_tools import WeighedBatches
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.arithmetic import max_threads
from p2p_dtfm.train.stage.replay.work import (
    ACTIVATION,
    GRADIENT,
    Frame,
    GivenWork,
    LentLayer,
    NoTensor,
    Replay,
    Replayed,
    ReplayedEdge,
    SegmentParts,
    added,
    bytes_of,
    from_bytes,
)
from p2p_dtfm.train.stage.tied_head import counted_once, tie
from p2p_dtfm.train.updates.exact_sums import squared_norm
from p2p_dtfm.train.updates.trimmed_sums import trimmed_over

Tensor = Any
_BOUNDARIES = (FrameKind.ACTIVATION, FrameKind.ACTIVATION_GRADIENT)
NO_WORK = bytes(WORK_BYTES)
"""The result of a work that nobody can have done as it is claimed."""
PartsOf = dict[tuple[int, int, str], bytes]
"""Others' parts by segment, chunk and holder."""
Fetch = Callable[[Lack, str, int], Awaitable[bytes]]
"""`fetch(due, blob, size_bytes)`: what a peer has claimed as its part of a chunk, or as a frame
that it has sent a neighbour."""
FRAMES_AT_ONCE = 8
FRAMES_AT_ONCE_BYTES = 128 << 10
"""Each small frame takes a trip, and there may be hundreds. A large one is fetched in several
pieces at once, and more of them would be late over thin lines."""


class UnlikeParts(Exception):
    """A peer has claimed other chunks than its segments have."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        super().__init__(f"the claim of {peer_id} is of other chunks than its segments have")


@dataclass(frozen=True)
class StageAccount:
    """One holder's own gradients, until its next step overwrites them."""

    parts: Parts
    cut: dict[int, SegmentParts]
    """Parts of segments with other holders, by segment."""
    work: OpenStepWork | None = None
    """The open step's work, which keeps the frames that were sent. None where the account is of
    another's work that was replayed."""
    began: BegunWith | None = None
    """The parameters with which the step began, where members hold unlike layers."""
    losses: bytes = b""
    """What the peer should have told of its losses, where another's work was replayed."""
    sent: Edges = field(default_factory=dict)
    """What that peer should have sent its neighbours."""
    _asked: dict[str, bytes] = field(default_factory=dict)
    """The chunk that was asked for last: others fetch it in pieces, and ask again for each."""

    @property
    def parameters(self) -> Mapping[int, bytes]:
        return self.began.digests if self.began is not None else {}

    def is_stated(self, share: Share, peer_id: str) -> bool:
        """Whether a peer's replayed work comes to what stands in its claim. Those that got
        something from that peer judge it by the claim."""
        losses = share.losses.get(peer_id, b"")
        made = made_in(self.parts, self.sent, self.losses if losses else b"")
        return made_in(share.parts, share.edges, losses) == made

    def find(self, digest: str) -> bytes | memoryview | None:
        """The bytes of an own chunk, of a frame that was sent, or of a layer's parameters."""
        if self.work is not None and (frame := self.work.find(bytes.fromhex(digest))) is not None:
            return frame
        if digest in self._asked:
            return self._asked[digest]
        for number, cut in self.cut.items():
            for chunk, each in enumerate(self.parts[number]):
                if each.hex() == digest:
                    self._asked.clear()
                    self._asked[digest] = cut.payload(chunk)
                    return self._asked[digest]
        return self.began.find(digest) if self.began is not None else None


def account_of(
    plan: Plan,
    wire: WirePlan,
    peer_id: str,
    gradients: Mapping[int, Tensor],
    work: OpenStepWork | None = None,
    states: Mapping[int, LayerState] | None = None,
) -> StageAccount:
    """`gradients` are by layer; `states` are those of the peer itself. Reads all of them, so call
    it beside the event loop."""
    began = begun_with(plan, states) if states is not None else None
    account = StageAccount({}, {}, work, began)
    for number, segment in segments_of(plan, peer_id).items():
        mine = [gradients[layer] for layer in segment.layers]
        if len(segment.holders) == 1:
            account.parts[number] = SegmentParts(mine, whole(mine)).digests()
            continue
        account.cut[number] = cut = SegmentParts(mine, wire.chunks[segment.first_layer])
        account.parts[number] = cut.digests()
    return account


def norms_of(
    spec: RunSpec, plan: Plan, peer_id: str, gradients: Mapping[int, Tensor]
) -> NormsAlone:
    """Norms of the segments that nobody else holds. `gradients` are by layer; after the last step
    there are none. Compute thread."""
    ends, reduced = tied_ends(spec), dict(gradients)
    if gradients and ends and set(ends) <= gradients.keys():
        reduced |= tie(spec, reduced)
    norms = {
        number: added_up(
            squared_norm(counted_once(spec, layer, reduced[layer])) for layer in segment.layers
        )
        for number, segment in segments_of(plan, peer_id).items()
        if gradients and len(segment.holders) == 1
    }
    is_mixed = bool(gradients) and states_ends(plan, peer_id, ends)
    return norms_alone(peer_id, plan.segments(), norms, is_mixed=is_mixed)


def whole(gradients: Sequence[Tensor]) -> Chunks:
    """One chunk for a segment that nobody else sums."""
    return Chunks(((0, sum(len(gradient) for gradient in gradients)),), ("",))


def edges_of(plan: Plan, me: str, work: OpenStepWork, due: Due = TRAINING) -> Edges:
    """What this peer's work of a step has taken from the neighbours and given them."""
    noted, activation, gradient = work.edges or {}, *_BOUNDARIES
    return {
        number: Boundary(
            noted.get((activation, number, False), b""),
            noted.get((activation, number, True), b""),
            noted.get((gradient, number, False), b""),
            noted.get((gradient, number, True), b""),
        )
        for number in beside(plan, me, due)
    }


def losses_told(plan: Plan, me: str, step: int, mailbox: Mailbox, own: bytes) -> dict[str, bytes]:
    """Digests of what others have told this peer of their losses in a step, and of its own."""
    known = tellers(plan)
    told = {it: mailbox.losses_told(step, it) for it in known.to(me)}
    return told | {me: own} if me in known.heads else told


def got_by_holder(plan: Plan, wire: WirePlan, me: str, arrived: Mapping[int, Arrived]) -> Got:
    """Digests of what has arrived, by segment and holder, as a share has them."""
    found = {}
    for number, segment in segments_of(plan, me).items():
        if len(segment.holders) > 1:
            here, owners = arrived[segment.first_layer], wire.chunks[segment.first_layer].owners
            found[number] = tuple(
                ()
                if holder == me
                else tuple(
                    here[chunk, holder] if owner == me else b""
                    for chunk, owner in enumerate(owners)
                )
                for holder in segment.holders
            )
    return found


def _sent(result: Replayed, number: int) -> Boundary:
    activation = result.sent.get((ACTIVATION, number), b"")
    return Boundary(b"", activation, b"", result.sent.get((GRADIENT, number), b""))


class Judge:
    """Computes works of one step again, by what this peer has itself and what others give."""

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        wire: WirePlan,
        states: Mapping[int, LayerState | LentLayer],
        compute: Compute,
        fetch: Fetch,
        *,
        recompute: bool = True,
    ) -> None:
        """`states` are those of the layers of the peers that it judges. It need not `recompute`
        where this peer's own stage does not either, and has the same layers or more: the stage's
        own activations are gone when a step is audited."""
        self._recompute = recompute
        self._spec = spec
        self._plan = plan
        self._wire = wire
        self._states = states
        self._compute = compute
        self._fetch = fetch

    async def work_of(
        self,
        peer_id: str,
        microbatches: Sequence[int],
        batch: WeighedBatches,
        step: int,
        claims: Mapping[str, Claimed],
        mine: Mapping[str, StageAccount],
        *,
        adds: bool,
        held_out: Sequence[int] = (),
        due: Due = TRAINING,
    ) -> bytes:
        """`mine`: this peer's own account by its id. Without `adds` the judged peer's sums are
        taken as claimed. `held_out`: microbatches that are evaluated before the others. Raises as
        `fetch` does, and `UnlikeParts`."""
        adds = adds and due.trains
        near = await self._edges(peer_id, claims, due)
        threads = claims[peer_id].share.threads
        if threads > max_threads():
            return NO_WORK  # nobody with this arithmetic computes so
        coming = asyncio.create_task(self._parts(peer_id, claims, mine) if adds else _nothing())
        replay = self.own_work(
            peer_id, microbatches, batch, step, threads, near, held_out=held_out, due=due
        )
        replayed = asyncio.create_task(replay)
        try:  # a peer that withholds its part is known once it says so, to all auditors
            (theirs, own), parts = await asyncio.gather(replayed, coming)
        except NoTensor:  # a peer that claims to have computed from that lies, whoever sent it
            return NO_WORK
        finally:
            coming.cancel()
            replayed.cancel()
        claim = claims[peer_id]
        if own == claim.work[:OWN_BYTES] and not theirs.is_stated(claim.share, peer_id):
            return NO_WORK  # the work is right, but not of what the peer says that it has sent
        if not adds:
            return own + claim.work[OWN_BYTES:]
        known = {**mine, peer_id: theirs}
        sums, norms = dict[int, bytes](), dict[int, str]()
        for number, segment, chunks in self._shared(peer_id):
            made = [
                await self._sum(number, segment, chunk, parts, known)
                for chunk, owner in enumerate(chunks.owners)
                if owner == peer_id
            ]
            sums[number] = sum_digest(b"".join(digest for digest, _ in made))
            norms[number] = added_up(norm for _, norm in made).hex()
        norms = norms if states_parameters(self._plan) else {}
        added_here = sums_digest(sums, norms)
        stated = norms_made(peer_id, self._plan.segments(), claim.share.norms)
        if added_here == claim.work[OWN_BYTES:] and norms != stated:
            return NO_WORK  # likewise, of the norms
        return own + added_here

    async def own_work(
        self,
        peer_id: str,
        microbatches: Sequence[int],
        batch: WeighedBatches,
        step: int,
        threads: int,
        near: Mapping[int, ReplayedEdge] = MappingProxyType({}),
        *,
        held_out: Sequence[int],
        due: Due,
    ) -> tuple[StageAccount, bytes]:
        """A peer's gradients, and the first half of its work. `near`: what came into its stage."""
        given = GivenWork(
            batch=partial(batch, step),
            threads=threads,
            edge=lambda number: near.get(number, ReplayedEdge()),
            recompute=self._recompute,
            weight=partial(batch.weight, step),
            step=step,
        )
        states = {layer: self._states[layer] for layer in self._plan.layers_of(peer_id)}
        replay = await self._compute.run(Replay, self._spec, states, given)
        for number in held_out:  # one call each: others wait, and are to see this peer get on
            await self._compute.run(replay.evaluate, number)
        for number in microbatches:
            await self._compute.run(replay.train, number)
        result = replay.replayed()
        theirs, gradients = StageAccount({}, {}), result.gradients if due.trains else {}
        if due.trains:
            theirs = await self._compute.run_beside(
                account_of, self._plan, self._wire, peer_id, gradients
            )
        of_it = self._spec, self._plan, peer_id, gradients
        alone = await self._compute.run(norms_of, *of_it)
        sent = {number: _sent(result, number) for number in near}
        losses = result.loss_sum, result.held_out_loss_sum
        theirs = replace(theirs, losses=losses_digest(*losses), sent=sent)
        return theirs, own_digest(theirs.parts, losses[0], sent, losses[1], alone)

    def _shared(self, peer_id: str) -> list[tuple[int, Segment, Chunks]]:
        """The segments of a peer that have other holders."""
        return [
            (number, segment, self._wire.chunks[segment.first_layer])
            for number, segment in segments_of(self._plan, peer_id).items()
            if len(segment.holders) > 1
        ]

    async def _parts(
        self, peer_id: str, claims: Mapping[str, Claimed], mine: Mapping[str, StageAccount]
    ) -> PartsOf:
        """What others have given of the chunks that a peer sums, fetched while its work is computed
        again. All holders are asked at once, each for one part after the other."""
        wanted: dict[str, list[tuple[int, int, int]]] = {}
        for number, segment, chunks in self._shared(peer_id):
            for chunk, owner in enumerate(chunks.owners):
                start, end = chunks.bounds[chunk]
                for holder in segment.holders if owner == peer_id else ():
                    if holder != peer_id and holder not in mine:
                        wanted.setdefault(holder, []).append((number, chunk, end - start))
        found: PartsOf = {}

        async def from_one(holder: str) -> None:
            for number, chunk, elements in wanted[holder]:
                payload = await self._part(holder, number, chunk, elements, claims[holder].share)
                found[number, chunk, holder] = payload

        await together(map(from_one, wanted))
        return found

    async def _part(
        self, holder: str, number: int, chunk: int, elements: int, share: Share
    ) -> bytes:
        named = share.parts.get(number, ())
        segment = self._plan.segments()[number]
        if len(named) != len(self._wire.chunks[segment.first_layer].bounds):
            raise UnlikeParts(holder)
        due = Lack(holder, Kind.PART, segment.first_layer, chunk)
        payload = await self._fetch(due, named[chunk].hex(), FLOAT_BYTES * elements)
        if len(payload) != FLOAT_BYTES * elements:
            raise UnlikeParts(holder)
        return payload

    async def _edges(
        self, peer_id: str, claims: Mapping[str, Claimed], due: Due
    ) -> dict[int, ReplayedEdge]:
        """What its neighbours have sent a stage, by microbatch, as fetched from them. All of it is
        in memory at once: what a stage's neighbours keep is bounded."""
        claimed, found = claims[peer_id].share.edges, dict[int, ReplayedEdge]()
        at_once = min(FRAMES_AT_ONCE, FRAMES_AT_ONCE_BYTES // boundary_bytes(self._spec))
        turns = asyncio.Semaphore(max(1, at_once))

        async def fetched(number: int, before: str, after: str) -> None:
            comes_back = number < self._spec.microbatches_per_step
            activation = gradient = None
            activation_out = gradient_out = ""
            if before:
                lines = self._wire.boundaries[before, peer_id]
                gradient_out, codec = lines.gradient, lines.activation
                lack = Lack(before, Kind.ACTIVATION, min(layers), number)
                payload = await self._frame(turns, lack, claimed[number].activation_in, codec)
                activation = Frame(codec, payload)
            if after:
                lines = self._wire.boundaries[peer_id, after]
                activation_out, codec = lines.activation, lines.gradient
                if comes_back:
                    lack = Lack(after, Kind.GRADIENT, max(layers) + 1, number)
                    payload = await self._frame(turns, lack, claimed[number].gradient_in, codec)
                    gradient = Frame(codec, payload)
            found[number] = ReplayedEdge(activation, gradient, activation_out, gradient_out)

        layers, around = self._plan.layers_of(peer_id), beside(self._plan, peer_id, due)
        await together([fetched(number, *it) for number, it in around.items()])
        return {number: found[number] for number in around}

    async def _frame(self, turns: asyncio.Semaphore, due: Lack, digest: bytes, codec: str) -> bytes:
        shape = self._spec.boundary_shape(1)
        size_bytes = codec_of(codec, self._spec.codecs).payload_bytes(math.prod(shape))
        async with turns:
            return await self._fetch(due, digest.hex(), size_bytes)

    async def _sum(
        self,
        number: int,
        segment: Segment,
        chunk: int,
        parts: PartsOf,
        known: Mapping[str, StageAccount],
    ) -> tuple[bytes, float]:
        """The sum of all holders' parts of a chunk: its digest and squared norm."""
        values = [
            known[holder].cut[number].part(chunk)
            if holder in known
            else from_bytes(parts.pop((number, chunk, holder)))
            for holder in segment.holders
        ]
        trimmed = trimmed_over(self._spec, self._plan, segment)
        total = await self._compute.run_beside(added, values, trimmed)
        return sum_digest(bytes_of(total)), await self._compute.run_beside(squared_norm, total)


async def _nothing() -> PartsOf:
    return {}
