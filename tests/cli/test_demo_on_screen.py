"""What a demo says at its end."""

from io import StringIO

from rich.console import Console

from p2p_dtfm.cli.commands.demo import _summary


def test_of_a_single_step_no_speed_is_told() -> None:
    """A single step has no time between steps. The demo ended with a traceback instead of a
    summary."""
    result = {
        "shaped_links": False,
        "emulated": False,
        "steps": 1,
        "peers": 2,
        "training_s": 0.0,
        "first_loss": 5.5,
        "last_loss": 5.5,
        "held_out_loss": 5.4,
        "tokens_per_s": None,
        "views": [],
        "agreed": True,
        "processes_left": 0,
    }
    console = Console(file=StringIO(), width=200)
    _summary(console, result, None, None)
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 step by 2 peers" in told and "tokens/s" not in told
