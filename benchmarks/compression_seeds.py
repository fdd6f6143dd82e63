"""What `benchmarks.compression --seeds` says: a step for all after each batch, in AdamW and in
Muon, and Muon with local steps and one bit for each element of the replicas' differences."""

import argparse
import json
from collections.abc import Iterable
from typing import Any

TIMES_FEWER = 400


def by_seed(rows: list[dict[str, Any]], replicas: int, steps: int) -> list[dict[str, Any]]:
    """For each seed with all three rows: how many times fewer bytes, and the differences in
    loss."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        of = {row["name"]: row for row in rows if row["seed"] == seed}
        if len(of) < 3:
            continue
        signs = of["Muon + signs"]
        plain_bytes = steps * 2 * (replicas - 1) * 4 * signs["parameters"]
        loss = {name: row["held_out_loss"] for name, row in of.items()}
        found.append(
            {
                "seed": seed,
                "times_fewer": round(plain_bytes / signs["reduction_bytes"], 1),
                "tokens_share": signs["tokens"] / of["AdamW"]["tokens"],
                "against_adamw": loss["Muon + signs"] / loss["AdamW"] - 1,
                "against_muon": loss["Muon + signs"] / loss["Muon"] - 1,
                "muon_against_adamw": loss["Muon"] / loss["AdamW"] - 1,
            }
        )
    return found


def compare_seeds(
    measured: Iterable[dict[str, Any]], options: argparse.Namespace, steps: int
) -> int:
    """Print the rows of all seeds and their means; the exit status."""
    rows: list[dict[str, Any]] = []
    for row in measured:
        rows.append(row)
        if not options.json:
            print(
                f"seed {row['seed']:3d}  {row['name']:14s} {row['replicas']:2d} replicas  "
                f"{row['reduction_bytes']:13,d} bytes  held-out {row['held_out_loss']:.4f}  "
                f"{row['took_s']:.0f} s",
                flush=True,
            )
    found = by_seed(rows, options.replicas, steps)
    means = {
        key: sum(each[key] for each in found) / len(found)
        for key in (found[0] if found else ())
        if key != "seed"
    }
    met = bool(found) and means["times_fewer"] >= TIMES_FEWER and means["against_adamw"] <= 0
    if options.json:
        facts = {"steps": steps, "rows": rows, "seeds": found, "mean": means, "met": met}
        print(json.dumps(facts))
    elif found:
        for each in [*found, {"seed": "mean"} | means]:
            print(
                f"seed {each['seed']!s:>4s}: {each['times_fewer']:.0f} times fewer bytes, "
                f"{each['against_adamw']:+.2%} against AdamW in step, "
                f"{each['against_muon']:+.2%} against Muon in step "
                f"({each['muon_against_adamw']:+.2%} against AdamW)"
            )
        verdict = "met" if met else "MISSED"
        print(f"target: {TIMES_FEWER} times fewer, no worse than AdamW: {verdict}")
    return 0 if met or options.quick or not found else 1
