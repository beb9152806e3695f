"""Greedy tokens and input logprobs of two servers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.errors import InputError, ServerError
from cglab.measure.parity import Verdict
from cglab.serving.diagnosis import Fault
from cglab.serving.parity import LOGPROB_REQUESTS, Replies, ask, ask_all, compare, parity_bodies
from tests.serving.stand_in import StandIn, generate

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


def server(arm=0, **answers):
    return StandIn({"/generate": generate(arm), "/flush_cache": "flushed", **answers})


def test_equal_servers_are_bitwise_and_were_asked_one_by_one_from_an_empty_cache():
    servers = server(), server()
    replies = [ask(each, PROMPTS, 8, logprobs=True) for each in servers]
    found = compare(*replies)
    assert found.bitwise and found.tokens.verdict is Verdict.BITWISE
    assert (found.equal_outputs, found.outputs, found.logprobs_compared) == (2, 2, 5)
    assert found.largest_difference == 0.0 and found.first_difference is None
    paths = [path for path, _ in servers[0].posted]
    assert paths == ["/flush_cache", "/generate", "/generate"]
    assert [body["input_ids"] for _, body in servers[0].posted[1:]] == PROMPTS
    assert "5 of 5 input logprobs bitwise equal" in str(found)


@given(st.integers(0, 1), st.integers(0, 7), st.integers(2, 8))
def test_the_first_difference_is_told(row, step, count):
    step = min(step, count - 1)
    tokens = [tuple(range(count)), tuple(range(count))]
    other = [list(each) for each in tokens]
    other[row][step] += 1
    prompts = ((1,), (2,))
    found = compare(Replies(prompts, tuple(map(tuple, other))), Replies(prompts, tuple(tokens)))
    assert (found.tokens.row, found.tokens.step) == (row, step) and not found.bitwise
    assert (found.equal_outputs, found.outputs) == (1, 2)


def test_one_bit_of_a_logprob_is_a_difference():
    tokens, prompts = ((1,),), ((5, 6, 7),)
    ours, theirs = ((-1.5, -2.0),), ((-1.5, -2.0000000000000004),)
    found = compare(Replies(prompts, tokens, ours), Replies(prompts, tokens, theirs))
    assert found.first_difference == (0, 2) and found.logprobs_equal == 1 and not found.bitwise
    assert 0 < found.largest_difference < 1e-15
    assert "first at request 0, token 2" in str(found)


def test_another_model_is_corrupted_and_goes_into_a_record():
    found = compare(ask(server(1), PROMPTS, 4), ask(server(), PROMPTS, 4))
    assert found.tokens.verdict is Verdict.CORRUPTED
    plain = found.as_dict()
    assert plain["verdict"] == "corrupted" and plain["equal_outputs"] == 0 and plain["bitwise"] is False
    assert plain["logprobs_compared"] == 0 and plain["largest_difference"] is None


def test_s3_asks_13():
    bodies = parity_bodies(500)
    assert len(bodies) == LOGPROB_REQUESTS == 13 and bodies == parity_bodies(500)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(InputError, match="different prompts"):
        compare(Replies(((1,),), ((1,),)), Replies(((2,),), ((1,),)))
    with pytest.raises(InputError, match="at least one of each"):
        ask(server(), [], 4)
    with pytest.raises(ServerError, match="refused /flush_cache"):
        ask(server(**{"/flush_cache": 400}), PROMPTS, 4)
    with pytest.raises(ServerError, match="it gave 1"):
        ask(server(**{"/generate": {"output_ids": [1]}}), PROMPTS, 4)
    with pytest.raises(ServerError, match="without output_ids"):
        ask(server(**{"/generate": {"text": "hi"}}), PROMPTS, 4)
    without = StandIn({"/generate": generate(logprobs=False), "/flush_cache": "ok"})
    with pytest.raises(ServerError, match="0 input logprobs of a prompt of 3 tokens"):
        ask(without, PROMPTS, 4, logprobs=True)


def test_a_logprob_that_is_no_number_is_a_difference_and_goes_into_a_record():
    def corrupt(body):
        reply = generate()(body)
        reply["meta_info"]["input_token_logprobs"][2][0] = None  # as JSON has a NaN
        return reply

    found = compare(
        ask(server(**{"/generate": corrupt}), PROMPTS, 4, logprobs=True),
        ask(server(), PROMPTS, 4, logprobs=True),
    )
    assert found.first_difference == (0, 2) and found.logprobs_equal == 3 and not found.bitwise
    assert found.largest_difference == 0.0
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_server_that_refuses_logprobs_is_compared_by_tokens_and_says_why():
    """As DFLASH of 0.5.16 does."""
    words = 'the server refused POST /generate: {"message":"DFLASH does not support return_logprob yet."}'

    def refuses(body):
        if not body.get("return_logprob"):
            return generate()(body)
        return ServerError(
            f"{words} Most likely: refused; correct the request. The log is /a/b.log", fault=Fault.REFUSED
        )

    found = ask_all(server(**{"/generate": refuses}), PROMPTS, 4)
    told = compare(found, ask_all(server(), PROMPTS, 4))
    assert told.bitwise and told.logprobs_compared == 0 and told.refused == words
    assert f"no logprobs were compared: {words}" in str(told) and told.as_dict()["refused"] == words
    assert not compare(ask_all(server(), PROMPTS, 4), ask_all(server(), PROMPTS, 4)).refused
    with pytest.raises(ServerError, match="refused /generate with status 400"):
        ask_all(server(**{"/generate": 400}), PROMPTS, 4)
