"""Who is suspected of holding up a step: peers that are stuck or lie, never slow or waiting
peers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
import pytest

from p2p_dtfm.core.liveness.drips import LEAST_NS, STEPS, Drips
from p2p_dtfm.core.liveness.liveness import SECOND_NS
from p2p_dtfm.core.liveness.news import SETTLED_NS, EarlyNews
from p2p_dtfm.core.liveness.pace import (
    FETCH_BYTES_PER_S,
    Pace,
    Patience,
    bytes_per_s_from,
    fetch_bytes_per_s,
)
from p2p_dtfm.core.liveness.stalls import Stalls
from p2p_dtfm.core.liveness.waits import PossibleWaits
from p2p_dtfm.core.messages.work import Kind, Lack, Work
from p2p_dtfm.core.planner.planner import fixed_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.recovery.view import View
from tests.core.builders import run_spec
from tests.core.planning import Peer, name_of, snapshot

A, B, C, D = map(name_of, range(4))
TICK_NS = SECOND_NS // 10
SPEC = run_spec()
Script = Callable[[float], tuple[int, Work | None]]
"""What a peer says at a time: its progress, and where it stands."""


def view_of(stage_counts: tuple[int, ...]) -> View:
    found = snapshot([Peer()] * 4, workload_of(SPEC))
    return View(found, fixed_plan(found, stage_counts))


@dataclass
class Judge:
    """One peer that hears the scripts of the others and judges them."""

    me: str
    view: View
    mine: Work
    given: set[tuple[str, Lack]] = field(default_factory=set)
    patience: Patience | None = None
    asleep: range = range(0)
    """Seconds in which this peer neither hears nor judges."""
    tick_ns: int = TICK_NS
    crowd: int = 3
    """How many peers this peer watches."""

    def run(self, scripts: dict[str, Script], seconds: int = 30) -> dict[str, float]:
        """The suspects, each with the second of its first suspicion."""
        stalls = Stalls(self.me, 2 * SECOND_NS)
        stalls.watch(
            name_of(number) for number in range(self.crowd + 1) if name_of(number) != self.me
        )
        pace = Pace(self.view, SPEC, 0)
        fixed = self.patience
        possible, found = PossibleWaits(self.view), dict[str, float]()
        for now_ns in range(0, seconds * SECOND_NS, self.tick_ns):
            now_s = now_ns / SECOND_NS
            if int(now_s) in self.asleep:
                continue
            if now_ns % SECOND_NS == 0:
                for peer_id, script in scripts.items():
                    stalls.heard(peer_id, *script(now_s))
            suspicions = stalls.tick(
                self.mine,
                possible,
                lambda peer, lack: (peer, lack) in self.given,
                pace.patience if fixed is None else lambda peer, step: fixed,
                now_ns,
            )
            for suspicion in suspicions:
                found.setdefault(suspicion.peer_id, now_s)
        return found


def always(work: Work | None, progress: int = 0) -> Script:
    return lambda now_s: (progress, work)


def gets_on(work: Work, every_s: float) -> Script:
    return lambda now_s: (int(now_s / every_s), work)


class TestPipelineOfFour:
    """A sends activations to B, B to C, C to D; gradients come back."""

    view = view_of((4,))
    layers: ClassVar = {stage.peer_id: stage.first_layer for stage in view.plan.pipelines[0].stages}

    def work(self, *lacks: Lack, computes: bool = False, step: int = 3) -> Work:
        return Work(self.view.id, step, computes, lacks)

    def activation(self, of: str, to: str, number: int = 0) -> Lack:
        return Lack(of, Kind.ACTIVATION, self.layers[to], number)

    def gradient(self, of: str, number: int = 0) -> Lack:
        return Lack(of, Kind.GRADIENT, self.layers[of], number)

    def honest(self) -> dict[str, Script]:
        """All wait for C."""
        return {
            A: always(self.work(self.gradient(B))),
            B: always(self.work(self.gradient(C))),
            D: always(self.work(self.activation(C, D))),
        }

    def judged_by_all(
        self, liar: Script, seconds: int = 30, **changes: object
    ) -> dict[str, dict[str, float]]:
        """What A, B and D find where C says this of its own work."""
        scripts = self.honest() | {C: liar}
        found = {}
        for me in (A, B, D):
            _, mine = scripts[me](0)
            assert mine is not None
            judge = Judge(me, self.view, mine)
            for name, value in changes.items():
                setattr(judge, name, value)
            found[me] = judge.run(scripts, seconds)
        return found

    def test_who_completes_nothing_is_suspected_by_all_and_nobody_else_is(self) -> None:
        for says_it_computes in (False, True):
            found = self.judged_by_all(always(self.work(computes=says_it_computes)))
            for me in (A, B, D):
                assert set(found[me]) == {C}
                assert found[me][C] < 7, "the swarm may be held up for ten seconds in all"

    def test_in_a_crowd_who_runs_late_itself_is_patient(self) -> None:
        stuck = always(self.work(computes=True))

        def noticed_s(tick_ns: int, crowd: int) -> float:
            return self.judged_by_all(stuck, 60, tick_ns=tick_ns, crowd=crowd)[D][C]

        late_ns = SECOND_NS
        punctual_s = noticed_s(TICK_NS, 3)
        assert noticed_s(TICK_NS, 32) == punctual_s, "a crowd with time to spare"
        assert noticed_s(late_ns, 8) <= punctual_s + late_ns / SECOND_NS, "few share its machine"
        assert 1.2 * punctual_s + 1 < noticed_s(late_ns, 32) < 4 * punctual_s + 1, "but noticed"

    def test_a_slow_peer_whose_work_gets_on_is_waited_for(self) -> None:
        patience = Patience(6 * SECOND_NS, 100 * SECOND_NS, SECOND_NS)
        slow = gets_on(self.work(computes=True), every_s=5)
        assert self.judged_by_all(slow, patience=patience) == {A: {}, B: {}, D: {}}

    def test_but_not_for_ever(self) -> None:
        feigned = gets_on(self.work(computes=True), every_s=0.5)
        for found in self.judged_by_all(feigned).values():
            assert set(found) == {C}

    def test_a_wait_for_what_it_has_accepted_is_its_victims_to_deny(self) -> None:
        lack = self.activation(B, C)
        liar = always(self.work(lack))
        found = self.judged_by_all(liar, seconds=9, given={(C, lack)})
        assert set(found[B]) == {C}
        assert found[B][C] < 7
        assert C in found[D] or not found[D]
        assert not found[A].keys() - {C}, "who is far away blames nobody else"

    def test_a_wait_that_the_plan_does_not_know_is_none(self) -> None:
        for lack in (
            self.activation(A, C),
            Lack(D, Kind.SUM, 0, 0),
            Lack(A, Kind.RECEIPT),
            Lack("12D3nobody", Kind.ACTIVATION, 0, 0),
            Lack(A, Kind.PREPARED),
            Lack(A, Kind.ACTIVE),
            self.activation(C, C),
        ):
            found = self.judged_by_all(always(self.work(lack)))
            assert [set(suspects) for suspects in found.values()] == [{C}] * 3, lack

    def test_nobody_else_sees_receipts_so_the_two_settle_it(self) -> None:
        """C may have got the receipt: all others took its side, and its guardian was out."""
        guardian, mine = self.view.guards[self.layers[C]], self.work(Lack(C, Kind.PREPARED))
        scripts = {C: always(self.work(Lack(guardian, Kind.RECEIPT))), guardian: always(mine)}
        other = next(it for it in (A, B, D) if it != guardian)
        patience = Patience(6 * SECOND_NS, 6 * SECOND_NS, SECOND_NS)
        found = Judge(guardian, self.view, mine, patience=patience).run(scripts)
        assert set(found) == {C} and found[C] < 7
        found = Judge(other, self.view, mine, patience=patience).run(scripts)
        assert set(found) == {guardian} and found[guardian] > 11, "the two may lie together"

    @pytest.mark.parametrize("is_first", [True, False])
    def test_a_guardian_that_owes_its_own_word_is_judged_by_that(self, is_first: bool) -> None:
        """The guardian is stuck, so it gives C no receipt, and nobody its Prepared. All see the
        latter: C must not stand alone against it, whichever of the two is looked at first."""
        guardian = self.view.guards[self.layers[C]]
        other = next(it for it in (A, B, D) if it != guardian)
        lacks = [Lack(C, Kind.PREPARED), Lack(guardian, Kind.PREPARED)]
        mine = self.work(*(lacks if is_first else reversed(lacks)))
        scripts = {
            C: always(self.work(Lack(guardian, Kind.RECEIPT))),
            guardian: always(self.work(computes=True)),
        }
        patience = Patience(6 * SECOND_NS, 6 * SECOND_NS, SECOND_NS)
        found = Judge(other, self.view, mine, patience=patience).run(scripts)
        assert set(found) == {guardian} and found[guardian] < 7

    def test_who_waits_for_one_that_has_gone_on_has_no_reason(self) -> None:
        scripts = self.honest() | {
            C: always(self.work(Lack(A, Kind.PREPARED), step=2)),
            A: always(self.work(step=3)),
        }
        _, mine = scripts[B](0)
        assert mine is not None
        assert set(Judge(B, self.view, mine).run(scripts)) == {C}

    def test_everyone_waits_for_a_true_straggler_at_the_end_of_the_chain(self) -> None:
        scripts = self.honest() | {
            C: always(self.work(self.gradient(D))),
            D: gets_on(self.work(computes=True), every_s=4),
        }
        patience = Patience(6 * SECOND_NS, 1000 * SECOND_NS, SECOND_NS)
        for me in (A, B, C):
            _, mine = scripts[me](0)
            assert mine is not None
            assert Judge(me, self.view, mine, patience=patience).run(scripts) == {}

    def test_whoever_computes_itself_judges_nobody(self) -> None:
        scripts = self.honest() | {C: always(self.work())}
        mine = self.work(self.gradient(C), computes=True)
        assert Judge(B, self.view, mine).run(scripts) == {}

    def test_a_sleeper_counts_only_the_time_in_which_it_was_awake(self) -> None:
        scripts = self.honest() | {C: always(self.work())}
        _, mine = scripts[B](0)
        assert mine is not None
        found = Judge(B, self.view, mine, asleep=range(2, 20)).run(scripts)
        assert found[C] > 22

    def test_withheld_prepared(self) -> None:
        """C has said no Prepared to B, and says that it waits for that of others."""
        mine = self.work(Lack(C, Kind.PREPARED))
        for lacks in ((), (Lack(B, Kind.PREPARED),), (Lack(D, Kind.PREPARED),)):
            scripts = {
                A: always(self.work(Lack(C, Kind.PREPARED))),
                C: always(self.work(*lacks)),
                D: always(self.work(Lack(C, Kind.PREPARED))),
            }
            found = Judge(B, self.view, mine).run(scripts)
            assert set(found) == {C} and found[C] < 7

    def test_data_are_fetched_for_a_while(self) -> None:
        fetching = Work(self.view.id, 3, fetches=True)
        scripts = self.honest() | {C: always(fetching)}
        _, mine = scripts[B](0)
        assert mine is not None
        patience = Patience(SECOND_NS, SECOND_NS, 20 * SECOND_NS)
        found = Judge(B, self.view, mine, patience=patience).run(scripts)
        assert 19 < found[C] < 22

    def test_whom_somebody_gives_its_data_has_longer(self) -> None:
        """D, which has nothing else to do, gives C its data over a thin line. Giving is no reason
        for D itself, since anybody may ask for a file."""
        fetching = Work(self.view.id, 3, fetches=True)
        giving = Work(self.view.id, 3, lacks=(self.activation(C, D),), sends_to=(C,))
        scripts = self.honest() | {C: always(fetching), D: always(giving)}
        _, mine = scripts[B](0)
        assert mine is not None
        patience = Patience(SECOND_NS, SECOND_NS, 20 * SECOND_NS, 40 * SECOND_NS)
        found = Judge(B, self.view, mine, patience=patience).run(scripts, seconds=60)
        assert found.keys() == {C} and 39 < found[C] < 42

    @pytest.mark.parametrize("gets_on", [True, False])
    def test_who_fetches_many_files_has_the_time_of_each(self, gets_on: bool) -> None:
        fetching = Work(self.view.id, 3, fetches=True)
        scripts = self.honest() | {C: lambda now_s: (int(now_s) if gets_on else 0, fetching)}
        _, mine = scripts[B](0)
        assert mine is not None
        patience = Patience(SECOND_NS, SECOND_NS, 20 * SECOND_NS, 0, 60 * SECOND_NS)
        found = Judge(B, self.view, mine, patience=patience).run(scripts, seconds=90)
        first_s, last_s = (59, 62) if gets_on else (19, 22)
        assert found.keys() == {C} and first_s < found[C] < last_s

    @pytest.mark.parametrize("gets_on", [True, False])
    def test_who_fetches_late_in_a_step_has_the_whole_time_of_its_fetch(
        self, gets_on: bool
    ) -> None:
        """Seed 501867: one heard late that a step had begun, computed, and then borrowed layers to
        compute another's work again, each on a lane that was late. All of that counted as one
        fetch, and it was out after six seconds."""
        fetching, computing = Work(self.view.id, 3, fetches=True), self.work(computes=True)
        scripts = self.honest() | {
            C: lambda now_s: (int(now_s) * gets_on, computing if now_s < 4 else fetching)
        }
        _, mine = scripts[B](0)
        assert mine is not None
        patience = Patience(10 * SECOND_NS, 10 * SECOND_NS, 6 * SECOND_NS)
        found = Judge(B, self.view, mine, patience=patience).run(scripts)
        assert found.keys() == {C} and 9.5 < found[C] < 12

    def test_two_liars_that_wait_for_each_other_leave_the_honest_alone(self) -> None:
        """In a cycle, B and C say that they wait for each other."""
        scripts = {
            B: always(self.work(self.gradient(C))),
            C: always(self.work(self.activation(B, C))),
            D: always(self.work(self.activation(C, D))),
        }
        mine = self.work(self.gradient(B))
        found = Judge(A, self.view, mine).run(scripts, seconds=60)
        assert found.keys() <= {B, C}
        assert found, "somebody must be"


class TestSpare:
    """A has all layers; D only learns what commits."""

    view = view_of((1,))

    def judged_by_spare(self, step: int) -> dict[str, float]:
        mine = Work(self.view.id, 3, lacks=(Lack(A, Kind.PREPARED),))
        return Judge(D, self.view, mine).run({A: always(Work(self.view.id, step))})

    def test_it_may_miss_a_message_and_learn_later(self) -> None:
        assert self.judged_by_spare(step=4) == {}

    def test_it_sees_who_is_stuck(self) -> None:
        assert set(self.judged_by_spare(step=3)) == {A}

    def test_a_step_is_over_for_it_once_anybody_with_a_stage_is_beyond(self) -> None:
        """The seed 505295: B had fetched data for five seconds, and what it said then came a second
        late over a slow line. By then A was in the next step, which needs all of B's work."""
        view = view_of((2, 1))
        mine = Work(view.id, 3, lacks=(Lack(B, Kind.PREPARED), Lack(C, Kind.PREPARED)))
        stuck = always(Work(view.id, 3))
        ahead, abreast = always(Work(view.id, 4)), always(Work(view.id, 3, computes=True))
        assert B in Judge(D, view, mine).run({A: abreast, B: stuck, C: abreast})
        assert Judge(D, view, mine).run({A: ahead, B: stuck, C: stuck}) == {}
        by_c = Work(self.view.id, 3, lacks=(Lack(A, Kind.PREPARED),))
        said = {A: always(Work(self.view.id, 3)), B: always(Work(self.view.id, 4))}
        assert A in Judge(C, self.view, by_c).run(said), "another spare says nothing of it"


