"""The rarer of two ways: never on a machine, and each point of the table stands in one place."""

import asyncio
import contextvars
import re
from pathlib import Path

import pytest

import p2p_dtfm
from p2p_dtfm.ports import rarely

ASKED = re.compile(r"rarely\.(?:happens|fails|lingers)\(\s*\"([^\"]+)\"")


class Always:
    def happens(self, point: str) -> bool:
        return True

    def lingers_s(self, point: str) -> float:
        return 0.01


def test_each_point_is_asked_in_one_place_and_no_other_is_asked() -> None:
    root = Path(p2p_dtfm.__file__).parent
    asked = [
        point
        for path in sorted(root.rglob("*.py"))
        if path.parent.name != "ports"
        for point in ASKED.findall(path.read_text())
    ]
    assert sorted(asked) == sorted(rarely.POINTS)


def test_on_a_machine_nothing_is_rarer_and_no_turn_passes() -> None:
    assert not any(map(rarely.happens, rarely.POINTS))
    rarely.fails("part unreadable")
    lingering = rarely.lingers("step late")
    with pytest.raises(StopIteration):
        lingering.send(None)


def test_a_world_may_say_otherwise_for_the_tasks_that_begin_in_it() -> None:
    async def inside() -> tuple[bool, float]:
        rarely.live_by(Always())
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        await asyncio.create_task(rarely.lingers("step late"))
        with pytest.raises(OSError, match="Input/output"):
            rarely.fails("part unreadable")
        return rarely.happens("busy"), loop.time() - before_s

    is_busy, took_s = asyncio.run(inside(), debug=False)
    assert is_busy and took_s >= 0.009
    assert not rarely.happens("busy"), "outside of it all is as before"


def test_a_point_that_the_table_has_not_is_a_mistake_of_ours() -> None:
    def ask() -> None:
        rarely.live_by(Always())
        with pytest.raises(AssertionError, match="no such point"):
            rarely.happens("no such point")

    contextvars.copy_context().run(ask)
