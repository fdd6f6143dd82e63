"""What a daemon leaves and says when its run is complete: a report, and what can be typed next."""

import logging
import shlex
from pathlib import Path

from p2p_dtfm.core.protocol.facts.in_words import counted, duration
from p2p_dtfm.daemon.machine.home import home_option
from p2p_dtfm.ports import disk
from p2p_dtfm.web.report import report_html
from p2p_dtfm.web.state import DashboardState

FILE = "report.html"

log = logging.getLogger("p2p_dtfm")


def next_commands(home: Path, prompt: str = "def ") -> tuple[str, ...]:
    """What to do with a trained model, as it would be typed here."""
    where = home_option(home)
    return (
        f"p2p-dtfm generate{where} --prompt {shlex.quote(prompt)}",
        f"p2p-dtfm export{where} --out my-model",
    )


def write_report(path: Path, state: DashboardState, commands: tuple[str, ...]) -> bool:
    """Write it whole or not at all; returns whether it is there. A full disk costs the report, not
    the model. A daemon that starts again when all is done has seen nothing of the run, and leaves
    what an earlier life wrote."""
    try:
        if path.exists() and not state.live.committed_here:
            return True
        page = report_html(state, commands).encode("utf-8", "replace")
        disk.write_whole(path, page, disk.ONLY_OWNER)
    except OSError as error:
        log.warning("the report cannot be written to %s: %s", path, error)
        return False
    return True


def last_words(state: DashboardState, report: Path | None, commands: tuple[str, ...]) -> list[str]:
    """For whoever reads the log: thanks, and the next lines to type."""
    name = state.run.name if state.run else "the run"
    ever = state.contribution.ever
    lines = [f"{name} is complete: {counted(state.live.step, 'step')}"]
    if ever.steps:
        lines.append(
            f"thank you: {counted(ever.tokens, 'token')} of it computed here, in "
            f"{counted(ever.steps, 'step')} and {duration(ever.seconds)}"
        )
    if report is not None:
        lines.append(f"what became of it: {report}")
    return lines + [f"next: {command}" for command in commands]
