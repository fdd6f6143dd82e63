"""`p2p-dtfm plan --advise SCENARIO --run FILE`: a run spec that suits a swarm."""

import json
from pathlib import Path
from typing import Any

import typer

from p2p_dtfm.cli.terminal.output_files import check_writable
from p2p_dtfm.cli.terminal.progress import plans_made
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.sim.advice.choices import Values, dimensions_in
from p2p_dtfm.sim.advice.sweep import Advice, Weighed, advise
from p2p_dtfm.sim.scenario.files import find_run_spec, read_scenario, read_values


def advise_on(scenario: str, run: str, vary: str | None, out: Path | None, as_json: bool) -> None:
    """Print the frontier, and write the run spec that is advised. Raises `UserError`."""
    dimensions = dimensions_in(vary)
    check_writable(out, "--out")
    if out is not None and out.exists():
        raise UserError(f"--out {out} is there already", "choose another name: nothing is replaced")
    swarm, path = read_scenario(scenario), find_run_spec(run)
    values = read_values(path)
    found = advise(swarm, values, path.name, dimensions, plans_made("run specs"))
    if out is not None:
        _write(out, found.best, scenario, path.name)
    result = _result(found, out)
    typer.echo(json.dumps(result) if as_json else _text(found, out))


def _result(found: Advice, out: Path | None) -> dict[str, Any]:
    return {
        "before": None if found.before is None else _facts(found.before),
        "best": _facts(found.best),
        "frontier": [_facts(each) for each in found.frontier],
        "plans": found.plan_count,
        "written": None if out is None else str(out),
    }


def _facts(each: Weighed) -> dict[str, Any]:
    return {
        "changes": each.choice.told(),
        "tokens_per_s": round(each.tokens_per_s, 1),
        "bytes_per_token": round(each.bytes_per_token, 3),
        "computing": round(each.computing, 3),
        "bound_by_computing": each.is_bound_by_computing,
        "loss_percent": None if each.loss is None else each.loss.percent,
        "loss_source": None if each.loss is None else each.loss.source,
        "pipelines": len(each.plan.pipelines),
        "spares": list(each.plan.spares),
        "plan": each.plan.digest(),
    }


def _text(found: Advice, out: Path | None) -> str:
    lines = [f"{found.plan_count} ways to run it were planned; predicted, fastest first:"]
    lines += [f"  {_line(each)}" for each in found.frontier]
    before, best = found.before, found.best
    if before is not None:
        lines.append(f"as it is: {_line(before)}")
    gain = f", {best.tokens_per_s / before.tokens_per_s:.1f} times as fast" if before else ""
    bound = "bound by computing" if best.is_bound_by_computing else "links still hold it up"
    lines.append(f"advised ({bound}{gain}): {_line(best)}")
    if best.loss is None:
        lines.append("what this costs in loss has not been measured: docs/compression.md")
    else:
        lines.append(f"costs {best.loss.percent:+.2f}% in loss: {best.loss.source}")
    if out is not None:
        lines.append(f"written to {out}; learning rates are as they were: look them over")
    return "\n".join(lines)


def _line(each: Weighed) -> str:
    loss = "not measured" if each.loss is None else f"{each.loss.percent:+.2f}%"
    return (
        f"{each.tokens_per_s:.0f} tokens/s, {each.bytes_per_token:.1f} bytes a token, "
        f"{each.computing:.0%} of all devices' speed, loss {loss}: {each.choice.told()}"
    )


def _write(out: Path, best: Weighed, scenario: str, origin: str) -> None:
    """Only where nothing is yet. Raises `UserError`."""
    about = (
        f"# {origin} for the swarm {scenario}: {best.choice.told()}.\n"
        f"# Predicted: {best.tokens_per_s:.0f} tokens a second.\n"
    )
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(about + toml_of(best.choice.values))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "choose another --out") from error


def toml_of(values: Values, table: str = "") -> str:
    """A run spec's tables and values, as TOML."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    lines = [f"\n[{table}]"] if table and plain else []
    lines += [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    text = "\n".join([*lines, ""]) if lines else ""
    for key, value in values.items():
        if isinstance(value, dict):
            text += toml_of(value, f"{table}.{key}" if table else key)
    return text


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value)
    return repr(value)
