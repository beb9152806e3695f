"""The decode step with sampling in the graph: every replay draws anew, and what eager draws."""

import pytest
import torch

from cglab.graphs.out_forms import same_bits
from cglab.runners.decode import INPUTS

backends = pytest.mark.parametrize("backend", ["full", "breakable"])
HOT = 50.0
"""A temperature at which every token is about as likely as any other."""


@pytest.fixture
def sampler(world):
    """A function that makes a world whose runner samples."""
    return lambda backend="full", **options: world(backend, settings={"sampling": True}, **options)


def drawn(one, lengths, temperatures, seeds, run=None):
    """Tokens and logits of one step, from the same cache every time."""
    values, before = one.inputs(lengths), one.cache()
    values["temperatures"] = torch.tensor(temperatures, device=one.device)
    values["seeds"] = torch.tensor(seeds, device=one.device)
    tokens, logits = (run or one.runner.run)(len(lengths), **values)
    one.restore(before)
    return tokens, logits


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_live_size_of_every_bucket_is_bitwise(sampler, backend, dtype):
    one = sampler(backend, dtype=dtype)
    for live in (8, 1, 7, 2, 6, 3, 5, 4):
        step = (
            [3 + live + i % 4 for i in range(live)],
            [HOT * (i % 3) for i in range(live)],
            list(range(live)),
        )
        size = one.runner.captured.pad(live)
        wanted = drawn(
            one, *step, run=lambda rows, size=size, **v: one.runner.run_padded_eager(rows, size, **v)
        )
        assert all(map(same_bits, drawn(one, *step), wanted))
    assert one.runner.coverage().captured == 8 and one.runner.coverage().eager == 0


@backends
def test_b50_b48_p38_a_replay_draws_by_its_own_seed_and_position(sampler, backend):
    one = sampler(backend)
    steps = [([length] * 4, [HOT] * 4, [0, 1, 2, 3]) for length in range(1, 17)]
    tokens = torch.stack([drawn(one, *step)[0] for step in steps])
    again = torch.stack([drawn(one, *step)[0] for step in steps])
    assert torch.equal(tokens, again), "the same seed at the same position draws the same"
    assert tokens.unique().numel() > 30, "64 draws of 97 tokens that are about as likely"
    assert all(tokens[:, i].unique().numel() > 8 for i in range(4)), "positions differ"
    assert all(tokens[i].unique().numel() > 1 for i in range(16)), "seeds differ"


@backends
def test_a_request_draws_the_same_alone_and_in_any_place_of_a_batch(sampler, backend):
    one = sampler(backend)
    lengths, temperatures, seeds = [9, 5, 12], [HOT, 1.0, HOT], [11, -5, 2**62]
    together = drawn(one, lengths, temperatures, seeds)[0]
    for live in (1, 2):
        part = drawn(one, lengths[:live], temperatures[:live], seeds[:live])[0]
        assert torch.equal(part, together[:live])


@backends
def test_p37_temperatures_are_data_and_0_is_the_greedy_form(sampler, world, backend):
    """Captured over padding, which is greedy; then hot, greedy and mixed batches on the same recordings."""
    one, greedy = sampler(backend), world(backend)
    lengths, seeds = [9, 5, 12], [1, 2, 3]
    tokens, logits = greedy.runner.run(3, **greedy.inputs(lengths))
    cold = drawn(one, lengths, [0.0] * 3, seeds)
    assert same_bits(cold[0], tokens) and same_bits(cold[1], logits)
    hot = drawn(one, lengths, [HOT] * 3, seeds)
    assert same_bits(hot[1], logits) and not torch.equal(hot[0], tokens)
    mixed = drawn(one, lengths, [HOT, 0.0, HOT], seeds)[0]
    assert mixed.tolist() == [hot[0][0], tokens[1], hot[0][2]]


def test_p02_the_form_is_part_of_the_key_and_of_the_inputs(sampler, world):
    one, greedy = sampler(), world()
    assert [line["bucket"] for line in one.runner.captured.memory()] == [
        f"{n}/sampling" for n in (8, 4, 2, 1)
    ]
    assert [line["bucket"] for line in greedy.runner.captured.memory()] == ["8", "4", "2", "1"]
    assert one.runner.inputs == tuple(one.runner.slots()) == (*INPUTS, "temperatures", "seeds")
    assert greedy.runner.inputs == tuple(greedy.runner.slots()) == INPUTS


def test_the_greedy_form_does_not_pay_for_sampling(device, sampler, world):
    if device.type == "cuda":
        pytest.skip("operations are listed by the tape")
    plain, more = (runner.captured.inspect(4) for runner in (world().runner, sampler().runner))
    start = next(i for i, (a, b) in enumerate(zip(plain, more, strict=False)) if a != b)
    assert plain[start].startswith("aten::argmax"), "equal up to the choice of the token"
    assert not any(name.startswith("aten::log") for name in plain)
    assert 30 < len(more) - len(plain) < 50


def test_p14_padding_is_greedy_and_has_no_seed(sampler):
    one = sampler()
    drawn(one, [9] * 8, [HOT] * 8, list(range(1, 9)))
    drawn(one, [9] * 3, [HOT] * 3, [1, 2, 3])
    views = one.runner.captured.buffers.view(4)
    assert views["temperatures"][3:].tolist() == [0.0] and views["seeds"][3:].tolist() == [0]
