"""From its first lie on, and not before, a liar signs something else than it has computed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy
import pytest

from p2p_dtfm.core.commit import step as transaction
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.step.reduction.step_reduction import _Courses
from p2p_dtfm.daemon.step.step_engine import LocalResult
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.testbed.lies import in_sums, in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie

HONEST = Prepared(
    view=ViewId(1, "00" * 32),
    step=5,
    peer_id="z",
    squared_norms={0: 2.0},
    loss_sum=3.0,
    token_count=64,
    held_out_loss_sum=4.0,
    held_out_token_count=64,
    ready_for=None,
    base="ab" * 32,
    states={1: bytes([1]) * 16},
)
CHANGED = {
    "norm": {"squared_norms": {0: 4.0}},
    "count": {"token_count": 128},
    "digest": {"states": {1: bytes(16)}},
    "lineage": {"base": "00" * 32},
}


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A liar's process is changed for good, and that of the tests is restored."""

    def put(owner: Any, name: str, made: Any) -> None:
        monkeypatch.setattr(owner, name, made)

    for owner, name in ((step_loop.StepLoop, "_say_prepared"), (transaction, "fault_of")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    for module in (in_words, in_sums):
        monkeypatch.setattr(module, "put", put)


@pytest.mark.parametrize("kind", sorted(CHANGED))
def test_a_signed_lie_is_in_one_field(kind: str, put_back: None) -> None:
    INSTALLED[kind](Lie(kind, 5))
    before = msgspec.structs.replace(HONEST, step=4)
    for prepared, changed in ((before, {}), (HONEST, CHANGED[kind])):
        signed = step_loop.sign_prepared(prepared, lambda payload: b"")  # type: ignore[attr-defined]
        assert decode(signed.payload, Prepared) == msgspec.structs.replace(prepared, **changed)


@pytest.mark.parametrize(
    "kind, strength, field, told",
    [("loss", 1.0, "loss_sum", 6.0), ("held-out", 0.5, "held_out_loss_sum", 6.0)],
)
def test_what_it_says_of_its_losses_it_goes_by_itself(
    kind: str, strength: float, field: str, told: float, put_back: None
) -> None:
    """Otherwise its lineage would differ from the others', and they would find that instead of the
    lie."""
    said: list[tuple[int, float]] = []

    def take(self: Any, view: None, step: int, local: LocalResult) -> None:
        said.append((step, getattr(local, field)))

    step_loop.StepLoop._say_prepared = take  # type: ignore[method-assign,assignment]
    INSTALLED[kind](Lie(kind, 5, strength))
    loop: Any = SimpleNamespace(_tools=SimpleNamespace(me="z"))
    local = LocalResult({0: 2.0}, 3.0, 64, 4.0, 64)
    for step in (4, 5):
        step_loop.StepLoop._say_prepared(loop, None, step, local)  # type: ignore[arg-type,call-arg]
    assert said == [(4, getattr(local, field)), (5, told)]
    impossible = msgspec.structs.replace(HONEST, loss_sum=-1.0)
    assert transaction.fault_of(impossible, None) == ""  # type: ignore[attr-defined]


class Sent:
    """What a reduction sent, by receiver."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def header(self, *what: Any) -> None: ...

    def send_later(self, peer_id: str, lane: str, header: None, payload: bytes) -> None:
        self.values[peer_id] = numpy.frombuffer(payload, dtype="<f4").tolist()


@pytest.mark.parametrize(
    "kind, sent_kind, told",
    [
        ("part", FrameKind.GRADIENT_PART, {"a": [-1.0], "b": [-1.0]}),
        ("part", FrameKind.GRADIENT_SUM, {"a": [1.0], "b": [1.0]}),
        ("unlike-sums", FrameKind.GRADIENT_SUM, {"a": [1.1], "b": [1.2]}),
    ],
)
def test_what_others_are_sent(
    kind: str, sent_kind: FrameKind, told: dict[str, list[float]], put_back: None
) -> None:
    INSTALLED[kind](Lie(kind, 5))
    for step, expected in ((4, {peer_id: [1.0] for peer_id in told}), (5, told)):
        sent = Sent()
        courses = _Courses(None, sent, step, 0, "fp32")  # type: ignore[arg-type]
        for peer_id in told:
            payload = numpy.float32([1.0]).tobytes()
            asyncio.run(courses.send(peer_id, sent_kind, 0, 1, payload))
        for peer_id, values in expected.items():
            assert sent.values[peer_id] == pytest.approx(values)
