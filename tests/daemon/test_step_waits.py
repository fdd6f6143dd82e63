"""What a peer tells of what it lacks, where that is more than is told."""

from types import SimpleNamespace
from typing import Any, cast

from p2p_dtfm.core.messages.work import LACKS_LIMIT, Kind
from p2p_dtfm.daemon.step.mailbox import FrameKey
from p2p_dtfm.daemon.trainer.step_waits import StepWaits
from p2p_dtfm.net.streams.frames import FrameKind
from tests.daemon.trainer_parts import view_of


def waits_of(keys: list[FrameKey]) -> StepWaits:
    view = view_of(1, 2)
    frames = SimpleNamespace(is_writing_to=lambda peer_id: False)
    mailbox = SimpleNamespace(lacks=lambda: keys)
    engine = SimpleNamespace(view=view.id, frames=frames, mailbox=mailbox)
    state = SimpleNamespace(
        view=view, stopped=False, step=3, fetches=False, restart=None, ledger=None
    )
    net = SimpleNamespace(
        blobs=SimpleNamespace(gave_lately=lambda peer_id: False),
        bulk=SimpleNamespace(unacknowledged_bytes=lambda peer_id, lane: 0),
    )
    tools = SimpleNamespace(
        me="me",
        net=net,
        spec=SimpleNamespace(total_steps=10),
        compute=SimpleNamespace(is_idle=True),
    )
    steps = SimpleNamespace(engine=engine, audits=SimpleNamespace(fetches=False))
    return StepWaits(*(cast(Any, it) for it in (tools, state, steps, SimpleNamespace())))


def test_whose_part_is_lacked_is_told_before_whose_sums() -> None:
    """One of many replicas hangs before its part: all lack the sums of all, and of those who wait
    for a part nobody is in the way but that one."""
    sums = [FrameKey(3, FrameKind.GRADIENT_SUM, 0, n, f"a-{n:02}") for n in range(30)]
    hangs = FrameKey(3, FrameKind.GRADIENT_PART, 0, 7, "z")
    work = waits_of([*sums, hangs]).work(())
    assert work is not None and len(work.lacks) == LACKS_LIMIT
    assert (work.lacks[0].peer_id, work.lacks[0].kind) == ("z", Kind.PART)
