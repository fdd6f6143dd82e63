"""Parts of a swarm that went apart, and peers that missed what the others agreed on."""

from collections.abc import Callable

import msgspec
import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, SendMessage
from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.views.known_views import KnownViews
from p2p_dtfm.core.consensus.views.origins import origins_by_most, origins_of_founders
from p2p_dtfm.core.consensus.views.reminders import Reminders, reminded_of
from p2p_dtfm.core.membership.familiar_peers import FamiliarPeers
from p2p_dtfm.core.messages.agreement_messages import (
    AgreementMessage,
    Contribution,
    KnownView,
    PresentView,
    Ready,
    Reminder,
    Standing,
)
from p2p_dtfm.core.messages.prepared import SignedPrepared
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot, ViewId
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.hash_training import Tensor, true_state
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import WORKLOAD, record
from tests.core.liars import active, contribution, lives, say, trains_on, view_of
from tests.core.test_agreement import one_pipeline_each, same_view

FOUR = ["a", "b", "c", "d"]
FIVE = [*FOUR, "e"]
NEWCOMERS = ["n1", "n2", "n3"]


class LosesReady(AgreementWorld):
    """A world that loses each Ready to `deaf`."""

    deaf = ""

    def send(
        self, sender: str, receiver: str, message: AgreementMessage | SignedPrepared | Tensor
    ) -> None:
        if not (isinstance(message, Ready) and receiver == self.deaf):
            super().send(sender, receiver, message)


def trained(names: list[str]) -> LosesReady:
    """A world in which each member holds all layers."""
    world = LosesReady(1, WORKLOAD, record("template"), one_pipeline_each, timing=TIMING)
    world.rejoins = True
    for name in names:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found(names[0]))
    world.run_until(lambda: same_view(world, names))
    trains_on(world, names)
    return world


def split(world: AgreementWorld, one: list[str], other: list[str]) -> Callable[[], None]:
    links = {(a, b) for a in one for b in other}
    return world.cut(links | {(b, a) for a, b in links}, "in two")


def test_a_part_with_new_members_comes_back_as_a_whole() -> None:
    """More than half of the part were let in when it went on by itself. They go along with those
    that were in the last view of all, and nobody goes to and fro."""
    world = trained(FIVE)
    ours, theirs = ["d", "e", *NEWCOMERS], ["a", "b", "c"]
    heal = split(world, ours, theirs)
    for name in NEWCOMERS:
        world.add_peer(name)
    world.run_until(lambda: same_view(world, ours) and same_view(world, theirs))
    trains_on(world, ours)
    heal()
    everyone = sorted([*FIVE, *NEWCOMERS])
    world.run_until(lambda: same_view(world, everyone), limit_s=60)
    trains_on(world, everyone)


def test_who_lacks_a_ready_when_the_others_go_on_takes_their_view_over_first() -> None:
    """Otherwise the peer would be in a view of which the others know that they have left it."""
    world = trained(FOUR)
    world.deaf = "b"
    world.crash("d", lose_disk=True)
    before = view_of(world, "b").id
    world.run_until(lambda: view_of(world, "a").id == view_of(world, "c").id != before)
    missed = view_of(world, "a").id
    assert view_of(world, "b").id == before
    world.deaf = ""
    asks = world.peers["a"].agreement.repeat_step("a lost tensor", world.peers["a"].now_ns)
    world.peers["a"].do(asks)
    rest = ["a", "b", "c"]
    world.run_until(lambda: same_view(world, rest) and view_of(world, "a").id > missed, 20)
    assert missed in [view.id for view in world.peers["b"].views]
    trains_on(world, rest)


def known(number: int, *names: str) -> KnownView:
    return KnownView(ViewId(number, f"{number:064}"), tuple(Member(n, 1) for n in names), "plan")


def test_who_left_a_part_does_not_compare_by_its_views_again() -> None:
    before, ours, later = known(2, *FOUR), known(3, "c", "d"), known(4, "c", "d", "n1")
    views = KnownViews((before, ours, later))
    assert views.newest_common([ours.view, before.view]) == ours
    views.leaves(before)
    assert views.newest_common([later.view, ours.view, before.view]) == before
    assert views.told == (before.view,) and views.history == (before,)


def saying(name: str, *origins: KnownView, of: KnownView | None = None) -> Contribution:
    """What a member of a view says of where that view came from, or a newcomer of its own past."""
    present = PresentView(of.view, of.members, None) if of is not None else None
    signed = contribution(12, present, Member(name, 1), origins=origins)
    return decode(signed.payload, Contribution)