class TestReplicas:
    """Four pipelines of one stage: A, B, C and D sum their gradients."""

    view = view_of((1, 1, 1, 1))

    def work(self, *lacks: Lack, computes: bool = False) -> Work:
        return Work(self.view.id, 3, computes, lacks)

    def test_who_withholds_its_part_is_suspected_by_all(self) -> None:
        """B owns the chunk and waits for C's part; A and D wait for B's sum."""
        part, total = Lack(C, Kind.PART, 0, 1), Lack(B, Kind.SUM, 0, 1)
        for lies in (
            (),
            (Lack(B, Kind.PREPARED),),
            (Lack(B, Kind.PART, 0, 1),),
            (Lack(B, Kind.ACTIVATION, 1, 0),),
        ):
            scripts = {
                A: always(self.work(total)),
                B: always(self.work(part)),
                C: always(self.work(*lies)),
                D: always(self.work(total)),
            }
            for me in (A, B, D):
                _, mine = scripts[me](0)
                assert mine is not None
                given = {(C, Lack(B, Kind.PART, 0, 1))} if me == B else set()
                found = Judge(me, self.view, mine, given).run(scripts, seconds=9)
                assert me != B or (set(found) == {C} and found[C] < 7)
                assert found.keys() <= {C}, (me, lies)

    @pytest.mark.parametrize("kind", [Kind.CLAIM, Kind.AUDIT])
    def test_what_this_peer_has_heard_is_no_reason_to_wait(self, kind: Kind) -> None:
        """A peer that has heard something tells it to a peer that has not. So B says what is not
        so, and C, of which B says it, is not to blame."""
        prepared, denied = Lack(B, Kind.PREPARED), Lack(C, kind)
        scripts = {name: always(self.work(prepared)) for name in (A, C, D)}
        scripts[B] = always(self.work(denied))
        patience = Patience(9 * SECOND_NS, 9 * SECOND_NS, SECOND_NS)
        for me in (A, C, D):
            given = {(B, denied)} if me == C else set()
            judge = Judge(me, self.view, self.work(prepared), given, patience)
            found = judge.run(scripts, seconds=20)
            assert set(found) == {B} and 8.9 < found[B] < 9.2, "no sooner by C than by others"

    def owners(self, liar: str, *victims: str) -> dict[str, Script]:
        """Scripts in which each peer owns a chunk. The liar has given `victims` no part, and truly
        says that it lacks their sums. An owner that lacks no part has given its sum."""
        said: dict[str, Script] = {}
        for number, me in enumerate((A, B, C, D)):
            parts = [Lack(liar, Kind.PART, 0, number)] if me in victims else []
            sums = [Lack(it, Kind.SUM, 0, chunk) for chunk, it in enumerate((A, B, C, D))]
            due = [it for it in sums if it.peer_id in victims and it.peer_id != me]
            said[me] = always(self.work(*parts, *due))
        return said

    def test_a_sum_that_it_lacks_is_no_reason_to_withhold_a_part_from_all(self) -> None:
        """No part waits for anybody's sum, so each of the three knows by itself who is in the
        way."""
        scripts = self.owners(C, A, B, D)
        for me in (A, B, D):
            _, mine = scripts[me](0)
            assert mine is not None
            found = Judge(me, self.view, mine).run(scripts, seconds=20)
            assert set(found) == {C} and found[C] < 8, (me, found)

    def test_who_lacks_none_itself_takes_nobodys_word_for_it(self) -> None:
        """Either A, which lacks C's part, or C, which says it gave the part, lies. B and D cannot
        know which, and must not be the first to say so."""
        scripts = self.owners(C, A)
        for me in (B, D):
            _, mine = scripts[me](0)
            assert mine is not None
            patience = Patience(6 * SECOND_NS, 6 * SECOND_NS, SECOND_NS)
            found = Judge(me, self.view, mine, patience=patience).run(scripts, seconds=10)
            assert found == {}, (me, found)
        _, mine = scripts[A](0)
        assert mine is not None
        found = Judge(A, self.view, mine).run(scripts, seconds=10)
        assert set(found) == {C} and found[C] < 8

    def test_a_receipt_is_owed_whatever_else_the_guardian_waits_for(self) -> None:
        mine = self.work(Lack(D, Kind.RECEIPT))
        scripts = {D: always(self.work(Lack(A, Kind.PREPARED)))}
        found = Judge(A, self.view, mine).run(scripts)
        assert set(found) == {D} and found[D] < 10

    def test_but_the_gradients_may_be_on_their_way_to_it(self) -> None:
        """Meanwhile D computes nothing new, and says so."""
        mine = self.work(Lack(D, Kind.RECEIPT))
        patience = Patience(5 * SECOND_NS, 40 * SECOND_NS, SECOND_NS)
        for computes in (False, True):
            scripts = {D: always(self.work(computes=computes))}
            assert Judge(A, self.view, mine, patience=patience).run(scripts) == {}


