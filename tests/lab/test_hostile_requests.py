"""Requests and calls that a hurried user makes: refused with a word, or right; never wrong without one."""

import pytest
import torch

import cglab
from cglab.engine.requests import Request, Sampling
from cglab.errors import ClosedError, InputError

PROMPT = [1, 2, 3, 4] * 10


@pytest.fixture
def lab():
    with cglab.open("pico-gqa", device="cpu", max_batch=2) as lab:
        lab.captures.decode = lab.captures.prefill = "eager"
        yield lab
        assert lab.engine.idle
        lab.engine.scheduler.check_invariants()


def test_a_prefix_of_weights_written_behind_torchs_back_is_forgotten(lab):
    before = lab.generate([PROMPT], 6).tokens
    assert lab.generate([PROMPT], 6).timings.prefill_tokens == [8], (
        "the prefix is known, as the weights are the same"
    )
    for parameter in lab.model.parameters():
        parameter.data.mul_(1.5)  # counted by no version
    changed = lab.generate([PROMPT], 6).tokens
    lab.engine.flush_cache()
    assert changed == lab.generate([PROMPT], 6).tokens != before


def test_rows_that_are_swapped_are_other_weights(lab):
    lab.generate([PROMPT], 2)
    rows = lab.model.blocks[0].feed_forward.down.weight.data
    rows[[0, 1]] = rows[[1, 0]]
    assert lab.generate([PROMPT], 2).timings.prefill_tokens == [40]


def test_inference_mode_has_weights_without_versions(lab):
    want = lab.generate([PROMPT], 3).tokens
    with torch.inference_mode(), cglab.open("pico-gqa", device="cpu", max_batch=1) as other:
        assert other.generate([PROMPT], 3).tokens == want


@pytest.mark.parametrize(
    "temperature", ["1", None, True, [1.0], 10**400, 1e39, float("inf"), float("nan"), -1]
)
def test_what_is_no_temperature_is_refused(temperature):
    with pytest.raises(InputError, match="temperature must be"):
        Sampling(temperature)


def test_the_hottest_temperature_still_draws(lab):
    drawn = {lab.generate([PROMPT], 1, temperature=1e30, seed=seed).tokens[0][0] for seed in range(8)}
    assert len(drawn) > 4, "infinite noise always takes token 0"


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": "abc"}, {"prompt": (1, 2)}, {"prompt": [1.5]}, {"prompt": None}, {"limit": 2.5}, {"limit": "3"},
        {"limit": None}, {"sampling": None}, {"stops": None}, {"stops": 5}, {"output": [5]},
    ],
    ids=str,
)  # fmt: skip
def test_a_request_of_other_kinds_is_refused_before_anything_runs(lab, wrong):
    good = Request(0, [1, 2], 3)
    with pytest.raises(InputError, match="prompt 1"):
        list(lab.stream([good, Request(**{"index": 1, "prompt": [1, 2], "limit": 3} | wrong)]))
    assert (good.finish, good.output) == ("cancelled", [])


@pytest.mark.parametrize("requests", [None, Request(0, [1], 1), [5]], ids=["None", "one", "number"])
def test_what_is_no_list_of_requests_is_refused(lab, requests):
    with pytest.raises(InputError, match=r"give (a Request|\[Request)"):
        list(lab.stream(requests))


def test_a_request_of_another_lab_leaves_this_one_usable(lab):
    with cglab.open("pico-gqa", device="cpu", max_batch=1) as other:
        other.captures.decode = other.captures.prefill = "eager"
        foreign = Request(9, [1, 2], 2)
        other.engine.submit(foreign)
        with pytest.raises(InputError, match="added before"):
            list(lab.stream([Request(0, [1, 2], 0), foreign]))
        assert len(list(lab.stream([Request(1, [1, 2], 2)]))) == 2


def test_a_stream_left_at_its_last_event_takes_no_events_of_the_next(lab):
    first = lab.stream([Request(0, [1, 2], 1)])
    assert next(first).finish == "length"
    second = lab.stream([Request(7, [1, 2], 4)])
    events = [next(second)]
    assert list(first) == []
    assert len(events + list(second)) == 4


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_no_step_is_measured_in_the_middle_of_a_stream(lab, name):
    request = Request(0, [1, 2], 5)
    stream = lab.stream([request])
    next(stream)
    with pytest.raises(InputError, match="in flight"):
        lab.profile(name, ("eager",), repeats=1)
    assert (len(list(stream)), request.finish) == (4, "length")


def test_a_stream_ends_with_its_lab():
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1)
    stream = lab.stream([Request(0, [1, 2], 5)])
    next(stream)
    lab.close()
    with pytest.raises(ClosedError, match="open it again"):
        list(stream)


@pytest.mark.parametrize(
    "sizes", [{"tokens": "16"}, {"tokens": 16.0}, {"cached": 16.0}, {"requests": True}], ids=str
)
def test_sizes_are_whole_numbers(lab, sizes):
    with pytest.raises(InputError, match="whole number"):
        lab.profile("prefill", ("eager",), repeats=1, **sizes)


@pytest.mark.parametrize("requests", [0, "2"])
def test_a_sweep_is_shared_by_whole_requests(lab, requests):
    with pytest.raises(InputError, match="at least 1"):
        lab.sweep("prefill", requests=requests)


@pytest.mark.parametrize("prompts", [None, 5, [b"abc"]], ids=str)
def test_what_is_no_prompt_is_refused(lab, prompts):
    with pytest.raises(InputError, match="give a string"):
        lab.generate(prompts, 1)


@pytest.mark.parametrize(
    "ask", ["memory", "coverage", "max_context", "prefix_reuse_reason", "engine", "model"]
)
def test_a_closed_lab_says_so(ask):
    lab = cglab.open("pico-gqa", device="cpu", max_batch=1)
    lab.close()
    with pytest.raises(ClosedError, match="open it again"):
        value = getattr(lab, ask)
        value()
    assert not hasattr(lab, "nothing_of_this_name")
