"""Who leaves goes when nobody needs it any more."""

from dataclasses import dataclass

from p2p_dtfm.core.leaving import only_holders, staying
from p2p_dtfm.core.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.records import Intent
from p2p_dtfm.core.snapshot import HeldLayer
from tests.core.builders import record

PLAN = Plan((Pipeline((Stage("a", 0, 2, 1), Stage("b", 2, 4, 1)), 0, 4),), ("c",), 1)


@dataclass
class Case:
    leaving: str

    def staying(self, planned: bool, held: str = "") -> str:
        """`held`: peer, layer and version of each state."""
        records = [
            record(name, intent=Intent.LEAVING if name in self.leaving else Intent.TRAIN)
            for name in "abc"
        ]
        states = [HeldLayer(item[0], int(item[1]), int(item[2])) for item in held.split()]
        present = PLAN if planned else None
        return "".join(r.peer_id for r in staying(records, planned, present, states))


def test_who_has_a_stage_first_gives_it_up() -> None:
    assert Case("a").staying(planned=True) == "abc"
    assert Case("c").staying(planned=True) == "ab"
    assert Case("ac").staying(planned=True) == "ab"
    assert Case("").staying(planned=True) == "abc"


def test_after_a_failure_who_has_the_only_copy_stays() -> None:
    assert Case("a").staying(False, "a03 b03 b13") == "bc"
    assert Case("a").staying(False, "a03 b02 b13") == "abc", "b's state of layer 0 is older"
    assert Case("ab").staying(False, "a03 b03") == "c", "nobody alone"


def test_where_all_leave_all_go() -> None:
    assert Case("abc").staying(planned=True) == ""
    assert Case("abc").staying(False, "a03 b13") == ""


def test_only_holders() -> None:
    held = [HeldLayer("a", 0, 5), HeldLayer("b", 0, 5), HeldLayer("b", 1, 4), HeldLayer("c", 1, 3)]
    assert only_holders(held) == {"b"}
