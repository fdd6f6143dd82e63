"""An economy of liars: what they leave in a run, and what it costs the others.

    python -m benchmarks.liars.economy [--rules built] [--seeds 20] [--steps 20000] [--json]
        [--keys-ahead 0]

`--rules built` plays what is built, by the very functions and constants of `p2p_dtfm.core`: waits
for a place, rates of audits, and how far a run goes back. `first` is the design as it was first
written; it falls, see docs/benchmarks/liars.md. `amended` is the design with three amendments. A
withheld opening has everybody audited for that step. A conviction raises the rate of audits for a
while, so that colluders are found at once, and less is undone for them. Waits for a place begin at
400 steps. `designed_economy` says what is judged. With `--keys-ahead` so many keys are made known
in the first steps, and used later.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.liars.designed_economy import (
    CERTAINTY,
    FIRST_RULES,
    NEVER,
    STRATEGIES,
    Body,
    Proof,
    Rules,
    Run,
    Strategy,
    played,
)
from p2p_dtfm.core.audit.draw import rate_in_force
from p2p_dtfm.core.audit.roles import (
    KNOWN,
    WATCHED_MILLIONTHS,
    held_off,
    probation_ends_step,
    quiet_from,
    watched_until,
    with_roles,
)
from p2p_dtfm.core.commit.step_terms import StepTerms
from p2p_dtfm.core.membership.bars import united, with_convicted
from p2p_dtfm.core.membership.undo import undo_due
from p2p_dtfm.core.protocol.lineage import Epochs
from p2p_dtfm.core.protocol.sections.audit_spec import AuditSpec
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, ViewId

RATE = 0.02
"""The advised settings, with the steps within which a liar in every step is found, but for
`CERTAINTY`."""
SPEC = AuditSpec(rate=RATE, undo_steps=math.ceil(math.log(CERTAINTY) / math.log(1 - RATE)))
TERMS = StepTerms(
    *(1, 1, 1, 1, 1, 1.0),
    audits=True,
    follow_steps=SPEC.follow_steps,
    undo_steps=SPEC.undo_steps,
    rate_millionths=SPEC.rate_millionths,
    undo_every=SPEC.undo_every,
)
BUILT_STRATEGIES = (
    *STRATEGIES,
    Strategy("a convicted key returns, every step", keeps_key=True),
    Strategy(
        "a convicted key returns, confesses",
        wrong_share=0.0,
        confesses_after=0,
        confesses_new=True,
        keeps_key=True,
    ),
    Strategy("new keys confess", wrong_share=0.0, confesses_after=0, confesses_new=True),
)
KEYS_AHEAD = Strategy("keys made known ahead", wrong_share=0.0, confesses_after=-1)
"""Played only on request: nothing that is built holds it off (decision 73)."""
KNOWN_AT_STEP = 10
BACK_AFTER_STEPS = 10
"""A member that leaves without a verdict is let in again after ten seconds."""


class BuiltRules(Rules):
    """The rules of the code, as `SPEC` asks for."""

    @property
    def undo_steps(self) -> int:
        return SPEC.undo_steps


BUILT_RULES = BuiltRules(audit_share=RATE, probation_share=WATCHED_MILLIONTHS / 1e6)


class BuiltRun(Run):
    """One run by what is built. All counts are steps of the lineage, as in snapshots; what is found
    does not commit, and steps are drawn whole, so that all that lie in one are found in it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.epochs = Epochs()
        names = [_name(number, body) for number, body in enumerate(self.bodies)]
        self.bars = tuple(Bar(GENESIS, 0, it, 0, 0, KNOWN) for it in ("honest", *names))
        ahead = [
            _name(number, Body(key=1 + key))
            for key in range(self.strategy.keys_ahead // max(1, len(names)))
            for number in range(len(names))
        ]
        self.bars = with_roles(self.bars, (), ahead, KNOWN_AT_STEP, TERMS.follow_steps)
        self.closed = 0
        self._bar_of: dict[int, Bar] = {}
        self._drawn_at, self._is_drawn_whole = -1, False
        self._look_at_bars()

    def step(self) -> None:
        super().step()
        at = len(self.wrong)
        quiet = quiet_from(self.bars, at, TERMS.follow_steps, TERMS.undo_steps)
        self.closed = self.closed + 1 if at < quiet else 0
        self.longest_wait = max(self.longest_wait, self.closed)

    def _share(self) -> float:
        at = len(self.wrong)
        if at >= self._alarm_ends:  # it is looked at in each step
            return self.rules.audit_share
        return rate_in_force(SPEC.rate_millionths, self.bars, at) / 1e6

    def _is_on_probation(self, body: Body) -> bool:
        return len(self.wrong) < watched_until(self._bar_of[id(body)])

    def _is_drawn(self, body: Body, share: float) -> bool:
        if self._drawn_at != self.clock:
            self._drawn_at, self._is_drawn_whole = self.clock, self.chance.random() < share
        is_drawn = self._is_drawn_whole
        if self._is_on_probation(body):
            is_drawn |= self.chance.random() < self.rules.probation_share
        colluders = sum(each.has_place for each in self.bodies) - 1
        return is_drawn and self.chance.random() >= colluders / (self.rules.members - 1)

    def _give_up_place(self, body: Body) -> None:
        super()._give_up_place(body)
        body.may_return_at = len(self.wrong) + BACK_AFTER_STEPS

    def _prove(self, number: int, due: int) -> None:
        super()._prove(number, self.clock)

    def _judge(self) -> None:
        for number, body in enumerate(self.bodies):
            if body.confesses_at is not None and self.clock >= body.confesses_at:
                body.confesses_at = None
                self._prove(number, self.clock)
        found, self.proofs = self.proofs, []
        if found:
            self._take_back(found)

    def _take_back(self, proofs: Sequence[Proof]) -> None:
        """Convict all that are found in one step, in one view."""
        step, view = len(self.wrong), ViewId(self.clock, "")
        bodies = [self.bodies[proof.body] for proof in proofs]
        names = {_name(proof.body, self.bodies[proof.body]) for proof in proofs}
        after = with_convicted(self.bars, dict.fromkeys(names, (view, step)), {})
        undo = undo_due(self.bars, after, TERMS, self.epochs)
        assert undo is not None
        quiet = quiet_from(after, step, TERMS.follow_steps, TERMS.undo_steps)
        places = {_name(n, body) for n, body in enumerate(self.bodies) if body.has_place}
        bars = held_off(after, places - names, step, quiet)
        safe = undo.newest - undo.newest % SPEC.undo_every
        del self.wrong[safe:], self.shares[safe:]
        self.epochs = self.epochs.next_one(safe)
        self.clock += self.rules.crash_steps
        self.audited += 1  # the first step of a view is audited whole
        for body in bodies:
            self.convictions += 1
            body.key += not self.strategy.keeps_key
            body.has_place, body.confesses_at = False, None
            body.may_return_at = 0 if self.strategy.returns else NEVER
        news = {_name(n, body) for n, body in enumerate(self.bodies)}
        bars = with_roles(bars, (), news, safe, TERMS.follow_steps, quiet)
        self.bars = united(bars, news)
        self._look_at_bars()

    def _look_at_bars(self) -> None:
        known = {bar.peer_id: bar for bar in self.bars}
        for number, body in enumerate(self.bodies):
            self._bar_of[id(body)] = known[_name(number, body)]
        self._alarm_ends = len(self.wrong)
        while rate_in_force(0, self.bars, self._alarm_ends):
            self._alarm_ends += 1

    def _come_back(self, body: Body) -> None:
        at = len(self.wrong)
        may_at = max(body.may_return_at, probation_ends_step(self._bar_of[id(body)]))
        if not body.has_place and at >= may_at:
            body.has_place, body.first_stage = True, at


def _name(number: int, body: Body) -> str:
    return f"{number}:{body.key}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--members", type=int, default=Rules.members)
    parser.add_argument("--rules", choices=("first", "amended", "built"), default="built")
    parser.add_argument("--keys-ahead", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = {"first": FIRST_RULES, "amended": Rules(), "built": BUILT_RULES}
    rules = replace(kinds[options.rules], members=options.members)
    kind = BuiltRun if options.rules == "built" else Run
    ways = BUILT_STRATEGIES if options.rules == "built" else STRATEGIES
    if options.keys_ahead:
        ways = (*ways, replace(KEYS_AHEAD, keys_ahead=options.keys_ahead))
    rows = [played(rules, it, options.steps, options.seeds, kind) for it in ways]
    if options.json:
        print(json.dumps({"undo_steps": rules.undo_steps, "rows": rows}))
    else:
        print(f"undo by {rules.undo_steps} steps; {options.seeds} runs of {options.steps} steps")
        for row in rows:
            print(
                f"{row['strategy']:32s} left {row['wrong_left_per_key']:7.2f} a key (bound "
                f"{row['bound_per_key']:6.2f}), convictions {row['convictions']:5.1f}, goodput "
                f"{row['goodput']:.1%}, worst {row['worst_goodput']:.1%}, "
                f"longest wait {row['longest_wait']:6d}: "
                f"{'holds' if row['holds'] else 'FALLS'}"
            )
    return 0 if all(row["holds"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
