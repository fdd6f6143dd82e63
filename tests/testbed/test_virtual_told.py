"""The words of daemons are compared with the truth: each kind of falsehood is found."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from p2p_dtfm.daemon.telemetry.problems import NO_STEPS, NOT_LET_IN
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.judge import Reference
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.told.figures import _has_looked, _rate, marks_s
from p2p_dtfm.testbed.virtual.seeds.told.told import Comparison
from p2p_dtfm.testbed.virtual.seeds.told.whom import _has_prepared
from p2p_dtfm.testbed.virtual.seeds.told.world import Word
from p2p_dtfm.testbed.virtual.seeds.told.wrong import STANDS_S
from p2p_dtfm.testbed.virtual.swarm import HOURS, Swarm, play
from p2p_dtfm.web.state import Problem
from tests.testbed.begun import are_in_views_of, begun, participant_of

STEPS = 16
LATER_S = 200.0
"""A comparison is so much later: as if the word stayed for so long, and the world as it is."""
GONE = "12D3KooW" + "G" * 44

Change = Callable[[Word], Word]


def status(**changed: Any) -> Change:
    return lambda word: replace(word, status={**word.status, **changed})


def live(**changed: Any) -> Change:
    return lambda word: replace(word, live=msgspec.structs.replace(word.live, **changed))


def wrong(what: str, name: str = "") -> Change:
    return live(problems=(Problem(what, "", name),))


def agreement(reason: str) -> Change:
    return lambda word: status(agreement={**word.status["agreement"], "reason": reason})(word)


def heard(ago_s: float) -> Change:
    return lambda word: replace(
        word,
        members=[{**it, "heard_s_ago": ago_s} for it in word.members if not it["is_this_peer"]],
    )


def times(name: str, factor: float) -> Change:
    return lambda word: status(**{name: word.status[name] * factor})(word)


class Suspecting(Word):
    """A word that holds all others for lost."""

    @property
    def suspected(self) -> tuple[str, ...]:
        return tuple(others(self))


def silent(word: Word) -> Word:
    told = wrong("b fell silent, stands still or went on with others", NO_STEPS)(word)
    return Suspecting(**vars(told))


FALSE: dict[str, tuple[Change, str]] = {
    "state, outside": (status(state="joining"), "says that it is joining"),
    "state, spare": (status(state="spare"), "says that it is spare"),
    "state, done": (status(state="done"), "says that it is done"),
    "state, leaving": (status(state="leaving"), "says that it is leaving"),
    "state, waits": (status(state="waiting", reason="for others"), "takes steps, and says"),
    "reason, failure": (
        status(state="waiting", reason="a failure: the members agree"),
        "says waiting: a failure",
    ),
    "reason, step": (status(reason="step 15 of 16"), "and is at step"),
    "reason, layers": (
        status(state="syncing", reason="waits for 3 layers as of step 4"),
        "and 0 are late",
    ),
    "asks the dead": (
        status(state="joining", reason=f"asks {GONE} to be let in"),
        f"names {GONE} in asks",
    ),
    "waits for the dead": (status(waits_for=[GONE]), f"names {GONE} in waits_for"),
    "waits for Active": (
        lambda word: agreement(f"waits for Active from {others(word)[0]}")(word),
        "waits for Active from b, which has said so",
    ),
    "waits for the gone": (agreement(f"waits for what {GONE} contribute"), "names"),
    "steps, too many": (status(step=15), "tells of 15 steps of 16"),
    "steps, too few": (status(step=1), "tells of 1 steps, and is at"),
    "loss": (lambda word: times("loss", 1.01)(word), "tells of loss"),
    "held-out loss": (lambda word: times("held_out_loss", 1.01)(word), "tells of held-out loss"),
    "rate": (lambda word: times("tokens_per_s", 8.0)(word), "steps/s, and"),
    "no rate": (status(tokens_per_s=None), "tells of no rate"),
    "end": (lambda word: times("eta_s", 1.5)(word), "s left, at"),
    "members": (lambda word: status(members=[*word.status["members"], GONE])(word), "as a member"),
    "heard long ago": (heard(9.0), "and was called"),
    "steps of its own": (live(committed_here=1), "has seen 1 steps, and told of"),
    "checkpoint": (status(whole_checkpoint_step=12), "tells of a whole checkpoint of step 12"),
    "no steps": (wrong("no step was committed for 12 s: b", NO_STEPS), "and committed one"),
    "let in": (wrong("for 2 min nobody has let this peer in", NOT_LET_IN), "and is in a view"),
    "disk": (wrong("the history cannot be written", "history"), "has refused nothing"),
    "data": (wrong("data shard 12 is missing here", "data"), "and takes steps"),
    "untold": (lambda word: replace(word, now_s=word.now_s + 40.0), "and nothing is wrong"),
    "a wait that is none": (
        status(waits=[{"owner": "x", "place": "y", "waited_s": 9.0}]),
        "tells of a wait that is none",
    ),
}


def others(word: Word) -> list[str]:
    return [it for it in word.status["members"] if it != word.me]


class Falsified(Comparison):
    """A comparison that hears of the first peer something else than it tells."""

    change: Change | None = None
    first = ""

    def _word_of(self, peer: Peer) -> Word | None:
        word = super()._word_of(peer)
        return self.change(word) if word is not None and self.change and peer.name == "a" else word


def found(told: Falsified, change: Change, now_s: float) -> str:
    """The first finding, once the falsehood has lasted."""
    told.change = change
    word = told._word_of(told.world.by_id[told.first])
    assert word is not None
    texts = [it.text for it in told._falsehoods(word)]
    problem = told.look(now_s)
    told._since_s = {key: since_s - LATER_S for key, since_s in told._since_s.items()}
    problem = problem or told.look(now_s)
    told.change = None
    assert not told.look(now_s), "what is told is so"
    return "; ".join(texts) if problem else ""


def as_told(peer: Peer) -> Reference:
    """A reference in which the losses that the peer has told so far are right."""
    steps = [event for event in peer.events() if event["event"] == "step"]
    losses = [event["loss"] for event in steps]
    held_out = {it["step"]: it["held_out_loss"] for it in steps if it["held_out_loss"]}
    return Reference(losses, losses, held_out, Path())


async def two_that_train(swarm: Swarm, run: Path) -> Falsified:
    """Two peers that train, as one of them computes, some steps after the beginning."""
    swarm.are_slow = True  # so that it lasts
    peers = await begun(swarm, run, "ab")
    await swarm.until(lambda: all(it.takes_part for it in peers), "both take part", 60)
    await swarm.until(are_in_views_of(peers, 2), "both are in a view", 60)
    told = Falsified(swarm, STEPS)
    while min(peer.told_step() for peer in peers) < 5:
        now_s = swarm.now_s
        await swarm.until(lambda: swarm.now_s >= now_s + 1.0, "a second", 2)  # noqa: B023
        assert not told.look(swarm.now_s)
    trains = participant_of(peers[0]).trainer
    await swarm.until(lambda: trains._steps.computes, "a step is computed", 60)
    return told


def test_each_falsehood_is_found_and_nothing_that_is_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)
    missed: dict[str, str] = {}

    async def scene(swarm: Swarm) -> None:
        told = await two_that_train(swarm, run)
        told.world.reference = as_told(swarm.peers[0])
        told.world._gone_s[GONE] = swarm.now_s - LATER_S
        told.first = swarm.peers[0].peer_id
        for name, (change, says) in FALSE.items():
            problem = found(told, change, swarm.now_s)
            if says not in problem:
                missed[name] = problem

    play(1, tmp_path / "world", scene)
    assert not missed


def test_who_is_heard_and_goes_on_is_not_missing(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        told = await two_that_train(swarm, run)

        def is_found() -> bool:
            told.look(swarm.now_s)
            word = told._word_of(swarm.peers[0])
            assert word is not None
            return any("which goes on" in it.text for it in told._falsehoods(silent(word)))

        assert not is_found(), "it has just begun: what it was before may be told still"
        await swarm.until(is_found, "it is known to all", 30)

    play(1, tmp_path / "world", scene)


def test_what_the_world_has_carried_and_computed_bounds_what_was_given(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        told = await two_that_train(swarm, run)
        one, links = swarm.peers[0], swarm.network.links
        swarm.taken[one.peer_id] = 0
        assert "tokens, and it has taken 0" in told.look(swarm.now_s)
        swarm.taken[one.peer_id] = 1 << 40
        carried, links.carried_bytes[one.peer_id] = links.carried_bytes[one.peer_id], 1
        assert "bytes, and 1 were carried" in told.look(swarm.now_s)
        links.carried_bytes[one.peer_id] = carried
        told.world.awake_s[one.peer_id] = 0.0
        links.arrived_s[swarm.peers[1].peer_id, one.peer_id] = 0.0
        assert "and nothing came for" in told.look(swarm.now_s)

    play(1, tmp_path / "world", scene)


def test_a_wait_that_is_told_of_nowhere_is_found(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        told = await two_that_train(swarm, run)
        told.change = status(waits=[])
        for _ in range(15):
            now_s = swarm.now_s
            await swarm.until(lambda: swarm.now_s >= now_s + 1.0, "a second", 2)  # noqa: B023
            if problem := told.look(swarm.now_s):
                assert problem.startswith("a tells nothing of a wait of")
                return
        raise AssertionError("nothing was found")

    play(1, tmp_path / "world", scene)


def test_who_stands_still_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        told = await two_that_train(swarm, run)
        assert not told.look(swarm.now_s)
        told.world.step_s = -math.inf
        assert not told.look(swarm.now_s), "not for long"
        assert told._stands_since_s is not None
        told._stands_since_s -= STANDS_S
        assert "nobody says why: a says training" in told.look(swarm.now_s)

    play(1, tmp_path / "world", scene)


def test_who_is_away_says_that_it_is_paused(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        swarm.stays_resident = True
        one = swarm.peer("a", run=str(run), hours=HOURS, exit_when_done=False)
        swarm.start(one)
        await swarm.until(lambda: one.told_step() >= 2, "steps", 60)
        swarm.leave(one)
        await swarm.until(lambda: one.is_away, "it is paused", 60)
        told = Comparison(swarm, STEPS)
        assert not told.look(swarm.now_s)
        assert one.resident is not None
        shown = one.resident.state()
        said = msgspec.structs.replace(shown.live, state="training")
        one.resident.state = lambda: msgspec.structs.replace(shown, live=said)  # type: ignore[method-assign]
        assert "a is away, and says training" in told.look(swarm.now_s)

    play(1, tmp_path / "world", scene)


def test_a_rate_is_over_the_present_view() -> None:
    events = [
        {"event": "view", "view": 1, "step": 0, "at_s": 1.0},
        {"event": "step", "step": 0, "loss": 5.0, "at_s": 2.0},
        {"event": "view", "view": 2, "step": 1, "at_s": 3.0},
        {"event": "step", "step": 0, "loss": 5.0, "at_s": 3.5},
        {"event": "step", "step": 1, "loss": 5.0, "at_s": 4.0},
        {"event": "step", "step": 2, "loss": None, "at_s": 5.0},
    ]
    assert marks_s(events, 2) == [3.0, 4.0], "neither a step of before, nor the last look"
    steps = [{"event": "step", "step": n, "loss": 5.0, "at_s": 10.0 * n} for n in range(1, 31)]
    assert marks_s([*events, *steps], 2)[0] == 100.0, "the last twenty"


def test_a_rate_leaves_the_time_out_that_a_machine_has_slept() -> None:
    """Seed 990011: one that had slept for 19 s told of the steps of before, and was said to lie."""
    events = [
        {"event": "view", "view": 1, "step": 0, "at_s": 1.0},
        {"event": "step", "step": 0, "loss": 5.0, "at_s": 4.5},
    ]
    spec = SimpleNamespace(tokens_per_step=100, total_steps=40)

    def problems(slept_s: float) -> list[str]:
        word: Any = SimpleNamespace(
            status={"tokens_per_s": 100 / 3.5, "eta_s": 39 * 3.5, "step": 1},
            view=SimpleNamespace(id=SimpleNamespace(number=1)),
            participant=SimpleNamespace(membership=SimpleNamespace(run=SimpleNamespace(spec=spec))),
            peer=SimpleNamespace(
                events=lambda: events, process=SimpleNamespace(behind_ns=int(slept_s * 1e9))
            ),
            now_s=28.0,
        )
        return [it.text for it in _rate(word, None)]  # type: ignore[arg-type]

    assert not problems(slept_s=19.0)
    assert "tells of 0.286 steps/s" in problems(slept_s=2.0)[0]


def test_who_was_away_for_a_look_at_the_model_tells_of_its_last_one() -> None:
    step = {"event": "step", "step": 24, "held_out_loss": None, "at_s": 4.0}
    events = [
        {"event": "view", "view": 1, "step": 0, "at_s": 1.0},
        {"event": "step", "step": 0, "held_out_loss": 5.5, "at_s": 2.0},
        {"event": "view", "view": 7, "step": 24, "at_s": 3.0},
        step,
    ]
    assert _has_looked(events[:2], 1)
    assert not _has_looked(events, 7)
    assert _has_looked([*events, {**step, "step": 25, "held_out_loss": 3.0}], 7)


def test_whose_prepared_is_said_is_not_waited_for_for_long() -> None:
    def stands(step: int, *missing: str) -> Any:
        ledger = SimpleNamespace(view="V", step=step, missing=missing)
        return SimpleNamespace(trainer=SimpleNamespace(_state=SimpleNamespace(ledger=ledger)))

    def has_said(there: Any, is_clear: bool = True) -> bool:
        word: Any = SimpleNamespace(trainer=stands(4, "b").trainer._state, me="a")
        world: Any = SimpleNamespace(
            participant_of=lambda peer_id: there, is_clear=lambda *ends: is_clear
        )
        return _has_prepared(word, world, "b")

    assert has_said(stands(4)) and has_said(stands(5, "b"))
    assert not has_said(stands(4, "b")) and not has_said(stands(3)), "it has not come so far"
    assert not has_said(stands(4), is_clear=False), "it may be on its way"
    assert not has_said(None), "it does not run"


def test_where_no_step_is_under_way_nobody_is_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS)

    async def scene(swarm: Swarm) -> None:
        told = await two_that_train(swarm, run)
        one = participant_of(swarm.peers[0])
        one.membership.agreement._state.attempts.frozen = True
        one.local.status.facts["waits_for"] = [swarm.peers[1].peer_id]
        word = told._word_of(swarm.peers[0])
        assert word is not None
        texts = [it.text for it in told._falsehoods(word)]
        assert "waits for b, and no step is under way" in texts

    play(1, tmp_path / "world", scene)
