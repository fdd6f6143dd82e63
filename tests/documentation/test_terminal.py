"""What a terminal shows of a program's output, and the page that is made of it."""

import os
import sys
from pathlib import Path

from tests.documentation.terminal import Screen, Story, Terminal


def shown(*written: str, columns: int = 10, lines: int = 3) -> str:
    screen = Screen(columns, lines)
    for text in written:
        screen.feed(text)
    return screen.text()


def test_lines_wrap_and_go_out_at_the_top_and_are_kept() -> None:
    assert shown("one\r\ntwo\r\nthree\r\nfour") == "one\ntwo\nthree\nfour"
    assert shown("0123456789ab") == "0123456789\nab"
    assert shown("0123456789\r\nab") == "0123456789\nab", "a full line is no empty one more"


def test_a_panel_that_is_drawn_again_stands_there_once() -> None:
    first = "\x1b[?25llog\r\n\x1b[32mstep 1\x1b[0m\r\nloss 5"
    again = "\r\x1b[2K\x1b[1A\x1b[2Kstep 2\r\nloss 4"
    assert shown(first, again) == "log\nstep 2\nloss 4"
    assert shown("one\r\ntwo\x1b[H\x1b[Jnew") == "new"


def test_orders_may_come_in_pieces() -> None:
    assert shown("wrong\r\x1b", "[", "2", "Kright") == "right"


def test_a_command_runs_in_it_and_hears_its_keys(tmp_path: Path) -> None:
    code = "import time, sys; print('here', sys.stdout.isatty(), flush=True); time.sleep(60)"
    with Terminal([sys.executable, "-c", code], tmp_path, dict(os.environ)) as terminal:
        terminal.wait_for("here True", 30.0)
        terminal.press_ctrl_c()
        terminal.wait_for_end(30.0)
        assert "KeyboardInterrupt" in terminal.text()


def test_what_is_hidden_is_hidden_where_a_line_breaks_it_too() -> None:
    story = Story("A page", "As seen.", {"/home/x": "~"})
    story.hide("secretline", "LINE")
    story.add("First", "go /home/x", "It went.", "see sec\nretline and http://a/#token=abc")
    text = story.text()
    assert "secret" not in text and "| 0:00 | First | `go ~` |" in text
    assert "$ go ~\nsee LINE and http://a/#token=..." in text
