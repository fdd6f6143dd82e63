"""The plan in force, in terminals of all widths."""

import io

import pytest
from rich.console import Console

from p2p_dtfm.cli.terminal.plan_table import plan_table
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage

NAMES = ("brave-otter", "mighty-salamander", "young-hawk", "Ada & co. of London town")


def drawn(width: int, depth: int = 3) -> str:
    stages = [Stage(NAMES[at], at, at + 1, 1) for at in range(depth - 1)]
    stages.append(Stage(NAMES[depth - 1], depth - 1, 48, 1))
    made = Plan((Pipeline(tuple(stages), 0, 128),), (NAMES[3],), 1)
    screen = io.StringIO()
    Console(file=screen, width=width).print(plan_table(made, lambda name: name, width))
    return screen.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_word_is_cut(width: int) -> None:
    text = drawn(width)
    assert "…" not in text
    for word in (*NAMES, "2-47", "128", "spare"):
        assert word in " ".join(text.split()), text
    assert max(map(len, text.splitlines())) <= width


def test_stages_stand_side_by_side_where_there_is_room() -> None:
    assert "stage 3" in drawn(120) and "stage 3" not in drawn(80)
    assert "stage 2" in drawn(80, depth=2)
    assert f"{NAMES[0]}: layer 0" in drawn(120), "one layer is a layer"