def test_newcomers_are_told_of_a_view_with_each_who_may_be_elsewhere() -> None:
    """Four went apart. Then two of one part left it for the other, and forgot what both had been in
    since. A newcomer that the last one lets in must still find the view in common."""
    before, middle, ours = known(2, *FOUR), known(5, "b", "c", "d"), known(9, "d")
    last = KnownViews((known(1, "a"), before, known(4, "c", "d"), middle, ours))
    assert last.origins(ours.members) == (middle, before), "one for b and c, one for a"
    said = (saying("d", *last.origins(ours.members), of=ours), saying("n"))
    records = tuple(record(name) for name in ("d", "n"))
    joined = Snapshot("run", WORKLOAD, 10, GENESIS, True, records, (), (), 0, None)
    view, newcomer = View(joined, NoPlan("of no matter here")), KnownViews()
    newcomer.says_ready(view, [], origins_by_most(said))
    newcomer.takes_over(view)
    went_over = KnownViews((before, known(7, "a"), known(8, *FOUR[:3])))
    assert newcomer.newest_common(went_over.told) == before
    third = saying("n", *newcomer.origins(view.members), of=known(10, "d", "n"))
    assert {middle, before} <= origins_by_most([third]), "and whom the newcomer lets in"
    another = saying("d", known(3, "x"), of=known(10, "d", "n"))
    assert origins_by_most([third, another]) == set(), "by the word of most"


def test_founders_believe_of_a_past_only_whom_they_know() -> None:
    """Otherwise a liar that names a view of made-up keys could have the founders follow it."""
    past, invented = known(2, *FOUR), known(3, "e", "key1", "key2")
    said = [saying("d", past), saying("e", invented), saying("n")]
    knows = FamiliarPeers("n")
    assert origins_of_founders(said, knows) == set()
    knows.meet(["d"])
    assert origins_of_founders(said, knows) == {past}
    member = saying("a", past, of=known(4, "a"))
    assert origins_of_founders([*said, member], knows) == set(), "members' word goes before"


def test_founders_belong_to_what_one_of_them_was_in() -> None:
    """The member left in a part has forgotten all views but one, and newcomers are with it. They
    begin anew, three or more, and go over to the others when these are there again."""
    theirs, ours = ["a", "b", "c"], ["d", "e", "n1", "n2"]
    world = trained(FIVE)
    heal = split(world, ours, theirs)
    for name in ("d", "e"):
        world.crash(name, lose_disk=name == "d")
    for name in ("n1", "n2"):
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    for name in ("d", "e"):
        world.restart(name)
    world.run_until(lambda: same_view(world, ours) and same_view(world, theirs), limit_s=60)
    heal()
    world.run_until(lambda: same_view(world, sorted([*FIVE, "n1", "n2"])), limit_s=60)


def test_newcomers_are_told_of_few_views() -> None:
    """Each contribution holds the views that newcomers are told."""
    alone = [known(number, "a", f"x{number}") for number in range(1, 30)]
    assert KnownViews(alone).origins(known(40, "a").members) == tuple(reversed(alone[-8:]))
    many = [known(number, *(f"x{number}-{n}" for n in range(40))) for number in range(1, 9)]
    assert KnownViews(many).origins(known(40, "a").members) == (many[-1],)


