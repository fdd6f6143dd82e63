"""An audit that does not come to an end here blames nobody, and ends no daemon."""

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.audit.claim_book import ClaimBook, commitment_to
from p2p_dtfm.core.audit.work import OWN_BYTES, WORK_BYTES, sums_digest
from p2p_dtfm.core.messages.audit_messages import COULD_NOT, Audited, Boundary, Claimed
from p2p_dtfm.core.planner.wire_plan import Chunks, WirePlan
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.lent_parameters import NoParameters
from p2p_dtfm.daemon.step.reduction.segment_exchange import sum_digest
from p2p_dtfm.daemon.step.stage_account import Judge, StageAccount
from p2p_dtfm.daemon.trainer.audited import recomputing as recomputing_module
from p2p_dtfm.daemon.trainer.audited.recomputing import Recomputing
from p2p_dtfm.daemon.trainer.step_shards import StepShards, could_have_shards
from p2p_dtfm.daemon.trainer.trainer_state import Stopped, TrainerState
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.train.stage.replay.arithmetic import max_threads
from p2p_dtfm.train.stage.replay.work import NoTensor
from tests.core.audit.parts import LOSSES, NAMES, PLAN, VIEW, share_of, two_by_two
from tests.core.audit.test_boundaries import share_of as stage_of
from tests.core.builders import run_spec


def claim(name: str, threads: int = 1) -> Claimed:
    share = msgspec.structs.replace(share_of(name), threads=threads)
    return Claimed(VIEW, 7, share, b"w" * WORK_BYTES, b"o" * 32, commitment_to(b"o" * 32))


async def offers_nothing() -> None:
    """Nobody waits for states."""


def recomputing(outlet: Any, over_after_s: float = 0.0) -> Recomputing:
    """The audits of a view that is over, or ends after `over_after_s`."""
    tools: Any = SimpleNamespace(spec=run_spec())
    state = TrainerState()
    state.stopped = not over_after_s

    def ends() -> None:
        state.stopped = True
        state.wake.set()

    if over_after_s:
        asyncio.get_running_loop().call_later(over_after_s, ends)
    return Recomputing(tools, outlet, state, lambda digest: None, offers_nothing)


async def result_of(audits: Recomputing, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
    """The result of the audit, once its work has ended."""
    view: Any = None
    task = asyncio.create_task(work())
    await asyncio.wait([task])
    return await audits._result(view, task)


def test_an_error_in_a_replay_is_no_word_against_anybody(caplog: pytest.LogCaptureFixture) -> None:
    audits = recomputing(None)

    async def fail() -> bytes:
        raise MemoryError("no room for an audit")

    assert asyncio.run(result_of(audits, fail)) == COULD_NOT
    assert "no room for an audit" in caplog.text


def test_who_has_claimed_tensors_and_shows_none_is_blamed_and_who_is_not_reached_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputing_module, "STARTS_AGAIN_S", 0.01)
    told: list[tuple[str, str]] = []
    outlet = SimpleNamespace(
        poison=lambda peer_id, cause: told.append(("poison", peer_id)),
        trouble=lambda peer_id, cause: told.append(("trouble", peer_id)),
    )

    async def fail() -> bytes:
        causes = {"denies": "blob 0123 is not here", "is far": "no answer within 5 s"}
        raise BlobUnavailable("0123", causes, {"denies"})

    async def scene() -> None:
        await result_of(recomputing(outlet, over_after_s=0.2), fail)

    with pytest.raises(Stopped):
        asyncio.run(scene())
    assert told == [("poison", "denies"), ("trouble", "is far")]


@pytest.mark.parametrize(
    "error",
    [
        NoParameters(["z"], 3),
        BlobUnavailable("0123", {"z": "blob 0123 is not here"}, {"z"}),
    ],
    ids=["parameters", "parts"],
)
def test_who_has_started_again_since_it_claimed_them_is_not_blamed(error: Exception) -> None:
    """A member that started again has no tensors of its earlier life. It says so before all others
    have heard of the new life: an honest peer was blamed (seed 503099)."""
    told: list[str] = []
    outlet: Any = SimpleNamespace(
        poison=lambda peer_id, cause: told.append(peer_id),
        trouble=lambda peer_id, cause: told.append(peer_id),
    )

    async def fail() -> bytes:
        raise error

    async def scene() -> None:
        await result_of(recomputing(outlet, over_after_s=0.05), fail)

    with pytest.raises(Stopped):
        asyncio.run(scene())
    assert told == []


