"""Swarms that need not exist: scenario files, their peers and links, and what the planner sees.

The ground of `sim`: the rooms beside it build on it. Begin with `scenario`; `files` finds scenario
files.
"""
