"""What no run can have, of a model or of the options of `import`, reported under its own name."""

from collections.abc import Mapping
from typing import Any

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.run_spec import parse_run_spec

_SOME_RUN: dict[str, Any] = {
    "name": "some",
    "total_steps": 1000,
    "model": {"layers": 1, "width": 8, "heads": 1, "context": 8, "vocabulary": 256},
    "batch": {"global_batch": 1, "microbatch": 1},
    "optimizer": {"peak_learning_rate": 1e-4},
    "evaluation": {"sequences": 1},
}


def require_model(model: Mapping[str, Any], origin: str) -> None:
    """Refuse sizes and choices that no run trains. Raises `UserError`."""
    try:
        parse_run_spec({**_SOME_RUN, "model": dict(model)}, origin)
    except UserError as error:
        fix = "import another model: changing that file alone would make it unlike its weights"
        raise UserError(error.cause, fix) from error


def require_options(
    name: str, total_steps: int, global_batch: int, microbatch: int, learning_rate: float
) -> None:
    """Refuse options that no run can have. Raises `UserError`. `name`: empty if none was given."""
    batch = {"global_batch": global_batch, "microbatch": 1}
    for option, value, change in (
        ("--name", name, {"name": name or "some"}),
        ("--steps", total_steps, {"total_steps": total_steps}),
        ("--learning-rate", learning_rate, {"optimizer": {"peak_learning_rate": learning_rate}}),
        ("--global-batch", global_batch, {"batch": batch}),
    ):
        try:
            parse_run_spec({**_SOME_RUN, **change}, option)
        except UserError as error:
            _, _, why = error.cause.removeprefix(f"{option}: ").partition(": ")
            raise UserError(f"{option}: {why}, not {value}", f"change {option}") from error
    if global_batch % microbatch:
        raise UserError(
            f"--microbatch: must divide --global-batch ({global_batch}), not {microbatch}",
            "change one of the two",
        )
