"""How long faults held up a swarm, and where that time went. Begin with `times`."""
