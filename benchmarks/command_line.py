"""The options of benchmarks, and how benchmarks end."""

import argparse
import json
from collections.abc import Iterable, Sequence
from typing import Any


def parse_options(
    description: str,
    steps: int,
    quick: str,
    scenarios: Sequence[str] = (),
    kinds: Sequence[str] = (),
    slower: bool = False,
) -> argparse.Namespace:
    """Parse `steps`, `quick` and `json`; `scenario` and `kind`, where there are any to choose from;
    and `slower`, where it is asked for."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    for name, choices in (("scenario", scenarios), ("kind", kinds)):
        if choices:
            parser.add_argument(f"--{name}", nargs="*", default=choices, choices=choices)
    if slower:
        text = "all devices and links so many times slower: what the machine itself adds stays"
        parser.add_argument("--slower", type=int, default=1, help=text)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def conclude(
    figures: dict[str, Any], lines: Iterable[str], verdict: str, met: bool, as_json: bool
) -> int:
    """Print a table, or its figures as one object, and whether targets are met. Returns 0 if they
    are."""
    if as_json:
        print(json.dumps({**figures, "met": met}))
    else:
        for line in lines:
            print(line)
        print(f"{verdict}: {'met' if met else 'MISSED'}")
    return 0 if met else 1
