"""Another's work, computed again here: with the states that this peer holds or is lent, and with
tensors as their senders have claimed them."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from blake3 import blake3

from p2p_dtfm.core.audit.boundaries import TRAINING, Due
from p2p_dtfm.core.audit.claim_book import ClaimBook
from p2p_dtfm.core.commit.step_terms import StepTerms, terms_of
from p2p_dtfm.core.liveness.pace import bytes_per_s_from
from p2p_dtfm.core.messages.audit_messages import COULD_NOT
from p2p_dtfm.core.messages.work import Lack
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.partial_replay import whole_step
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.asked_tensors import AskedTensors
from p2p_dtfm.daemon.step.lent_parameters import Borrowing, NoParameters
from p2p_dtfm.daemon.step.neighbours import held_out_judged
from p2p_dtfm.daemon.step.stage_account import Judge, StageAccount, UnlikeParts
from p2p_dtfm.daemon.step.step_engine import StepEngine
from p2p_dtfm.daemon.trainer.audited.late_words import LateWords
from p2p_dtfm.daemon.trainer.audited.stopped_steps import NOT_DENIED, LateWork, StoppedSteps
from p2p_dtfm.daemon.trainer.step_shards import StepShards, could_have_shards, have_shards
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Stopped, Tools, TrainerState
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.replay.work import LentLayer

STARTS_AGAIN_S = 1.0
"""How long it takes until all have heard that a peer has begun another life."""
Find = Callable[[str], bytes | memoryview | None]
OfferStates = Callable[[], Awaitable[None]]
"""Gives states to those that wait for them at the boundary from which the step started."""

log = logging.getLogger("p2p_dtfm")


@dataclass(frozen=True)
class OpenStep:
    """The step under way."""

    view: View
    plan: Plan
    step: int
    engine: StepEngine
    book: ClaimBook
    mine: StageAccount
    words: LateWords


class Recomputing:
    """Computes one work at a time. `find` gives bytes that this peer itself has claimed."""

    def __init__(
        self,
        tools: Tools,
        outlet: Outlet,
        state: TrainerState,
        find: Find,
        offer_states: OfferStates,
    ) -> None:
        self._tools = tools
        self._outlet = outlet
        self._state = state
        self._offer_states = offer_states
        self._find = find
        self.count = 0
        """Works that were computed again here."""
        self._asked = AskedTensors()
        self._in_flight = 0
        """Fetches under way of what any of several members can give."""

    @cached_property
    def _terms(self) -> StepTerms:
        return terms_of(self._tools.spec)

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """The parts and frames that are waited for, each with the peer that owes it."""
        return self._asked.lacks

    @property
    def fetches(self) -> bool:
        """Whether this peer fetches layers that are lent to it, or the data of a stage that it does
        not hold."""
        return self._in_flight > 0

    async def work_of(self, here: OpenStep, peer_id: str) -> bytes:
        """Another's work as it comes out here, or `COULD_NOT`. Raises `Stopped`."""
        tools, step = self._tools, here.step
        due, evaluates = self._terms.due(step, here.plan) or TRAINING, self._terms.evaluates(step)
        microbatches = whole_step(here.plan, peer_id).microbatches if due.trains else ()
        held_out = held_out_judged(here.plan, peer_id, tools.spec, due) if evaluates else []
        shards = StepShards(step, microbatches, bool(held_out), peer_id)
        judged = self._judged(here, peer_id, shards, held_out, due)
        with tools.recorder.span("audit"):
            found = await self._unless_over(here.view, asyncio.create_task(judged))
        self.count += 1
        self._tools.status.facts["audits"] = self.count
        return found

    async def of_before(self, here: OpenStep, it: LateWork, stopped: StoppedSteps) -> bytes:
        """Whether a work of this step was false in a view that has ended: see
        `StoppedSteps.judged`. Raises `Stopped`."""
        judged = asyncio.create_task(self._judged_late(here, it, stopped))
        return await self._unless_over(here.view, judged)

    async def _judged_late(self, here: OpenStep, it: LateWork, stopped: StoppedSteps) -> bytes:
        if not await self._has_data(it.stopped.plan, stopped.shards_of(it)):
            return NOT_DENIED
        with self._tools.recorder.span("audit"):
            return await stopped.judged(it, here.engine.states)

    async def _judged(
        self, here: OpenStep, peer_id: str, shards: StepShards, held_out: Sequence[int], due: Due
    ) -> bytes:
        tools, engine, own = self._tools, here.engine, here.engine.states
        states: Mapping[int, LayerState | LentLayer] = own
        claims = here.book.claims
        borrows = not here.book.has_layers(tools.me, peer_id)
        if not borrows:
            await have_shards(tools, self._outlet, self._state, here.view, here.plan, shards)
        else:
            of_others = self._fetch_lent, tools.compute, partial(self._bytes_per_s, here.view)
            borrowing = Borrowing(tools.me, tools.spec, here.plan, own, *of_others)
            lent = await borrowing.borrowed(peer_id, claims[peer_id].share.parameters)
            if lent is None or not await self._has_data(here.plan, shards):
                return COULD_NOT
            states = {**own, **lent}
        judge = Judge(
            tools.spec,
            here.plan,
            engine.mailbox.wire,
            states,
            tools.compute,
            self._fetch,
            recompute=engine.work.runner.recompute or borrows,
        )
        return await judge.work_of(
            peer_id,
            shards.microbatches,
            tools.batches,
            here.step,
            claims,
            {tools.me: here.mine},
            adds=peer_id not in here.book.misled(),
            held_out=held_out,
            due=due,
        )

    async def _has_data(self, plan: Plan, shards: StepShards) -> bool:
        with self._under_way():
            return await could_have_shards(self._tools, self._outlet, plan, shards)

    # what comes of it ---------------------------------------------------------------------------

    async def _unless_over(self, view: View, work: "asyncio.Task[bytes]") -> bytes:
        try:
            while not self._state.is_over(view):
                await self._state.done_or_woken(work)
                if work.done():
                    return await self._result(view, work)
                self._state.wake.clear()
                await self._offer_states()
            raise Stopped
        finally:
            work.cancel()
            self._state.wake.set()

    async def _result(self, view: View, work: "asyncio.Task[bytes]") -> bytes:
        """What a recomputation has come to. What others withhold is lost like any tensor: the step
        is repeated. A failure on this peer is no word against anybody."""
        try:
            return work.result()
        except asyncio.CancelledError:
            raise
        except NoParameters as found:
            await self._wait_for_restart(view)
            for peer_id in found.peer_ids:
                self._outlet.poison(peer_id, "claims parameters that are none")
        except UnlikeParts as found:
            self._outlet.poison(found.peer_id, "a claim of other chunks than its segments have")
        except BlobUnavailable as found:
            if found.denied:
                await self._wait_for_restart(view)
            for peer_id, cause in found.causes.items():
                # a peer that claimed tensors in this step and denies now that it has them is out,
                # like one that sends what nobody should, once all auditors have been told so
                blame = self._outlet.poison if peer_id in found.denied else self._outlet.trouble
                blame(peer_id, f"no tensors for an audit: {cause}")
        except Exception:  # an audit is a favour: whatever goes wrong in it here, training goes on
            log.exception("an audit did not come to an end here")
            return COULD_NOT
        await self._state.until_over(view)

    async def _wait_for_restart(self, view: View) -> None:
        """A peer that denies now what it has claimed may be another life of the same peer. That
        life tells so as soon as it asks to be let in: then the view is over. Raises `Stopped` in
        that case."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STARTS_AGAIN_S):
                await self._state.until_over(view)

    # from others --------------------------------------------------------------------------------

    async def _fetch(self, due: Lack, blob: str, size_bytes: int) -> bytes:
        """Bytes that one peer alone can give. Raises `BlobUnavailable`."""
        if due.peer_id == self._tools.me and (mine := self._find(blob)) is not None:
            return bytes(mine)
        with self._asked.waiting(due):
            return await self._fetch_from([due.peer_id], blob, size_bytes)

    async def _fetch_lent(self, peer_ids: Sequence[str], blob: str, size_bytes: int) -> bytes:
        """Raises `BlobUnavailable`."""
        with self._under_way():
            return await self._fetch_from(peer_ids, blob, size_bytes)

    def _bytes_per_s(self, view: View, peer_id: str) -> int:
        """How fast a peer gives, if this peer's own line carries as much."""
        return min(bytes_per_s_from(it, view) for it in (peer_id, self._tools.me))

    async def _fetch_from(self, peer_ids: Sequence[str], blob: str, size_bytes: int) -> bytes:
        """Raises `BlobUnavailable`."""
        return await self._tools.net.blobs.fetch_bytes(blob, peer_ids, size_bytes, blake3)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
