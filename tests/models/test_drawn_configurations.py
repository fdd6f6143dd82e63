"""What `transformers` makes of three families goes round unchanged, or is refused in words."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.hugging_face.export import export_hugging_face
from p2p_dtfm.train.hugging_face.model_import import Training, import_hugging_face
from tests.models.conftest import own_logits
from tests.models.drawn import drawn_configuration
from tests.models.families import make_model
from tests.models.test_families import logits_of, their_model
from tests.models.test_hugging_face import imported_states

TRAINING = Training("python-standard-library", 20, 4, 2, 3e-3)
EVERY_DAY, AT_NIGHT = range(0, 12), range(12, 312)
FILES = (torch.float32, torch.float32, torch.bfloat16, torch.float16)


def go_round(seed: int, directory: Path) -> str:
    """Whether the model goes round: `as before`, or why it was refused."""
    torch.set_num_threads(1)
    family, stated = drawn_configuration(seed)
    made = make_model(family, seed, **stated)
    made.to(FILES[seed % len(FILES)])  # type: ignore[arg-type]
    made.save_pretrained(directory / "hf", max_shard_size="20KB" if seed % 3 else "1GB")
    theirs = their_model(directory / "hf").float()
    try:
        spec = import_hugging_face(directory / "hf", directory / "in", "", TRAINING)
    except UserError as error:
        assert error.fixes, error.cause
        assert not list(directory.glob("in*")), "nothing half-imported stays"
        return error.cause
    states = imported_states(directory / "in", spec)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(spec.model.vocabulary, (2, spec.model.context), generator=generator)
    expected = logits_of(theirs, tokens)
    exact = logits_of(deepcopy(theirs).double(), tokens)
    close = 1e-5 + (expected - exact).abs().max()  # some models round their own by more than 1e-5
    assert (own_logits(states, tokens) - expected).abs().max() < close, (family, stated)
    export_hugging_face(directory / "in", directory / "out", None)
    again = their_model(directory / "out")
    assert type(again) is type(theirs)
    assert (logits_of(again, tokens) - expected).abs().max() < close, (family, stated)
    after = again.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in theirs.state_dict().items())
    return "as before"


@pytest.mark.parametrize("seed", EVERY_DAY)
def test_it_goes_round_or_is_refused(seed: int, tmp_path: Path) -> None:
    go_round(seed, tmp_path)


@pytest.mark.nightly
def test_three_hundred_more_and_most_go_round(tmp_path: Path) -> None:
    found = [go_round(seed, tmp_path / str(seed)) for seed in AT_NIGHT]
    refused = sorted({cause for cause in found if cause != "as before"})
    assert found.count("as before") > len(found) / 2, refused
