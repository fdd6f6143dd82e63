"""Sections of a run spec that have files of their own; `run_spec` puts them together."""
