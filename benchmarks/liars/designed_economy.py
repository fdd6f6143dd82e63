"""The economy of liars that the design gives, step by step: `benchmarks.liars.economy` plays it.

Members commit steps; each claims one stage-step in each. The openings of all draw audits after the
claims are made; an auditor is drawn from the other established members, and one that lies passes
its colluders. A wrong claim that an honest auditor replays is proof: the liar loses its place, and
the run goes back by `undo_steps` of the proof, or to before the liar's first stage. A newcomer with
a new key follows first. Newcomers are promoted one at a time, with waits that double with each
conviction, and are audited more often for their first steps. Nothing here trains: steps and claims
are counted.

Each strategy of a quarter of the members is judged over all seeds. Wrong steps that stay in the
run's lineage for each key are judged against the bound of `left_bound`. Goodput, steps that stay
over steps computed, is judged against 90%; audits count as the computing that they are.
"""

import math
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

GOODPUT_TARGET = 0.90
CERTAINTY = 0.01
"""Wrong steps of a liar in every step may stay with this probability."""
HONEST_SHARE = 0.75
"""The share of auditors that collude, at the worst."""
NEVER = 10**9


@dataclass(frozen=True)
class Rules:
    """The rules of the swarm. Counts are steps that were computed."""

    members: int = 16
    audit_share: float = 0.02
    probation_share: float = 0.20
    probation_steps: int = 300
    followed_audits: int = 20
    first_wait_steps: int = 400
    checkpoint_steps: int = 50
    verdict_steps: int = 20
    """Steps from a draw to the verdict."""
    crash_steps: int = 1
    """Steps computed anew after a member goes without a word."""
    withheld_share: float | None = 1.0
    """The share of claims audited in a step of which an opening is withheld; None: the draw is made
    anew."""
    alarm_share: float = 0.20
    alarm_steps: int = 300
    """Steps for which the rate is raised after a conviction."""

    @property
    def follower_steps(self) -> int:
        """A newcomer repeats so many steps before it has had its audits, at the rate of its own."""
        return round(self.followed_audits / self.probation_share)

    @property
    def undo_steps(self) -> int:
        """A liar in every step is caught within so many steps, except with probability 1 -
        `CERTAINTY`, without an alarm."""
        return math.ceil(math.log(CERTAINTY) / math.log(1 - HONEST_SHARE * self.audit_share))


FIRST_RULES = Rules(withheld_share=None, alarm_steps=0, first_wait_steps=100)


@dataclass(frozen=True)
class Strategy:
    """The behaviour of the liars."""

    name: str
    wrong_share: float = 1.0
    """The share of wrong steps of a liar with a place."""
    confesses_after: int | None = None
    """A colluder proves the first wrong claim so many steps after it, to have work undone."""
    goes_when_drawn: bool = False
    """The liar leaves its place rather than show what is asked for."""
    opens_last: bool = False
    """Every other liar only opens last, and gives up its place when a colluder's claim is drawn."""
    returns: bool = True
    """The liar comes back with a new key after each conviction."""
    confesses_new: bool = False
    """The liar lies also while its key is watched."""
    keeps_key: bool = False
    """The liar returns with the key that was convicted, once it may."""
    keys_ahead: int = 0
    """So many keys of all liars are made known in the first steps, and used later."""


STRATEGIES = (
    Strategy("in every step"),
    Strategy("in 10% of steps", wrong_share=0.1),
    Strategy("in 1% of steps", wrong_share=0.01),
    Strategy("once each key, confesses late", wrong_share=0.0, confesses_after=-1),
    Strategy("goes when drawn, every step", goes_when_drawn=True),
    Strategy("goes when drawn, 10%", wrong_share=0.1, goes_when_drawn=True),
    Strategy("opens last, every step", opens_last=True),
    Strategy("opens last, 10%", wrong_share=0.1, opens_last=True),
    Strategy("no new keys, every step", returns=False),
)


