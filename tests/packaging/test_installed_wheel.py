"""The wheel, installed in an environment that has nothing of this repository: what `pipx` does."""

import itertools
import json
import os
import re
import time
import zipfile
from pathlib import Path

from tests.packaging.conftest import Installed
from tests.programs import skip_without
from tests.web import chromium as browser


def test_it_asks_for_a_python_and_for_no_tests(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel)
    (name,) = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = files.read(name).decode()
    assert "Requires-Python: >=3.11" in metadata
    needed = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==).*$", metadata, re.MULTILINE)
    assert "torch" in needed and not {"pytest", "mypy", "ruff", "transformers"} & set(needed)
    assert not [name for name in files.namelist() if name.startswith("tests/")]


def test_it_runs_where_nothing_else_of_this_repository_is(installed: Installed) -> None:
    program = installed.program
    assert program("--version").strip() == "0.1.0"
    where = installed.python("import p2p_dtfm; print(p2p_dtfm.__file__)")
    assert where.startswith(str(installed.library)), "it is the installed one"
    planned = program("plan", "three-homes", "--run", "tiny", "--json")
    assert '"peers": 6' in planned, "scenarios and run specs are in it"
    unit = program("service", "install", "--print", "--hours", "22-07")
    assert f'ExecStart="{installed.place / "bin/p2p-dtfm"}" --config' in unit
    shell = program("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_P2P_DTFM_COMPLETE" in shell


def test_the_papers_page_is_made_in_a_minute_where_no_compiler_is(installed: Installed) -> None:
    """The wheel was built without one, too: nothing of it is compiled, here or there."""
    asked = "from p2p_dtfm.sim.paper.annealing import has_kernel; print(has_kernel())"
    assert installed.python(asked) == "False"
    out = installed.folder / "page"
    began_s, began_user_s = time.monotonic(), os.times().children_user
    printed = installed.program(
        "reproduce", "--quick", "--out", out, "--json", PATH=str(installed.place / "bin")
    )
    used_s = os.times().children_user - began_user_s
    assert used_s < 60, f"{used_s:.0f} s of processor time, {time.monotonic() - began_s:.0f} s"
    told = json.loads(printed)
    assert told["bars"] and all(bar["kind"] and bar["source"] for bar in told["bars"])
    page = (out / "index.html").read_text()
    assert told["facts"]["claim"] in page and page.count("<svg") > 10


@skip_without("browser", "" if browser.PROGRAM else "no Chromium here: apt-get install chromium")
def test_a_browser_shows_that_page(installed: Installed, tmp_path: Path) -> None:
    index = installed.folder / "page" / "index.html"
    if not index.exists():
        installed.program("reproduce", "--quick", "--out", index.parent)
    with browser.chromium(tmp_path) as page:
        for width, dark in itertools.product((1440, 390), (False, True)):
            page.set_view(width, 900, dark=dark)
            page.open(index.as_uri())
            page.wait_for("document.readyState == 'complete' && document.querySelector('#claim')")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, dark)
            assert page.problems == [], (width, dark)
            page.open("about:blank")
