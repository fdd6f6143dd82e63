"""A wide-area network between network namespaces of this machine, by `wanem`."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Missing(Exception):
    """The real network lacks something here."""


def options_of(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all measurements over such a network have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    wanem = os.environ.get("BENCHMARK_WANEM")
    parser.add_argument("--wanem", type=Path, default=Path(wanem) if wanem else None)
    parser.add_argument("--json", action="store_true")
    return parser


def tell_skipped(missing: Missing, as_json: bool) -> int:
    """Returns the exit code."""
    skipped = {"skipped": str(missing)}
    print(json.dumps(skipped) if as_json else f"skipped: {missing}")
    return 0


def tell_verdict(result: dict[str, Any]) -> int:
    """Print a ratio against its target. Returns the exit code."""
    if result["own_ratio"] is not None:
        print(f"{result['own_ratio']:.1%} without what other processes had of the processors")
    verdict = "met" if result["met"] else "MISSED"
    print(f"ratio {result['ratio']:.1%}, target {result['target']:.0%}: {verdict}")
    return 0 if result["met"] else 1


@contextlib.contextmanager
def wide_area(
    source: Path | None, folder: Path, matrix: str, count: int, mtu: int
) -> Iterator[None]:
    """Namespaces wan0 .. with the links of `matrix` between them. Raises `Missing`."""
    if source is None or not source.is_file():
        raise Missing("no wanem.c: give --wanem PATH or set BENCHMARK_WANEM")
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        raise Missing("network namespaces need root and /dev/net/tun")
    for tool in ("gcc", "ip"):
        if shutil.which(tool) is None:
            raise Missing(f"{tool} is not installed")
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    if any(line.startswith("wan") for line in names.stdout.splitlines()):
        raise Missing("namespaces called wan... exist: another wanem runs here")
    program, links = folder / "wanem", folder / "matrix"
    subprocess.run(["gcc", "-O2", "-w", "-o", str(program), str(source)], check=True)
    links.write_text(matrix)
    process = subprocess.Popen(
        [str(program), str(links), str(mtu)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != f"ready {count}":
            raise Missing("wanem could not make its network: " + process.communicate()[1][-300:])
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=10)
