"""The verbs, one file each; all but `run` are thin clients of the daemon that runs.

Imported when they are needed, so that help is quick. Begin with `swarm`.
"""
