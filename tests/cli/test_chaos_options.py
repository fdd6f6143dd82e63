"""What does not go together is refused: no option of `chaos` is dropped without a word."""

from pathlib import Path

import pytest

from p2p_dtfm.cli.commands.chaos import refuse_with_replay
from p2p_dtfm.cli.scenarios.chaos_case import chaos_case
from p2p_dtfm.core.protocol.errors import UserError

SCENARIO = """
name = "four"

[[group]]
name = "near"
count = 4
measured = true

[[link]]
from = "*"
to = "*"
latency_ms = 5.0
bandwidth_mbps = 800.0
"""
FAULT = """
[[fault]]
at_step = 8
kind = "kill"
peer = "near-2"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    "given", [{"a scenario": "two-cities"}, {"--peers": 4}, {"--seed": 0}, {"--faults": 0}]
)
def test_what_a_replay_says_by_itself_is_not_said_again(given: dict[str, object]) -> None:
    ((name, _),) = given.items()
    with pytest.raises(UserError, match=f"--replay does not go with {name}"):
        refuse_with_replay(given)
    refuse_with_replay(dict.fromkeys(given))


def test_a_scenario_says_who_there_is(tmp_path: Path) -> None:
    path = written(tmp_path, SCENARIO)
    with pytest.raises(UserError, match="a scenario says which peers there are"):
        chaos_case(path, 6, None, None, "tiny")
    assert len(chaos_case(path, None, None, None, "tiny").peers) == 4
    assert len(chaos_case(None, None, None, 3, "tiny").peers) == 6
    assert len(chaos_case(None, 4, None, 3, "tiny").peers) == 4


def test_a_seed_is_of_faults_that_are_drawn(tmp_path: Path) -> None:
    path = written(tmp_path, SCENARIO + FAULT)
    with pytest.raises(UserError, match="states its faults, so that nothing is drawn") as refused:
        chaos_case(path, None, 0, None, "tiny")
    assert "--faults" in refused.value.fixes[1]
    assert [fault.kind for fault in chaos_case(path, None, None, None, "tiny").schedule] == ["kill"]
    drawn = chaos_case(path, None, 5, 3, "tiny")
    assert len(drawn.schedule) == 3 and drawn.seed == 5
    without = written(tmp_path, SCENARIO)
    assert chaos_case(without, None, 5, None, "tiny").seed == 5
    assert chaos_case(without, None, None, None, "tiny").seed == 1
