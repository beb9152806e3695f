"""T5, the draft's sampler: the same tokens in a recording, eager and spelt out, and why it stays outside of one."""

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from cglab.errors import InputError
from cglab.graphs.captured import Captured
from cglab.graphs.coverage import Reason
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.models.decoder import Decoder
from cglab.runners.draft_sampler import DraftSampler, Shard, why_eager

from .blocks import UNTIED, BlockWorld, replace

BLOCK, HIDDEN, BUCKETS, STATES = 4, 32, (1, 2, 4, 8), 10_000
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SHARDS = {"whole": None, "offset": Shard(1000, 97), "odd part": Shard(7, 51)}


def target_with(weight, vocabulary=97):
    """A target whose head is this; nothing else of it is read."""
    with torch.device("meta"):
        target = Decoder(replace(UNTIED, vocab_size=vocabulary), device="meta", dtype=weight.dtype)
    target.head = nn.Linear(HIDDEN, len(weight), bias=False, device="meta")
    target.head.weight = nn.Parameter(weight, requires_grad=False)
    return target


def whole_numbers(shape, high, dtype, generator):
    """Small whole numbers: their products and sums are exact, in whatever order they are added up."""
    return torch.randint(-high, high + 1, shape, generator=generator).to(dtype)


def planted(rows, dtype, generator):
    """A head of which every fifth row is an earlier one again, so that the best is often there twice."""
    weight = whole_numbers((rows, HIDDEN), 3, dtype, generator)
    for row in range(5, rows, 5):
        weight[row] = weight[int(torch.randint(row, (1,), generator=generator))]
    return weight


def spelt_out(hidden, weight, shard):
    """The first best token of every row but row 0 of a block: exact scores, rounded to the head's type."""
    rows = hidden.cpu().double().view(-1, BLOCK, HIDDEN)[:, 1:]
    scores = (rows @ weight.cpu().double().T).to(weight.dtype).double()[..., : shard.tokens]
    best = scores == scores.max(-1, keepdim=True).values
    return torch.where(best, torch.arange(shard.tokens), shard.tokens).min(-1).values + shard.first, best


@pytest.fixture
def recorded(device):
    """A sampler in a recording of its own, as the tail of a draft is one."""
    made = []

    def make(sampler, dtype, buckets=BUCKETS):
        slots = {"hidden": Slot(shape=(-1, HIDDEN), dtype=dtype, pad=0.0, width=BLOCK)}
        made.append(Captured("sampler", sampler, slots, buckets, device, Options(strict=True)))
        made[-1].capture()
        return made[-1]

    yield make
    for one in made:
        one.close()


@dtypes
@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("spare", [0, 7], ids=["exact", "padded"])
def test_p64_p65_p67_in_graph_eager_and_spelt_out_are_equal_on_ten_thousand_states(
    recorded, device, dtype, shard, spare
):
    """Rows that are no token score highest by far; a draft in float32 over a head in bfloat16 is among the cases."""
    generator = torch.Generator().manual_seed(11)
    shape = shard or Shard(0, 97)
    weight = planted(shape.tokens + spare, dtype, generator)
    weight[shape.tokens :] = 100
    weight = weight.to(device)
    sampler = DraftSampler(target_with(weight), BLOCK, shard=shard)
    assert sampler.why_eager is None
    of_the_draft = torch.float32 if spare else dtype
    one, states, ties, live = recorded(sampler, of_the_draft), 0, 0, 0
    while states < STATES:
        live = live % BUCKETS[-1] + 1
        hidden = whole_numbers((live * BLOCK, HIDDEN), 3, of_the_draft, generator).to(device)
        in_graph, eager = one(hidden=hidden), sampler(hidden)
        wanted, best = spelt_out(hidden, weight, shape)
        assert torch.equal(in_graph, eager) and torch.equal(in_graph.cpu(), wanted), live
        states, ties = states + in_graph.numel(), ties + int((best.sum(-1) > 1).sum())
    assert ties > STATES / 20, "planted"
    assert {int(key) for key in one.counts.hits} == {*BUCKETS} and one.counts.eager == 0