def test_patience_follows_the_plan_and_the_last_steps() -> None:
    view = view_of((4,))
    pace = Pace(view, SPEC, 0)
    pace.begin(0)
    small = pace.patience(A, 3)
    assert min(small.stuck_ns, small.step_ns) >= 5 * SECOND_NS
    assert max(small.stuck_ns, small.step_ns) < 8 * SECOND_NS
    for _ in range(8):
        pace.committed(20 * SECOND_NS)
    assert pace.patience(A, 3).step_ns > 100 * SECOND_NS
    assert pace.patience(A, 0).stuck_ns > small.stuck_ns, "what is done for the first time"


@pytest.mark.parametrize("every_steps", [5, 7])
def test_who_saves_is_given_time_for_it_at_the_end_of_a_run_too(every_steps: int) -> None:
    """The last states are saved at whatever step the run ends. Of large layers that takes minutes,
    in which the others waited for the last look at them, and called their holders stuck."""
    spec = run_spec(total_steps=20, checkpoint={"every_steps": every_steps})
    view = view_of((4,))
    block = msgspec.structs.replace(view.snapshot.workload.block, state_bytes=120_000_000)
    workload = msgspec.structs.replace(view.snapshot.workload, block=block)
    large = replace(view, snapshot=msgspec.structs.replace(view.snapshot, workload=workload))
    assert isinstance(view.plan, Plan)
    holder, pace = view.plan.pipelines[0].stages[1].peer_id, Pace(large, spec, 0)
    saves_ns, usual_ns = (pace.patience(holder, it).stuck_ns for it in (every_steps, 1))
    assert saves_ns - usual_ns > 10 * SECOND_NS
    assert spec.saves_at(20) and pace.patience(holder, 20).stuck_ns == saves_ns


