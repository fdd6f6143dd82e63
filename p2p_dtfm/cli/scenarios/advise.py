"""`p2p-dtfm plan --advise SCENARIO --run FILE`: a run spec that suits a swarm."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from p2p_dtfm.cli.terminal.output_files import check_writable
from p2p_dtfm.cli.terminal.progress import plans_made
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.sim.advice.choices import Values, dimensions_in
from p2p_dtfm.sim.advice.sweep import Advice, Weighed, advise
from p2p_dtfm.sim.scenario.files import find_run_spec, read_changed, read_scenario
from p2p_dtfm.sim.scenario.what_if import what_if


@dataclass(frozen=True, slots=True)
class AdviceWish:
    """The question that advice answers."""

    scenario: str
    run: str
    layers: int | None = None
    global_batch: int | None = None
    change: str | None = None

    def swarm(self) -> str:
        """The swarm in words."""
        return self.scenario if self.change is None else f"{self.scenario} with {self.change}"


def advise_on(wish: AdviceWish, vary: str | None, out: Path | None, as_json: bool) -> None:
    """Print the frontier, and write the run spec that is advised. Raises `UserError`."""
    dimensions = dimensions_in(vary)
    check_writable(out, "--out")
    if out is not None and out.exists():
        raise UserError(f"--out {out} is there already", "choose another name: nothing is replaced")
    swarm, path = read_scenario(wish.scenario), find_run_spec(wish.run)
    if wish.change is not None:
        swarm = what_if(swarm, wish.change)
    values = read_changed(path, wish.layers, wish.global_batch)
    if out is not None:
        _mean_the_same(values, path, out)
    found = advise(swarm, values, path.name, dimensions, plans_made("run specs"), _read)
    if out is not None:
        _write(out, found.best, wish.swarm(), path.name)
    result = _result(found, out)
    typer.echo(json.dumps(result) if as_json else _text(found, out))


def _mean_the_same(values: Values, path: Path, out: Path) -> None:
    """Make the run spec `out` name the same files as `path`, although it lies elsewhere. Data that
    are not there yet may also be prepared beside `out`. Raises `UserError`."""
    from p2p_dtfm.daemon.machine.before_start import (
        data_directory,
        has_own_data,
        source_from_anywhere,
    )

    if path.absolute().parent.resolve() == out.absolute().parent.resolve():
        return
    spec = parse_run_spec(values, path.name)
    if spec.model.initial:
        raise UserError(
            f"--out {out}: the run begins with weights that lie beside its run spec",
            f"have it written there: --out {path.parent / out.name}",
        )
    if has_own_data(spec) and data_directory(spec, path).is_dir():
        values["data"]["source"] = source_from_anywhere(spec, path)


def _read(values: Values, origin: str) -> RunSpec:
    """Raises `UserError` for a run spec that no founder could use."""
    from p2p_dtfm.train.codecs import require_directions  # torch, only for these
    from p2p_dtfm.train.model.kinds.registry import with_sizes

    spec = with_sizes(parse_run_spec(values, origin))
    require_directions(spec)
    return spec


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


def _write(out: Path, best: Weighed, swarm: str, origin: str) -> None:
    """Write the run spec to `out`, only if nothing is there yet. Raises `UserError`."""
    about = (
        f"# {origin} for the swarm {swarm}: {best.choice.told()}.\n"
        f"# Predicted: {best.tokens_per_s:.0f} tokens a second.\n"
    )
    text = about + toml_of(best.choice.values)
    assert _read(tomllib.loads(text), str(out)) == best.choice.spec, "what is written reads back"
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "choose another --out") from error


def toml_of(values: Values, header: str = "") -> str:
    """A run spec's tables and values as TOML. A null value is left out, as TOML has no word for it.
    `header`: name of the table that `values` are in."""
    path = header.strip("[]")
    tables = {key: value for key, value in values.items() if _is_table(value)}
    plain = {key: value for key, value in values.items() if key not in tables and value is not None}
    is_named = header and (plain or not tables or header.startswith("[["))
    lines = [f"\n{header}"] if is_named else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items()]
    text = "\n".join([*lines, ""]) if lines else ""
    for key, value in tables.items():
        name = f"{path}.{_toml_key(key)}" if path else _toml_key(key)
        if isinstance(value, dict):
            text += toml_of(value, f"[{name}]")
        else:
            text += "".join(toml_of(each, f"[[{name}]]") for each in value)
    return text


def _is_table(value: Any) -> bool:
    """Whether the value is a table, or a list of tables, each of which has a header."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) for each in value)
    return isinstance(value, dict)


def _toml_key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_toml_key(key)} = {_toml_value(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
