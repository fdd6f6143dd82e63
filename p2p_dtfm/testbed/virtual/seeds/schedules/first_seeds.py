"""From which seed on each family of schedules begins."""

STORMS = 100_000
"""From this seed on: eight small machines, and nothing but kills, one upon the other."""
LIES = 200_000
"""From this seed on: a quarter of the members lie, in a run with audits. In every other seed
machines also crash, and owners take theirs back."""
RECIPES = 300_000
"""From this seed on: the schedules of the first seeds, in runs that are trained otherwise."""
LIES_IN_STAGES = 400_000
"""From this seed on: one of six or seven small machines lies."""
QUICK = 500_000
"""From this seed on: the schedules of the first seeds in short runs, with their faults sooner one
after the other. A seed costs mostly its steps."""
QUICK_LIES = 600_000
"""From this seed on: the schedules of the seeds from 200000 on, on links that take few probes."""
QUICK_STORMS = 700_000
"""From this seed on: a few machines that only crash, in short runs and after them, with lanes
apart. Most are small: then most layers have one holder, and what is told to be safe rests on
guardians."""
MOMENTS = 800_000
"""From this seed on: faults begin when something is said, and are done to the speaker or to the
hearer."""
LATE_WORDS = 900_000
"""From this seed on: a word is so late that others go on without it, and somebody dies
meanwhile."""
RARER = 930_000
"""From this seed on: the schedules of the seeds from `QUICK` on, with daemons that go the rarer of
two ways again and again."""
RARER_LIES = 935_000
"""From this seed on: a quarter lies, or one of six or seven in stages, beside such daemons."""
ROUTERS = 940_000
"""From this seed on: some machines are behind routers, and their relays go away."""
ABSENCES = 950_000
"""From this seed on, on slow machines: somebody is away for long, or lives by a clock that is
ahead."""
CROWDS = 960_000
"""From this seed on: while a few train, dozens of others join within two seconds. Later a part of
all goes at once."""
LARGE_CROWDS = 969_000
"""From this seed on the crowds are of two hundred."""
DUMB = 970_000
"""From this seed on: the schedules of the seeds from `QUICK` on, with p2pd that do not answer, some
of them as a daemon begins."""
PARTINGS = 980_000
"""From this seed on: a swarm of slow machines is divided. When its sides meet again, most of the
run is left."""
LIDS = 990_000
"""From this seed on: slow machines sleep, some or all of them at once, and some die meanwhile."""