def test_a_newcomer_does_not_go_on_without_the_members_that_let_it_in() -> None:
    """The newcomer holds what the first step starts from, and the only member lacks a layer. From
    where the newcomer stands it would go on best alone. The member may yet come back with what it
    has."""
    world = AgreementWorld(1, WORKLOAD, record("template"), one_pipeline_each)
    for name in ("a", "n", "silent"):
        world.add_peer(name)
    member = world.peers["a"]
    member.states = {0: true_state(5, WORKLOAD.microbatch_count)}
    member.agreement.resume(5, {0: 5}, "lineage")
    world.found("a")
    world.run_until(lambda: member.view is not None)
    for name in ("n", "silent"):
        world.ask_to_join(name, "a")
    world.after(SECOND_NS // 5, lambda: world.crash("silent", lose_disk=False))
    newcomer = world.peers["n"].agreement
    world.run_until(lambda: newcomer.attempting and "n" in member.agreement.awaited)
    world.crash("a", lose_disk=False)
    world.run_to(world.now_ns + 30 * SECOND_NS)
    assert newcomer.view is None and not newcomer.attempting and not newcomer.frozen


def test_who_answers_late_is_not_told_to_be_silent() -> None:
    """Others never held the late member for absent, so their digests must be able to agree."""
    late = contribution(3, None)
    member = Member(late.peer_id, 1)
    digests = []
    for absent in (set(), {member}):
        attempt = Attempt(Member("a", 1), 3, False, GENESIS, 4)
        attempt.evidence.absent = absent
        attempt.add(late, decode(late.payload, Contribution))
        digests.append(attempt.digest)
        assert attempt.silent == set()
    assert digests[0] == digests[1]


def test_a_newcomer_hears_of_the_view_while_its_members_deal_with_a_failure() -> None:
    """Nobody answered the newcomer. After a while newcomers took it that nobody was in a view."""
    world = trained(FOUR)
    member, newcomer = world.peers["a"], world.add_peer("n")
    member.do(member.agreement.repeat_step("a lost tensor", member.now_ns))
    assert member.agreement.frozen
    actions, _ = say(world, "n", "a", newcomer.agreement.wants_view())
    told = [it.message for it in actions if isinstance(it, SendMessage)]
    assert [type(message) for message in told] == [Standing]


def test_newcomers_that_their_old_members_left_behind_follow_them() -> None:
    """The old members of a part go over to the others alone. The newcomer they had let in is cut
    off meanwhile, and finds that it comes from the same view as all of them."""
    old, others = ["d", "e"], ["a", "b", "c"]
    world = trained(FIVE)
    heal = split(world, [*old, *NEWCOMERS], others)
    for name in NEWCOMERS:
        world.add_peer(name)
    world.run_until(
        lambda: same_view(world, sorted([*old, *NEWCOMERS])) and same_view(world, others)
    )
    trains_on(world, old)
    heal_newcomers = split(world, NEWCOMERS, FIVE)
    heal()
    world.run_until(lambda: same_view(world, FIVE), limit_s=60)
    world.run_until(lambda: same_view(world, NEWCOMERS), limit_s=60)
    heal_newcomers()
    everyone = sorted([*FIVE, *NEWCOMERS])
    world.run_until(lambda: same_view(world, everyone), limit_s=60)


def test_who_joins_a_view_that_waits_for_members_costs_nobody_its_place() -> None:
    """Newcomers ask the same member one after another, and for each it has all agree anew."""
    nothing = NoPlan("too little memory")
    world = AgreementWorld(1, WORKLOAD, record("template"), lambda s: nothing, timing=TIMING)
    names = [f"p{number}" for number in range(8)]
    world.add_peer(names[0])
    world.peers[names[0]].agreement.wants_view()
    world.found(names[0])
    for name in names[1:]:
        world.add_peer(name)
        world.ask_to_join(name, names[0])
        world.run_to(world.now_ns + 4 * SECOND_NS)
    world.run_to(world.now_ns + 10 * SECOND_NS)
    assert same_view(world, names)


def test_after_a_power_cut_parts_are_compared_by_views_that_came_since() -> None:
    """All come back, and begin with low numbers again. The newest view of a time before would count
    as the newest of all. The two that were in it would then undo the work of the four."""
    old, ours = FIVE[:3], ["c", *NEWCOMERS]
    world = trained(old)
    for view in (ViewId(number, "") for number in range(2, 9, 2)):
        member = world.peers["a"]
        member.do(member.agreement.request_replan("again", member.now_ns))
        world.run_until(lambda after=view: all(view_of(world, name).id > after for name in old))  # type: ignore[misc]
    for name in old:
        world.crash(name, lose_disk=False)
    for name in old:
        world.restart(name)
    world.found("a")
    world.run_until(lambda: same_view(world, old))
    for name in NEWCOMERS:
        world.add_peer(name)
    everyone = sorted([*old, *NEWCOMERS])
    world.run_until(lambda: same_view(world, everyone), limit_s=60)
    trains_on(world, everyone)
    heal = split(world, ours, ["a", "b"])
    world.run_until(lambda: same_view(world, ours) and same_view(world, ["a", "b"]))
    trains_on(world, ours)
    heal_newcomers = split(world, NEWCOMERS, ["a", "b"])
    heal()  # those of the time before meet, and no others
    stays, goes = world.peers["c"], world.peers["a"]
    lives = stays.record.life, goes.record.life
    world.run_until(lambda: (stays.record.life, goes.record.life) != lives)
    assert stays.record.life == lives[0], "the four count"
    heal_newcomers()
    world.run_until(lambda: same_view(world, everyone), limit_s=60)


def founded_anew(old: list[str], others: list[str]) -> tuple[AgreementWorld, Callable[[], None]]:
    """Some members lost their disks while they were cut off and found anew; the others train on."""
    everyone = sorted([*old, *others])
    world = trained(everyone)
    heal = split(world, old, others)
    for name in old:
        world.crash(name, lose_disk=True)
    world.run_until(lambda: same_view(world, others), limit_s=60)
    for name in old:
        world.restart(name)
    world.run_until(lambda: same_view(world, old), limit_s=60)
    trains_on(world, old)
    return world, heal


@pytest.mark.parametrize("old", [["a", "b", "c"], ["a", "b", "c", "d"]])
def test_those_that_lost_their_disks_are_shown_what_they_signed(old: list[str]) -> None:
    """Three or more found anew while they are cut off, and know of no view with the others. The
    others show each of them its own signatures. Where the others are more, the founders go over, as
    ever."""
    others = [name for name in "abcdefg" if name not in old]
    world, heal = founded_anew(old, others)
    stays = others if len(others) > len(old) else old
    before = lives(world, stays)
    heal()
    everyone = sorted([*old, *others])
    world.run_until(lambda: same_view(world, everyone), limit_s=120)
    trains_on(world, everyone)
    assert lives(world, stays) == before


def test_they_are_shown_it_though_all_others_have_started_again() -> None:
    """What members had signed was in memory alone (agreement seed 4134)."""
    old, others = ["a", "b", "c"], ["d", "e", "f", "g"]
    world, heal = founded_anew(old, others)
    for name in others:
        world.crash(name, lose_disk=False)
    for name in others:
        world.restart(name)
    world.found("d")
    world.run_until(lambda: same_view(world, others), limit_s=60)
    trains_on(world, others)
    heal()
    everyone = sorted([*old, *others])
    world.run_until(lambda: same_view(world, everyone), limit_s=120)
    trains_on(world, everyone)


def reminder_of(world: AgreementWorld, teller: str, receiver: str) -> Reminder:
    """What one peer can show another that lives, of the view that they are in together."""
    state = world.peers[teller].agreement._state
    reminders, views = Reminders(), state.others.views
    reminders.goes_on(view_of(world, teller), state.active, views, ())
    found = reminders.of(receiver, views)
    assert found is not None
    return found


def test_a_peer_believes_its_own_signatures_and_no_others() -> None:
    """A peer believes only signatures from before all that it knows of, since it may have left a
    view since."""
    world = trained(FOUR)
    shown, verify = reminder_of(world, "a", "b"), world.peers["b"].agreement._state.settings.verify
    certificate, was = shown.certificate, shown.active.sender
    now = Member("b", was.life + 1)
    anew = KnownViews((KnownView(ViewId(1, "anew"), (now,), "plan"),))
    assert reminded_of(shown, now, anew, verify) is not None
    assert reminded_of(shown, Member("c", 9), anew, verify) is None, "it is another peer's"
    known = KnownViews((KnownView(ViewId(1, "as it was"), (was,), "plan"),))
    assert reminded_of(shown, now, known, verify) is None, "it has been there, and remembers"
    moved = KnownViews(anew.history)
    moved.leaves(None)
    moved.recalls(anew.history[0])
    assert reminded_of(shown, now, moved, verify) is None, "its user sent it elsewhere since"
    other = msgspec.structs.replace(certificate, members=(*certificate.members, Member("key1", 1)))
    forged = [
        Reminder(other, shown.active),
        Reminder(certificate, stated(shown.active, sign_for("a"))),
        Reminder(certificate, active(ViewId(4, "of another view"), was)),
        Reminder(msgspec.structs.replace(certificate, ready=()), shown.active),
    ]
    assert [reminded_of(it, now, anew, verify) for it in forged] == [None] * 4


def test_few_views_can_be_shown_and_none_that_is_no_ancestor() -> None:
    world = trained(FOUR)
    state = world.peers["a"].agreement._state
    reminders, views = Reminders(), state.others.views
    reminders.goes_on(view_of(world, "a"), state.active, views, view_of(world, "a").members)
    assert reminders.of("b", views) is None, "nobody has gone"
    reminders.goes_on(view_of(world, "a"), state.active, views, ())
    assert reminders.of("b", views) is not None and reminders.of("z", views) is None
    views.leaves(None)
    assert reminders.of("b", views) is None