@dtypes
def test_of_any_states_the_recording_chooses_what_padded_eager_does(recorded, device, dtype):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(97, HIDDEN, generator=generator).to(device, dtype)
    sampler = DraftSampler(target_with(weight), BLOCK)
    one = recorded(sampler, dtype)
    for step in range(160):
        live = 1 + step % BUCKETS[-1]
        values = {"hidden": torch.randn(live * BLOCK, HIDDEN, generator=generator).to(device, dtype)}
        got = one(**values).clone()
        assert torch.equal(got, one.run_padded_eager(values, live, one.pad(live)))
        scores = (values["hidden"].view(live, BLOCK, HIDDEN)[:, 1:] @ weight.T).double()
        gap = scores.max(-1).values - scores.gather(-1, got.unsqueeze(-1)).squeeze(-1)
        assert (gap <= torch.finfo(dtype).eps * scores.abs().max()).all()


def test_no_requests_choose_nothing():
    sampler = DraftSampler(target_with(torch.ones(97, HIDDEN)), BLOCK)
    assert sampler(torch.zeros(0, HIDDEN)).shape == (0, BLOCK - 1)


@pytest.mark.parametrize("given", [None, torch.zeros(8), torch.zeros(6, HIDDEN), torch.zeros(8, 16)])
def test_p61_what_is_no_hidden_state_of_blocks_is_refused(given):
    sampler = DraftSampler(target_with(torch.ones(97, HIDDEN)), BLOCK)
    with pytest.raises(InputError, match="the sampler takes hidden states of 32 for whole blocks of 4"):
        sampler(given)


