"""Every command of docs/models-in-and-out.md, typed as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_models_in_and_out(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "p2p-dtfm"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m p2p_dtfm "$@"\n')
    program.chmod(0o755)
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": search,
        "HF_HUB_OFFLINE": "1",
    }
    blocks = _BLOCK.findall((ROOT / "docs" / "models-in-and-out.md").read_text())
    assert len(blocks) == 6
    for language, text in blocks:
        shell = ["sh", "-ec", text] if language == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(
            shell, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    assert (tmp_path / "finest" / "run.toml").is_file()
    assert list((tmp_path / "finer-home").glob("runs/*/checkpoints/step-00000020/manifest.json"))
