"""Somebody with nothing but a wheel and a pasted line, until the computer trains with a friend's.

With WRITE_SCREENS=1 docs/from-a-wheel.md and its pictures are made anew. With WHOLE_INSTALL=1 it is
pipx that installs the wheel and, over the network, what it needs, with PyTorch's build for the
processor alone; else what it needs is there already, as the tests have it.
"""

import datetime
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from p2p_dtfm.testbed.local_swarm import LocalSwarm
from tests.documentation.pages import ROOT
from tests.documentation.screens import WRITES
from tests.documentation.terminal import Story, Terminal
from tests.e2e.helpers import run_program, step_of, wait_until
from tests.packaging.conftest import (
    PROCESSOR_TORCH,
    Installed,
    install,
    install_by_pipx,
    pipx_of_its_own,
)
from tests.programs import skip_without
from tests.web.chromium import PROGRAM, Page, chromium

PAGE = ROOT / "docs" / "from-a-wheel.md"
PICTURES = ROOT / "docs" / "screenshots"
DRAWN = "document.querySelector('#answers dd') && document.querySelector('.u-over')"
WHOLE = "WHOLE_INSTALL"
WITHIN_S = 180.0
LINE = re.compile(r"p2p-dtfm --invite (\S+)")
INSTALLED = "python3 -m venv ~/p2p && ~/p2p/bin/pip install --quiet {wheel}"
BY_PIPX = f"pipx install --preinstall {PROCESSOR_TORCH} {{wheel}}"
AT_ONCE = "At once."


def introduction() -> str:
    needed = "was there already: it takes as long as your line does."
    if os.environ.get(WHOLE):
        needed = (
            "came over the network.\n"
            "The index that was used has of this torch the build for the processor alone.\n"
            "Elsewhere the same line brings gigabytes of libraries for NVIDIA cards;\n"
            "the [quick start](quick-start.md) has the line that leaves them out."
        )
    cores, gib = psutil.cpu_count(), psutil.virtual_memory().total / (1 << 30)
    system = f"{platform.system()}, Python {platform.python_version()}"
    lines = (
        "You have a wheel from a friend, a line that the friend has sent, and an empty home. This",
        "page shows what you type, when, and what is then on the screen.",
        "[volunteer.md](volunteer.md) says what else you can do, and",
        "[how to undo it all](volunteer.md#leave). [troubleshooting.md](troubleshooting.md)",
        "explains error messages.",
        "",
        "`tests/packaging/test_a_stranger.py` types all of it every night. It wrote this page on",
        f"{datetime.date.today().isoformat()}, on a machine with {cores} processor cores and",
        f"{gib:.0f} GiB of memory ({system}, load average",
        f"{os.getloadavg()[0]:.1f} when it began). The friend's daemon ran there, too,",
        "so each had half of its cores.",
        f"What the wheel needs, torch above all, {needed}",
    )
    return "\n".join(lines)


@pytest.fixture
def short_home() -> Iterator[Path]:
    """A path as long as most homes have, since a terminal breaks long ones."""
    with tempfile.TemporaryDirectory(prefix="ann") as directory:
        yield Path(directory)


@pytest.mark.nightly
@skip_without("browser", "" if PROGRAM else "no Chromium here: apt-get install chromium")
def test_from_a_wheel_and_a_line_to_training_in_three_minutes(
    wheel: Path, tmp_path: Path, short_home: Path
) -> None:
    home, spec = short_home, tmp_path / "tiny.toml"
    tiny = (ROOT / "configs" / "tiny.toml").read_text(encoding="utf-8")
    spec.write_text(tiny.replace("total_steps = 250", "total_steps = 10_000"), encoding="utf-8")
    with LocalSwarm(tmp_path, ["--threads", "1", "--dashboard", "off"]) as friends:
        friend, _ = friends.found(["--run", str(spec), "--name", "Ada"])
        wait_until(lambda: step_of(friend) > 0, "the friend trains")
        pasted = LINE.search(run_program("invite", "--home", friend.home).stdout)
        assert pasted is not None
        hidden = {str(home): "~", pasted[1]: "LINE"}
        pipx = pipx_of_its_own(tmp_path / "pipx") if os.environ.get(WHOLE) else None
        story = Story("From a wheel to training with a friend", introduction(), hidden)
        if pipx is not None:
            here, command = install_by_pipx(pipx, wheel, home), BY_PIPX
        else:
            here, command = install(wheel, home, home / "p2p"), INSTALLED
        said = f"It took {story.elapsed_s:.0f} s."
        story.add("It is installed", command.format(wheel=wheel.name), said, "")
        with chromium(tmp_path / "profile") as page:
            trained_s = joins(story, Stranger(here, home), page, pasted[1])
            assert not page.problems, page.problems
        assert len((friend.status() or {})["members"]) == 1, "whoever leaves is missed by nobody"
    assert trained_s < WITHIN_S
    if os.environ.get(WRITES):
        PAGE.write_text(story.text() + "\n", encoding="utf-8")
    assert headings(PAGE.read_text(encoding="utf-8")) == headings(story.text())