class Quantised(nn.Module):
    """A head of whole numbers and a scale, which scores by its own method."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter((weight * 10).to(torch.int8), requires_grad=False)

    def forward(self, hidden):
        return hidden @ self.weight.to(hidden.dtype).T / 10


class Packed(nn.Module):
    """A head whose weight has another name."""

    def __init__(self):
        super().__init__()
        self.qweight = torch.zeros(4, 4)


class Wrapped(torch.Tensor):
    """A tensor that stands for another one, as quantising libraries have them."""


class Meeting:
    """Ranks of one process: each leaves its part and sees those that are there."""

    def __init__(self, count, parts, rank):
        self.count, self.parts, self.rank, self.why = count, parts, rank, None

    def unrecorded(self, device):
        return self.why

    def gather(self, mine):
        self.parts[self.rank] = mine.clone()
        return torch.stack([self.parts.get(rank, torch.zeros_like(mine)) for rank in range(self.count)])


def head(rows=97, columns=HIDDEN, dtype=torch.float32):
    return nn.Linear(columns, rows, bias=False, dtype=dtype)


def wrapped():
    module = head()
    module.weight = nn.Parameter(torch.zeros(97, HIDDEN).as_subclass(Wrapped), requires_grad=False)
    return module


def on_the_host():
    ranks = Meeting(2, {}, 0)
    ranks.why = "gloo on cuda, recorded there: nccl"
    return ranks


WHOLE = Shard(0, 97)


@pytest.mark.parametrize(
    ("block", "module", "shard", "ranks", "reason", "facts"),
    [
        (4, head(), WHOLE, None, None, ""),
        (4, nn.Embedding(97, HIDDEN), WHOLE, None, None, ""),
        (4, head(dtype=torch.bfloat16), WHOLE, Meeting(2, {}, 0), None, ""),
        (4, head(rows=128), WHOLE, None, None, ""),
        (1, head(), WHOLE, None, Reason.BLOCK_OF_ONE, "block size 1"),
        (4, None, WHOLE, None, Reason.NO_HEAD, ""),
        (4, Quantised(torch.ones(97, HIDDEN)), WHOLE, None, Reason.HEAD_NOT_DENSE, "Quantised with torch.int8"),
        (4, Packed(), WHOLE, None, Reason.HEAD_NOT_DENSE, "Packed with no weight"),
        (4, wrapped(), WHOLE, None, Reason.HEAD_NOT_DENSE, "in a Wrapped"),
        (4, head().to(torch.float8_e4m3fn), WHOLE, None, Reason.HEAD_NOT_DENSE, "float8_e4m3fn"),
        (4, head(columns=16), WHOLE, None, Reason.HEAD_NOT_DENSE, "[97, 16], at least 97 rows of 32"),
        (4, head(rows=48), WHOLE, None, Reason.HEAD_NOT_DENSE, "[48, 32], at least 97 rows of 32"),
        (4, head(rows=48), None, Meeting(2, {}, 0), Reason.SHARD_UNKNOWN, "48 rows, 2 ranks"),
        (4, head(), WHOLE, on_the_host(), Reason.COLLECTIVE, "gloo on cuda, recorded there: nccl"),
    ],
)  # fmt: skip
def test_p63_every_reason_to_stay_outside_is_told_with_its_facts(block, module, shard, ranks, reason, facts):
    miss = why_eager(block, module, hidden_size=HIDDEN, shard=shard, ranks=ranks)
    assert (miss.reason if miss else None) is reason
    assert miss is None or facts in miss.facts


def test_p63_a_head_that_cannot_be_borrowed_is_asked_by_the_targets_own_method(device, monkeypatch):
    one = BlockWorld(device, "full", (1, 2))
    try:
        one.model.head = Quantised(one.model.head.weight)
        monkeypatch.setattr(one.model, "logits", lambda hidden: one.model.head(hidden))
        sampler = DraftSampler(one.model, BLOCK)
        eager = type(one.runner)(
            one.draft, one.draft_kv, one.group, (1, 2), Options(strict=True, clone=True), sampler=sampler
        )
        eager.capture()
        values = one.inputs([5, 3])
        drafted = eager.run(2, **values)
        scores = one.model.head(drafted.hidden.view(2, BLOCK, HIDDEN)[:, 1:])
        assert torch.equal(eager.tokens(drafted), scores.argmax(-1))
        assert eager.coverage().captured == 1, "the draft itself is a graph"
        assert eager.sampling().reasons == {"HEAD_NOT_DENSE": 1}
        eager.close()
    finally:
        one.close()


@given(seed=st.integers(0, 1 << 30), ranks=st.integers(2, 4), low=st.booleans())
def test_p65_ranks_choose_the_first_best_token_of_the_whole_vocabulary(seed, ranks, low):
    """Parts of unequal sizes, each padded with rows that score highest, and ties across them."""
    dtype = torch.bfloat16 if low else torch.float32
    generator = torch.Generator().manual_seed(seed)
    weight = planted(97, dtype, generator)
    hidden = whole_numbers((3 * BLOCK, HIDDEN), 3, dtype, generator)
    wanted, _ = spelt_out(hidden, weight, WHOLE)
    cuts = sorted({0, 97, *torch.randperm(97, generator=generator)[: ranks - 1].tolist()})
    parts, samplers = {}, []
    for rank, (first, end) in enumerate(pairwise(cuts)):
        mine = torch.cat([weight[first:end], torch.full((3, HIDDEN), 100, dtype=dtype)])
        meeting = Meeting(len(cuts) - 1, parts, rank)
        samplers.append(
            DraftSampler(target_with(mine), BLOCK, shard=Shard(first, end - first), ranks=meeting)
        )
    for sampler in samplers:
        sampler(hidden)  # all have left their part
    assert all(torch.equal(sampler(hidden), wanted) for sampler in samplers)


@pytest.mark.slow
def test_p65_two_processes_record_their_collective_and_replay_the_whole_vocabularys_choice(
    tmp_path, environment
):
    """Gloo inside recordings of the tape: eight steps of four buckets each, over a head in two parts."""
    script = Path(__file__).with_name("sampling_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=120)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert told == ["32 steps captured, 0 eager, 0 parted, 1 collective each"] * 2
