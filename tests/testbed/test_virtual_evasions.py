"""Real daemons in virtual time: a member flips its gradients. Whenever it is drawn it has all agree
anew, or is gone, before anybody has computed its work again. It then did that step rightly, as the
first step of a view is audited whole, and lied in the next ones. Nobody ever convicted it: at a
rate of a half two thirds of all steps stayed wrong, and it had its place to the end."""

import asyncio
import functools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies import evasions, late_claims
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds import player as players
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end, of_single_sequences

STEPS, FEW = 16, 8
"""Steps, and few steps for eight daemons, whose liars are out in the first ones."""
RATE = 0.5
CONVICTED = (
    "claims another work of the step than it did before",
    "works otherwise than those who computed it again",
    "has sent most of the others other gradients, sums or losses than it claims",
)
"""The second text is for a liar that says no Prepared any more where it is drawn."""
GONE = "was gone when its work was to be computed again"


@pytest.mark.parametrize(
    ("what", "members", "liars", "seed"),
    [
        ("evade", "abcd", "d", 0),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("evade-early", "abcd", "d", 0),
                ("evade", "abcd", "d", 1),
                ("evade", "abcd", "d", 2),
                ("evade-early", "abcd", "d", 1),
                ("evade-early", "abcd", "d", 2),
                ("evade", "abcdefgh", "gh", 0),
                ("evade-early", "abcdefgh", "gh", 3),
            )
        ),
    ],
)
def test_who_stops_the_step_in_which_it_is_drawn_is_convicted_when_that_is_done_again(
    tmp_path_factory: pytest.TempPathFactory, what: str, members: str, liars: str, seed: int
) -> None:
    schedule = lying_to_the_end(what, members, liars, RATE)
    played = Player(tmp_path_factory.mktemp("player"), STEPS).play(LIES + seed, schedule)
    assert played.problem == "" and played.lies
    told = "\n".join(played.reports)
    assert any(reason in told for reason in CONVICTED), told


@pytest.mark.parametrize("what", ["late-part", "late-split"])
@pytest.mark.parametrize(
    ("members", "liars", "seed"),
    [
        ("abcd", "d", 0),
        pytest.param("abcd", "d", 1, marks=pytest.mark.nightly),
        pytest.param("abcdefgh", "gh", 0, marks=pytest.mark.nightly),
    ],
)
def test_who_claims_the_truth_where_it_is_drawn_is_convicted_by_what_it_has_sent(
    tmp_path: Path, what: str, members: str, liars: str, seed: int
) -> None:
    """The liar's audit found nothing wrong; it said no Prepared, and had all agree anew. Nobody
    held it to what had come from it: of 15 lying steps 6 stayed, at a rate of a half. Nor did
    anybody compare two parts of one claim, what it sent and the right work beside it: 8 stayed."""
    schedule = lying_to_the_end(what, members, liars, RATE)
    played = Player(tmp_path, STEPS).play(LIES + seed, schedule)
    told = "\n".join(played.reports)
    assert any(reason in told for reason in CONVICTED), (played, told)
    assert played.problem == "" and played.stayed < played.lies


def stop_before_an_audit(lie: Any) -> None:
    """Stop as soon as the liar has claimed the truth: nobody has said a Prepared by then."""
    liar = evasions._known_where(lie, in_first=False)
    late_claims.claim_what_was_due_if_drawn(lie)
    evasions._stop_where_drawn(lie, liar)