def test_what_is_withheld_is_told_at_once_and_not_when_all_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The auditors take different times to compute, and have to blame the member together."""

    async def compute_for_ever(self: Judge, *work: object, **more: object) -> None:
        await asyncio.get_running_loop().create_future()

    async def show_nothing(self: Judge, *wanted: object) -> None:
        raise BlobUnavailable("0123", {"z": "blob 0123 is not here"}, {"z"})

    monkeypatch.setattr(Judge, "own_work", compute_for_ever)
    monkeypatch.setattr(Judge, "_parts", show_nothing)
    spec: Any = run_spec()
    judge = Judge(spec, PLAN, None, {}, None, None)  # type: ignore[arg-type]
    claims = {"a": claim("a")}

    async def scene() -> None:
        work = judge.work_of("a", (0, 1), None, 7, claims, {}, adds=True)  # type: ignore[arg-type]
        with pytest.raises(BlobUnavailable):
            await asyncio.wait_for(work, 5)

    asyncio.run(scene())


def test_who_could_not_audit_is_not_waited_for_and_nothing_is_disputed() -> None:
    book = ClaimBook(VIEW, PLAN, 1_000_000)
    book.step_begins(7)
    for name in NAMES:
        book.record(name, claim(name))
    for peer_id, auditor in book.drawn().items():
        book.record(auditor, Audited(VIEW, 7, peer_id, COULD_NOT))
    assert book.not_audited() == () and book.disputed() == []


def test_nobody_computes_with_more_threads_than_a_machine_is_asked_to() -> None:
    spec: Any = run_spec()
    compute = Compute()
    judge = Judge(spec, PLAN, None, {}, compute, None)  # type: ignore[arg-type]
    claims = {"a": claim("a", max_threads() + 1)}
    try:
        work = judge.work_of("a", (0, 1), None, 7, claims, {}, adds=True)  # type: ignore[arg-type]
        assert asyncio.run(work) == bytes(WORK_BYTES) != claims["a"].work
        assert compute.is_idle and compute.done_count == 0
    finally:
        compute.close()


def test_an_audit_of_data_that_nobody_gives_is_none_and_holds_nobody_up() -> None:
    """This peer would wait for the data of its own stage, until they come."""

    async def fetch_shards(needed: set[str]) -> None:
        raise BlobUnavailable("0123", {"z": "blob 0123 is not here"}, {"z"})

    outlet: Any = SimpleNamespace(fetch_shards=fetch_shards)
    batches = SimpleNamespace(shards=lambda step, numbers, held_out: {"0123"})
    tools: Any = SimpleNamespace(spec=run_spec(), me="a", batches=batches)
    read = StepShards(7, (0,), held_out=False, stage_of="b")
    has_data = could_have_shards(tools, outlet, PLAN, read)
    assert asyncio.run(asyncio.wait_for(has_data, 5)) is False


def test_parameters_that_nobody_shows_are_held_against_all_who_claim_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recomputing_module, "STARTS_AGAIN_S", 0.01)
    told: list[str] = []
    outlet: Any = SimpleNamespace(poison=lambda peer_id, cause: told.append(peer_id))

    async def fail() -> bytes:
        raise NoParameters(["y", "z"], 3)

    async def scene() -> None:
        await result_of(recomputing(outlet, over_after_s=0.2), fail)

    with pytest.raises(Stopped):
        asyncio.run(scene())
    assert told == ["y", "z"]


def test_who_claims_to_have_computed_from_what_is_no_tensor_has_done_no_such_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim of the member has the digest of these bytes. So the member says that it got them,
    whoever gives them to the auditor."""

    async def fails(self: Judge, *work: object, **more: object) -> None:
        raise NoTensor("9 bytes in fp32 where 4096 are due")

    monkeypatch.setattr(Judge, "own_work", fails)
    spec: Any = run_spec()
    judge = Judge(spec, PLAN, None, {}, None, None)  # type: ignore[arg-type]
    claims = {"a": claim("a")}
    for adds in (True, False):
        monkeypatch.setattr(Judge, "_parts", _nothing_is_asked_for)
        work = judge.work_of("a", (0, 1), None, 7, claims, {}, adds=adds)  # type: ignore[arg-type]
        assert asyncio.run(work) == bytes(WORK_BYTES) != claims["a"].work


