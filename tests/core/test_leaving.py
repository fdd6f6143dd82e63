"""A leaving peer goes when nobody needs it any more."""

from dataclasses import dataclass

import msgspec

from p2p_dtfm.core.membership.leaving import (
    is_waited_for,
    last_holders,
    newest_holders,
    staying,
)
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import HeldLayer
from tests.core.builders import record
from tests.core.planning import Peer, name_of, snapshot

PLAN = Plan((Pipeline((Stage("a", 0, 2, 1), Stage("b", 2, 4, 1)), 0, 4),), ("c",), 1)


@dataclass
class Case:
    leaving: str

    def staying(
        self, planned: bool, held: str = "", steps: bool = True, failed: bool = False
    ) -> str:
        """Whether the leaving peers stay. `held`: peer, layer and version of each state; `steps`:
        there was a plan so far; `failed`: some peer did."""
        records = [
            record(name, intent=Intent.LEAVING if name in self.leaving else Intent.TRAIN)
            for name in "abc"
        ]
        present = PLAN if steps else None
        return "".join(r.peer_id for r in staying(records, planned, present, states(held), failed))


def states(text: str) -> list[HeldLayer]:
    return [HeldLayer(item[0], int(item[1]), int(item[2])) for item in text.split()]


def test_who_has_a_stage_first_gives_it_up() -> None:
    assert Case("a").staying(planned=True) == "abc"
    assert Case("c").staying(planned=True) == "ab"
    assert Case("ac").staying(planned=True) == "ab"
    assert Case("").staying(planned=True) == "abc"


def test_after_a_failure_who_has_any_copy_stays() -> None:
    assert Case("a").staying(False, "a03 b03 b13") == "abc", "b may fail before c has it"
    assert Case("a").staying(False, "a02 b03 b13") == "bc", "an older state serves nobody"
    assert Case("c").staying(False, "a03 b13") == "ab"


def test_without_steps_who_leaves_stays_for_what_nobody_else_has() -> None:
    assert Case("a").staying(False, "a03 b03 b13", steps=False) == "bc"
    assert Case("a").staying(False, "a03 b02 b13", steps=False) == "abc", "b's is older"
    assert Case("ab").staying(False, "a03 b03", steps=False) == "abc", "c has it not"


def test_where_all_leave_all_go() -> None:
    assert Case("abc").staying(planned=True) == ""
    assert Case("abc").staying(False, "a03 b13") == ""


def test_where_all_leave_but_who_failed_they_stay_for_it() -> None:
    assert Case("abc").staying(False, "a03 b13", failed=True) == "ab"


def test_holders() -> None:
    held = states("a05 b05 b14 c13")
    assert newest_holders(held) == {0: {"a", "b"}, 1: {"b"}}
    assert last_holders(held, frozenset("b")) == {"b"}
    assert last_holders(held, frozenset("ab")) == {"a", "b"}
    assert last_holders(held, frozenset("a")) == frozenset()


def test_of_two_that_both_want_to_leave_neither_waits_for_the_other() -> None:
    """The view's records hold only the first one's wish. The second took itself for one on whom the
    others depend, and both waited for a minute."""
    held = (HeldLayer(name_of(0), 0, 5), HeldLayer(name_of(1), 1, 5))
    both = msgspec.structs.replace(snapshot([Peer(intent=Intent.LEAVING), Peer()]), held=held)
    assert not is_waited_for(name_of(1), both, has_plan=False)
    one = msgspec.structs.replace(snapshot([Peer(), Peer()]), held=held)
    assert is_waited_for(name_of(0), one, has_plan=False), "the other wants what it has"