class Stranger:
    """Somebody at a terminal, with the program and an empty home."""

    def __init__(self, here: Installed, home: Path) -> None:
        self._program, self._home = str(here.place / "bin/p2p-dtfm"), home
        kept = {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
        path = f"{here.place / 'bin'}:/usr/bin:/bin"
        self._environment = {**kept, "HOME": str(home), "PATH": path}

    def types(self, *words: str) -> Terminal:
        return Terminal([self._program, *words], self._home, self._environment)

    def asks(self, *words: str) -> str:
        """In a second terminal: what the command says."""
        with self.types(*words) as terminal:
            terminal.wait_for_end(60.0)
            assert terminal.process.returncode == 0, terminal.text()
            return terminal.text()


def joins(story: Story, stranger: Stranger, page: Page, line: str) -> float:
    """The stranger's part; seconds from nothing to training."""
    with stranger.types("--invite", line) as terminal:
        typed = "p2p-dtfm --invite LINE"
        at_s = terminal.wait_for(r"\bpeer [a-z]+-[a-z]+ \(12D3", 60.0)
        said = f"After {at_s:.0f} s it has an identity, and a name that is made of it."
        story.add("The line is pasted", typed, said, terminal.text())
        at_s = terminal.wait_for(r"(?m)^training for ", 120.0)
        trained_s = story.elapsed_s
        said = f"After {at_s:.0f} s it has what the others have learnt, and computes its part."
        story.add("It trains", typed, said, terminal.text())
        address = stranger.asks("dashboard").split()[0]
        looks(story, page, address, "Its page", "from-a-wheel-page.png", (1200, 720))
        at_s = terminal.wait_for(r"(?m)^training for ([3-9]\d s|\d+ min)", 240.0)
        assert re.search(r"(?m)^loss \d", terminal.text()), terminal.text()
        story.add("It learns", typed, f"After {at_s:.0f} s.", terminal.text())
        looks(story, page, address, "On a phone", "from-a-wheel-phone.png", (390, 844))
        for words in ("status", "peers"):
            title, typed_then = f"In a second terminal: {words}", f"p2p-dtfm {words}"
            story.add(title, typed_then, AT_ONCE, stranger.asks(words))
        page.open("about:blank")
        terminal.press_ctrl_c()
        terminal.wait_for_end(60.0)
        said = "Ctrl-C: the step is finished, the layers are handed over."
        story.add("Enough for today", typed, said, terminal.text())
        assert terminal.process.returncode == 0 and "Traceback" not in terminal.text()
    return trained_s


def looks(
    story: Story, page: Page, address: str, title: str, name: str, size: tuple[int, int]
) -> None:
    """At the page of the daemon, as far as a window of this size shows it."""
    page.open("about:blank")
    page.set_view(*size)
    page.open(address)
    page.wait_for(DRAWN)
    time.sleep(1.0)  # lines are drawn one after another
    said = f"The address that `p2p-dtfm dashboard` prints, in a window {size[0]} pixels wide."
    if os.environ.get(WRITES):
        page.screenshot(PICTURES / name, whole=False)
    story.picture(title, said, PICTURES / name, PAGE.parent)


def headings(page: str) -> list[str]:
    return re.findall(r"^## (.*)$", page, re.MULTILINE)