def test_nor_does_it_help_to_stop_the_step_before_anybody_has_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had come from the liar is held against its claim, when the step is done again."""
    monkeypatch.setitem(INSTALLED, "late-part", stop_before_an_audit)
    played = Player(tmp_path, STEPS).play(LIES, lying_to_the_end("late-part", "abcd", "d", RATE))
    told = "\n".join(played.reports)
    assert CONVICTED[2] in told, (played.problem, told)
    assert played.problem == "" and played.stayed < played.lies


@pytest.mark.parametrize(
    ("what", "members", "liars", "seed"),
    [
        ("evade-sum", "abcd", "d", 0),
        ("late-sum", "abcd", "d", 0),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("evade-sum", "abcd", "d", 1),
                ("late-sum", "abcd", "d", 1),
                ("evade-sum", "abcdefgh", "gh", 0),
                ("late-sum", "abcdefgh", "gh", 0),
            )
        ),
    ],
)
def test_whose_sums_are_false_is_convicted_when_the_step_is_done_again(
    tmp_path: Path, what: str, members: str, liars: str, seed: int
) -> None:
    """In the repeated step a member's own work was held against its claim. Its sums, as the others
    got them, were held against nothing."""
    schedule = lying_to_the_end(what, members, liars, RATE)
    played = Player(tmp_path, STEPS).play(LIES + seed, schedule)
    told = "\n".join(played.reports)
    assert any(reason in told for reason in CONVICTED), (played, told)
    assert played.problem == "" and played.stayed < played.lies


def claim_that_other_came(lie: Any, other: bytes = b"o" * 32) -> None:
    """Where the liar is drawn, its claim says that something else came from one of those whose
    parts it summed falsely. The next time it says what came."""
    liar = evasions._known_where(lie, in_first=False)
    late_claims.make_other_sums_until_drawn(lie)
    honest = Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said = await honest(self, here, local)
        if not liar.lies or not await late_claims._knows_that_it_is_drawn(self, here, said, lie):
            return said
        got = dict(said.share.got)
        for number, each in got.items():
            first, *rest = each
            got[number] = (tuple(part and other for part in first), *rest)
        share = msgspec.structs.replace(said.share, got=got)
        return msgspec.structs.replace(said, share=share)

    evasions.put(Audits, "_claim", claim)


@pytest.mark.parametrize(
    ("other", "reason"), [(b"", CONVICTED[0]), (b"o" * 32, "for one that was sent twice")]
)
def test_nor_does_it_help_to_claim_that_something_else_came_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bytes, reason: str
) -> None:
    """The claimed part was not what came in the repeated step, so nobody compared the sums. A
    member that says that nothing came blames nobody; otherwise one of the two says what is not
    so."""
    lie = functools.partial(claim_that_other_came, other=other)
    monkeypatch.setitem(INSTALLED, "evade-sum", lie)
    played = Player(tmp_path, STEPS).play(LIES, lying_to_the_end("evade-sum", "abcd", "d", RATE))
    told = "\n".join(played.reports)
    assert reason in told, (played.lies, played.stayed, told)
    assert played.problem == "" and played.stayed < played.lies


@pytest.mark.parametrize(
    ("what", "members", "liars"),
    [
        ("late-opening", "abcd", "d"),
        ("late-alien", "abcd", "d"),
        pytest.param("late-opening", "abcdefgh", "gh", marks=pytest.mark.nightly),
        pytest.param("late-alien", "abcdefgh", "gh", marks=pytest.mark.nightly),
    ],
)
def test_who_has_nobody_drawn_by_what_cannot_be_true_is_convicted_when_the_step_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, members: str, liars: str
) -> None:
    """A false opening, or an arithmetic that nobody else has, costs a place for ten seconds, and
    nothing was computed again for it."""
    monkeypatch.setattr(players, "make_run", lambda *it: of_single_sequences(make_run(*it)))
    schedule = lying_to_the_end(what, members, liars, RATE)
    played = Player(tmp_path, STEPS).play(LIES, schedule)
    told = "\n".join(played.reports)
    assert any(reason in told for reason in (GONE, *CONVICTED)), (played, told)
    assert len({it.partition(":")[0] for it in played.reports}) == len(liars), told
    assert played.problem == "" and played.stayed < played.lies


def withhold_a_claim_for_a_colluder(lie: Any) -> None:
    """The last colluder withholds its claim where one of them is drawn. It is out for that, and its
    own work is right."""
    liar, honest = evasions._flip_where(lie, in_first=False), Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me = await honest(self, here, local), self._tools.me
        if liar.lies and me == max(lie.colluders):
            await evasions._until_others_have_claimed(self, here)
            if not {*lie.colluders}.isdisjoint(evasions._drawn_by(here.book, me, said)):
                await self._state.until_over(here.view)
        return said

    evasions.put(Audits, "_claim", claim)


@pytest.mark.nightly
def test_where_a_colluder_withholds_its_claim_the_works_of_all_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The colluder alone knew the draw. Nobody computed the work of the one that stayed again."""
    monkeypatch.setitem(INSTALLED, "evade-early", withhold_a_claim_for_a_colluder)
    monkeypatch.setattr(players, "make_run", lambda *it: of_single_sequences(make_run(*it)))
    schedule = lying_to_the_end("evade-early", "abcdefgh", "gh", RATE)
    played = Player(tmp_path, STEPS).play(LIES, schedule)
    told = "\n".join(played.reports)
    assert CONVICTED[0] in told and GONE in told, (played, told)
    assert played.problem == "" and played.stayed < played.lies


