"""Tests that need programs of the system skip without them, but not where `.ci/run` has them."""

import os

import pytest

MUST_RUN = os.environ.get("TESTS_MUST_RUN", "").split()
"""Kinds of tests whose programs are installed: if they would skip, something is wrong."""


def skip_without(kind: str, missing: str) -> pytest.MarkDecorator:
    """Skip where something is `missing`, for that reason. Where this kind must run, that is an
    error."""
    assert not missing or kind not in MUST_RUN, f"{kind}: {missing}"
    return pytest.mark.skipif(bool(missing), reason=missing)
