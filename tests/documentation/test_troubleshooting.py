"""Whoever looks up an error message finds it, and what the page explains is really said.

The other direction for messages as they are printed: `tests.e2e.helpers.run_program` looks up each
error of the program that a test provokes.
"""

import pytest

from tests.documentation.error_messages import (
    heading_of,
    headings,
    is_raised,
    readable,
    templates,
)
from tests.documentation.pages import ROOT
from tests.documentation.screens import screens

LABORATORY = (
    "no shape file", "the shape of", "the shape file", "larger than", "chaos", "no daemon of the",
    "the founder did not start", "daemons are started on one machine", "shape", "…; run …",
)  # fmt: skip
"""Said to those who try out the program with launchers of its own, not to who takes part."""


@pytest.mark.parametrize("heading", headings())
def test_what_is_explained_is_really_said(heading: str) -> None:
    everywhere = templates("")
    told_by_the_run_spec = heading.startswith("ORIGIN: ")
    assert told_by_the_run_spec or is_raised(heading, everywhere), "no code says so any more"


def test_what_a_daemon_says_is_explained() -> None:
    said = [readable(template) for template in templates("daemon", "net")]
    assert len(said) > 25
    unexplained = [
        cause
        for cause in said
        if heading_of(cause) is None and not any(part in cause for part in LABORATORY)
    ]
    assert unexplained == []


def test_each_screen_of_bad_input_is_compared_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "e2e").glob("*.py"))
    assert len(screens()) >= 11
    assert [heading for heading in screens() if f'"{heading}"' not in tests] == []


def test_a_message_that_nobody_explains_is_not_found() -> None:
    assert heading_of("the moon is too bright") is None
    assert heading_of("a daemon is already running in /x (process 5)") is not None
