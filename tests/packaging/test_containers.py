"""The containers' files: what they start, set and publish is what the program and the pages have.

They are built where podman and an index of images are; here they are read.
"""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import bootstrap as _registers  # noqa: F401  (its command)
from p2p_dtfm.daemon.machine.settings import PREFIX, Settings
from tests.documentation.pages import ROOT, blocks_of

FILES = {"Containerfile": "docs/bootstrap.md", "Containerfile.volunteer": "docs/volunteer.md"}


def lines_of(name: str, keyword: str) -> list[str]:
    text = (ROOT / "bootstrap" / name).read_text(encoding="utf-8")
    return re.findall(rf"^{keyword} (.*)$", text, re.MULTILINE)


def refuse_what_is_unknown(words: list[str]) -> dict[str, Any]:
    """What the program makes of these words, without doing it."""
    program: Any = typer.main.get_command(app)
    if words and not words[0].startswith("-"):
        program, words = program.get_command(None, words[0]), words[1:]
    context = program.make_context("p2p-dtfm", list(words), resilient_parsing=False)
    values: dict[str, Any] = context.params
    return values


def run_line(name: str) -> list[str]:
    """Of the page that speaks of it."""
    commands = [words for block in blocks_of(FILES[name]) for words in block.commands()]
    (line,) = [words for words in commands if words[:2] == ["podman", "run"]]
    return line


@pytest.mark.parametrize("name", FILES)
def test_what_it_starts_is_the_program(name: str) -> None:
    (entry,) = [json.loads(each) for each in lines_of(name, "ENTRYPOINT")]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry[0] in scripts
    (volume,) = lines_of(name, "VOLUME")
    if len(entry) > 1:
        assert str(refuse_what_is_unknown(entry[1:])["home"]) == volume


def test_what_the_volunteers_container_sets_is_a_setting() -> None:
    (line,) = lines_of("Containerfile.volunteer", "ENV")
    given = dict(each.split("=", 1) for each in shlex.split(line))
    values = {name.removeprefix(PREFIX).lower(): value for name, value in given.items()}
    assert all(name.startswith(PREFIX) for name in given)
    settings = Settings.model_validate(values)
    assert lines_of("Containerfile.volunteer", "VOLUME") == [str(settings.home)]


@pytest.mark.parametrize("name", FILES)
def test_the_page_publishes_the_ports_and_keeps_the_volume(name: str) -> None:
    (line,) = lines_of(name, "EXPOSE")
    exposed = [int(each.removesuffix("/tcp")) for each in line.split()]
    words = run_line(name)
    published = words[words.index("-p") + 1].split(":")
    assert published[0] == published[1], "what the daemon tells others is what they call"
    assert [int(port) for port in published[1].split("-")] == exposed
    assert words[words.index("-v") + 1].endswith(f":{lines_of(name, 'VOLUME')[0]}")


def test_what_follows_the_volunteers_image_are_options_of_the_daemon() -> None:
    words = run_line("Containerfile.volunteer")
    given = refuse_what_is_unknown(words[words.index("p2p-dtfm") + 1 :])
    assert given["invite"] == "LINE"
    port = lines_of("Containerfile.volunteer", "EXPOSE")[0].partition("/")[0]
    assert given["listen"] == [f"/ip4/0.0.0.0/tcp/{port}"]


@pytest.mark.parametrize(("name", "page"), FILES.items())
def test_the_page_builds_the_file(name: str, page: str) -> None:
    commands = [words for block in blocks_of(page) for words in block.commands()]
    (build,) = [words for words in commands if words[:2] == ["podman", "build"]]
    path = Path(build[build.index("-f") + 1])
    assert path == Path("bootstrap") / name and (ROOT / path).is_file()
    assert build[build.index("-t") + 1] in run_line(name)
