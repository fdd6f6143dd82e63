"""From which seed on there is what: by its number a seed belongs to a family of schedules."""

STORMS = 100_000
"""From this seed on: eight small machines, and nothing but kills, one upon the other."""
LIES = 200_000
"""From this seed on: a quarter of the members lie, in a run with audits; in every other one
machines crash besides, and owners take theirs back."""
RECIPES = 300_000
"""From this seed on: the schedules of the first seeds, in runs that are trained otherwise."""
LIES_IN_STAGES = 400_000
"""From this seed on: one of six or seven small machines lies."""
QUICK = 500_000
"""From this seed on: the schedules of the first seeds, in short runs, with their faults sooner one
after the other: what a seed costs are mostly its steps."""
QUICK_LIES = 600_000
"""From this seed on: the schedules of the seeds from 200000 on, on links that take few probes."""
QUICK_STORMS = 700_000
"""From this seed on: a few machines that only crash, in short runs and after them, with lanes
apart; most are small, so that most layers have one holder, and what is told to be safe rests on who
guards them."""
MOMENTS = 800_000
"""From this seed on: faults begin when something is said, and are done to who says it or to whom it
is said."""
LATE_WORDS = 900_000
"""From this seed on: a word comes so late that others go on without it, and somebody dies
meanwhile."""
ABSENCES = 950_000
"""From this seed on: somebody is away for long, or lives by a clock that is ahead, on slow
machines."""
DUMB = 970_000
"""From this seed on: the schedules of those from 500000 on, and p2pd that do not answer, some
of them as a daemon begins."""
PARTINGS = 980_000
"""From this seed on: a swarm of slow machines is divided, and most of the run is left when its
sides meet again."""
LIDS = 990_000
"""From this seed on: slow machines sleep, some at once, or all, and some die meanwhile."""
