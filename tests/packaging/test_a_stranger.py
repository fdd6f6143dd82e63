"""Somebody with nothing but a wheel and a pasted line, until the computer trains with a friend's.

With WRITE_SCREENS=1 docs/from-a-wheel.md is written anew. With WHOLE_INSTALL=1 what the wheel needs
is installed over the network; else it is there already, as the tests have it.
"""

import datetime
import os
import platform
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from p2p_dtfm.testbed.local_swarm import LocalSwarm
from tests.documentation.pages import ROOT
from tests.documentation.screens import WRITES
from tests.documentation.terminal import Story, Terminal
from tests.e2e.helpers import run_program, wait_until, write_endless_spec
from tests.packaging.conftest import Installed, install

PAGE = ROOT / "docs" / "from-a-wheel.md"
WHOLE = "WHOLE_INSTALL"
WITHIN_S = 180.0
LINE = re.compile(r"p2p-dtfm --invite (\S+)")
INSTALLED = "python3 -m venv ~/p2p && ~/p2p/bin/pip install --quiet {wheel}"


def introduction() -> str:
    needed = "was there already: it takes as long as your line does"
    if os.environ.get(WHOLE):
        needed = "came over the network"
    cores, gib = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
    system = f"{platform.system()}, Python {platform.python_version()}"
    lines = (
        "A wheel from a friend, a line that the friend has pasted, an empty home: what was typed,",
        "when, and what stood on the screen. `tests/packaging/test_a_stranger.py` types it every",
        f"night, and wrote this page on {datetime.date.today().isoformat()}, on a machine with",
        f"{cores} processor cores and {gib:.0f} GiB of memory ({system}, load average",
        f"{os.getloadavg()[0]:.1f} when it began). The friend's daemon ran there, too.",
        f"What the wheel needs, torch above all, {needed}.",
    )
    return "\n".join(lines)


@pytest.fixture
def short_home() -> Iterator[Path]:
    """A path as long as most homes have, since a terminal breaks long ones."""
    with tempfile.TemporaryDirectory(prefix="ann") as directory:
        yield Path(directory)


@pytest.mark.nightly
def test_from_a_wheel_and_a_line_to_training_in_three_minutes(
    wheel: Path, tmp_path: Path, short_home: Path
) -> None:
    home = short_home
    spec = write_endless_spec(tmp_path)
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off"]) as friends:
        friend, _ = friends.found(["--run", str(spec), "--name", "Ada"])
        wait_until(lambda: (friend.status() or {}).get("step"), "the friend trains")
        pasted = LINE.search(run_program("invite", "--home", friend.home).stdout)
        assert pasted is not None
        hidden = {str(home): "~", pasted[1]: "LINE"}
        story = Story("From a wheel to training with a friend", introduction(), hidden)
        here = install(wheel, home, home / "p2p", with_all_it_needs=bool(os.environ.get(WHOLE)))
        said = (
            f"It took {story.elapsed_s:.0f} s, into a directory of its own, as `pipx install` does."
        )
        command = INSTALLED.format(wheel=wheel.name)
        story.add("It is installed", command, said, "")
        trained_s = joins(story, here, home, pasted[1])
        assert len((friend.status() or {})["members"]) == 1, "whoever leaves is missed by nobody"
    assert trained_s < WITHIN_S
    if os.environ.get(WRITES):
        PAGE.write_text(story.text() + "\n", encoding="utf-8")
    assert headings(PAGE.read_text(encoding="utf-8")) == headings(story.text())


def joins(story: Story, here: Installed, home: Path, line: str) -> float:
    """The stranger's part; seconds from nothing to training."""
    kept = {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
    environment = {**kept, "HOME": str(home), "PATH": f"{here.place / 'bin'}:/usr/bin:/bin"}
    program = str(here.place / "bin/p2p-dtfm")
    with Terminal([program, "--invite", line], home, environment) as terminal:
        typed = "p2p-dtfm --invite LINE"
        at_s = terminal.wait_for(r"\bpeer [a-z]+-[a-z]+ \(12D3", 60.0)
        said = f"After {at_s:.0f} s it has an identity, and a name that is made of it."
        story.add("The line is pasted", typed, said, terminal.text())
        at_s = terminal.wait_for(r"(?m)^(training|spare) for ", 120.0)
        trained_s = story.elapsed_s
        said = f"After {at_s:.0f} s it has what the others have learnt, and takes part."
        story.add("It takes part", typed, said, terminal.text())
        at_s = terminal.wait_for(r"(?m)^(training|spare) for ([5-9]|\d\d) s", 120.0)
        assert re.search(r"(?m)^loss \d", terminal.text()), terminal.text()
        story.add("It learns", typed, f"After {at_s:.0f} s.", terminal.text())
        for words in ("status", "peers"):
            with Terminal([program, words], home, environment) as second:
                second.wait_for_end(60.0)
                story.add(
                    f"In a second terminal: {words}", f"p2p-dtfm {words}", "At once.", second.text()
                )
                assert second.process.returncode == 0
        terminal.press_ctrl_c()
        terminal.wait_for_end(60.0)
        said = "Ctrl-C: the step is finished, the layers are handed over."
        story.add("Enough for today", typed, said, terminal.text())
        assert terminal.process.returncode == 0 and "Traceback" not in terminal.text()
    return trained_s


def headings(page: str) -> list[str]:
    return re.findall(r"^## (.*)$", page, re.MULTILINE)
