"""Copies of a holder's layers on their way to a guardian that lags, and kept there."""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.peers.wire import CutBegun
from p2p_dtfm.daemon.state_transfer.cut_store import CutStore
from p2p_dtfm.daemon.trainer import cut_transfers
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts, pause_s
from p2p_dtfm.daemon.trainer.trainer import Trainer
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.train.model.layer_state import LayerSnapshot, LayerState
from tests.core.planning import Link, Peer, name_of, snapshot
from tests.daemon.trainer_parts import SPEC, trainer_tools

HOLDER, GUARDIAN = name_of(0), name_of(1)
STEP = 7
STEP_NS = 1_000_000_000
LAYERS = SPEC.model.layers + 2


def lagging_view(holder: str, guardian: str) -> View:
    link = Link(round_trip_ns=80_000_000, bytes_per_s=1_000_000_000)
    found = snapshot([Peer()] * 2, workload_of(SPEC), link=link)
    stage = Stage(holder, 0, LAYERS, 1)
    pipeline = Pipeline((stage,), 0, SPEC.microbatches_per_step)
    return View(found, Plan((pipeline,), (guardian,), STEP_NS))


VIEW = lagging_view(HOLDER, GUARDIAN)


def lineage_of(step: int) -> str:
    return f"{step:064x}"


class Outlet:
    def __init__(self) -> None:
        self.cuts: tuple[SavedState, ...] = ()
        self.remembers = True

    def set_cuts(self, cuts: tuple[SavedState, ...]) -> None:
        self.cuts = cuts

    def lineage_at(self, step: int) -> str:
        return lineage_of(step) if self.remembers else ""


@dataclass
class End:
    """One peer's cuts; what they send reaches `other`."""

    cuts: Cuts
    outlet: Outlet
    state: TrainerState


@dataclass
class Line:
    """Messenger and bulk plane of one end."""

    me: str
    deliver: Callable[[str, Any, Any], None]
    told: list[Any] = field(default_factory=list)

    def tell(self, peer_id: str, message: Any) -> None:
        self.told.append(message)
        self.deliver(self.me, message, None)

    async def send(self, peer_id: str, lane: str, header: Any, payload: Any) -> None:
        assert (peer_id, lane) == (GUARDIAN, "state")
        self.deliver(self.me, header, bytearray(payload))

    async def flush(self, peer_id: str, lane: str) -> None:
        assert (peer_id, lane) == (GUARDIAN, "state")


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def run(scenario: Callable[[End, End], Awaitable[None]]) -> None:
        async def whole() -> None:
            ends: dict[str, End] = {}

            def deliver(sender: str, message: Any, payload: Any) -> None:
                other = ends[GUARDIAN if sender == HOLDER else HOLDER].cuts
                if isinstance(message, CutBegun):
                    other.begun(sender, message)
                elif payload is None:
                    other.receipt(sender, message)
                else:
                    other.frame(sender, message, payload)

            for name in (HOLDER, GUARDIAN):
                (tmp_path / name).mkdir()
                tools = trainer_tools(tmp_path / name, name, Line(name, deliver))
                outlet, state = Outlet(), TrainerState()
                state.view, state.step = VIEW, STEP
                any_outlet: Any = outlet
                ends[name] = End(Cuts(tools, any_outlet, state), outlet, state)
                ends[name].cuts.take_over(VIEW, STEP)
            try:
                await scenario(ends[HOLDER], ends[GUARDIAN])
            finally:
                for end in ends.values():
                    end.cuts.stop()

        asyncio.run(asyncio.wait_for(whole(), 20))

    return run


def states_at(version: int) -> dict[int, LayerState]:
    found = {layer: LayerState.genesis(SPEC, layer) for layer in range(LAYERS)}
    for state in found.values():
        state.version = version
    return found