def test_who_gets_layers_in_a_planned_view_is_given_time_for_their_last_gradients() -> None:
    """The last gradients of large layers take minutes. A peer that waited for them in its first
    step was thrown out for getting nothing, which the others do not see as a reason."""
    view, large = view_of((2,)), 40_000_000
    assert isinstance(view.plan, Plan)
    block = msgspec.structs.replace(view.snapshot.workload.block, parameter_count=large)
    work = msgspec.structs.replace(view.snapshot.workload, block=block)
    (pipeline,) = view.plan.pipelines
    first, second, *rest = pipeline.stages
    more = msgspec.structs.replace(first, end_layer=first.end_layer + 1)
    less = msgspec.structs.replace(second, first_layer=second.first_layer + 1)
    stages = (more, less, *rest)
    plan = msgspec.structs.replace(
        view.plan, pipelines=(msgspec.structs.replace(pipeline, stages=stages),)
    )
    planned = msgspec.structs.replace(
        view.snapshot, planned=True, step=5, workload=work, present=view.plan
    )
    pace = Pace(View(planned, plan), SPEC, 0)
    usual = pace.patience(first.peer_id, 5)
    pace.begin(5)
    gets, others = (pace.patience(peer, 5) for peer in (first.peer_id, second.peer_id))
    line = fetch_bytes_per_s(View(planned, plan))
    assert gets.fetch_ns - others.fetch_ns >= 4 * large * SECOND_NS // line
    assert others.fetch_ns - usual.fetch_ns < 10 * SECOND_NS
    assert pace.patience(first.peer_id, 6).fetch_ns == usual.fetch_ns, "no longer afterwards"


def test_who_computes_a_work_of_other_layers_again_is_given_time_to_fetch_them() -> None:
    """Nobody else is given that time: a peer that says it fetches holds everybody up for as
    long."""
    audited = SPEC.model_copy(update={"audit": SPEC.audit.model_copy(update={"rate": 1.0})})
    view = view_of((4,))
    pace, plain = Pace(view, audited, 0), Pace(view, SPEC, 0)
    usual = pace.patience(A, 3)
    assert plain.patience(A, 3) == plain.patience(A, 3, borrowed=1)
    assert usual.stuck_ns >= plain.patience(A, 3).stuck_ns, "its pieces may be another stage's"
    assert replace(usual, stuck_ns=0) == replace(plain.patience(A, 3), stuck_ns=0)
    one, two = (pace.patience(A, 3, borrowed=count) for count in (1, 2))
    longer_ns = one.fetch_ns - usual.fetch_ns
    assert longer_ns > 0 and two.fetch_ns - one.fetch_ns == pytest.approx(longer_ns, rel=0.01)
    assert one.given_ns > usual.given_ns
    assert (one.stuck_ns, one.step_ns) == (usual.stuck_ns, usual.step_ns)


