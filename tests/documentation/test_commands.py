"""Every command of the pages, typed as it stands there.

Long-lived ones are started and stopped, `make` shows what it would do (`make test` is what runs
this), and a few commands of docs/bootstrap.md and docs/volunteer.md change the machine itself
(services, containers, homes) or take long: those are only counted, and NOT_TYPED says why.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import typer.main

from p2p_dtfm.cli import main
from p2p_dtfm.cli.app import app
from tests.documentation.pages import ROOT, blocks_of, mentioned, pages, unseen_commands
from tests.documentation.typist import NOT_TYPED, Typist, why_not_typed

ELSEWHERE = {
    "docs/chaos.md": "tests/e2e/test_chaos.py",
    "docs/dashboard.md": "tests/e2e/test_watching.py",
    "docs/layers.md": "tests/documentation/test_layers_page.py",
}
"""Pages whose commands the tests of their subject type."""
OF_OTHERS = {
    *("--quick", "--only", "--case", "--slower", "--kind", "--scenario"),
    *("--shrink", "--faults", "--jobs", "--coverage", "--rules", "--stage-steps", "--steps"),
    *("--at-once", "--bytes", "--batch", "--pairs", "--rate", "--wanem", "--keys-ahead"),
}
"""Options of the benchmarks and of the simulation, of which pages speak."""
LIKE_OTHERS = "docs/troubleshooting.md"
TYPED = {
    "README.md",
    "docs/bootstrap.md",
    "docs/data.md",
    "docs/founder.md",
    "docs/models-in-and-out.md",
    "docs/quick-start.md",
    "docs/reproduce.md",
    "docs/simulator.md",
    "docs/verify.md",
    "docs/volunteer.md",
}


@pytest.fixture
def typist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Typist]:
    made = Typist(tmp_path, monkeypatch, lambda: request.getfixturevalue("demo_run"))
    folder = tmp_path / "my-texts"
    folder.mkdir()
    for path in sorted((ROOT / "docs").glob("*.md")):
        (folder / path.name).write_bytes(path.read_bytes())
    try:
        yield made
    finally:
        made.end()


def test_every_page_with_commands_is_typed_here() -> None:
    with_commands = {page for page in pages() if blocks_of(page)}
    assert with_commands == TYPED | {LIKE_OTHERS} | ELSEWHERE.keys()
    for page, path in ELSEWHERE.items():
        shell = [block for block in blocks_of(page) if block.language != "python"]
        verbs = {words[1] for block in shell for words in block.commands()}
        test = (ROOT / path).read_text()
        assert page in test or all(f'"{verb}"' in test for verb in verbs)
    typed = [words[1:] for page in TYPED for block in blocks_of(page) for words in block.commands()
             if block.language != "python"]  # fmt: skip
    for block in blocks_of(LIKE_OTHERS):
        assert all(words[1:] in typed for words in block.commands()), "typed from another page"


@pytest.mark.parametrize("page", pages())
def test_each_block_of_commands_says_that_it_is_one(page: str) -> None:
    assert unseen_commands(page) == []


def test_blocks_that_nobody_would_type_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Type\n\n    p2p-dtfm status\n\nor\n\n```\npipx install FILE.whl\n```\n\nand see\n\n"
        "```\nagreed on view 2\n```\n\n```toml\n    make = 1\n```\n\n    max over x\n"
    )
    assert unseen_commands(str(page)) == ["p2p-dtfm", "pipx"]


def test_what_is_not_typed_stands_on_a_page_and_has_a_reason() -> None:
    shell = [block for page in pages() for block in blocks_of(page) if block.language != "python"]
    commands = [words for block in shell for words in block.commands()]
    for start, why in NOT_TYPED.items():
        assert why
        begun = [words for words in commands if " ".join(words).startswith(start)]
        assert begun and all(why_not_typed(words) for words in begun), start


def options_of(command: Any) -> set[str]:
    return {name for option in command.params for name in (*option.opts, *option.secondary_opts)}


def test_what_pages_mention_in_passing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["p2p-dtfm", "--help"])
    with pytest.raises(SystemExit):
        main()  # registers the commands
    program: Any = typer.main.get_command(app)
    groups = [each for each in program.commands.values() if hasattr(each, "commands")]
    inner = [each for group in groups for each in group.commands.values()]
    every = (program, *program.commands.values(), *inner)
    ours = set().union(*(options_of(each) for each in every))
    checked = 0
    for page in pages():
        for words in mentioned(page):
            verb = words[1] if words[0] == "p2p-dtfm" and len(words) > 1 else ""
            known = ours
            if verb and not verb.startswith("-") and verb.islower():
                assert verb in program.commands, f"{page}: {' '.join(words)}"
                command = program.commands[verb]
                if hasattr(command, "commands") and len(words) > 2:
                    assert words[2] in command.commands, f"{page}: {' '.join(words)}"
                    command = command.commands[words[2]]
                known = options_of(command) | {"--help"}
            used = {word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)}
            strange = used - known - OF_OTHERS
            assert not strange, f"{page}: {' '.join(words)}"
            checked += len(used)
    assert checked > 50


def type_page(typist: Typist, page: str, not_typed: int = 0) -> None:
    for block in blocks_of(page):
        typist.type(block)
    assert len(typist.not_typed) == not_typed


def test_readme(typist: Typist) -> None:
    type_page(typist, "README.md")
    assert (typist.directory / "my-data" / "manifest.json").is_file()
    assert not typist.daemons, "it has left"


@pytest.mark.nightly
def test_a_volunteers_way(typist: Typist) -> None:
    typist.found()
    type_page(typist, "docs/volunteer.md", not_typed=8)
    assert len(typist.daemons) == 2, "the founder and whoever has no limits train on"


@pytest.mark.nightly
def test_three_ways_to_begin(typist: Typist) -> None:
    typist.found()
    type_page(typist, "docs/quick-start.md", not_typed=2)
    assert len(typist.daemons) == 3, "each of them trains"
    assert (typist.directory / "paper" / "index.html").is_file()


def test_a_founders_way(typist: Typist) -> None:
    type_page(typist, "docs/founder.md", not_typed=1)
    assert (typist.directory / "my-gpt" / "model.safetensors").is_file()


@pytest.mark.nightly
def test_bootstrap_nodes(typist: Typist) -> None:
    type_page(typist, "docs/bootstrap.md", not_typed=8)
    assert (len(typist.nodes), len(typist.daemons)) == (4, 3)


@pytest.mark.nightly
def test_the_paper_and_a_page_of_ones_own(typist: Typist) -> None:
    type_page(typist, "docs/reproduce.md", not_typed=2)
    for name in ("DIR/index.html", "page.html", "levels.svg"):
        assert (typist.directory / name).is_file(), name


@pytest.mark.nightly
def test_a_step_that_is_played(typist: Typist) -> None:
    type_page(typist, "docs/simulator.md")
    assert (typist.directory / "trace.json").is_file()


@pytest.mark.nightly
def test_checking_a_run(typist: Typist) -> None:
    type_page(typist, "docs/verify.md")
    assert list((typist.directory / "proven").glob("peer-0/runs/*/transcript.txt"))


def test_own_data(typist: Typist) -> None:
    texts = [path.read_text() for path in sorted((typist.directory / "my-texts").iterdir())]
    rows = [paragraph for text in texts for paragraph in text.split("\n\n")]
    lines = "".join(json.dumps({"body": row}) + "\n" for row in rows)
    (typist.directory / "posts.jsonl").write_text(lines)
    pyarrow.parquet.write_table(pyarrow.table({"body": rows}), typist.directory / "posts.parquet")
    chats = [{"prompt": f"say {n}: ", "completion": "word"} for n in range(100)]
    (typist.directory / "chats.jsonl").write_text("".join(f"{json.dumps(c)}\n" for c in chats))
    saved = ROOT / "tests" / "train_data" / "saved_data_set"
    (typist.directory / "saved").symlink_to(saved)
    type_page(typist, "docs/data.md")


@pytest.mark.nightly
def test_models_in_and_out(typist: Typist) -> None:
    type_page(typist, "docs/models-in-and-out.md")
    assert (typist.directory / "finest" / "run.toml").is_file()
    homes = typist.directory / "finer-home"
    assert list(homes.glob("runs/*/checkpoints/step-00000020/manifest.json"))
