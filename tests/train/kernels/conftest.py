"""The kernels, compiled once for a processor."""

import pytest

from tests.train.kernels.processor import ProcessorLauncher


@pytest.fixture(scope="session")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ProcessorLauncher:
    return ProcessorLauncher(tmp_path_factory.mktemp("kernels"))
