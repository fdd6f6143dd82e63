"""Runs that go on from a model that is there: what of it they train."""
