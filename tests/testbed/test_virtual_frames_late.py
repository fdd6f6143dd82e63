"""Real daemons in virtual time in pipelines of two stages: a member shows the frames that it has
sent late, and shows nothing else late. An auditor of its neighbour's work waited for them, and
seemed to stand still, or to fetch for too long. One honest auditor after the other was out, and
nobody named the member that they waited for."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.liveness.pace import FLOOR_NS, SECOND_NS
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.daemon.step import lent_parameters
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork
from p2p_dtfm.daemon.trainer.audited.recomputing import Recomputing
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.testbed.lies import in_sums, in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.kinds import KINDS
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end, with_lies
from tests.testbed.pairs import CUT, planned_in_pairs

STEPS = 8
NIGHTLY = pytest.mark.nightly


def _showing_late(says_so: bool) -> Callable[[Lie], None]:
    """Makes a liar that shows frames late. `says_so`: it says that something is on its way to the
    asker."""

    def show_frames_late(lie: Lie) -> None:
        honest, find, is_frame = BlobExchange._serve, OpenStepWork.find, [False]

        def noted(self: OpenStepWork, digest: bytes) -> bytes | None:
            frame = find(self, digest)
            is_frame[0] |= frame is not None
            return frame

        async def serve(self: Any, sender: str, body: bytes) -> bytes:
            is_frame[0] = False
            reply = await honest(self, sender, body)
            if is_frame[0] and lie.is_told(0):
                if not says_so:
                    self._gave_at_s.pop(sender, None)
                await asyncio.sleep(lie.strength)
            return reply

        in_sums.put(OpenStepWork, "find", noted)
        in_sums.put(BlobExchange, "_serve", serve)

    return show_frames_late


def _lack_a_frame_of_others(lie: Lie) -> None:
    """In place of any work that the liar is to compute again, it lacks a frame of an honest member,
    and does not ask for it."""
    honest = Recomputing.work_of

    async def work_of(self: Any, here: Any, peer_id: str) -> bytes:
        if not lie.is_told(here.step):
            return await honest(self, here, peer_id)
        me, pairs = self._tools.me, here.plan.pipelines
        of = next(it for it in pairs if me not in {stage.peer_id for stage in it.stages})
        lack = Lack(of.stages[0].peer_id, Kind.ACTIVATION, CUT, of.microbatches[0])
        self._asked._due[lack] += 1
        try:
            await self._state.until_over(here.view)
        finally:
            self._asked._due.clear()

    in_words.put(Recomputing, "work_of", work_of)


def out_of_views(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, liar: str
) -> tuple[set[str], bool]:
    """The honest members that any honest member's view has left out, and whether the liar was left
    out."""
    planned_in_pairs(monkeypatch, LIES, "ace", "bdf")
    run = with_audits(make_run(tmp_path, STEPS), 1.0, 5)
    schedule = lying_to_the_end(kind, "abcdef", liar, 1.0)

    async def scene(swarm: Swarm) -> tuple[set[str], bool]:
        one = await with_lies(swarm, run, schedule)
        assert one.lying.count
        names = {peer.peer_id: peer.name for peer in swarm.peers}
        told = [event for peer in one.honest() for event in peer.events()]
        seen = [set(event["members"]) for event in told if event["event"] == "view"]
        out = {names[peer_id] for view in seen for peer_id in names.keys() - view}
        return out - {liar}, liar in out

    return play(LIES, tmp_path / "world", scene)


@pytest.mark.parametrize(
    ("liar", "late_s", "holders_alone"),
    [
        ("b", 8.0, False),
        ("b", 8.0, True),
        *(
            pytest.param(*case, marks=NIGHTLY)
            for case in (
                ("a", 8.0, False),
                ("a", 8.0, True),
                ("b", 20.0, False),
                ("e", 20.0, True),
                ("b", 3.0, False),
                ("b", 4.5, True),
            )
        ),
    ],
)
def test_who_shows_late_what_it_has_sent_a_neighbour_costs_no_honest_one_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: str, late_s: float, holders_alone: bool
) -> None:
    """With room for a stage's parameters, members with other layers judge as well. A member late by
    less than all others allow is slow: its frames come several at a time, and the step is as late
    once or twice."""
    monkeypatch.setitem(INSTALLED, "shown-late", _showing_late(says_so=True))
    monkeypatch.setitem(KINDS, "shown-late", KINDS["shown-late"]._replace(strength=late_s))
    if holders_alone:
        monkeypatch.setattr(lent_parameters, "free_bytes", lambda device: 0)
    honest_out, is_out = out_of_views(tmp_path, monkeypatch, "shown-late", liar)
    assert honest_out == set() and is_out == (late_s * SECOND_NS > FLOOR_NS)


@pytest.mark.parametrize("liar", ["b", pytest.param("e", marks=NIGHTLY)])
def test_nor_does_more_than_one_if_it_says_that_it_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    """Then one member's word stands against the other's, and the one in doubt again goes first."""
    monkeypatch.setitem(INSTALLED, "shown-late", _showing_late(says_so=False))
    honest_out, is_out = out_of_views(tmp_path, monkeypatch, "shown-late", liar)
    assert len(honest_out) <= 1 and is_out


@pytest.mark.parametrize("liar", ["d", pytest.param("a", marks=NIGHTLY)])
def test_who_says_that_it_lacks_a_frame_that_it_never_asks_for_costs_one_its_place_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    monkeypatch.setitem(INSTALLED, "opening", _lack_a_frame_of_others)
    honest_out, is_out = out_of_views(tmp_path, monkeypatch, "opening", liar)
    assert len(honest_out) <= 1 and is_out
