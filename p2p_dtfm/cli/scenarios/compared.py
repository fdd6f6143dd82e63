"""What a verdict on losses rests on, and how a run ends in words where nothing was compared."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

LOSSES = "losses"
EMULATED = "emulated devices compute nothing"


def not_compared(reason: str, besides: Sequence[str] = ()) -> dict[str, Any]:
    """Fields of a report. `reason`: why losses were not compared; "" if they were. `besides`: what
    else was not looked at."""
    missing = [LOSSES] if reason else []
    return {"not_looked_at": [*missing, *besides], "not_compared": reason or None}


def difference_in_words(report: dict[str, Any]) -> str:
    """The largest difference of losses, or why there is none."""
    largest: float | None = report["max_loss_difference"]
    return f"not compared: {report['not_compared']}" if largest is None else f"{largest:.1e}"


def tell_end(console: Console, report: dict[str, Any]) -> None:
    """Print what was violated, and whether everything that should be looked at was looked at."""
    for violation in report["violations"]:
        console.print(f"violated: {violation}", style="red", highlight=False, markup=False)
    if not report["ok"]:
        console.print("[red]NOT ok[/red]")
    elif missing := report["not_looked_at"]:
        console.print(f"[yellow]held, as far as looked at[/yellow]; not {', '.join(missing)}")
    else:
        console.print("[green]all invariants held[/green]")
