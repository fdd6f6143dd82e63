"""The module that the nursery's tests run: `echo STATUS`, `raise` or `draw`; and `names`, behind
the words that a swarm tells all of its daemons."""

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
