"""Routed experts: one by one as the reference, padding that reaches none, and no count on the host."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import cglab
from cglab.models import experts as module
from cglab.models.experts import RoutedExperts, every, grouped, takes_groups
from cglab.models.loading import fill_randomly
from tests.models.latent import TINY

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def routed(dtype=torch.float32, device="cpu", **fields):
    layer = RoutedExperts(replace(TINY, **fields), device=device, dtype=dtype)
    layer.requires_grad_(requires_grad=False)
    fill_randomly(layer, 1, seed=3)
    layer.router.bias.normal_(0.0, 0.3)
    return layer


def one_by_one(layer, hidden):
    """The formula, token by token, in float64."""
    config, router = TINY, layer.router
    inner = len(layer.gate_up) // config.num_experts // 2
    gate_up = layer.gate_up.double().view(-1, 2 * inner, config.hidden_size)
    down = layer.down.double().view(-1, config.hidden_size, inner)
    out = []
    for row in hidden.double():
        score = (router.weight.double() @ row).sigmoid()
        chosen = (score + router.bias.double()).topk(router.kept).indices
        weight = score[chosen] / score[chosen].sum() * router.scale
        total = torch.zeros_like(row)
        for expert, share in zip(chosen.tolist(), weight, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            total += share * (down[expert] @ (F.silu(gate) * up))
        if layer.shared is not None:
            gate, up = (layer.shared.gate_up.weight.double() @ row).chunk(2)
            total += layer.shared.down.weight.double() @ (F.silu(gate) * up)
        out.append(total)
    return torch.stack(out).float()


@pytest.mark.parametrize("products", [grouped, every])
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_experts_are_those_of_the_formula(products, shared, monkeypatch):
    monkeypatch.setattr(module, "takes_groups", lambda *_: products is grouped)
    layer, hidden = routed(shared_experts=shared), torch.randn(13, TINY.hidden_size)
    torch.testing.assert_close(layer(hidden), one_by_one(layer, hidden), **CLOSE)


@pytest.mark.parametrize("products", [grouped, every])
@pytest.mark.parametrize("junk", [float("nan"), 1e30])
def test_padding_reaches_no_expert_and_changes_no_live_row(products, junk, monkeypatch):
    monkeypatch.setattr(module, "takes_groups", lambda *_: products is grouped)
    layer, hidden = routed(shared_experts=0), torch.randn(16, TINY.hidden_size)
    hidden[9:] = junk
    live = torch.arange(16) < 9
    out = layer(hidden, live)
    assert out[:9].equal(layer(hidden[:9])) and (out[9:] == 0).all()


def test_rows_that_no_group_reaches_are_dropped_whatever_they_hold(monkeypatch):
    layer = routed(torch.bfloat16, shared_experts=0, expert_size=24)
    hidden = torch.randn(16, TINY.hidden_size).bfloat16()
    live, product, spoiled = torch.arange(16) < 9, F.grouped_mm, []
    expected = layer(hidden, live)

    def spoilt(rows, weights, *, offs):
        out = product(rows, weights, offs=offs)
        spoiled.append(len(out) - int(offs[-1]))
        out[int(offs[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(F, "grouped_mm", spoilt)
    assert layer(hidden, live).equal(expected)
    assert spoiled == [7 * TINY.experts_per_token] * 2


def test_expert_counts_equal_those_of_the_live_size():
    layer, hidden = routed(), torch.randn(20, TINY.hidden_size)
    count = TINY.num_experts
    alone = layer.router(hidden[:11])
    padded = layer.router(hidden, torch.arange(20) < 11)
    ends = [routing.group_ends(count)[1] for routing in (alone, padded)]
    counts = Counter(alone.experts.flatten().tolist())
    assert ends[0].equal(ends[1])
    assert ends[0].diff(prepend=ends[0].new_zeros(1)).tolist() == [counts[n] for n in range(count)]
    assert (padded.experts[11:] == count).all() and (padded.weights[11:] == 0).all()


def test_a_step_without_a_live_token_is_zero():
    layer, hidden = routed(shared_experts=0), torch.randn(3, TINY.hidden_size)
    assert layer(hidden, torch.zeros(3, dtype=torch.bool)).equal(torch.zeros_like(hidden))


def test_the_router_computes_in_float32_whatever_the_rest():
    layer = routed(torch.bfloat16)
    assert layer.router.weight.dtype == layer.router.bias.dtype == torch.float32
    routing = layer.router(torch.randn(4, TINY.hidden_size, dtype=torch.bfloat16))
    assert routing.weights.dtype == torch.float32
    torch.testing.assert_close(routing.weights.sum(-1), torch.full((4,), TINY.routed_scale))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recording_routes_anew_at_every_replay(device, dtype):
    layer = routed(
        dtype, device, expert_size=24
    )  # rows of whole 16 bytes, as the grouped product asks for on a GPU

    def step(hidden, live):
        return layer(hidden, live)

    slots = {"hidden": cglab.Slot(), "live": cglab.Slot(pad=False)}
    with cglab.capture(step, slots=slots, buckets=(8, 16)) as captured:
        for tokens in (8, 11, 3, 16):
            hidden = torch.randn(tokens, TINY.hidden_size, device=device, dtype=dtype)
            live = torch.ones(tokens, device=device, dtype=torch.bool)
            size = 8 if tokens <= 8 else 16
            padded = [F.pad(hidden, (0, 0, 0, size - tokens)), F.pad(live, (0, size - tokens))]
            assert captured(hidden=hidden, live=live).equal(layer(*padded)[:tokens])
        assert captured.coverage().misses == {}


@pytest.mark.parametrize(
    ("dtype", "expert_size", "grouped"),
    [
        (torch.bfloat16, 24, True),
        (torch.bfloat16, 20, False),
        (torch.float32, 24, False),
        (torch.float16, 24, False),
    ],
)
def test_groups_are_for_whole_16_bytes_of_bfloat16(dtype, expert_size, grouped):
    down = torch.empty(2, 32, expert_size, dtype=dtype)
    assert takes_groups(torch.empty(3, 32, dtype=dtype), down) == grouped
    assert not takes_groups(torch.empty(3, 32, dtype=torch.float64), down)


def test_bfloat16_experts_of_any_width_are_those_of_the_formula():
    hidden = torch.randn(9, TINY.hidden_size).bfloat16()
    layer = routed(torch.bfloat16, expert_size=20)
    torch.testing.assert_close(layer(hidden).float(), one_by_one(layer, hidden), rtol=0.05, atol=0.05)