def test_of_who_is_gone_when_it_is_drawn_the_others_compute_the_work_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member was back after a second, and had its stage."""
    run, gone = with_audits(make_run(tmp_path, STEPS), RATE, 5), list[str]()

    async def be_gone(audits: Any, view: Any) -> None:
        process = PROCESS.get()
        assert process is not None
        gone.append(process.peer_name)
        await asyncio.Event().wait()

    monkeypatch.setattr(evasions, "_have_all_agree_anew", be_gone)

    async def scene(swarm: Swarm) -> None:
        one = Play(swarm, run, lying_to_the_end("evade", "abcd", "d", RATE))
        lying, first = one.lying, swarm.peers

        async def end_it() -> None:
            await swarm.until(lambda: bool(gone), "it is drawn", 60)
            swarm.kill(swarm.named("d"))
            await asyncio.sleep(0.3)
            swarm.start(swarm.named("d"))

        with put_in(lying, [("d", "evade")]):
            ending = asyncio.create_task(end_it())
            await one.play()
            await ending
        assert any(GONE in report for report in lying.reports), lying.reports
        honest = first[0].daemon
        assert honest is not None and len(gone) == 1
        assert [it["peer_id"] for it in honest.status_json()["barred"]] == [lying.ids["d"]]

    play(LIES, tmp_path / "world", scene)


def test_who_has_another_one_go_whenever_it_is_drawn_is_convicted_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others then have other microbatches, and nobody could be held to their claims. A colluder
    that was back after a second each time kept its liar to the end."""
    run, drawn = with_audits(make_run(tmp_path, STEPS), RATE, 5), list[str]()

    async def wait_until_it_is_over(audits: Any, view: Any) -> None:
        drawn.append("d")
        await audits._state.until_over(view)

    monkeypatch.setattr(evasions, "_have_all_agree_anew", wait_until_it_is_over)

    async def scene(swarm: Swarm) -> list[int]:
        one = Play(swarm, run, lying_to_the_end("evade", "abcd", "d", RATE))

        async def go_and_come_back() -> None:
            count = 0
            while True:
                while len(drawn) == count:
                    await asyncio.sleep(0.05)
                count, colluder = len(drawn), swarm.named("c")
                swarm.kill(colluder)
                await asyncio.sleep(1.0)
                swarm.start(colluder)

        with put_in(one.lying, [("d", "evade")]):
            going = asyncio.create_task(go_and_come_back())
            await one.play()
            going.cancel()
        told = "\n".join(one.lying.reports)
        assert drawn and any(reason in told for reason in CONVICTED), (drawn, told)
        honest = swarm.peers[0].daemon
        assert honest is not None
        assert [it["peer_id"] for it in honest.status_json()["barred"]] == [one.lying.ids["d"]]
        return one.lying.stayed()

    stayed = play(LIES, tmp_path / "world", scene)
    assert len(drawn) == 1 and len(stayed) < STEPS / 3, (drawn, stayed)