def outcome(step: int, kept: int) -> StepOutcome:
    return StepOutcome(step, 1.0, 1.0, 1, None, None, kept)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_a_guardian_gets_what_the_states_were_at_the_cut(play: Callable[..., None]) -> None:
    async def scenario(holder: End, guardian: End) -> None:
        assert VIEW.cut_pace is not None, "80 ms would be more than 2% of the step"
        states = states_at(STEP)
        digests = {layer: state.digest() for layer, state in states.items()}
        holder.cuts.begin(STEP, states)
        await holder.cuts.copied()
        for state in states.values():
            state.parameters.add_(1.0)
        assert holder.cuts.kept == -1, "nobody has it yet"
        await until(lambda: holder.cuts.kept == STEP)
        (kept,) = guardian.outlet.cuts
        assert kept == SavedState(STEP, lineage_of(STEP), tuple(range(LAYERS)))
        for layer, digest in digests.items():
            copy = guardian.cuts.find(layer, STEP)
            assert copy is not None and copy.digest() == digest
            restored = LayerState.from_bytes(SPEC, layer, copy.to_bytes())
            assert (restored.digest(), restored.version) == (digest, STEP)

    play(scenario)


def test_a_kept_copy_becomes_a_state_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is as large as a layer. A peer whose heart does not beat meanwhile is taken for
    dead."""
    copied_in: list[int] = []
    to_bytes = LayerSnapshot.to_bytes

    def noted(copy: LayerSnapshot) -> memoryview:
        copied_in.append(threading.get_ident())
        return to_bytes(copy)

    async def scenario() -> None:
        tools, states = trainer_tools(tmp_path), states_at(STEP)
        trainer = Trainer(tools, Outlet())  # type: ignore[arg-type]
        cuts: Any = SimpleNamespace(find=lambda n, step: states[n].snapshot())
        trainer._restarting._cuts = cuts
        monkeypatch.setattr(LayerSnapshot, "to_bytes", noted)
        found = await trainer._restarting._load(1, STEP)
        assert found is not None and found.digest() == states[1].digest()
        tools.compute.close()

    asyncio.run(scenario())
    assert copied_in and threading.get_ident() not in copied_in


def test_the_next_cut_begins_when_the_one_before_is_whole(play: Callable[..., None]) -> None:
    async def scenario(holder: End, guardian: End) -> None:
        every = VIEW.cut_pace.every_steps if VIEW.cut_pace is not None else 0
        step, states = STEP, states_at(STEP)
        holder.cuts.begin(step, states)
        await until(lambda: holder.cuts.kept == STEP)
        for step in range(STEP, STEP + every):
            kept = holder.cuts.kept
            for end in (holder, guardian):
                end.state.step = step + 1
                end.cuts.committed(VIEW, outcome(step, kept))
            await holder.cuts.copied()
            for state in states.values():
                state.version = step + 1
            holder.cuts.begin(step + 1, states)
        assert (holder.cuts.whole_step, guardian.cuts.whole_step) == (STEP, STEP)
        await until(lambda: holder.cuts.kept == STEP + every)
        assert [cut.version for cut in guardian.outlet.cuts] == [STEP, STEP + every]
        step = STEP + every
        for end in (holder, guardian):
            end.state.step = step + 1
            end.cuts.committed(VIEW, outcome(step, step))
        assert [cut.version for cut in guardian.outlet.cuts] == [step], "the older one may go"
        assert holder.outlet.cuts == (), "of the only stage-holder no copy outlives its states"

    play(scenario)


def test_who_pauses_after_the_last_piece_of_a_cut_does_not_outlive_the_next(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The paused task was forgotten, and did not end with the daemon."""
    pauses_s = itertools.chain([0.0] * (LAYERS - 1), itertools.repeat(60.0))
    module = "p2p_dtfm.daemon.trainer.cut_transfers"
    monkeypatch.setattr(f"{module}.pause_s", lambda *of: next(pauses_s))

    async def scenario(holder: End, guardian: End) -> None:
        every = VIEW.cut_pace.every_steps if VIEW.cut_pace is not None else 0
        holder.cuts.begin(STEP, states_at(STEP))
        while holder.cuts.kept < STEP:
            await asyncio.sleep(0)
        before = holder.cuts._sending
        assert before is not None and not before.done()
        await holder.cuts.copied()
        for step in range(STEP, STEP + every):
            holder.state.step = step + 1
            holder.cuts.committed(VIEW, outcome(step, STEP))
        holder.cuts.begin(STEP + every, states_at(STEP + every))
        await until(lambda: holder.cuts._sending is not before)
        holder.cuts.stop()
        _, left = await asyncio.wait({before}, timeout=0.5)
        assert not left

    play(scenario)