@dataclass
class Body:
    """One liar, whichever key it has now. Clocks are steps computed, not steps of the lineage."""

    only_opens: bool = False
    key: int = 0
    has_place: bool = True
    promoted_at: int | None = None
    """Clock; None: established from the start."""
    first_stage: int = 0
    """Step of the lineage at which its key got its first stage."""
    may_return_at: int = 0
    confesses_at: int | None = None


@dataclass(frozen=True)
class Proof:
    """A verdict under way."""

    due: int
    step: int
    """Step of the lineage at which it was proven."""
    body: int
    key: int


@dataclass
class Run:
    """One run of one strategy."""

    rules: Rules
    strategy: Strategy
    chance: random.Random
    wrong: list[bool] = field(default_factory=list)
    """The lineage: whether each committed step holds something wrong."""
    shares: list[float] = field(default_factory=list)
    """For each of the lineage's steps: how many claims were audited."""
    clock: int = 0
    audited: float = 0.0
    """Computing that went into audits, in steps' worth."""
    alarm_until: int = 0
    convictions: int = 0
    last_promotion_at: int = 0
    longest_wait: int = 0
    """The longest time in which no new liar had a stage; counted only by the built rules."""
    proofs: list[Proof] = field(default_factory=list)

    def __post_init__(self) -> None:
        opens_last = self.strategy.opens_last
        count = self.rules.members // 4
        self.bodies = [Body(only_opens=opens_last and number % 2 == 1) for number in range(count)]

    def step(self) -> None:
        """All claim, some are drawn, and the step is committed. Then verdicts follow, and liars
        come back."""
        self.clock += 1
        share = self._share()
        liars = [number for number, body in enumerate(self.bodies) if self._lies(body)]
        self.wrong.append(bool(liars))
        self.shares.append(share)
        self.audited += share
        for number in self._caught(liars, share):
            body = self.bodies[number]
            self._prove(number, self.clock + self.rules.verdict_steps)
            if self.strategy.goes_when_drawn:
                self._give_up_place(body)  # replayed all the same: others hold its frames
        self._judge()
        for body in self.bodies:
            self._come_back(body)

    def _share(self) -> float:
        is_alarmed = self.clock < self.alarm_until
        return self.rules.alarm_share if is_alarmed else self.rules.audit_share

    def _lies(self, body: Body) -> bool:
        if not body.has_place or body.only_opens:
            return False
        after = self.strategy.confesses_after
        if after is None:
            return self.chance.random() < self.strategy.wrong_share
        is_too_new = not self.strategy.confesses_new and self._is_on_probation(body)
        if body.confesses_at is not None or is_too_new:
            return False
        body.confesses_at = self.clock + (self.rules.undo_steps - 1 if after < 0 else after)
        return True

    def _is_on_probation(self, body: Body) -> bool:
        at = body.promoted_at
        return at is not None and self.clock - at < self.rules.probation_steps

    def _caught(self, liars: list[int], share: float) -> list[int]:
        """The liars whose wrong claims honest auditors replay, once the last opening is made or
        withheld."""
        while True:
            found = [number for number in liars if self._is_drawn(self.bodies[number], share)]
            openers = (body for body in self.bodies if body.only_opens and body.has_place)
            colluder = next(openers, None)
            withheld = self.rules.withheld_share
            if not found or colluder is None or withheld == share:
                return found
            if withheld is not None and self.chance.random() < withheld:
                return found  # it would be audited all the same: the place is not given for it
            self._give_up_place(colluder)  # its own claim was right: its audit shows nothing

    def _is_drawn(self, body: Body, share: float) -> bool:
        if self._is_on_probation(body):
            share = max(share, self.rules.probation_share)
        colluders = sum(each.has_place for each in self.bodies) - 1
        is_honest = self.chance.random() >= colluders / (self.rules.members - 1)
        return self.chance.random() < share and is_honest

    def _give_up_place(self, body: Body) -> None:
        body.has_place = False
        body.may_return_at = self.clock + self.rules.follower_steps
        self.clock += self.rules.crash_steps

    def _prove(self, number: int, due: int) -> None:
        self.proofs.append(Proof(due, len(self.wrong), number, self.bodies[number].key))

    def _judge(self) -> None:
        for number, body in enumerate(self.bodies):
            if body.confesses_at is not None and self.clock >= body.confesses_at:
                body.confesses_at = None
                self._prove(number, self.clock)
        due = [proof for proof in self.proofs if self.clock >= proof.due]
        self.proofs = [proof for proof in self.proofs if self.clock < proof.due]
        for proof in due:
            if proof.key == self.bodies[proof.body].key:
                self._convict(self.bodies[proof.body], proof)

    def _convict(self, body: Body, proof: Proof) -> None:
        """Undo, and bar the key. Its body comes back with another key."""
        self.convictions += 1
        safe = max(self._safe_step(proof.step), body.first_stage)
        safe -= safe % self.rules.checkpoint_steps
        del self.wrong[safe:], self.shares[safe:]
        self.alarm_until = self.clock + self.rules.alarm_steps
        body.key, body.has_place, body.confesses_at = body.key + 1, False, None
        waits = self.rules.follower_steps if self.strategy.returns else NEVER
        body.may_return_at = self.clock + waits

    def _safe_step(self, proven: int) -> int:
        """A liar in every step since would have been caught before, but for `CERTAINTY`."""
        missed, step = 1.0, min(proven, len(self.shares))
        while step and missed > CERTAINTY:
            step -= 1
            missed *= 1 - HONEST_SHARE * self.shares[step]
        return step

    def _come_back(self, body: Body) -> None:
        """Liars come back one at a time, with waits that the convictions so far have doubled."""
        wait_steps = self.rules.first_wait_steps * 2 ** min(self.convictions, 20)
        is_due = self.clock >= max(body.may_return_at, self.last_promotion_at + wait_steps)
        if not body.has_place and is_due:
            self.last_promotion_at = body.promoted_at = self.clock
            body.first_stage, body.has_place = len(self.wrong), True


