"""Compiles the planner's and the trainer's kernels when the package is built; builds without them
if need be.

A kernel is the same algorithm as its Python twin with equal results, only many times faster, so a
machine without a compiler or Python's headers loses time, never correctness.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = (
    "p2p_dtfm/sim/paper/_kernel.c",
    "p2p_dtfm/core/schedule/_weights.c",
    "p2p_dtfm/train/kernels/_processor.c",
)
OPTIONS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""A product and a sum are never one operation, which would round once; and a root that the
processor has is not asked of a library."""


class KernelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds each source into a module beside it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for source in SOURCES:
            target = compiled(Path(self.root), source)
            if target is not None:
                build_data["artifacts"].append(f"/{target.relative_to(self.root).as_posix()}")
                build_data["pure_python"] = False
                build_data["infer_tag"] = True


def compiled(root: Path, source: str) -> Path | None:
    """The module built from `source`, or None, with a word on why."""
    path = root / source
    target = path.with_name(path.stem + sysconfig.get_config_var("EXT_SUFFIX"))
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_path("include")
    command = [*compiler, *OPTIONS, f"-I{include}", str(path), "-o", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", "") or error
        print(f"{source} is not compiled, its slower Python twin serves: {detail}", file=sys.stderr)
        target.unlink(missing_ok=True)
        return None
    return target
