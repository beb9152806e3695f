"""Scores through the installed harness, with what an arm differs from itself beside them."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cglab.errors import InputError, ServerError
from cglab.serving import evaluate as module
from cglab.serving.arm import ServerArm
from cglab.serving.evaluate import Score, evaluate
from tests.serving.stand_in import StandIn


@pytest.fixture
def questions(tmp_path):
    def write(names):
        file = tmp_path / "questions.jsonl"
        file.write_text(
            "".join(json.dumps({"question": str(name), "answer": "#### 1"}) + "\n" for name in names)
        )
        return file

    return write


@pytest.fixture
def score(fake_python, tmp_path):
    def run(data, count=6, shots=2, *, started=None, key=None, **settings):
        @contextmanager
        def start(arm, **_):
            if started is not None:
                started.append(arm.name)
            info = {"version": "0.5.23", "internal_states": [{"avg_spec_accept_length": 3.0}]}
            answers = {"/server_info": {**info, "speculative_algorithm": "EAGLE"}, "/metrics": ""}
            server = StandIn(answers, python=fake_python)
            server.key = key
            yield server

        arm = ServerArm("arm", "pico-gqa", python=fake_python)
        return evaluate(
            arm, "gsm8k", count, shots, data=data, folder=tmp_path / "out", start=start, **settings
        )

    return run


def test_both_orders_on_two_servers_with_the_same_examples(score, questions, tmp_path):
    started = []
    found = score(questions(range(10)), started=started)
    assert started == ["arm", "arm"] and len(found.runs) == 4
    asked = [json.loads(line) for line in (tmp_path / "out" / "asked.jsonl").read_text().splitlines()]
    first, forward, backward = asked[:3]
    assert first == ["0"]  # so that every run finds the examples in the cache
    assert forward == list("012345") and backward == list("015432") and asked[3:] == asked[:3]
    assert found.score == 0.5 and found.spread == 0.0 and found.invalid == 0.25
    assert found.accept_length == 3.0 and "accept length 3.000" in str(found)
    assert found.as_dict()["score"] == 0.5


@pytest.mark.parametrize("key", ["of this server", None])
def test_the_harness_asks_with_the_servers_key(score, questions, tmp_path, key):
    score(questions(range(10)), key=key)
    assert (tmp_path / "out" / "key").read_text() == str(key)


def test_what_lies_within_the_range_is_no_difference():
    one = Score("one", "gsm8k", 100, (0.94, 0.95, 0.943, 0.946), 0.0, None)
    other = replace(one, arm="other", runs=(0.94, 0.936, 0.945, 0.939))
    assert not one.differs_from(other) and not other.differs_from(one)
    assert one.differs_from(replace(other, runs=(0.90, 0.901, 0.902, 0.899)))
    assert one.spread == pytest.approx(0.01)


def test_what_cannot_be_scored_is_refused(score, questions, monkeypatch, fake_python, tmp_path):
    data = questions(range(5))
    for settings, told in (
        ({"count": 6}, "has 5 lines"),
        ({"count": 2, "shots": 2}, "the first 2 of them"),
        ({"count": 4, "instances": 1}, "needs 2 servers"),
    ):
        with pytest.raises(InputError, match=told):
            score(data, **settings)
    with pytest.raises(InputError, match="'mmlu' is no task; good names: gsm8k"):
        evaluate(ServerArm("a", "pico-gqa"), "mmlu", 4, 1, data=data, folder=tmp_path)
    (tmp_path / "odd.jsonl").write_text("[1]\n")
    with pytest.raises(InputError, match="cannot be read|has 1 lines"):
        score(tmp_path / "odd.jsonl", 1, 0)
    monkeypatch.setattr(module, "TASKS", {"gsm8k": "sglang.test.gone"})
    with pytest.raises(InputError, match=r"not available in SGLang 0\.5\.23"):
        score(data, 4)


def test_a_harness_that_fails_says_its_last_lines(score, questions):
    with pytest.raises(ServerError, match=r"ended with status 1(.|\n)*does not like this"):
        score(questions([2, 4, 6, "boom"]), 4, 0)


def test_scores_of_other_questions_are_not_compared():
    one = Score("one", "gsm8k", 100, (0.94, 0.95), 0.0, None)
    with pytest.raises(InputError, match="ask both the same"):
        one.differs_from(replace(one, arm="other", questions=50))


def test_questions_are_not_written_over(score, questions, tmp_path):
    (tmp_path / "out").mkdir()
    data = questions(range(10)).rename(tmp_path / "out" / "forward.jsonl")
    before = data.read_text()
    with pytest.raises(InputError, match="would be written over"):
        score(data)
    assert data.read_text() == before
