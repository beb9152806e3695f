"""What is sent: exact counts, one spelling, one hash."""

import json
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cglab.engine.load import Load
from cglab.errors import InputError
from cglab.serving.workload import (
    Workload,
    payload_hash,
    point,
    requests_at,
    require_equal_payloads,
    steady_decode,
    write_data_file,
)


def test_as_many_requests_as_s3_sends():
    assert [requests_at(lanes) for lanes in (1, 4, 16)] == [16, 32, 128]
    assert point(512, 64, 4, vocabulary=100).load.count == 32
    control = steady_decode(1, vocabulary=100).load
    assert (control.prompt_tokens, control.new_tokens, control.count) == (1000, 512, 16)


@given(
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(0, 30),
    st.integers(2, 300),
    st.integers(0, 5),
)
def test_token_counts_are_exact_and_the_hash_is_of_the_bytes_written(
    tmp_path_factory, fresh, out, lanes, cached, vocabulary, seed
):
    asked = point(fresh, out, lanes, cached=cached, vocabulary=vocabulary, count=5, seed=seed)
    bodies = asked.bodies()
    assert all(len(body["input_ids"]) == cached + fresh for body in bodies)
    assert all(0 <= token < vocabulary for body in bodies for token in body["input_ids"])
    assert {body["sampling_params"]["max_new_tokens"] for body in bodies} == {out}
    if cached:
        assert {tuple(body["input_ids"][:cached]) for body in bodies} == {
            tuple(asked.prefix_body()["input_ids"])
        }
    file = tmp_path_factory.mktemp("data") / "requests.jsonl"
    written = write_data_file(file, asked)
    assert written == asked.payload == sha256(file.read_bytes()).hexdigest()
    assert [json.loads(line) for line in file.read_text().splitlines()] == bodies


def test_warm_up_is_as_long_and_of_other_tokens():
    asked = point(64, 4, 2, vocabulary=4096)
    warm = asked.warm_bodies()
    assert [len(body["input_ids"]) for body in warm] == [64, 64]
    heads = {tuple(body["input_ids"][:16]) for body in asked.bodies()}
    assert not heads & {tuple(body["input_ids"][:16]) for body in warm}
    assert Workload("none", asked.load, 4096, warmups=0).warm_bodies() == []


def test_one_token_more_is_another_payload():
    bodies = point(8, 4, 1, vocabulary=50).bodies()
    longer = [*bodies[:-1], {**bodies[-1], "input_ids": [*bodies[-1]["input_ids"], 1]}]
    assert payload_hash(bodies) != payload_hash(longer) != payload_hash(longer[::-1])


def test_arms_that_were_sent_other_requests_are_refused():
    assert require_equal_payloads({"off": "a" * 64, "on": "a" * 64}) == "a" * 64
    with pytest.raises(InputError, match="'on' was sent other requests than 'off'"):
        require_equal_payloads({"off": "a" * 64, "on": "b" * 64})


def test_a_load_that_samples_and_bad_numbers_are_refused():
    with pytest.raises(InputError, match="greedy"):
        Workload("hot", Load(1, 1, 1, 1, temperature=0.5), 10)
    for fields in ({"vocabulary": 0}, {"lane_offset": -1}, {"warmups": -1}):
        with pytest.raises(InputError, match="need at least"):
            Workload("bad", Load(1, 1, 1, 1), **{"vocabulary": 10, **fields})
