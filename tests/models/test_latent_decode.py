"""Decode and verify steps of latent attention against the form over packed keys, and in every kind of recording."""

from dataclasses import replace

import pytest
import torch

from cglab.errors import InputError
from cglab.models.attention import LiveRows
from cglab.models.latent_decode import LatentDecode
from cglab.models.loading import random_model
from tests.models.latent import TINY, LatentRequests

CLOSE = {"rtol": 2e-4, "atol": 2e-5}
LENGTHS = (11, 3, 6)
"""Tokens in the cache: above what is kept, below it, and as many."""


def filled(model):
    """Three requests with tokens in their caches."""
    torch.manual_seed(5)
    requests = LatentRequests(model, 3, 24)
    requests.step({row: torch.randint(97, (length,)) for row, length in enumerate(LENGTHS)})
    return requests


@torch.no_grad()
def decoded(requests, ids, *, padding=0, live=None, width=1):
    """Hidden states of ``width`` new tokens of each request."""
    chunks = dict(enumerate(ids.view(3, width)))
    _, tokens, position, slots = requests.place(chunks)
    rows, lengths = torch.arange(1, 4), torch.tensor(requests.lengths)
    idle = torch.zeros(padding, dtype=torch.int64)
    tokens, position, slots = (torch.cat((part, idle.repeat(width))) for part in (tokens, position, slots))
    attend = LatentDecode(
        requests.kv, request_rows=torch.cat((rows, idle)), seq_lens=torch.cat((lengths, idle + width)), out_slots=slots,
        index_topk=requests.model.config.index_topk, width=width, live=live,
    )  # fmt: skip
    return requests.model(tokens, position, attend), attend


@pytest.fixture(params=[6, 24], ids=["sparse", "every key kept"])
def model(request):
    return random_model(replace(TINY, index_topk=request.param), device="cpu", dtype=torch.float32, seed=1)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_step_of_any_width_is_the_same_tokens_over_packed_keys(model, width):
    ids = torch.randint(97, (3 * width,))
    one, other = filled(model), filled(model)
    found, _ = decoded(one, ids, width=width)
    wanted = other.step(dict(enumerate(ids.view(3, width))))
    torch.testing.assert_close(found, wanted, **CLOSE)
    for name, cache in other.kv.caches().items():
        torch.testing.assert_close(one.kv.caches()[name][:, 1:], cache[:, 1:], **CLOSE)


@pytest.mark.parametrize("live", [None, LiveRows(3)], ids=["all rows", "live rows"])
def test_p12_p53_padding_reads_no_reserved_slot_and_selects_nothing(model, live):
    ids = torch.randint(97, (6,))
    clean, _ = decoded(filled(model), ids, width=2, padding=2)
    requests = filled(model)
    for cache in requests.kv.caches().values():
        cache[:, :4] = float("nan")
    found, attend = decoded(requests, ids, width=2, padding=2, live=live)
    assert found[:6].equal(clean[:6]) and found.isfinite().all()
    assert (attend.selected[6:] == -1).all() and (attend.selected[:6, 0] > 0).all()


def test_p54_a_break_without_live_requests_attends_to_nothing(model):
    _, attend = decoded(filled(model), torch.randint(97, (3,)), live=LiveRows(0))
    assert (attend.selected == -1).all()


def test_what_is_no_step_of_equal_widths_is_refused(model):
    requests, one = filled(model), torch.ones(1, dtype=torch.int64)
    step = {"request_rows": one, "seq_lens": one, "index_topk": 6}
    with pytest.raises(InputError, match="draft with topk 1"):
        LatentDecode(requests.kv, out_slots=one, tree=torch.ones(1, 1, 1, dtype=torch.bool), **step)
    with pytest.raises(InputError, match="width 2: give one length and 2 slots"):
        LatentDecode(requests.kv, out_slots=one, width=2, **step)
    attend = LatentDecode(requests.kv, out_slots=one, **step)
    with pytest.raises(InputError, match="start with a full indexer"):
        attend.attend(0, None, None, None, None)
