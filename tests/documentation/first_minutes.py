"""A newcomer's first minutes, by what README says alone: timed, and with what was on screen.

    python -m tests.documentation.first_minutes --out docs/first-five-minutes.md

clones this repository into a new directory, with an empty home, types README's commands into a
terminal of its own, and writes a page. It installs everything anew, over the network.
"""

import argparse
import datetime
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.documentation.pages import ROOT
from tests.documentation.terminal import Story, Terminal

TITLE = "A newcomer's first five minutes"
INSTALL_S, DEMO_S, COMMAND_S = 3600.0, 1800.0, 600.0
SHORT = "p2p-dtfm"
FOUND = "--run configs/tiny.toml"
JOIN = "--initial-peers ADDRESS --home ~/second"
LOOKS = {
    "The dashboard's address": "dashboard",
    "What this daemon does": "status",
    "Who takes part": "peers",
    "Who holds what, and why": "plan --explain",
}
KEPT = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PATH")


class Newcomer:
    """A user in a directory with the sources, with an empty home, and the page about that user."""

    def __init__(self, directory: Path, home: Path, program: Sequence[str]) -> None:
        self._directory, self._home, self._program = directory, home, tuple(program)
        self.story = Story(TITLE, introduction(), {str(directory): "~/p2p-dtfm", str(home): "~"})

    def types(self, *words: str) -> Terminal:
        """Type any command."""
        kept = {n: v for n, v in os.environ.items() if n in KEPT or n.startswith("PIP_")}
        return Terminal(words, self._directory, {**kept, "HOME": str(self._home)})

    def runs(self, words: str) -> Terminal:
        """Run the program with these words."""
        return self.types(*self._program, *words.replace("~", str(self._home)).split(" "))

    def looks(self, title: str, *words: str) -> None:
        """Show what a command says that ends by itself."""
        with self.types(*self._program, *words) as terminal:
            elapsed_s = terminal.wait_for_end(COMMAND_S)
            typed = " ".join((SHORT, *(f'"{it}"' if " " in it else it for it in words)))
            self.story.add(title, typed, f"It took {elapsed_s:.1f} s.", terminal.text())
            assert terminal.process.returncode == 0, terminal.text()


def introduction() -> str:
    cores, gib = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
    system = f"{platform.system()}, Python {platform.python_version()}"
    lines = (
        "What README says, typed into a fresh clone with an empty home, where everything is",
        "installed anew: when each screen was there, and what was on it.",
        "`tests/documentation/first_minutes.py` wrote this page on",
        f"{datetime.date.today().isoformat()}, on a machine with {cores} processor cores and",
        f"{gib:.0f} GiB of memory ({system}), whose load average was {os.getloadavg()[0]:.1f} when",
        "it began.",
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory(prefix="ann") as temporary:
        home, directory = Path(temporary), Path(temporary) / "p2p-dtfm"
        newcomer = Newcomer(directory, home, [str(directory / ".venv/bin/p2p-dtfm")])
        subprocess.run(["git", "clone", "--quiet", ROOT, directory], check=True)
        sees_the_demo(newcomer, newcomer.story.elapsed_s)
        founds(newcomer)
        out.write_text(newcomer.story.text(), encoding="utf-8")


def sees_the_demo(newcomer: Newcomer, cloned_s: float) -> None:
    """Install first, and then see the demo."""
    with newcomer.types("make", "demo") as demo:
        installed_s = demo.wait_for(r"dashboard|step \d+/", INSTALL_S)
        trained_s = demo.wait_for(r"step [1-9]\d*/", INSTALL_S)
        said = (
            f"The clone took {cloned_s:.0f} s, the installation {installed_s:.0f} s; the first "
            f"steps were committed\n{trained_s - installed_s:.0f} s later. The address at the top "
            "opens the dashboard of one of the daemons."
        )
        newcomer.story.add("It trains", "make demo", said, demo.text())
        ended_s = demo.wait_for_end(DEMO_S)
        said = f"The demo ended by itself {ended_s - installed_s:.0f} s after the installation."
        newcomer.story.add("The demo's summary", "make demo", said, demo.text())


def founds(newcomer: Newcomer) -> None:
    """Found a swarm of one's own, which a second daemon joins, to the end of its run."""
    story, typed = newcomer.story, f"{SHORT} {FOUND}"
    with newcomer.runs(FOUND) as founder:
        invited_s = founder.wait_for("others join with", COMMAND_S)
        trained_s = founder.wait_for(r"loss \d\.\d+ ·", COMMAND_S)
        said = f"The line for others was there after {invited_s:.0f} s, a loss after "
        story.add("A swarm of one's own", typed, f"{said}{trained_s:.0f} s.", founder.text())
        with newcomer.runs(JOIN.replace("ADDRESS", address_on(founder))) as joiner:
            sees_it_join(newcomer, joiner)
            for title, words in LOOKS.items():
                newcomer.looks(title, *words.split())
            ended_s = founder.wait_for(r"(?m)^done for ", COMMAND_S)
            said = (
                f"Founded {ended_s:.0f} s ago: all steps are done, and the model is on both disks."
            )
            story.add("The run is done", typed, said, founder.text())
            newcomer.looks("Leaving", "leave")
            founder.wait_for_end(COMMAND_S)
            joiner.press_ctrl_c()
            joiner.wait_for_end(COMMAND_S)
            said = "The other one was told by Ctrl-C."
            story.add("Leaving by Ctrl-C", f"{SHORT} {JOIN}", said, joiner.text())
    newcomer.looks("What the model writes", "generate", "--prompt", "def main", "--tokens", "200")
    with newcomer.runs("doctor") as doctor:  # it may well find something
        elapsed_s = doctor.wait_for_end(COMMAND_S)
        said = f"It took {elapsed_s:.1f} s."
        story.add("Is anything wrong here?", f"{SHORT} doctor", said, doctor.text())


def address_on(founder: Terminal) -> str:
    text = founder.text().replace("\n", "")
    address = re.search(r"--initial-peers (/ip4/\S+?/p2p/12D3KooW\w{44})", text)
    assert address is not None, text
    return address[1]


def sees_it_join(newcomer: Newcomer, joiner: Terminal) -> None:
    """Watch the join in a second terminal. The joiner has a home of its own, as it is the same
    machine."""
    began_s = time.monotonic()
    joiner.wait_for(r"(training|spare) for .*(\n.*)*loss \d", COMMAND_S)
    said = (
        "In a second terminal. It is the same machine, so it gets a home of its own. It took part "
        f"after {time.monotonic() - began_s:.0f} s."
    )
    newcomer.story.add("A second one joins", f"{SHORT} {JOIN}", said, joiner.text())


if __name__ == "__main__":
    main()
