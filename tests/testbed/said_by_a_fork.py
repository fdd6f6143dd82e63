"""What the nursery's tests run as a module: `echo STATUS`, `raise` or `draw`; and, behind
what a swarm tells all of its daemons, `names`."""

import os
import random
import sys

if sys.argv[-1] == "names":
    print(*os.environ)
    sys.exit()
if sys.argv[1] == "raise":
    raise RuntimeError("as told")
if sys.argv[1] == "draw":
    print(random.random())
    sys.exit()
print(os.environ.get("SAID", ""), sys.stdin.readline(), end="")
sys.exit(int(sys.argv[2]))
