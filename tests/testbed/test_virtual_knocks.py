"""Real daemons in virtual time: a newcomer comes to many members, and asks for files only where it
may."""

import logging

import pytest

from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule

STEPS = 24
"""With 16 steps, and a newcomer after two seconds, nobody refuses a newcomer that asks all."""
JOINS = Fault(4.0, 0.0, "join", ("i",), 0.0)


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def test_who_joins_asks_nobody_for_files_at_whose_door_it_has_not_knocked(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In a storm of kills honest members said 179 times that they refuse a stranger."""
    log, said = logging.getLogger("p2p_dtfm"), _Said()
    schedule = Schedule(tuple("abcdefgh"), ("i",), (JOINS,))
    player = Player(tmp_path_factory.mktemp("player"), STEPS)
    before = log.level
    log.addHandler(said)
    log.setLevel(logging.INFO)
    try:
        played = player.play(0, schedule)
    finally:
        log.removeHandler(said)
        log.setLevel(before)
    assert played.problem == ""
    assert any(text.startswith("takes part in") for text in said.texts)
    assert not [text for text in said.texts if text.startswith("refuses ")]
