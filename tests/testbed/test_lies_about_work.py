"""A liar computes, withholds, gives and says otherwise from its first lie on only, and only what
its kind names."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2p_dtfm.core.protocol.records import Device, LayerTiming, Link
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.daemon.telemetry.seen_paces import SeenPaces
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.testbed.lies import in_sums, in_work, of_peers
from p2p_dtfm.testbed.lies.daemon import install
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import record

FIRST = 5
STEPS = (FIRST - 1, FIRST)


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (in_work, in_sums, of_peers):
        monkeypatch.setattr(module, "put", monkeypatch.setattr)


def stage(monkeypatch: pytest.MonkeyPatch, kind: str) -> Any:
    """A stage with three microbatches, whose tokens are 1, 2, 3 and whose losses weigh 1."""

    def init(self: Any) -> None:
        self._spec = SimpleNamespace(microbatches_per_step=8)
        self._replay = SimpleNamespace(microbatches=(2, 3, 7))
        tokens = torch.tensor([[1, 2, 3, 4]])
        self._batch = lambda step, number: (tokens[:, :-1], tokens[:, 1:])
        self._weight_of = lambda step, number: 1.0

    monkeypatch.setattr(Microbatches, "__init__", init)
    install(Lie(kind, FIRST))
    return Microbatches()  # type: ignore[call-arg]


def test_other_tokens_are_those_of_its_share_turned_round_but_for_held_out_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar = stage(monkeypatch, "tokens")
    told = {
        (step, n): [it.tolist() for it in liar._batch(step, n)] for step in STEPS for n in (7, 8)
    }
    honest, turned = [[[1, 2, 3]], [[2, 3, 4]]], [[[3, 2, 1]], [[4, 3, 2]]]
    assert told == {(4, 7): honest, (4, 8): honest, (5, 7): turned, (5, 8): honest}


def test_the_last_microbatch_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    liar = stage(monkeypatch, "skipped")
    assert [liar._weight_of(4, n) for n in (2, 3, 7)] == [1.0, 1.0, 1.0]
    assert [liar._weight_of(5, n) for n in (2, 3, 7)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("strength, victims", [(1.0, {"a", "b", "c"}), (0.4, {"a"})])
def test_parts_are_withheld_from_so_many_and_said_to_be_sent(
    strength: float, victims: set[str]
) -> None:
    sent: list[tuple[str, int, FrameKind]] = []

    async def send(peer_id: str, lane: str, header: Any, payload: bytes) -> None:
        sent.append((peer_id, header.step, header.kind))

    install(Lie("withheld", FIRST, strength))
    frames = StepFrames(None, SimpleNamespace(send=send), print)  # type: ignore[arg-type]
    kinds = (FrameKind.GRADIENT_PART, FrameKind.GRADIENT_SUM)

    async def scene() -> None:
        for peer_id in "abc":
            for step in STEPS:
                for kind in kinds:
                    header: Any = SimpleNamespace(step=step, kind=kind, layer=0, index=1)
                    frames.send_later(peer_id, "reduce", header, b"")
        await asyncio.sleep(0)

    asyncio.run(scene())
    due = {(peer, step, kind) for peer in "abc" for step in STEPS for kind in kinds}
    withheld = {(peer, FIRST, FrameKind.GRADIENT_PART) for peer in victims}
    assert set(sent) == due - withheld
    for peer_id in "abc":
        assert frames.has_given(peer_id, FIRST, FrameKind.GRADIENT_PART, 0, 1)
        assert not frames.is_writing_to(peer_id)


def test_what_audits_ask_for_is_shown_before_and_not_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async def account(self: Any, view: Any, plan: Any, step: int) -> None: ...

    monkeypatch.setattr(Audits, "account", account)
    monkeypatch.setattr(Audits, "find", lambda self, digest: b"a part")
    install(Lie("unshown", FIRST))
    liar = Audits.__new__(Audits)
    for step, shown in zip(STEPS, (b"a part", None), strict=True):
        asyncio.run(liar.account(None, None, step))  # type: ignore[arg-type,call-arg]
        assert liar.find("ab") == shown


@pytest.mark.parametrize(
    "kind, colluders, found",
    [
        ("accuse", (), bytes(32)),
        ("lazy", (), b"claimed"),
        ("flip", ("a",), b"claimed"),
        ("flip", (), b"computed"),
    ],
)
def test_what_it_finds_as_an_auditor(
    monkeypatch: pytest.MonkeyPatch, kind: str, colluders: tuple[str, ...], found: bytes
) -> None:
    async def work_of(self: Any, *given: Any, adds: bool) -> bytes:
        return b"computed"

    monkeypatch.setattr(Judge, "work_of", work_of)
    install(Lie(kind, FIRST, colluders=colluders))
    claims: Any = {"a": SimpleNamespace(work=b"claimed")}
    judge = Judge.__new__(Judge)
    told = [
        asyncio.run(judge.work_of("a", (), None, step, claims, {}, adds=True))  # type: ignore[arg-type]
        for step in STEPS
    ]
    assert told == [b"computed", found]


def test_speed_and_lines_are_so_many_times_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = LayerTiming(100, 200)
    honest = Device("cpu", "any", 1 << 30, timing, timing, timing)
    said = record("z", links={"a": Link(50_000, 4_000)}, device=honest)
    monkeypatch.setattr(SelfRecord, "_record", lambda self, is_brief: said)
    install(Lie("speed", 0, 10.0))
    install(Lie("links", 0, 1e-3))
    made = SelfRecord._record(None, False)  # type: ignore[arg-type]
    assert made.device.block == made.device.head == LayerTiming(10, 20)
    assert made.links == {"a": Link(50_000, 4)}


def test_all_but_colluders_are_called_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SeenPaces, "told", lambda self: {})
    paces = SeenPaces("z")
    paces._seen = dict.fromkeys("abc")  # type: ignore[arg-type]
    install(Lie("slander", 0, colluders=("b",)))
    assert paces.told().keys() == {"a", "c"}


def test_noise_is_in_place_of_the_parameters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3
    honest = b"header" + bytes(12 * count)
    monkeypatch.setattr(LayerState, "to_bytes", lambda self: memoryview(honest))
    install(Lie("state", 0))
    given = LayerState.to_bytes(SimpleNamespace(parameter_count=count))  # type: ignore[arg-type]
    assert len(given) == len(honest) and given[:6] == b"header"
    assert given[6 : 6 + 4 * count] != bytes(4 * count)
    assert given[6 + 4 * count :] == bytes(8 * count)
