"""Counter-based sampling: the distribution, and that a draw depends on nothing but seed, position and logits."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cglab
from cglab.graphs.out_forms import same_bits
from cglab.models import sampling
from cglab.models.sampling import sample, uniforms

DISTRIBUTIONS = {
    "flat": (torch.zeros(16), 1.0),
    "skewed": (-0.6 * torch.arange(16.0), 1.0),
    "skewed, cooler": (-0.6 * torch.arange(16.0), 0.5),
    "skewed, hotter": (-0.6 * torch.arange(16.0), 3.0),
}
SEED = st.integers(-(2**63), 2**63 - 1)


def integers(*values):
    return torch.tensor(values, dtype=torch.int64)


def far_off(observed, expected):
    """How many deviations the chi-square statistic of counts lies from its mean; both arguments [cells]."""
    kept = expected >= 5
    degrees = int(kept.sum()) - 1
    statistic = ((observed - expected)[kept] ** 2 / expected[kept]).sum()
    return abs(float(statistic) - degrees) / math.sqrt(2 * degrees)


def counts(tokens, cells):
    return tokens.flatten().bincount(minlength=cells).double()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A device of each recorder."""
    return torch.device(request.param)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("counter", ["positions", "seeds"])
def test_tokens_come_as_often_as_softmax_says(name, counter):
    logits, temperature = DISTRIBUTIONS[name]
    draws = 40_000
    counted, fixed = torch.arange(draws), torch.full((draws,), 7)
    seeds, positions = (fixed, counted) if counter == "positions" else (counted, fixed)
    tokens = sample(logits.expand(draws, -1), torch.full((draws,), temperature), seeds, positions)
    expected = draws * (logits / temperature).softmax(-1).double()
    assert far_off(counts(tokens, 16), expected) < 4
    wrong = draws * (logits / (temperature * 1.1) + 0.02 * torch.arange(16.0)).softmax(-1).double()
    assert far_off(counts(tokens, 16), wrong) > 4, "a slightly different distribution would be told"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_temperature_0_is_plain_argmax_in_every_tie(dtype):
    logits = torch.randn(64, 300).mul(2).round().to(dtype)  # full of ties
    logits[::3, ::7] = float("-inf")
    zero = torch.zeros(64)
    tokens = sample(logits, zero, torch.randint(-(2**63), 2**63 - 1, (64,)), torch.arange(64))
    assert torch.equal(tokens, logits.argmax(-1))
    assert not torch.equal(tokens, sample(logits, zero + 1, torch.arange(64), torch.arange(64)))


def test_p37_greedy_and_random_rows_share_a_batch():
    logits = torch.randn(6, 50)
    warm = sample(logits, torch.full((6,), 2.0), torch.arange(6), torch.arange(6))
    mixed = sample(logits, torch.tensor([0.0, 2.0] * 3), torch.arange(6), torch.arange(6))
    assert torch.equal(mixed[1::2], warm[1::2]) and torch.equal(mixed[::2], logits.argmax(-1)[::2])


@given(rows=st.lists(st.tuples(SEED, st.integers(0, 2**31 - 1)), min_size=1, max_size=9), order=st.randoms())
def test_a_draw_is_the_same_alone_in_any_batch_and_at_any_height(rows, order):
    seeds, positions = integers(*(s for s, _ in rows)), integers(*(p for _, p in rows))
    logits = torch.randn(len(rows), 33)
    together = sample(logits, torch.ones(len(rows)), seeds, positions)
    for i in range(len(rows)):
        part = slice(i, i + 1)
        assert together[i] == sample(logits[part], torch.ones(1), seeds[part], positions[part])[0]
    shuffled = order.sample(range(len(rows)), len(rows))
    again = sample(logits[shuffled], torch.ones(len(rows)), seeds[shuffled], positions[shuffled])
    assert torch.equal(again, together[shuffled])


def word(seed, position, column):
    """The hash in Python's integers, which do not overflow."""

    def mix(x):
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    first = mix((seed % 2**32 + 0x9E3779B1 * position) % 2**32)
    other = mix(((seed >> 32) + 0x85EBCA77 * position) % 2**32)
    return mix((first + (column + 1) * ((first ^ other) >> 1 | 1)) % 2**32)


def test_the_bits_are_those_of_exact_arithmetic_on_every_device(device):
    corner = [(s, p) for s in (0, 1, -1, 2**63 - 1, -(2**63), 2**32) for p in (0, 1, 2**31 - 1)]
    seeds, positions = (torch.tensor(list(c), device=device) for c in zip(*corner, strict=True))
    words = torch.tensor([[word(s, p, c) for c in range(40)] for s, p in corner])
    expected = (words.to(torch.float32) + 0.5) * sampling.BELOW_2_TO_MINUS_32
    assert same_bits(uniforms(seeds, positions, 40).cpu(), expected)
    far = 151_935  # the largest product of a real vocabulary
    last = uniforms(seeds[-1:], positions[-1:], far + 1)[0, far].cpu()
    assert last == torch.tensor(float(word(*corner[-1], far))).add(0.5) * sampling.BELOW_2_TO_MINUS_32