@pytest.mark.parametrize(
    ("change", "is_stated"),
    [
        ({}, True),
        ({"parts": share_of("a", word="flipped").parts}, False),
        ({"losses": {"a": b"l" * len(LOSSES)}}, False),
        ({"losses": {}}, True),
        ({"edges": {0: Boundary(b"", b"s" * 32, b"", b"")}}, False),
    ],
)
def test_a_work_that_is_right_and_not_of_what_stands_beside_it_is_none(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], is_stated: bool
) -> None:
    """The members that got the figures beside the work judge by those figures, and an audit judges
    by the work."""
    said = claim("a")
    said = msgspec.structs.replace(said, share=msgspec.structs.replace(said.share, **change))
    own, right = said.work[:OWN_BYTES], StageAccount(share_of("a").parts, {}, losses=LOSSES)

    async def replayed(self: Judge, *work: object, **more: object) -> tuple[StageAccount, bytes]:
        return right, own

    monkeypatch.setattr(Judge, "own_work", replayed)
    monkeypatch.setattr(Judge, "_edges", _nothing_is_asked_for)
    spec: Any = run_spec()
    judge = Judge(spec, PLAN, None, {}, None, None)  # type: ignore[arg-type]
    work = judge.work_of("a", (0, 1), None, 7, {"a": said}, {}, adds=False)  # type: ignore[arg-type]
    assert asyncio.run(work) == (said.work if is_stated else bytes(WORK_BYTES))


@pytest.mark.parametrize(
    ("norms", "made", "is_right"),
    [((4.0, 9.0), 4.0, True), ((5.0, 9.0), 4.0, False), ((5.0, 9.0), 5.0, False)],
)
def test_the_norm_of_what_a_holder_has_summed_is_part_of_its_work_where_others_hold_other_layers(
    monkeypatch: pytest.MonkeyPatch, norms: tuple[float, float], made: float, is_right: bool
) -> None:
    """The norm is in the holder's claim, by which others judge, and in the digest, by which an
    audit judges."""
    plan, right = two_by_two(), StageAccount(stage_of("a", two_by_two()).parts, {})
    chunks = Chunks(((0, 2), (2, 4)), ("a", "c"))
    wire, summed = WirePlan({0: chunks, 1: chunks}, {}), sum_digest(b"what is added up")
    share = msgspec.structs.replace(stage_of("a", plan), norms={0: norms}, threads=1)
    own = bytes(OWN_BYTES)
    work = own + sums_digest({0: sum_digest(summed)}, {0: made.hex()})
    said = Claimed(VIEW, 7, share, work, b"o" * 32, commitment_to(b"o" * 32))

    async def replayed(self: Judge, *given: object, **more: object) -> tuple[StageAccount, bytes]:
        return right, own

    async def added(self: Judge, *given: object) -> tuple[bytes, float]:
        return summed, 4.0

    monkeypatch.setattr(Judge, "own_work", replayed)
    monkeypatch.setattr(Judge, "_sum", added)
    monkeypatch.setattr(StageAccount, "is_stated", lambda *given: True)
    for asked in ("_edges", "_parts"):
        monkeypatch.setattr(Judge, asked, _nothing_is_asked_for)
    spec: Any = run_spec()
    judge = Judge(spec, plan, wire, {}, None, None)  # type: ignore[arg-type]
    found = asyncio.run(judge.work_of("a", (0, 1), None, 7, {"a": said}, {}, adds=True))  # type: ignore[arg-type]
    assert (found == work) == is_right


async def _nothing_is_asked_for(self: Judge, *wanted: object) -> dict[object, bytes]:
    return {}
