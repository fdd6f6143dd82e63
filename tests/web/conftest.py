"""What several tests of the page use."""

from collections.abc import Iterator

import pytest

from tests.web import chromium as browser
from tests.web.chromium import Page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser.chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