def test_receipts_may_come_while_layers_are_sent_anew(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Meanwhile the next cut may begin, whose copies are not made yet."""
    monkeypatch.setattr("p2p_dtfm.daemon.trainer.cut_transfers.RECEIPT_LIMIT_S", 0.05)
    caplog.set_level("INFO", "p2p_dtfm.cuts")

    async def scenario(holder: End, guardian: End) -> None:
        every = VIEW.cut_pace.every_steps if VIEW.cut_pace is not None else 0
        line: Any = guardian.cuts._tools.net.messenger
        receipts: list[Any] = []
        deliver, line.deliver = line.deliver, lambda *receipt: receipts.append(receipt)
        holder.cuts.begin(STEP, states_at(STEP))
        await holder.cuts.copied()
        bulk: Any = holder.cuts._tools.net.bulk
        send, again = bulk.send, asyncio.Event()

        async def commits_meanwhile(*frame: Any) -> None:
            await send(*frame)
            if len(receipts) >= LAYERS and holder.cuts.kept == -1:
                for receipt in receipts:
                    deliver(*receipt)
                for step in range(STEP, STEP + every):
                    holder.state.step = step + 1
                    holder.cuts.committed(VIEW, outcome(step, holder.cuts.kept))
                again.set()

        await until(lambda: len(receipts) == LAYERS)
        bulk.send = commits_meanwhile
        await again.wait()
        await until(lambda: holder.cuts._sending is None or holder.cuts._sending.done())
        assert holder.state._failure is None and holder.cuts.whole_step == STEP
        assert [r.message.count("anew") for r in caplog.records] == [1], "once, before they came"

    play(scenario)


@pytest.mark.parametrize("remembers", [True, False], ids=["soon", "long after"])
def test_a_cut_goes_on_in_the_next_view_if_all_stay_in_their_places(
    play: Callable[..., None], remembers: bool
) -> None:
    """On a thin line a cut is on its way for longer than lineages are remembered."""
    following = msgspec.structs.replace(VIEW.snapshot, number=2, previous=VIEW.id)
    after = View(following, VIEW.plan)
    assert after.goes_on_with_cuts_of(VIEW)
    failed = View(msgspec.structs.replace(following, planned=False), VIEW.plan)
    assert not failed.goes_on_with_cuts_of(VIEW) and not VIEW.goes_on_with_cuts_of(after)

    async def scenario(holder: End, guardian: End) -> None:
        lost: list[Any] = []
        line: Any = holder.cuts._tools.net.bulk
        deliver, line.deliver = line.deliver, lambda *message: lost.append(message)
        holder.cuts.begin(STEP, states_at(STEP))
        await holder.cuts.copied()
        await until(lambda: bool(lost))
        line.deliver = deliver
        for end in (holder, guardian):
            end.outlet.remembers = remembers
            end.state.step, end.state.view = STEP + 2, after
            end.cuts.take_over(after, STEP + 2)
        holder.cuts.begin(STEP + 2, states_at(STEP + 2))
        await until(lambda: holder.cuts.kept == STEP)
        assert [cut.version for cut in guardian.outlet.cuts] == [STEP]

    play(scenario)


def test_a_spare_that_comes_while_a_cut_is_under_way_calls_the_next_one_safe(
    tmp_path: Path,
) -> None:
    """It called no cut safe as long as it was in the view. Of the first that it hears of it does
    not know whether somebody has gone since that was whole."""
    outlet: Any = Outlet()
    state = TrainerState()
    state.view, state.step = VIEW, STEP + 2
    spare = Cuts(trainer_tools(tmp_path, name_of(2), Line(name_of(2), print)), outlet, state)
    spare.take_over(VIEW, STEP + 2)
    spare.committed(VIEW, outcome(STEP + 2, kept=STEP))
    assert spare.whole_step == STEP and spare.safe_step is None
    spare.committed(VIEW, outcome(STEP + 5, kept=STEP + 4))
    assert spare.safe_step == STEP + 4


def test_what_a_guardian_looks_at_as_the_next_view_begins_is_kept_in_that_view(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last piece came again meanwhile, and was taken to be looked at already. Nothing came of
    that look, and the holder sent all layers a third time, ten seconds later."""
    after = View(msgspec.structs.replace(VIEW.snapshot, number=2, previous=VIEW.id), VIEW.plan)
    looks, ends = list[str](), asyncio.Event()

    async def lingers(where: str) -> None:
        if where == "receipt late":
            looks.append(where)
            await ends.wait()

    monkeypatch.setattr(cut_transfers.rarely, "lingers", lingers)

    async def scenario(holder: End, guardian: End) -> None:
        holder.cuts.begin(STEP, states_at(STEP))
        await holder.cuts.copied()
        await until(lambda: len(looks) == LAYERS)
        for end in (holder, guardian):
            end.state.view = after
            end.cuts.take_over(after, STEP)
        holder.cuts._digests = {}
        await until(lambda: holder.cuts._digests.keys() == set(range(LAYERS)))
        await asyncio.sleep(0.1)
        assert len(looks) == LAYERS, "each is looked at still"
        ends.set()
        await asyncio.wait_for(until(lambda: holder.cuts.kept == STEP), 5)

    play(scenario)


def test_guardians_that_lagged_have_not_all_of_the_last_steps_as_they_begin_to_keep_up(
    play: Callable[..., None],
) -> None:
    """The guardians have been given the states, but the gradients that move them on may still
    travel. Steps that were told to be safe were gone with their holder's death (seed 800762)."""
    assert isinstance(VIEW.plan, Plan)
    longer = msgspec.structs.replace(VIEW.plan, predicted_step_ns=3600 * STEP_NS)
    following = msgspec.structs.replace(VIEW.snapshot, number=2, previous=VIEW.id, planned=True)
    keeps_up = View(following, longer)
    assert VIEW.cut_pace is not None and keeps_up.cut_pace is None

    async def scenario(holder: End, guardian: End) -> None:
        holder.cuts.take_over(keeps_up, STEP)
        assert not holder.cuts.guardians_have_all
        outcome = StepOutcome(STEP, 1.0, 2.0, 64, None, None, kept=STEP)
        holder.cuts.committed(keeps_up, outcome)
        assert holder.cuts.guardians_have_all
        again = View(msgspec.structs.replace(following, number=3, previous=keeps_up.id), longer)
        holder.cuts.take_over(again, STEP + 1)
        assert holder.cuts.guardians_have_all

    play(scenario)


def test_cuts_take_a_tenth_of_the_line() -> None:
    """The share is of the line's time, or of the bytes that it is known to carry."""
    assert pause_s(1.0, 1_000_000, 1_000_000) == 9.0
    assert pause_s(0.2, 1_000_000, 100_000) == pytest.approx(1.8), "it carries more than was probed"
    assert pause_s(0.2, 1_000_000, 10_000_000) == pytest.approx(0.8), "it was slow to begin"
    assert pause_s(1.0, 1_000_000, 10_000_000) == 9.0, "others share it now"


def test_what_cannot_be_a_piece_is_refused(play: Callable[..., None]) -> None:
    async def scenario(holder: End, guardian: End) -> None:
        sent: list[Any] = []
        line: Any = holder.cuts._tools.net.bulk
        line.deliver = lambda _, header, payload: payload and sent.append((header, payload))
        holder.cuts.begin(STEP, states_at(STEP))
        await until(lambda: bool(sent))
        header, payload = sent[0]
        for change in (
            {"index": 1 << 30},
            {"shape": (1,)},
            {"dtype": "float64"},
            {"step": 1 << 40},
            {"layer": 1 << 19},
        ):
            with pytest.raises(PeerFault):
                guardian.cuts.frame(HOLDER, msgspec.structs.replace(header, **change), payload)
        with pytest.raises(PeerFault, match="does not guard"):
            holder.cuts.frame(GUARDIAN, header, payload)
        assert guardian.outlet.cuts == ()

    play(scenario)


def test_a_guardian_tells_of_no_lineage_that_cannot_be(play: Callable[..., None]) -> None:
    """The other members would refuse all that the guardian says, as its own fault."""

    async def scenario(holder: End, guardian: End) -> None:
        begun = CutBegun(VIEW.id, STEP, lineage_of(STEP))
        for change in ({"lineage": "x" * 1000}, {"lineage": "AB" * 32}, {"step": 1 << 40}):
            with pytest.raises(PeerFault):
                guardian.cuts.begun(HOLDER, msgspec.structs.replace(begun, **change))
        with pytest.raises(PeerFault):
            guardian.cuts.begun(HOLDER, msgspec.structs.replace(begun, step=-1))
        guardian.cuts.begun(HOLDER, begun)
        guardian.outlet.lineage_at = lambda step: ""  # type: ignore[method-assign]
        assert guardian.cuts._lineage_of(HOLDER, STEP) == begun.lineage
        guardian.cuts.begun(HOLDER, CutBegun(VIEW.id, STEP - 1, "ab" * 32))
        assert guardian.cuts._lineage_of(HOLDER, STEP) == begun.lineage, "that was told before"

    play(scenario)


def test_the_last_piece_again_and_again_is_checked_once_at_a_time(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last piece may have a few bytes, and each check hashes a whole layer in a thread."""
    checks = 0
    keep = Cuts._keep

    async def counted(self: Cuts, *arguments: Any) -> None:
        nonlocal checks
        checks += 1
        await keep(self, *arguments)

    monkeypatch.setattr(Cuts, "_keep", counted)

    async def scenario(holder: End, guardian: End) -> None:
        sent: dict[int, list[Any]] = {}
        line: Any = holder.cuts._tools.net.bulk

        def note(_: str, header: Any, payload: Any) -> None:
            if payload is not None:
                sent.setdefault(header.layer, []).append((header, payload))

        line.deliver = note
        holder.cuts.begin(STEP, states_at(STEP))
        await until(lambda: len(sent) > 1)
        pieces = sent[min(sent)]
        for header, payload in pieces:
            guardian.cuts.frame(HOLDER, header, payload)
        for _ in range(100):
            guardian.cuts.frame(HOLDER, *pieces[-1])
        assert len(guardian.cuts._coming) == 1
        await until(lambda: bool(guardian.outlet.cuts))
        assert checks == 1
        await until(lambda: guardian.cuts._checking[min(sent)][1].done())
        guardian.cuts.frame(HOLDER, *pieces[-1])
        await until(lambda: checks == 2)  # its holder has not heard of it

    play(scenario)


def test_copies_of_steps_that_nobody_cuts_push_out_no_other_holder_s() -> None:
    """One of a guardian's several holders sends copies of its layers as of later steps. Copies for
    which other holders had receipts were gone, though all members took that cut for whole."""
    cut = STEP + 10
    store = CutStore(lambda found: None)
    whole, mine, its = states_at(STEP), 0, 1
    store.put(lineage_of(STEP), [whole[mine].snapshot(), whole[its].snapshot()])
    store.keep_from(STEP, lambda step, lineage: True)
    store.put(lineage_of(cut), [states_at(cut)[mine].snapshot()])
    for step in range(cut, cut + 5):
        store.put(lineage_of(step), [states_at(step)[its].snapshot()])
    assert store.find(mine, cut, lineage_of(cut)) is not None
    store.keep_from(cut, lambda step, lineage: True)
    assert store.find(mine, cut, lineage_of(cut)) is not None
    assert store.find(mine, STEP, lineage_of(STEP)) is None, "a newer one is whole"
    held = [it for it in range(STEP, cut + 5) if store.find(its, it, lineage_of(it)) is not None]
    assert len(held) <= 3, "nor has who sends many more of them there"
