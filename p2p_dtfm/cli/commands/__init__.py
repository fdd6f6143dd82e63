"""The verbs, one file each; all but `run` are thin clients of the daemon that runs.

Each file is imported when it is needed, so that help is quick. Begin with `swarm`.
"""
