"""What replaces messages from all to all in a swarm of many."""
