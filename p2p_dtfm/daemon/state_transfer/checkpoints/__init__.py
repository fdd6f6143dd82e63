"""Checkpoints of a swarm: what this peer saves, what others announce, and a whole model of both.

Begin with `checkpoints`; `layer_writes` writes what this peer holds, `files_here` knows what is on
this disk, `announced_files` what is on others', `layer_fetches` gets it from there, and `disk_room`
knows whether it fits.
"""
