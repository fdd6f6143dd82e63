"""Where programs are installed for tests, these tests cannot skip without being noticed."""

import pytest

from tests import programs


def test_what_must_run_does_not_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MUST_RUN", ["browser"])
    assert programs.skip_without("browser", "").args == (False,)
    assert programs.skip_without("translation", "no nft").args == (True,)
    with pytest.raises(AssertionError, match="browser: no Chromium"):
        programs.skip_without("browser", "no Chromium")