@pytest.mark.parametrize(("value", "uniform"), [(0, 2.0**-33), (sampling.WORD, 1 - 2.0**-24)])
def test_no_word_makes_a_uniform_of_0_or_1_or_noise_that_is_not_finite(monkeypatch, value, uniform):
    monkeypatch.setattr(sampling, "_mix", lambda words: words.fill_(value))
    one = integers(1)
    assert (uniforms(one, one, 8).double() - uniform).abs().max() < uniform * 2.0**-23
    logits = torch.randn(1, 8)
    assert torch.equal(sample(logits, torch.ones(1), one, one), logits.argmax(-1)), "equal noise for all"


def test_early_arrivals_which_win_are_told_apart():
    drawn = uniforms(torch.arange(256), torch.arange(256), 2**16)
    early = drawn[drawn < 2.0**-12].double()
    assert early.unique().numel() > 0.99 * early.numel() > 3500, "on a grid of 2^-24 a third would be ties"
    assert drawn.min() < 2.0**-21 and drawn.max() < 1


def test_seed_0_at_position_0_is_a_draw_like_any_other():
    """All zeros is where a hash made of products and shifts stands still."""
    nothing = integers(0)
    drawn = uniforms(nothing, nothing, 20_000)
    cells = counts((drawn * 100).long(), 100)
    assert far_off(cells, torch.full_like(cells, 200.0)) < 4
    assert drawn[0, :4].min() > 2.0**-10


def test_uniforms_are_uniform_and_independent_along_every_axis():
    """Correlations in deviations, between neighbours: token, position, seed, and both ways of trading them."""
    drawn = torch.stack([uniforms(torch.arange(500), torch.full((500,), p), 200) for p in range(20)])
    cells = counts((drawn * 1000).long(), 1000)
    assert far_off(cells, torch.full_like(cells, drawn.numel() / 1000)) < 4
    neighbours = {
        "token": (drawn[..., 1:], drawn[..., :-1]),
        "seed": (drawn[:, 1:], drawn[:, :-1]),
        "position": (drawn[1:], drawn[:-1]),
        "seed and position": (drawn[1:, 1:], drawn[:-1, :-1]),
        "seed for position": (drawn[1:, :-1], drawn[:-1, 1:]),
        "position for token": (drawn[1:, :, :-1], drawn[:-1, :, 1:]),
    }
    for name, pair in neighbours.items():
        correlation = torch.corrcoef(torch.stack([side.flatten() for side in pair]))[0, 1]
        assert abs(correlation) * math.sqrt(pair[0].numel()) < 4, name


@pytest.mark.parametrize("lag", [1, 2, 16])
def test_tokens_at_two_positions_are_independent(lag):
    seeds, zero = torch.arange(30_000), torch.zeros(30_000, dtype=torch.int64)
    logits = torch.linspace(0, 1, 8).expand(30_000, -1)
    now, later = (sample(logits, torch.ones(30_000), seeds, zero + p) for p in (3, 3 + lag))
    share = logits[0].softmax(-1).double()
    assert far_off(counts(8 * now + later, 64), 30_000 * torch.outer(share, share).flatten()) < 4


@pytest.mark.parametrize("base", [0, 123_456_789_012_345])
def test_every_bit_of_a_seed_counts(base):
    seeds = integers(
        base, *((base ^ 1 << bit) - (2**64 if (base ^ 1 << bit) >= 2**63 else 0) for bit in range(64))
    )
    drawn = uniforms(seeds, torch.zeros_like(seeds), 2000)
    correlation = torch.corrcoef(drawn) - torch.eye(65)
    assert correlation.abs().max() * math.sqrt(2000) < 5


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_b50_b48_p38_every_replay_draws_anew_and_what_eager_draws(device, backend):
    """64 steps over a flat distribution: a seed that was baked in at capture would repeat one quantile."""
    slots = {
        "logits": cglab.Slot(shape=(-1, 4096), dtype=torch.float32, pad=0.0),
        "temperatures": cglab.Slot(shape=(-1,), dtype=torch.float32, pad=0),
        "seeds": cglab.Slot(shape=(-1,), dtype=torch.int64, pad=0),
        "positions": cglab.Slot(shape=(-1,), dtype=torch.int64, pad=0),
    }
    seeds, drawn = torch.tensor([5, 6], device=device), []
    with cglab.capture(sample, slots=slots, buckets=(1, 4), backend=backend, strict=True) as captured:
        for position in range(64):
            values = {
                "logits": torch.zeros(2, 4096, device=device),
                "temperatures": torch.ones(2, device=device),
                "seeds": seeds,
                "positions": torch.full((2,), position, device=device),
            }
            tokens = captured(**values)
            assert torch.equal(tokens, sample(**values))
            drawn.append(tokens.tolist())
        assert captured.coverage().captured == 64
    for request in zip(*drawn, strict=True):
        assert len(set(request)) >= 60
    assert all(one != other for one, other in drawn)
    again = uniforms(seeds[:1].expand(64), torch.arange(64, device=device), 1)
    assert again.unique().numel() == 64
