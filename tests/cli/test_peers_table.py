"""What `p2p-dtfm peers` shows of a swarm, in wide terminals and in narrow ones."""

from typing import Any

import pytest
from typer.testing import CliRunner

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import plan, swarm

NAMES = ("curious-albatross", "brave-otter", "Ada of London and more")


def member(
    name: str, slowest: int, fastest: int, heard_s_ago: float | None, is_this_peer: bool = False
) -> dict[str, Any]:
    return {
        "peer_id": f"12D3KooW{name:x<44.44}",
        "name": name,
        "device": {
            "kind": "cpu",
            "name": "A processor with a long name of its own",
            "memory_bytes": 1023 << 20,
            "block": {"forward_ns": 41_000_000, "backward_ns": 82_000_000},
        },
        "links": {"a": {"bytes_per_s": slowest}, "b": {"bytes_per_s": fastest}},
        "layers": list(range(12, 24)),
        "heard_s_ago": heard_s_ago,
        "is_this_peer": is_this_peer,
    }


MEMBERS = [
    member(NAMES[0], 3_125_000, 128_000_000, None, is_this_peer=True),
    member(NAMES[1], 3_125_000, 3_125_000, 0.5),
    member(NAMES[2], 3_125_000, 128_000_000, 3.0),
]


def shown(monkeypatch: pytest.MonkeyPatch, columns: int, *options: str) -> list[str]:
    monkeypatch.setattr(swarm, "call_daemon", lambda home, what: MEMBERS)
    done = CliRunner().invoke(app, ["peers", *options], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= columns, done.output
    return lines


def test_who_is_in_no_view_shows_no_empty_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon was paused, which is not the same as not let in, as `plan` said."""
    monkeypatch.setattr(swarm, "call_daemon", lambda home, what: [])
    monkeypatch.setattr(plan, "call_daemon", lambda home, what: {"view": None})
    for command in ("peers", "plan"):
        done = CliRunner().invoke(app, [command])
        assert done.output.splitlines() == [swarm.IN_NO_VIEW] and done.exit_code == 0


@pytest.mark.parametrize("columns", [40, 50])
def test_a_terminal_of_a_phones_width_cuts_no_word_either(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """In narrow tables figures lost their units, and links their column."""
    text = "\n".join(shown(monkeypatch, columns))
    for whole in (*NAMES, "1,023 MiB, layers 12-23", "block fwd+bwd 123.0 ms", "25.0 Mbit/s"):
        assert whole in text, text
    assert "…" not in text and text.count("links") == 3


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_cuts_no_word(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    lines = shown(monkeypatch, columns)
    text = "\n".join(lines)
    for whole in ("peer", "memory", "fwd+bwd", "layers", "links", *NAMES[:2], "12-23", "123.0 ms"):
        assert whole in text, text
    assert "…" not in text and "heard" not in text and "device" not in text
    assert text.count("1,023 MiB") == 3 and "25.0 Mbit/s" in text
    first = next(at for at, line in enumerate(lines) if NAMES[0] in line)
    second = next(at for at, line in enumerate(lines) if NAMES[1] in line)
    assert second - first <= 3, text


def test_a_wide_one_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(shown(monkeypatch, 140))
    for whole in (
        "device",
        "heard",
        "this peer",
        "A processor",
        *NAMES,
        "25.0 Mbit/s to 1.02 Gbit/s",
    ):
        assert whole in text, text


def test_who_was_never_heard_is_not_taken_for_this_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEMBERS[2], "heard_s_ago", None)
    text = "\n".join(shown(monkeypatch, 140))
    assert text.count("this peer") == 1 and text.count("by others") == 1, text


def test_a_daemon_that_is_older_than_the_program_is_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon goes on for weeks after an update; the command ended with a traceback."""
    for each in MEMBERS:
        monkeypatch.delitem(each, "is_this_peer")
    text = "\n".join(shown(monkeypatch, 140))
    assert text.count("this peer") == 1 and "3 s ago" in text, text


def test_no_name_is_cut_where_all_columns_just_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, 90)
    text = "\n".join(lines)
    assert NAMES[0] in text and NAMES[1] in text and "…" not in text and "device" in text
    assert all(line[-1] in "┓┃┩│┘" for line in lines), text
    assert text.count("12-23") == 3 and text.count("1,023 MiB") == 3


@pytest.mark.parametrize("columns", [50, 80, 140])
def test_without_a_plan_nobody_is_a_spare(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A spare is one without which the plan is as fast."""
    monkeypatch.setitem(MEMBERS[1], "layers", [])
    text = "\n".join(shown(monkeypatch, columns))
    assert text.count("spare") == 1 and "no layers" not in text, text
    for each in MEMBERS:
        monkeypatch.setitem(each, "layers", [])
    text = "\n".join(shown(monkeypatch, columns))
    assert "spare" not in text and text.count("no layers" if columns == 50 else "none") == 3, text


def test_ids_are_whole_in_a_narrow_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, 60, "--ids")
    cells = "".join(line[:18].strip() for line in lines)
    assert all(member["peer_id"].replace(" ", "") in cells.replace(" ", "") for member in MEMBERS)
