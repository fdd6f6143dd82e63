"""The program with an engine that rests before each step, for runs that only go on while a test
waits for something else. Daemons that compute as fast as they can take the processor from what the
test waits for, and from all other tests. `RESTS_S`: how long it rests, where a fifth of a second is
too short."""

import asyncio
import os
from typing import Any

from p2p_dtfm.cli import main
from p2p_dtfm.daemon.step import step_engine
from p2p_dtfm.daemon.trainer import step_loop

MODULE = "tests.e2e.walking_daemon"
RESTS_S = float(os.environ.get("RESTS_S", "0.2"))


class _Walking(step_engine.StepEngine):
    async def run(self, step: int, **how: Any) -> step_engine.LocalResult:
        await asyncio.sleep(RESTS_S)
        return await super().run(step, **how)


if __name__ == "__main__":
    step_loop.StepEngine = _Walking  # type: ignore[misc]
    main()
