"""What `benchmarks.compression --boundaries` says: bytes between stages, and what they cost.

One pipeline of two stages crosses its boundary in fewer and fewer bytes, both ways and while it is
evaluated. Times are against the frames of fp32, headers included.
"""

import argparse
import json
from collections.abc import Iterable
from typing import Any

CODECS = {
    f"between stages {codec}": codec for codec in ("fp32", "rotated6", "rotated4", "subspace")
}
"""Rows, the first one uncompressed."""
TARGETS = ((8.0, 0.01), (4.0, 0.003))
"""The target: so many times fewer bytes, within so much of the loss with fp32, as a mean of
seeds."""
WIDE_PLAIN = "width 512, all written, fp32"
WIDE_TARGETS = ((32.0, 0.01),)
"""The target of a model whose blocks write few channels, against one whose blocks write all."""


def seeds_in(words: str) -> range:
    """The seeds of "A-B", or of "A" alone."""
    first, _, last = words.partition("-")
    return range(int(first), int(last or first) + 1)


def compare_boundaries(
    measured: Iterable[dict[str, Any]], options: argparse.Namespace, steps: int
) -> int:
    """Print the rows of all seeds and their means; the exit status. The first row of a seed is the
    uncompressed one."""
    plain: dict[int, dict[str, Any]] = {}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in measured:
        base = plain.setdefault(row["seed"], row)
        row["times_fewer"] = base["boundary_bytes_per_step"] / row["boundary_bytes_per_step"]
        row["loss_difference"] = row["held_out_loss"] / base["held_out_loss"] - 1
        if row is not base:
            found.setdefault(row["name"], []).append(row)
        if not options.json:
            print(
                f"seed {row['seed']:3d}  {row['name']:24s} {row['times_fewer']:6.2f} times fewer  "
                f"held-out {row['held_out_loss']:.4f}  {row['loss_difference']:+.2%}",
                flush=True,
            )
    means = [_mean(name, rows) for name, rows in found.items()]
    met = {
        f"{times:g} times within {within:.1%}": any(
            each["times_fewer"] >= times and each["loss_difference"] <= within for each in means
        )
        for times, within in (WIDE_TARGETS if options.wide else TARGETS)
    }
    if options.json:
        rows = [*plain.values(), *(row for each in found.values() for row in each)]
        print(json.dumps({"steps": steps, "rows": rows, "means": means, "met": met}))
    else:
        for each in means:
            print(
                f"{each['seeds']:2d} seeds {each['name']:24s} {each['times_fewer']:6.2f} times "
                f"fewer  {each['loss_difference']:+.2%}, worst {each['worst']:+.2%}"
            )
        for target, is_met in met.items() if not options.quick else ():
            print(f"target: {target}: {'met' if is_met else 'MISSED'}")
    return 0 if all(met.values()) or options.quick or options.only else 1


def _mean(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    differences = [row["loss_difference"] for row in rows]
    return {
        "name": name,
        "seeds": len(rows),
        "times_fewer": sum(row["times_fewer"] for row in rows) / len(rows),
        "loss_difference": sum(differences) / len(rows),
        "worst": max(differences),
    }
