"""`plan --advise` and `--objective cost`: run specs and peers that suit better."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from p2p_dtfm.cli.app import app
from p2p_dtfm.cli.commands import plan  # noqa: F401  (registers the command)
from p2p_dtfm.cli.scenarios.advise import _read, toml_of
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.sim.advice import sweep
from p2p_dtfm.sim.advice.choices import (
    DIMENSIONS,
    SettingsChoice,
    dimensions_in,
    neighbours,
    starts,
)
from p2p_dtfm.sim.advice.hiring import hire
from p2p_dtfm.sim.advice.loss_costs import EXACT, loss_cost
from p2p_dtfm.sim.scenario.files import (
    find_run_spec,
    packaged_configs,
    read_run_spec,
    read_values,
)
from p2p_dtfm.sim.scenario.scenario import parse_scenario
from tests.documentation.error_messages import heading_of
from tests.sim.sim_support import EQUAL_PEERS, small_spec


@pytest.fixture
def homes(tmp_path: Path) -> Path:
    """Two machines with thin uplinks, and a run that sends all gradients after each step."""
    path = tmp_path / "homes.toml"
    limits = "uplink_mbps = 20\ndownlink_mbps = 100\nprice_per_hour = 0.5"
    path.write_text(
        EQUAL_PEERS.format(count=2, latency_ms=10, bandwidth_mbps=100, limits=limits), "utf-8"
    )
    values = small_spec(layers=4, global_batch=64).model_dump(mode="json")
    for key in ("codecs", "sync", "compute", "limits", "checkpoint", "data", "admission"):
        del values[key]
    (tmp_path / "run.toml").write_text(toml_of(values), "utf-8")
    return path


def typed(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    failed = typed(*arguments)
    assert isinstance(failed.exception, UserError) and failed.exception.fixes
    assert heading_of(failed.exception.cause), failed.exception.cause
    return failed.exception.cause


def test_advice_is_faster_and_can_be_founded(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_PLANS", 14)
    run, out = homes.parent / "run.toml", homes.parent / "better.toml"
    found = json.loads(typed(homes, "--run", run, "--advise", "--out", out, "--json").stdout)
    assert found["plans"] <= 14
    before, best = found["before"], found["best"]
    assert before["loss_percent"] == 0
    assert best["tokens_per_s"] > 1.02 * before["tokens_per_s"]
    assert best["computing"] > before["computing"]
    speeds = [each["tokens_per_s"] for each in found["frontier"]]
    assert speeds == sorted(speeds, reverse=True)
    again = json.loads(typed(homes, "--run", out, "--json").stdout)
    assert again["tokens_per_s"] == pytest.approx(best["tokens_per_s"], rel=1e-4)
    assert "is there already" in refused(homes, "--run", run, "--advise", "--out", out)


def test_where_nothing_helps_it_says_so(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_PLANS", 6)
    alone = homes.parent / "alone.toml"
    alone.write_text(homes.read_text().replace("count = 2", "count = 1"))
    run = homes.parent / "run.toml"
    assert "makes run.toml faster" in refused(alone, "--run", run, "--advise")
    small = homes.parent / "small.toml"
    small.write_text(alone.read_text().replace("uplink", "memory_gb = 0.0001\nuplink"))
    assert "no plan for any" in refused(small, "--run", run, "--advise")
    assert "cannot be changed" in refused(homes, "--run", run, "--advise", "--vary", "colour")
    assert "--advise looks" in refused(homes, "--run", run, "--vary", "context")


def test_advice_takes_what_a_plan_takes_and_refuses_the_rest(
    homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MOST_PLANS", 3)
    run, out = homes.parent / "run.toml", homes.parent / "better.toml"
    asked = ("--run", run, "--advise")
    for option in (
        ("--objective", "cost"), ("--cost", "paper"), ("--explain",), ("--stages", "3"),
        ("--replicas", "2"), ("--svg", out), ("--html", "/nonexist/x"), ("--graphml", out),
    ):  # fmt: skip
        assert refused(homes, *asked, *option).startswith(f"{option[0]} is of plans"), option
    assert "zzz" in str(typed(homes, *asked, "--what-if", "+1 zzz").exception)
    changed = ("--layers", "2", "--global-batch", "32", "--what-if", "+1 home")
    found = json.loads(typed(homes, *asked, *changed, "--out", out, "--json").stdout)
    plain = json.loads(typed(homes, "--run", run, *changed, "--json").stdout)
    assert found["before"]["tokens_per_s"] == pytest.approx(plain["tokens_per_s"], rel=1e-4)
    assert read_values(out)["model"]["layers"] == 2
    assert "+1 home" in out.read_text("utf-8").splitlines()[0]


def test_advice_for_a_run_that_lists_its_layers_can_be_founded(
    homes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "MOST_PLANS", 5)
    slow, out = homes.parent / "slow.toml", homes.parent / "better.toml"
    slow.write_text(homes.read_text().replace("tflops = 1.0", "tflops = 0.02"))
    done = typed(slow, "--run", "digits", "--advise", "--out", out, "--json")
    assert done.exception is None, done.exception
    best = json.loads(done.stdout)["best"]
    again = json.loads(typed(slow, "--run", out, "--json").stdout)
    assert again["tokens_per_s"] == pytest.approx(best["tokens_per_s"], rel=1e-4)


def test_values_survive_being_written_as_toml() -> None:
    values = {
        "name": "öl 😀 \x7f \"q\"", "rate": 1e-5, "yes": True, "list": [1, [2.5, "a"]], "none": [],
        "at": {"deep": {"er": 1}, "mixed": [1, {"a": "😀", "b c": [{"d": 2}]}]},
        "layers": [{"kind": "a", "options": {"x": 1}}, {"kind": "b", "more": [{"y": 2}]}],
        "a key": {"an other": {"x.y": 1}},
    }  # fmt: skip
    assert tomllib.loads(toml_of(values)) == values
    assert "[[layers]]" in toml_of(values) and "😀" in toml_of(values)


def test_every_choice_is_a_run_spec_that_reads_back() -> None:
    path = find_run_spec("gpt2-small")
    values = read_values(path)
    begin, *together = starts(values, path.name, DIMENSIONS)
    assert begin.told() == "as it is" and begin.values == values and len(together) == 4
    for choice in (*together, *neighbours(values, path.name, together[0], DIMENSIONS)):
        spec = parse_run_spec(tomllib.loads(toml_of(choice.values)), "written")
        assert spec == choice.spec
        before, after = begin.spec, spec.total_steps * spec.tokens_per_step
        if dict(choice.settings).get("context", 1) == 1:
            assert after == pytest.approx(before.total_steps * before.tokens_per_step, rel=1e-3)
    assert dimensions_in("context, microbatch") == ("context", "microbatch")
    assert read_values(path) == values, "nothing is changed in place"


def test_loss_is_what_was_measured_or_unknown() -> None:
    path = find_run_spec("gpt2-small")
    values = read_values(path)
    begin, many, _, sparse, signs = starts(values, path.name, DIMENSIONS)
    assert loss_cost(begin.spec, begin.spec, 6) == EXACT
    assert loss_cost(many.spec, begin.spec, 6) is None
    source = (packaged_configs().parent / "docs" / "benchmarks" / "compression.md").read_text()
    assert outer_of(sparse.spec) == (1.0, 0.0) and outer_of(signs.spec) == (1.0, 0.5)
    near = list(neighbours(values, path.name, signs, DIMENSIONS))
    assert outer_of(one_of(near, "inner-steps", 20).spec) == (1.0, 0.3)
    often = one_of(near, "global-batch", 8)
    longer = one_of(neighbours(values, path.name, often, DIMENSIONS), "inner-steps", 20)
    two, four = loss_cost(longer.spec, begin.spec, 2), loss_cost(often.spec, begin.spec, 4)
    assert two is not None and four is not None and two.percent < four.percent < 0
    in_step = one_of(neighbours(values, path.name, begin, DIMENSIONS), "optimizer", "muon")
    muons = loss_cost(often.spec, in_step.spec, 4)
    assert muons is not None and muons.percent > 0, "more than Muon's own in step"
    for known in (two, four, muons):
        assert f"{known.percent:+.1f}%" in source


def test_of_local_steps_the_loss_is_known_as_they_were_measured() -> None:
    """The loss was predicted as for batches four times as large, half the context, and another
    rate."""
    tiny = read_run_spec("tiny")
    sparse = {"reduction": "sparse", "sparse": {"one_in": 1, "keep_percent": 50, "bits": 4}}
    local = {"mode": "local", "outer_learning_rate": 1.0}
    slower = {"peak_learning_rate": 1.5e-3}
    measured = (
        (2, 0.92, 320, {"inner_steps": 40, "outer_momentum": 0.0}, sparse, slower),
        (4, -1.2, 420, {"inner_steps": 13, "outer_momentum": 0.5}, {"reduction": "sign"}, MUON),
        (2, -10.1, 420, {"inner_steps": 26, "outer_momentum": 0.3}, {"reduction": "sign"}, MUON),
    )
    for replicas, percent, batch, sync, codecs, optimizer in measured:

        def changed(**sections: dict) -> RunSpec:
            values = tiny.model_dump(mode="python")
            for name, keys in sections.items():
                values[name] |= keys
            return RunSpec.model_validate(values)

        as_it_was = {
            "batch": {"global_batch": batch}, "sync": local | sync, "codecs": codecs,
            "optimizer": optimizer,
        }  # fmt: skip
        known = loss_cost(changed(**as_it_was), tiny, replicas)
        assert known is not None and known.percent == percent
        for name, keys in (
            ("batch", {"global_batch": 4 * batch}),
            ("model", {"context": 24}), ("optimizer", optimizer | {"peak_learning_rate": 6e-3}),
        ):  # fmt: skip
            assert loss_cost(changed(**as_it_was | {name: keys}), tiny, replicas) is None, name
        assert loss_cost(changed(**as_it_was), tiny, 8) is None, "nor with so many replicas"


MUON = {"kind": "muon"}


def test_of_boundaries_the_loss_is_known_where_one_codec_was_measured() -> None:
    path = find_run_spec("tiny")
    values = read_values(path)
    begin, *_ = starts(values, path.name, DIMENSIONS)
    source = (packaged_configs().parent / "docs" / "benchmarks" / "compression.md").read_text()
    for codec in ("rotated6", "subspace"):
        choice = one_of(neighbours(values, path.name, begin, DIMENSIONS), "boundaries", (codec,))
        known = loss_cost(choice.spec, begin.spec, 1)
        assert known is not None and f"**{known.percent:+.2f}%**" in source
        longer = one_of(neighbours(values, path.name, choice, DIMENSIONS), "inner-steps", 8)
        assert loss_cost(longer.spec, begin.spec, 1) is None, "not beside local steps"
    several = ("bf16", "int8", "subspace")
    choice = one_of(neighbours(values, path.name, begin, DIMENSIONS), "boundaries", several)
    assert loss_cost(choice.spec, begin.spec, 1) is None


def test_nothing_is_advised_that_cannot_be_founded() -> None:
    """Microbatches of few rows leave `subspace` no directions."""
    path = find_run_spec("tiny")
    values = read_values(path)
    values["batch"] |= {"microbatch": 1}
    values["model"] |= {"context": 8, "width": 32, "heads": 2}
    made = neighbours(values, path.name, next(starts(values, "", (), _read)), DIMENSIONS, _read)
    offered = {dict(each.settings).get("boundaries") for each in made}
    assert ("rotated6",) in offered and ("subspace",) not in offered


def outer_of(spec: RunSpec) -> tuple[float, float]:
    return spec.sync.outer_learning_rate, spec.sync.outer_momentum


def one_of(choices: Iterable[SettingsChoice], name: str, value: object) -> SettingsChoice:
    return next(each for each in choices if dict(each.settings).get(name) == value)


def test_an_outer_step_that_nobody_measured_promises_no_loss() -> None:
    path = find_run_spec("gpt2-small")
    named = read_values(path) | {"sync": {"outer_learning_rate": 0.7, "outer_momentum": 0.9}}
    begin, _, _, measured, signs = starts(named, path.name, DIMENSIONS)
    assert outer_of(measured.spec) == outer_of(signs.spec) == (0.7, 0.9), "the file's own stay"
    assert loss_cost(measured.spec, begin.spec, 2) is None
    assert loss_cost(signs.spec, begin.spec, 4) is None
    local = read_values(path) | {"sync": {"mode": "local"}}
    for choice in starts(local, path.name, DIMENSIONS):
        assert outer_of(choice.spec) == (0.7, 0.9), "of a run that takes local steps by itself"


def test_what_counts_steps_is_scaled_with_them() -> None:
    path = find_run_spec("tiny-speedrun")
    begin = next(starts(read_values(path), path.name, DIMENSIONS))
    near = list(neighbours(begin.values, path.name, begin, DIMENSIONS))
    larger = one_of(near, "global-batch", 16).spec
    assert (larger.total_steps, larger.optimizer.decay_steps) == (8, 4)
    inner = one_of(near, "inner-steps", 8).spec
    assert (inner.total_steps, inner.optimizer.decay_steps) == (125, 400)


def test_the_cheapest_tokens_are_made_without_who_costs_more_than_it_adds(homes: Path) -> None:
    run, dear = homes.parent / "run.toml", homes.parent / "dear.toml"
    text = homes.read_text().replace("uplink_mbps = 20\ndownlink_mbps = 100\n", "")
    text = text.replace("bandwidth_mbps = 100", "bandwidth_mbps = 10000")
    more = "\n[[peer]]\nname = 'home-2'\nprice_per_hour = 5.0\n"
    dear.write_text(text + more)
    fast = json.loads(typed(dear, "--run", run, "--json").stdout)
    assert fast["price_per_hour"] == 5.5
    cheap = json.loads(typed(dear, "--run", run, "--objective", "cost", "--json").stdout)
    assert cheap["left_out"] == ["home-2"] and cheap["price_per_hour"] == 0.5
    assert cheap["tokens_per_dollar"] > 3 * fast["tokens_per_dollar"]
    assert cheap["fastest"]["tokens_per_s"] == pytest.approx(fast["tokens_per_s"], rel=1e-3)
    assert "million tokens for a dollar" in typed(dear, "--run", run, "--objective", "cost").stdout
    assert "no price_per_hour" in refused("three-homes", "--run", run, "--objective", "cost")
    both = ("--objective", "cost", "--cost", "paper")
    assert "--objective cost" in refused("three-homes", "--run", run, *both)


THIN_AND_THICK = """
name = "thin-and-thick"
[[group]]
name = "thin"
count = 2
forward_tflops = 50.0
uplink_mbps = 6.0
price_per_hour = 1.0
[[group]]
name = "thick"
count = 3
forward_tflops = 50.0
price_per_hour = 1.1
[[link]]
from = "*"
to = "*"
latency_ms = 5.0
bandwidth_mbps = 1000.0
"""


def test_the_kind_that_is_cheapest_to_compute_is_left_out_where_its_line_is_thin() -> None:
    spec = read_run_spec("gpt2-small-homes")
    scenario = parse_scenario(THIN_AND_THICK, "thin-and-thick.toml")
    counted = []
    best, fastest = hire(scenario, spec, lambda done, most: counted.append((done, most)))
    assert [peer.group for peer in best.scenario.peers] == ["thick"] * 3
    thick = scenario.with_peers(tuple(p.name for p in scenario.peers if p.group == "thick"))
    assert best.tokens_per_dollar == pytest.approx(hire(thick, spec)[0].tokens_per_dollar)
    assert fastest.tokens_per_s >= best.tokens_per_s
    assert counted == [(done + 1, 8) for done in range(len(counted))] and len(counted) <= 8
