"""A stage-holder's work of a step as digests, and another's computed once more."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2p_dtfm.core.audit.work import by_owner, combined, short_digest, work_digest
from p2p_dtfm.core.messages.audit_messages import Claimed
from p2p_dtfm.core.planner.wire_plan import Chunks, WirePlan
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.mailbox import segments_of
from p2p_dtfm.daemon.step.segment_exchange import sum_digest
from p2p_dtfm.daemon.step.stage_tools import BatchOf
from p2p_dtfm.daemon.step.step_reduction import Got
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import (
    Replayed,
    SegmentParts,
    added,
    bytes_of,
    from_bytes,
    replay,
)

Tensor = Any
Fetch = Callable[[str, str, int], Awaitable[bytes]]
"""`fetch(peer_id, blob, size_bytes)`: of a chunk, what a peer has claimed as its part."""


class UnlikeParts(Exception):
    """A peer has claimed other chunks than its segments have."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        super().__init__(f"the claim of {peer_id} is of other chunks than its segments have")


@dataclass(frozen=True)
class StageAccount:
    """One holder's own gradients, until its next step overwrites them."""

    parts: dict[int, tuple[bytes, ...]]
    """By segment, a digest for each holder (`Account.parts`)."""
    chunks: dict[int, tuple[bytes, ...]]
    """By segment with other holders, of each chunk."""
    cut: dict[int, SegmentParts]

    def find(self, digest: str) -> bytes | None:
        """The bytes of an own chunk."""
        for number, digests in self.chunks.items():
            for chunk, each in enumerate(digests):
                if each.hex() == digest:
                    return self.cut[number].payload(chunk)
        return None


def account_of(
    plan: Plan, wire: WirePlan, peer_id: str, gradients: Mapping[int, Tensor]
) -> StageAccount:
    """`gradients` by layer. Reads all of them: beside the event loop."""
    account = StageAccount({}, {}, {})
    for number, segment in segments_of(plan, peer_id).items():
        mine = [gradients[layer] for layer in segment.layers]
        if len(segment.holders) == 1:
            account.parts[number] = (combined(short_digest(bytes_of(each)) for each in mine),)
            continue
        chunks = wire.chunks[segment.first_layer]
        account.cut[number] = cut = SegmentParts(mine, chunks)
        account.chunks[number] = digests = cut.digests()
        account.parts[number] = by_owner(digests, chunks.owners, segment.holders)
    return account


def got_by_holder(
    plan: Plan, wire: WirePlan, me: str, got: Mapping[int, Got]
) -> dict[int, tuple[bytes, ...]]:
    """As an `Account` has it."""
    found = {}
    for number, segment in segments_of(plan, me).items():
        if len(segment.holders) > 1:
            arrived, owners = got[segment.first_layer], wire.chunks[segment.first_layer].owners
            mine = [chunk for chunk, owner in enumerate(owners) if owner == me]
            found[number] = tuple(
                b"" if holder == me else combined(arrived[chunk, holder] for chunk in mine)
                for holder in segment.holders
            )
    return found


class Judge:
    """Computes works of one step again, by what this peer has itself and what others give."""

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        wire: WirePlan,
        states: Mapping[int, LayerState],
        compute: Compute,
        fetch: Fetch,
    ) -> None:
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
        batch: BatchOf,
        step: int,
        claims: Mapping[str, Claimed],
        mine: Mapping[str, StageAccount],
    ) -> bytes:
        """`mine`: this peer's own account by its id. Raises as `fetch` does, and `UnlikeParts`."""
        result: Replayed = await self._compute.run(
            replay,
            self._spec,
            self._states,
            microbatches,
            partial(batch, step),
            claims[peer_id].threads,
        )
        theirs = await self._compute.run_beside(
            account_of, self._plan, self._wire, peer_id, result.gradients
        )
        known = {**mine, peer_id: theirs}
        sums = {}
        for number, segment in segments_of(self._plan, peer_id).items():
            if len(segment.holders) > 1:
                chunks = self._wire.chunks[segment.first_layer]
                own = [n for n, owner in enumerate(chunks.owners) if owner == peer_id]
                digests = [
                    await self._sum(number, segment, chunks, chunk, claims, known) for chunk in own
                ]
                sums[number] = sum_digest(b"".join(digests))
        return work_digest(theirs.parts, sums, result.loss_sum)

    async def _sum(
        self,
        number: int,
        segment: Segment,
        chunks: Chunks,
        chunk: int,
        claims: Mapping[str, Claimed],
        known: Mapping[str, StageAccount],
    ) -> bytes:
        """The digest of what all holders' parts of a chunk add up to."""
        start, end = chunks.bounds[chunk]
        parts = []
        for holder in segment.holders:
            if holder in known:
                parts.append(known[holder].cut[number].part(chunk))
                continue
            named = claims[holder].parts.get(number, ())
            if len(named) != len(chunks.bounds):
                raise UnlikeParts(holder)
            payload = await self._fetch(holder, named[chunk].hex(), FLOAT_BYTES * (end - start))
            if len(payload) != FLOAT_BYTES * (end - start):
                raise UnlikeParts(holder)
            parts.append(from_bytes(payload))
        total = await self._compute.run_beside(added, parts)
        return sum_digest(bytes_of(total))
