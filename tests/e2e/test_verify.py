"""A run with audits leaves a transcript by which somebody who was not there can check what was
done: two pipelines of two, one of them killed, another one in its place."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.proof.transcript_file import FILE_NAME
from tests.e2e.helpers import run_program, step_of, wait_until
from tests.e2e.test_audits_of_stages import STEPS, swarm, until


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, prepared_data: Path) -> Path:
    """Of the founder, which was there from the first step to the last."""
    directory = tmp_path_factory.mktemp("verified")
    with (
        pytest.MonkeyPatch.context() as patch,
        swarm(directory, prepared_data, patch, "", 4, STEPS) as local,
    ):
        first, *_, last = local.children
        until([first], 5)
        last.process.kill()
        wait_until(lambda: (first.status() or {}).get("state") == "done", "the end")
        return first.home


def verified(place: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = run_program("verify", place, "--json", *options)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)


def test_an_honest_run_holds_though_a_member_was_killed(home: Path) -> None:
    code, told = verified(home, "--sample", "10%", "--seed", "3")
    assert code == 0 and told["holds"], told
    print(json.dumps(told)[:3000])
    assert told["judged"] >= len(told["drawn"]) > 3 and not told["unjudged"]
    spent = sum(each["token_layers"] for each in told["tallies"].values())
    assert spent == 6 * told["tokens"] and told["steps"] + len(told["missing"]) >= STEPS
    done = run_program("verify", home, "--sample", "10%")
    assert "bit for bit" in done.stdout, done.stdout


def test_what_is_changed_is_refused(home: Path, tmp_path: Path) -> None:
    lines = (home / "runs").glob(f"*/{FILE_NAME}")
    text = next(iter(lines)).read_text().splitlines()
    forged = tmp_path / "forged.txt"
    forged.write_text("\n".join([*text[:5], text[6], *text[7:]]) + "\n")
    code, told = verified(forged, "--sample", "0")
    assert code == 0 and told["missing"] == [[3, 4]] or code == 1
