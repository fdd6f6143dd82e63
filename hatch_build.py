"""Builds the compiled kernel beside its source. Without a C compiler the install still succeeds.

The package then runs the kernel's Python twin: equal results, far slower (only `plan --cost paper`
uses it). `python hatch_build.py` builds in place.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).parent
SOURCE = ROOT / "p2p_dtfm" / "core" / "_kernel.c"


def build_kernel() -> Path | None:
    """The extension module's path, or None if no compiler could make it."""
    target = SOURCE.with_name("_kernel" + sysconfig.get_config_var("EXT_SUFFIX"))
    compiler = shlex.split(os.environ.get("CC", "cc"))
    include = sysconfig.get_path("include")
    command = [*compiler, "-O3", "-shared", "-fPIC", f"-I{include}", str(SOURCE), "-o", str(target)]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"no compiled kernel, the Python one is used: {error}", file=sys.stderr)
        return None
    if done.returncode != 0:
        print(f"no compiled kernel, the Python one is used: {done.stderr}", file=sys.stderr)
        return None
    return target


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """hatchling calls this for wheels and editable installs alike."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        built = build_kernel()
        if built is not None:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"].append(f"/{built.relative_to(ROOT).as_posix()}")


if __name__ == "__main__":
    raise SystemExit(0 if build_kernel() else 1)
