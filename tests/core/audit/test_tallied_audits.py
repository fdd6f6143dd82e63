"""How many audits each peer has done. Whoever reads the words of the same step counts the same,
though one of those who signed them has said one thing to some and another to others."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.audit.work import WORK_BYTES
from p2p_dtfm.core.messages.audit_messages import COULD_NOT
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.transcript.tallies import of_step
from tests.core.audit.parts import NAMES, PLAN
from tests.core.audit.test_auditors_words import WORKS, Words, as_claimed, told

VIEW_OF_PLAN: Any = SimpleNamespace(plan=PLAN, guards={})


def audits(said: dict[str, Prepared]) -> dict[str, int]:
    return {peer: tally.audits for peer, tally in of_step(VIEW_OF_PLAN, said, 1).items()}


def test_what_others_have_heard_of_an_auditor_counts_and_not_what_it_says_of_itself() -> None:
    """Of one step one reader counted four audits of a liar, and another one none: it had signed two
    Prepared of it, which came to the same outcome."""
    words = as_claimed("b", "c")
    honest = told({"b": {"c": WORKS["c"]}}, words, {})
    assert audits(honest) == {"a": 0, "b": 1, "c": 0, "d": 0}
    account = honest["d"].audit
    assert account is not None
    boasts = msgspec.structs.replace(account, found=dict(WORKS))
    also = honest | {"d": msgspec.structs.replace(honest["d"], audit=boasts)}
    assert audits(also) == audits(honest)


@pytest.mark.parametrize("heard_by", ["d", ""])
def test_one_alone_neither_adds_to_what_is_counted_nor_takes_from_it(heard_by: str) -> None:
    words: Words = {name: [("b", "c", WORKS["c"])] for name in "abc"}
    words |= {name: [*words.get(name, []), ("d", "a", WORKS["a"])] for name in heard_by}
    assert audits(told({}, words, {})) == {"a": 0, "b": 1, "c": 0, "d": 0}


def test_who_could_not_audit_or_says_two_things_has_done_one_audit_at_most() -> None:
    could_not: Words = {name: [("b", "c", COULD_NOT)] for name in NAMES}
    assert sum(audits(told({}, could_not, {})).values()) == 0
    unlike: Words = {
        name: [("b", "c", WORKS["c"]), ("b", "c", b"0" * WORK_BYTES)] for name in NAMES
    }
    assert audits(told({}, unlike, {}))["b"] == 1