def evade_in_another_way(lie: Any) -> None:
    """The liar claims another number of threads in each view's first step than in those in which it
    lies."""
    evasions.stop_when_drawn(lie)
    honest_claim = Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said = await honest_claim(self, here, local)
        if not here.book.has_committed(self._tools.me):
            return said
        other = msgspec.structs.replace(said.share, threads=said.share.threads + 1)
        return msgspec.structs.replace(said, share=other)

    evasions.put(Audits, "_claim", claim)


def evade_without_a_name(lie: Any) -> None:
    """The liar claims last, and where it is drawn it claims an arithmetic that repeats no bits: so
    nobody is drawn."""
    liar, honest, honest_claim = (
        evasions._flip_where(lie, in_first=False),
        Audits._audited,
        Audits._claim,
    )
    evaded = list[int]()

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said, me = await honest_claim(self, here, local), self._tools.me
        if liar.lies:
            await evasions._until_others_have_claimed(self, here)
            if me in evasions._drawn_by(here.book, me, said):
                evaded.append(here.step)
                other = msgspec.structs.replace(said.share, arithmetic="")
                return msgspec.structs.replace(said, share=other)
        return said

    async def audited(self: Any, here: Any) -> Any:
        if liar.lies and here.step in evaded:
            await evasions._have_all_agree_anew(self, here.view)
        return await honest(self, here)

    evasions.put(Audits, "_claim", claim)
    evasions.put(Audits, "_audited", audited)


@pytest.mark.parametrize("way", [evade_in_another_way, evade_without_a_name])
def test_nor_does_it_help_to_do_that_step_again_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    """Work with another number of threads, or by another arithmetic, has other bits, and was held
    against nobody. The liar lied on, and nobody had to go for it."""
    monkeypatch.setitem(INSTALLED, "evade", way)
    played = Player(tmp_path, STEPS).play(LIES, lying_to_the_end("evade", "abcd", "d", RATE))
    told = "\n".join(played.reports)
    assert CONVICTED[0] in told, (played.problem, told)
    assert played.problem == "" and 0 < played.lies <= 3 and played.stayed < played.lies


def stop_in_turn(lie: Any) -> None:
    """Once an honest member is drawn for either liar, a liar stops the step before its claim in
    each further view of the step. It does not lie in that step, and stops it only so often that it
    keeps its place."""
    liar = evasions._flip_where(lie, in_first=False)
    honest, honest_claim = Audits._audited, Audits._claim

    async def audited(self: Any, here: Any) -> Any:
        judges = {here.book.drawn().get(it, it) for it in lie.colluders}
        if liar.lies and not judges <= set(lie.colluders):
            EVADED.add(here.step)
            LEFT[:] = (*lie.colluders, *lie.colluders)
            await asyncio.sleep(here.plan.stage_holders().index(self._tools.me) * 1e-3)
            await evasions._have_all_agree_anew(self, here.view)
        return await honest(self, here)

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said = await honest_claim(self, here, local)
        if LEFT and LEFT[-1] == self._tools.me:
            await evasions._until_others_have_claimed(self, here)
            LEFT.pop()
            await evasions._have_all_agree_anew(self, here.view)
        return said

    evasions.put(Audits, "_audited", audited)
    evasions.put(Audits, "_claim", claim)


LEFT: list[str] = []
"""The liar that stops the step next: the last one."""
EVADED: set[int] = set()
"""Steps in which an honest member was drawn for either liar."""


def test_nor_does_it_help_to_stop_that_step_until_the_lie_in_it_would_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claims in a step's last four views are kept, and each of two colluders may stop it three
    times. They lied on, unless they did so in too many steps within a minute."""
    monkeypatch.setitem(INSTALLED, "evade", stop_in_turn)
    monkeypatch.setattr(players, "make_run", lambda *it: of_single_sequences(make_run(*it)))
    LEFT.clear()
    EVADED.clear()
    schedule = lying_to_the_end("evade", "abcdefgh", "gh", RATE)
    played = Player(tmp_path, FEW).play(LIES, schedule)
    told = "\n".join(played.reports)
    assert any(reason in told for reason in CONVICTED), (played.problem, told)
    assert played.problem == "" and not LEFT and len(EVADED) == 1, EVADED
