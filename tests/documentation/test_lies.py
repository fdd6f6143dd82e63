"""One page promises, for each lie that can be played, what the program judges it by. Another page
says what was seen of it."""

import re

import pytest

from p2p_dtfm.testbed.lies.kinds import KINDS, WITH_STRENGTH
from tests.documentation.pages import ROOT

CHAOS = (ROOT / "docs" / "chaos.md").read_text()
TABLE = CHAOS[CHAOS.index("| kind | what a liar does |") :]
ROWS = re.findall(r"^\| (`[^|]*`) \|[^|]*\| ([^|]*) \|$", TABLE, re.MULTILINE)
PROMISED = {kind: said for kinds, said in ROWS for kind in re.findall(r"`([\w-]+)`", kinds)}
LIES = (ROOT / "docs" / "lies.md").read_text()
PLAYED = LIES.partition("\n## Late by")[0]
PLAYED_KINDS = re.findall(r"^\| `([\w-]+)` \|[^|]+\|[^|]+\|$", PLAYED, re.MULTILINE)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([\w-]+)`", text)) & KINDS.keys()


def test_each_kind_has_a_row_and_each_row_is_one() -> None:
    assert PROMISED.keys() == KINDS.keys()
    assert sorted(PLAYED_KINDS) == sorted(KINDS), "once each"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_promised_of_a_kind_is_what_it_is_judged_by(kind: str) -> None:
    promise, said = KINDS[kind].promise, PROMISED[kind]
    assert said.startswith("barred") == promise.barred
    may_cost_another = re.search("honest one|one of the two|costs one of them|one is out", said)
    assert bool(may_cost_another) >= promise.costs_another


def test_strengths_and_pipelines_are_those_of_the_program() -> None:
    told = re.search(r"A STRENGTH goes with (.*?):", CHAOS, re.DOTALL)
    assert told is not None and names_in(told[1]) == set(WITH_STRENGTH)
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    told = re.search(r"^A strength is of lies(.*?)The fix", page, re.DOTALL | re.MULTILINE)
    assert told is not None and names_in(told[1]) == set(WITH_STRENGTH)
    told = re.search(r"has all layers; for (.*?) six have memory", CHAOS, re.DOTALL)
    in_pipelines = {name for name, kind in KINDS.items() if kind.pipelines}
    assert told is not None and names_in(told[1]) == in_pipelines
    assert f"in {len(KINDS)} ways" in LIES
