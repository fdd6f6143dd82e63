"""Progress where there is no terminal."""

import json

from p2p_dtfm.cli.terminal.progress import LINE_EVERY_S, ProgressLines


def test_a_line_now_and_then_with_the_time_left() -> None:
    now_s, said = 0.0, []
    lines = ProgressLines(lambda: now_s, said.append)
    for second in range(40):
        now_s = float(second)
        lines(second * 10, 1000, "reading")
    lines(0, 100, "writing")
    assert len(said) == 39 // LINE_EVERY_S
    assert json.loads(said[0]) == {
        "doing": "reading", "done_bytes": 100, "total_bytes": 1000, "left_s": 90.0,
    }  # fmt: skip
