"""Takes the rows of a full `p2p-dtfm reproduce --out DIR` into the package, for `--quick`.

python -m benchmarks.reproduction_cache DIR --made "22 November 2026, on 2 cores"
"""

import argparse
import json
from pathlib import Path

from p2p_dtfm.sim.reproduction.bars import COMMAND
from p2p_dtfm.sim.reproduction.collection import CACHED, ROWS_FILE
from p2p_dtfm.sim.reproduction.tasks import tasks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--made", required=True, help="when, and on what machine")
    options = parser.parse_args()
    found = {}
    for line in (options.directory / ROWS_FILE).read_text().splitlines():
        row = json.loads(line)
        found[row["key"]] = row["value"]
    wanted = [task.key for task in tasks() if not task.quick]
    missing = [key for key in wanted if key not in found]
    assert not missing, missing
    rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(found[key])}" for key in wanted)
    head = f' "command": {json.dumps(COMMAND)},\n "made": {json.dumps(options.made)},\n'
    CACHED.write_text("{\n" + head + ' "rows": {\n' + rows + "\n }\n}\n")


if __name__ == "__main__":
    main()