def left_bound(rules: Rules, wrong_share: float) -> float:
    """Wrong steps that one key may leave on the average, one in `wrong_share` of its steps.

    Each is caught with p = 0.75 a, so 1/p are made before one is; those are undone of which the
    proof comes within `undo_steps`: 1/p · (1 - p)^(wrong_share · undo_steps).
    """
    caught = HONEST_SHARE * rules.audit_share
    return (1 - caught) ** (wrong_share * rules.undo_steps) / caught


def played(
    rules: Rules, strategy: Strategy, steps: int, seeds: int, kind: type[Run] = Run
) -> dict[str, Any]:
    """Of all seeds: wrong steps that stay, for each convicted key, and goodput."""
    left, keys, goodputs, convictions, longest_wait = 0, 0, [], 0, 0
    for seed in range(seeds):
        chance = random.Random(f"{strategy.name} {seed}")
        run = kind(rules, strategy, chance)
        while run.clock < steps:
            run.step()
        left += sum(run.wrong)
        convictions += run.convictions
        keys += run.convictions + sum(body.has_place for body in run.bodies)
        longest_wait = max(longest_wait, run.longest_wait)
        goodputs.append(len(run.wrong) / (run.clock + run.audited))
    bound = left_bound(rules, strategy.wrong_share) if strategy.confesses_after is None else 0.0
    per_key = left / keys if keys else 0.0
    goodput = statistics.median(goodputs)
    return {
        "strategy": strategy.name,
        "wrong_left_per_key": round(per_key, 2),
        "bound_per_key": round(bound, 2),
        "convictions": round(convictions / seeds, 1),
        "goodput": round(goodput, 4),
        "worst_goodput": round(min(goodputs), 4),
        "longest_wait": longest_wait,
        "holds": per_key <= bound * 1.25 + 0.5 and goodput >= GOODPUT_TARGET,
    }
