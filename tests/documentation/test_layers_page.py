"""docs/layers.md: its run, with the kind that it shows, is trained."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch

from p2p_dtfm.core.protocol.run_spec import parse_run_spec
from p2p_dtfm.train.model.kinds import registry
from p2p_dtfm.train.model.kinds.kind import LayerKind
from p2p_dtfm.train.model.kinds.registry import with_sizes
from p2p_dtfm.train.model.reference import Batch, ReferenceRun
from p2p_dtfm.train.stage.measure import measure_device
from tests.documentation.pages import ROOT, blocks_of

PAGE = "docs/layers.md"


def tables_of_the_page() -> list[dict]:
    text = (ROOT / PAGE).read_text()
    return [tomllib.loads(body) for body in re.findall(r"^```toml\n(.*?)^```$", text, re.M | re.S)]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[LayerKind]:
    """The page's package, with the entry point that the page gives it."""
    (code,) = (block.text for block in blocks_of(PAGE) if block.language == "python")
    _, package = tables_of_the_page()
    ((name, value),) = package["project"]["entry-points"][registry.GROUP].items()
    module, _, attribute = value.partition(":")
    made, above = ModuleType(module), ModuleType(module.partition(".")[0])
    exec(code, made.__dict__)
    above.__path__ = []
    monkeypatch.setitem(__import__("sys").modules, above.__name__, above)
    monkeypatch.setitem(__import__("sys").modules, module, made)
    points = [EntryPoint(name, value, registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    registry.kind_named.cache_clear()
    yield getattr(made, attribute)
    registry.kind_named.cache_clear()


def test_the_run_of_the_page_trains_with_its_kind(installed: LayerKind) -> None:
    run, _ = tables_of_the_page()
    values = {
        "name": "page",
        "total_steps": 9,
        "batch": {"global_batch": 4, "microbatch": 2},
        "optimizer": {"peak_learning_rate": 3e-3, "warmup_steps": 1},
        "evaluation": {"sequences": 2},
    }
    spec = with_sizes(parse_run_spec(values | run, PAGE))
    assert registry.kind_named("loud") is installed
    assert [sizes.boundary for layer in spec.layers if (sizes := layer.sizes)] == [
        *[(48, 64)] * 2,
        *[(48, 128)] * 3,
        (48, 256),
    ]
    assert len(measure_device(spec).unlike) == 6

    def batch(step: int, microbatch: int) -> Batch:
        tokens = torch.arange(98).view(2, 49) + step + microbatch
        return tokens[:, :-1], tokens[:, 1:]

    losses = list(ReferenceRun(spec, batch).losses(6))
    assert losses[-1] < losses[0] - 0.1


def test_all_kinds_that_come_along_are_in_the_table() -> None:
    text = (ROOT / PAGE).read_text()
    assert set(re.findall(r"^\| `([a-z]+)` \|", text, re.M)) == set(registry.SHIPPED)
    for name, kind in registry.SHIPPED.items():
        row = re.search(rf"^\| `{name}` \|.*$", text, re.M)
        assert row is not None
        assert all(f"`{option}`" in row[0] for option in kind.options)