def test_who_computes_disputed_works_again_is_given_time_for_each_of_them() -> None:
    """A liar had everybody compute all co-holders' works, and slow members were out meanwhile."""
    view = view_of((4,))
    assert isinstance(view.plan, Plan)
    pace = Pace(view, SPEC, 0)
    usual = pace.patience(A, 3)
    first, second = view.plan.stage_holders()[:2]
    one, two = (pace.patience(A, 3, 0, disputed) for disputed in ((first,), (first, second)))
    assert usual.step_ns < one.step_ns < two.step_ns
    assert (one.stuck_ns, one.fetch_ns) == (usual.stuck_ns, usual.fetch_ns)


def test_who_says_that_it_is_slow_at_what_it_does_not_hold_is_waited_for_as_others_are() -> None:
    """By its record the head takes this peer 19 hours, and no plan shows that. A step in which
    somebody disputed one of the peer's works was held up for 19 days."""
    view = view_of((2,))
    assert isinstance(view.plan, Plan)
    first, last = (
        view.plan.pipelines[0].stages[0].peer_id,
        view.plan.pipelines[0].stages[-1].peer_id,
    )
    hours_ns = 19 * 3600 * SECOND_NS
    records = tuple(
        msgspec.structs.replace(
            it,
            device=msgspec.structs.replace(
                it.device, head=msgspec.structs.replace(it.device.head, backward_ns=hours_ns)
            ),
        )
        if it.peer_id == first
        else it
        for it in view.snapshot.records
    )
    slow = replace(view, snapshot=msgspec.structs.replace(view.snapshot, records=records))
    audited = SPEC.model_copy(update={"audit": SPEC.audit.model_copy(update={"rate": 1.0})})
    told, usual = (Pace(it, audited, 0).patience(first, 3, 0, (last,)) for it in (slow, view))
    assert told.step_ns < 40 * usual.step_ns and told.stuck_ns < 40 * usual.stuck_ns


def with_uplinks(*uplinks_bytes_per_s: int) -> View:
    """The first members have these lines."""
    view = view_of((4,))
    records = tuple(
        msgspec.structs.replace(record, uplink_bytes_per_s=uplink)
        for record, uplink in zip(view.snapshot.records, uplinks_bytes_per_s, strict=True)
    )
    return replace(view, snapshot=msgspec.structs.replace(view.snapshot, records=records))


def test_who_fetches_over_thin_lines_is_waited_for() -> None:
    """Five homes fetched the data from a sixth at 47 KB/s, and the sixth called all of them silent.
    It went on alone, and came back as a spare."""
    usual = Pace(with_uplinks(0, 0, 0, 0), SPEC, 200_000)
    thin = Pace(with_uplinks(47_000, 47_000, 118_000, 1_183_000), SPEC, 200_000)
    longer_ns = thin.patience(A, 3).fetch_ns - usual.patience(A, 3).fetch_ns
    assert longer_ns / SECOND_NS == pytest.approx(200_000 / (47_000 / 3) - 0.8, rel=0.01)
    assert thin.patience(A, 3).given_ns == thin.patience(A, 3).fetch_ns
    one_thin = Pace(with_uplinks(47_000, 118_000, 118_000, 1_183_000), SPEC, 200_000)
    assert one_thin.patience(A, 3).fetch_ns < thin.patience(A, 3).fetch_ns, "few may say anything"
    assert one_thin.patience(A, 3).given_ns == thin.patience(A, 3).given_ns, "it may be the giver"
    one_liar = Pace(with_uplinks(1, 4_000_000, 4_000_000, 4_000_000), SPEC, 200_000)
    assert one_liar.patience(A, 3).fetch_ns == usual.patience(A, 3).fetch_ns
    assert one_liar.patience(A, 3).given_ns < (5 + 32) * SECOND_NS
    all_thin = Pace(with_uplinks(1, 1, 1, 1), SPEC, 200_000)
    assert all_thin.patience(A, 3).fetch_ns < (5 + 32) * SECOND_NS


def test_of_large_data_a_step_reads_as_many_files_as_it_has_sequences() -> None:
    """A home that came to a run of 50 GB had yet to fetch the 700 files of its first step. It was
    given the time of one file, and was out before it began."""
    file_bytes, sequences = 2 << 20, SPEC.batch.global_batch
    view = view_of((4,))
    large, small = (Pace(view, SPEC, file_bytes, n * file_bytes) for n in (10**5, 3))
    for pace, files in ((large, sequences), (small, 3)):
        needed_ns = files * file_bytes * SECOND_NS // FETCH_BYTES_PER_S
        for reads in (A, D):
            assert pace.patience(reads, 3).fetch_all_ns > needed_ns
            assert pace.patience(reads, 3).fetch_ns < needed_ns, "with nothing that comes"
        assert pace.patience(B, 3).fetch_all_ns < needed_ns, "it knows no tokens"
    evaluates = large.patience(A, SPEC.evaluation.every_steps).fetch_all_ns
    assert evaluates > large.patience(A, 3).fetch_all_ns


