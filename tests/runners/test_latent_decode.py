"""Decode and verify of a model with latent attention: captured steps are padded eager ones, to the bit."""

import pytest
import torch

from cglab.errors import AddressError
from cglab.graphs.out_forms import same_bits
from tests.runners.latent import LatentDecodeWorld, LatentVerifyWorld

backends = pytest.mark.parametrize("backend", ["full", "breakable"])


@pytest.fixture
def worlds(device):
    """Makes worlds and closes them."""
    made = []

    def make(kind, backend, **options):
        made.append(kind(device, backend, (2, 4), **options))
        made[-1].runner.capture()
        return made[-1]

    yield make
    for one in made:
        one.close()


def check(one, values, live):
    """A captured step and padded eager, outputs and caches but for the reserved page."""
    before = one.cache()
    got, after = one.runner.run(live, **values), one.cache()
    one.restore(before)
    wanted = one.runner.run_padded_eager(live, one.runner.captured.pad(live), **values)
    for tensor, other in zip((*got, *after), (*wanted, *one.cache()), strict=True):
        assert same_bits(
            tensor[:, 4:] if tensor.dim() > 2 else tensor, other[:, 4:] if tensor.dim() > 2 else other
        )
    return got


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_is_bitwise_padded_eager_below_and_above_index_topk(worlds, backend, dtype):
    one = worlds(LatentDecodeWorld, backend, dtype=dtype)
    for lengths in ([3, 12], [16], [6, 7, 9, 1], [15, 2, 6]):
        tokens, logits = check(one, one.inputs(lengths), len(lengths))
        assert logits.isfinite().all() and tokens.equal(logits.argmax(-1))
    assert one.runner.coverage().eager == 0 and one.runner.coverage().captured == 4


@backends
def test_verify_of_one_drafted_token_is_bitwise_padded_eager(worlds, backend):
    one = worlds(LatentVerifyWorld, backend)
    for committed in ([5, 10], [12], [1, 2, 11]):
        assert check(one, one.inputs(committed), len(committed)).hidden.isfinite().all()
    assert one.runner.coverage().eager == 0


@backends
def test_weights_loaded_in_place_are_followed_and_moved_ones_refused(worlds, backend):
    one = worlds(LatentDecodeWorld, backend)
    values = one.inputs([9, 4])
    first = check(one, values, 2)[1]
    with torch.no_grad():
        one.model.blocks[1].attention.indexer.query.weight.mul_(-1)
        one.model.blocks[2].feed_forward.router.weight.neg_()
    assert not same_bits(check(one, values, 2)[1], first)
    one.model.blocks[0].attention.latent_up.weight.data = one.model.blocks[
        0
    ].attention.latent_up.weight.data.clone()
    with pytest.raises(AddressError, match=r"latent_up"):
        one.runner.run(2, **values)