def test_who_gives_is_expected_to_give_what_its_own_line_carries() -> None:
    view = with_uplinks(47_000, 1, 4_000_000, 0)
    giving = [bytes_per_s_from(record.peer_id, view) for record in view.snapshot.records]
    assert giving[:3] == [47_000 // 3, FETCH_BYTES_PER_S // 32, FETCH_BYTES_PER_S]
    of_most = bytes_per_s_from("who is no member any more", view)
    assert giving[3] == of_most == 47_000 // 3, "of whom nobody knows it"


class TestJoining:
    """Another peer has accused the suspect, or was accused by it, first."""

    view = view_of((4,))

    def test_half_the_patience_is_enough_and_only_for_who_was_in_the_way(self) -> None:
        mine = Work(self.view.id, 3, lacks=(Lack(C, Kind.GRADIENT, 2, 0),))
        pace, possible = Pace(self.view, SPEC, 0), PossibleWaits(self.view)
        for waited_s, expected in ((1, []), (4, [C])):
            stalls = Stalls(B, 2 * SECOND_NS)
            for now_ns in range(0, waited_s * SECOND_NS, TICK_NS):
                stalls.heard(C, 0, Work(self.view.id, 3))
                stalls.tick(mine, possible, lambda peer, lack: False, pace.patience, now_ns)
            found = stalls.join([A, C], pace.patience, self.view.id)
            assert [suspicion.peer_id for suspicion in found] == expected

    @pytest.mark.parametrize(
        ("said", "waited_s", "joins"),
        [
            ({}, 4, True),
            ({"fetches": True}, 8, False),
            ({"fetches": True}, 31, True),
            ({"sends_to": (D,)}, 8, False),
            ({"sends_to": (D,)}, 11, True),
        ],
    )
    def test_it_is_half_of_what_it_takes_to_be_suspected(
        self, said: dict[str, object], waited_s: int, joins: bool
    ) -> None:
        """A peer that fetched its data, or sent something large, told of somebody that had died.
        All others that had waited for half a step accused it."""
        patience = Patience(5 * SECOND_NS, 20 * SECOND_NS, 60 * SECOND_NS, 60 * SECOND_NS)
        stalls = self.waits_for(Work(self.view.id, 3, **said), waited_s, patience)  # type: ignore[arg-type]
        found = stalls.join([A, C], lambda peer, step: patience, self.view.id)
        assert [suspicion.peer_id for suspicion in found] == [C] * joins

    def test_what_it_held_up_in_another_view_is_over(self) -> None:
        patience = Patience(5 * SECOND_NS, 20 * SECOND_NS, 60 * SECOND_NS)
        stalls = self.waits_for(Work(self.view.id, 3), 4, patience)
        for view in (ViewId(self.view.id.number + 1, "f" * 64), None):
            assert not stalls.join([A, C], lambda peer, step: patience, view)
        assert stalls.join([A, C], lambda peer, step: patience, self.view.id)

    def waits_for(self, said: Work, waited_s: int, patience: Patience) -> Stalls:
        """B lacks a gradient of C, and C says this of itself."""
        mine = Work(self.view.id, 3, lacks=(Lack(C, Kind.GRADIENT, 2, 0),))
        stalls, possible = Stalls(B, 2 * SECOND_NS), PossibleWaits(self.view)
        for now_ns in range(0, waited_s * SECOND_NS, TICK_NS):
            stalls.heard(C, 0, said)
            assert not stalls.tick(
                mine, possible, lambda peer, lack: False, lambda peer, step: patience, now_ns
            )
        return stalls


def test_the_first_step_of_a_view_may_take_long_for_who_gets_on() -> None:
    """Eight daemons that began beside much other load called two of them stuck, though these were
    computing."""
    pace = Pace(view_of((4,)), SPEC, 0)
    pace.begin(3)
    first, later = pace.patience(A, 3), pace.patience(A, 4)
    assert first.step_ns >= 2 * later.step_ns, "while its work gets on"
    assert first.stuck_ns - later.stuck_ns == SECOND_NS, "who completes nothing is missed as soon"


class TestAmongMany:
    """Four replicas. A listens to B and C only, and others watch D."""

    view = view_of((1, 1, 1, 1))

    def found(self, mine: Lack, of_b: tuple[Lack, ...] = ()) -> dict[str, float]:
        judge = Judge(A, self.view, Work(self.view.id, 3, lacks=(mine,)), crowd=2)
        return judge.run({B: always(Work(self.view.id, 3, lacks=of_b))}, seconds=100)

    @pytest.mark.parametrize("kind", [Kind.PART, Kind.SUM, Kind.PREPARED])
    def test_who_is_not_listened_to_is_not_judged(self, kind: Kind) -> None:
        """A does not know what D does meanwhile, and others wait for D as well."""
        assert list(self.found(Lack(B, kind, 0, 0))) == [B], "it is heard, and does nothing"
        assert self.found(Lack(D, kind, 0, 0)) == {}

    def test_nor_is_who_waits_for_it(self) -> None:
        waits = Lack(B, Kind.SUM, 0, 0)
        assert self.found(waits, (Lack(D, Kind.PART, 0, 0),)) == {}
        assert list(self.found(waits, (Lack(C, Kind.PART, 0, 0),))) == [C]

    def test_but_for_receipts_for_which_nobody_else_waits(self) -> None:
        assert list(self.found(Lack(D, Kind.RECEIPT, 0, 0))) == [D]


class TestDrips:
    """Three replicas; all wait for C's word, step after step, each time too short for a fault."""

    view = view_of((1, 1, 1))
    step_ns = 4 * SECOND_NS

    def work(self, step: int, *lacks: Lack, computes: bool = False) -> Work:
        return Work(self.view.id, step, computes, lacks)

    def suspected_in(
        self,
        lack: Lack,
        said: Callable[[int], Work],
        waits_s: float = 3.0,
        steps: int = 30,
        has_given: bool = True,
        members: int = 3,
        news: bool = True,
        b_lacks: Lack | None = None,
        watched_too: tuple[str, ...] = (),
        me: str = A,
    ) -> int | None:
        """In which step A suspects C. In each step A lacks something of C for `waits_s` seconds."""
        stalls, pace = Stalls(me, 2 * SECOND_NS), Pace(self.view, SPEC, 0)
        fellow = B if me == A else A
        stalls.watch([*[C, fellow][: members - 1], *watched_too])
        possible = PossibleWaits(self.view)
        for now_ns in range(0, steps * self.step_ns, TICK_NS):
            step, into_ns = divmod(now_ns, self.step_ns)
            waits = into_ns >= self.step_ns - waits_s * SECOND_NS
            mine = self.work(step, lack) if waits else self.work(step, computes=True)
            theirs = mine if b_lacks is None else self.work(step, b_lacks)
            stalls.heard(fellow, step, theirs if news else self.work(step - 1, lack))
            stalls.heard(C, step, said(step))
            for found in stalls.tick(mine, possible, lambda *_: has_given, pace.patience, now_ns):
                assert found.peer_id == C and "only its word" in found.reason
                return step
        return None

    @pytest.mark.parametrize("kind", [Kind.CLAIM, Kind.PREPARED])
    @pytest.mark.parametrize("computes", [False, True])
    def test_who_is_late_with_its_word_alone_is_found_after_twelve_steps(
        self, kind: Kind, computes: bool
    ) -> None:
        """What C has to compute first is here, so it does not matter whether C says that it
        computes."""
        found = self.suspected_in(Lack(C, kind), lambda step: self.work(step, computes=computes))
        assert found == STEPS

    def test_who_shares_its_last_layers_alone_does_not_know_that_it_has_computed_the_others(
        self,
    ) -> None:
        """An honest member that held the whole model was out among six slow machines (virtual seed
        990008). The holder of the head had all that it was owed by that member two seconds before
        the member came to its first layer."""
        cut = TestDrips()
        cut.view = view_of((2, 1))  # A and B hold halves, and C holds everything

        def computes(step: int) -> Work:
            return cut.work(step, computes=True)

        prepared = Lack(C, Kind.PREPARED)
        assert cut.suspected_in(prepared, computes, me=B) is None
        assert cut.suspected_in(prepared, cut.work, me=B) == STEPS, "who does nothing"
        assert cut.suspected_in(prepared, computes, me=A) == STEPS, "who computes nothing any more"

    def test_what_takes_less_than_half_of_the_steps_is_none(self) -> None:
        assert self.suspected_in(Lack(C, Kind.CLAIM), self.work, waits_s=1.9) is None

    @pytest.mark.parametrize("kind", [Kind.PART, Kind.SUM, Kind.AUDIT, Kind.RECEIPT])
    def test_who_owes_what_must_be_computed_or_travels_is_none(self, kind: Kind) -> None:
        def computes(step: int) -> Work:
            return self.work(step, computes=True)

        assert self.suspected_in(Lack(C, kind), computes) is None

    def test_who_waits_for_others_or_fetches_is_none(self) -> None:
        def waits(step: int) -> Work:
            return self.work(step, Lack(B, Kind.SUM))

        def fetches(step: int) -> Work:
            return msgspec.structs.replace(self.work(step), fetches=True)

        for said in (waits, fetches):
            assert self.suspected_in(Lack(C, Kind.PREPARED), said) is None

    def test_who_waits_for_this_peer_is_none_unless_it_has_what_it_says_it_lacks(self) -> None:
        def waits(step: int) -> Work:
            return self.work(step, Lack(A, Kind.SUM))

        prepared = Lack(C, Kind.PREPARED)
        assert self.suspected_in(prepared, waits, has_given=False) is None
        assert self.suspected_in(prepared, waits, has_given=True) == STEPS

    @pytest.mark.parametrize("kind", [Kind.CLAIM, Kind.AUDIT])
    def test_who_is_told_by_others_what_somebody_has_not_told_it_is_none(self, kind: Kind) -> None:
        """Passing on words takes a second or two in each step."""

        def untold(step: int) -> Work:
            return self.work(step, Lack(B, kind))

        assert self.suspected_in(Lack(C, Kind.PREPARED), untold) is None
        assert self.suspected_in(Lack(C, Kind.PREPARED), self.work) == STEPS

    @pytest.mark.parametrize("computes", [False, True])
    def test_nor_is_who_has_told_the_others_its_claim(self, computes: bool) -> None:
        """This peer would be the only one to say so."""

        def said(step: int) -> Work:
            return self.work(step, computes=computes)

        claim = Lack(C, Kind.CLAIM)
        assert self.suspected_in(claim, said, b_lacks=Lack(C, Kind.AUDIT)) is None
        assert self.suspected_in(claim, said, b_lacks=Lack(C, Kind.CLAIM)) == STEPS

    def test_who_tells_nothing_of_a_step_has_no_reason_in_it(self) -> None:
        """What C lacked in the step before excused it, as long as nothing newer was heard of it."""

        def stale(step: int) -> Work:
            return self.work(step - 1, Lack(B, Kind.SUM))

        claim = Lack(C, Kind.CLAIM)
        assert self.suspected_in(claim, stale, news=False) == STEPS
        assert self.suspected_in(Lack(C, Kind.SUM), stale, news=False) is None

    def test_news_has_a_second_to_come(self) -> None:
        def late(step: int) -> Work:
            return self.work(step - 1, Lack(B, Kind.SUM))

        short = TestDrips()
        short.step_ns = SECOND_NS * 3 // 2
        claim = Lack(C, Kind.CLAIM)
        assert short.suspected_in(claim, late, waits_s=0.9, news=False) is None
        assert short.suspected_in(claim, late, waits_s=1.2, news=False) == STEPS

    def test_what_it_gives_holds_up_no_word_unless_somebody_lacks_a_tensor_of_it(self) -> None:
        """A peer that computes works again fetched something of each lately, and that excused C for
        good."""

        def gives(step: int) -> Work:
            return msgspec.structs.replace(self.work(step), sends_to=(A, B))

        claim = Lack(C, Kind.CLAIM)
        assert self.suspected_in(claim, gives) == STEPS
        assert self.suspected_in(claim, gives, b_lacks=Lack(C, Kind.PART)) is None

    def test_of_two_members_neither_suspects_the_other(self) -> None:
        """Each of the two would go on alone, and nobody knows which one is slow. A member that
        watches itself, as daemons do, or a joiner makes no difference."""
        claim = Lack(C, Kind.CLAIM)
        assert self.suspected_in(claim, self.work, members=2) is None
        assert self.suspected_in(claim, self.work, members=2, watched_too=(A,)) is None
        assert self.suspected_in(claim, self.work, members=2, watched_too=(A, "a joiner")) is None
        assert self.suspected_in(claim, self.work, watched_too=(A, "a joiner")) == STEPS

    def spare_suspects_in(self, way_s: float, c_is_late_s: float = 0.0) -> int | None:
        """In which step a spare A near B suspects C; steps take a second and a half. C begins each
        step later by `way_s`, and its words take as long again."""
        view = view_of((2, 1))  # A, B and C hold layers
        spare, step_ns = name_of(3), SECOND_NS * 3 // 2
        assert spare not in view.plan.stage_holders()  # type: ignore[union-attr]
        stalls, pace = Stalls(spare, 2 * SECOND_NS), Pace(view, SPEC, 0)
        stalls.watch([A, B, C, spare])
        possible = PossibleWaits(view)
        late_ns = int(c_is_late_s * SECOND_NS)
        heard_ns = int((2 * way_s + 0.35) * SECOND_NS)
        for now_ns in range(0, 30 * (step_ns + late_ns), TICK_NS):
            step, into_ns = divmod(now_ns, step_ns + late_ns)
            come = into_ns >= step_ns
            missing = (C,) if come else (A, B, C)
            mine = Work(view.id, step, False, tuple(Lack(it, Kind.PREPARED) for it in missing))
            for peer_id in (A, B):
                stalls.heard(peer_id, step, Work(view.id, step, computes=not come))
            if come and into_ns >= heard_ns:
                stalls.heard(C, step, Work(view.id, step, False, ()))
            elif into_ns >= heard_ns:
                stalls.heard(C, step, Work(view.id, step, True, ()))
            else:  # what C said last of the step before
                before = Lack(B, Kind.PREPARED)
                stalls.heard(C, step, Work(view.id, step - 1, False, (before,)))
            for found in stalls.tick(mine, possible, lambda *_: True, pace.patience, now_ns):
                assert found.peer_id == C and "only its word" in found.reason
                return step
        return None

    def test_a_spare_suspects_nobody_for_being_far_away(self) -> None:
        """All owe the spare their word from a step's first moment on, since it owes nobody a
        tensor. A peer half a second away begins and is heard half a second later, and for most of
        the step had told nothing of it. Once somebody's Prepared has come, all others have
        begun."""
        assert self.spare_suspects_in(0.5) is None
        assert self.spare_suspects_in(0.05) is None
        assert self.spare_suspects_in(0.05, c_is_late_s=3.0) == STEPS

    def test_other_views_help_nobody(self) -> None:
        """Plans that are made anew because steps are slow restarted the count."""
        drips, found = Drips(), []
        for view in range(3):
            drips.begins(view * 100 * SECOND_NS)
            for step in range(1, STEPS):
                now_ns = (view * 100 + step) * SECOND_NS
                found.append(drips.step_over({C: SECOND_NS}, LEAST_NS, now_ns))
        assert not any(found[: STEPS - 1]) and all(found[STEPS - 1 :])

    def test_who_has_seen_half_of_it_joins_the_first_that_has_seen_enough(self) -> None:
        """The only member to accuse two others lost its own place, and so did one honest peer after
        the other."""
        stalls, pace = Stalls(A, 2 * SECOND_NS), Pace(self.view, SPEC, 0)
        stalls.watch([B, C])
        possible = PossibleWaits(self.view)
        joined: dict[int, list[str]] = {}
        for now_ns in range(0, STEPS * self.step_ns, TICK_NS):
            step, into_ns = divmod(now_ns, self.step_ns)
            if into_ns == TICK_NS:
                joined[step] = [
                    it.peer_id for it in stalls.join([B, C], pace.patience, self.view.id)
                ]
            mine = self.work(step, Lack(C, Kind.CLAIM))
            stalls.heard(B, step, mine)
            stalls.heard(C, step, self.work(step))
            assert not stalls.tick(mine, possible, lambda *_: True, pace.patience, now_ns)
        assert {step for step, names in joined.items() if names == [C]} == {*range(6, STEPS)}
        assert not any(joined[step] for step in range(6))

    def test_who_has_waited_for_half_as_long_joins(self) -> None:
        """The joiner has computed works again meanwhile. Where the shares were 50.1% and 49.9%, one
        member accused two alone, and was out."""
        for quarter_ns, joins in ((SECOND_NS, True), (SECOND_NS * 9 // 10, False)):
            drips = Drips()
            drips.begins(0)
            for step in range(1, STEPS + 1):
                assert not drips.step_over({C: quarter_ns}, LEAST_NS, step * self.step_ns)
            assert bool(drips.join([B, C], LEAST_NS)) == joins

    def test_who_was_left_out_begins_anew(self) -> None:
        drips, found = Drips(), []
        drips.begins(0)
        for step in range(1, 3 * STEPS):
            drips.keep({B, C} if step != STEPS else {B})
            found.append(drips.step_over({C: SECOND_NS}, LEAST_NS, step * SECOND_NS))
        first = next(n for n, each in enumerate(found) if each)
        assert first == STEPS + STEPS // 2 - 2, "half of the time is held against it again"

    def test_short_waits_are_none_however_short_the_steps(self) -> None:
        drips = Drips()
        drips.begins(0)
        for step in range(1, 100):
            assert not drips.step_over({C: LEAST_NS - 1}, LEAST_NS, step * LEAST_NS)


class TestNews:
    """What this peer says of its work between heartbeats."""

    view = view_of((1, 1, 1))

    def due(self, *stands: Work | None) -> list[int]:
        """The ticks at which news is due; some ticks are needed to settle."""
        news = EarlyNews()
        return [n for n, work in enumerate(stands) if news.is_due(work, n * SETTLED_NS // 2)]

    def work(self, step: int, *lacks: Lack) -> Work:
        return Work(self.view.id, step, False, lacks)

    def test_each_place_is_told_once_when_it_has_lasted(self) -> None:
        one, other = self.work(3, Lack(B, Kind.SUM)), self.work(3, Lack(B, Kind.CLAIM))
        assert self.due(one, one, one, one, other, other, other, other) == [2, 6]

    def test_what_passes_at_once_is_not_told(self) -> None:
        steps = [self.work(n, Lack(B, Kind.SUM)) for n in range(20)]
        assert self.due(*(each for step in steps for each in (step, step))) == []

    def test_microbatches_are_one_place_and_no_step_is_none(self) -> None:
        parts = [self.work(3, Lack(B, Kind.ACTIVATION, 0, n)) for n in range(6)]
        assert self.due(*parts, None, None, None, None) == [2]

    def test_who_is_never_long_in_one_place_is_heard_of_once_in_each_step(self) -> None:
        """A stage that waits and computes by turns said nothing before its heartbeat, which in a
        crowd comes after eight seconds. Nobody heard of its steps, and that is held against it."""
        turns = [
            msgspec.structs.replace(self.work(step), computes=bool(n % 2))
            for step in (3, 4)
            for n in range(8)
        ]
        assert self.due(*turns) == [2, 10]
