"""A process of SGLang that computes steps when asked: its boundary, its turns, and how it fails."""

import pytest

from cglab.errors import ServerError
from cglab.serving.token_worker import TokenWorker
from tests.serving.processes import gone

PROMPTS = [[1, 2, 3], [5, 5, 5]]


@pytest.fixture(scope="module")
def worker(installed):
    with TokenWorker(installed, ["--batch-size", "2"]) as running:
        yield running


def test_steps_follow_each_other_and_each_tells_its_seconds_and_tokens(worker):
    first = worker.ask("begin", prompts=PROMPTS)
    assert first["tokens"] == [6, 15] and first["seconds"] > 0
    second = worker.ask("step", tokens=first["tokens"])
    assert second["tokens"] == [12, 30]
    assert worker.ask("step", tokens=second["tokens"])["tokens"] == [24, 60]


def test_a_batch_is_forgotten_when_the_next_begins(worker):
    for _ in range(2):
        assert worker.ask("begin", prompts=PROMPTS)["tokens"] == [6, 15]


def test_a_launch_runs_the_forward_alone_and_leaves_it_as_it_was(worker):
    worker.ask("begin", prompts=PROMPTS)
    assert worker.ask("launch", calls=3)["seconds"] > 0
    assert worker.ask("begin", prompts=PROMPTS)["tokens"] == [6, 15]
    assert worker.ask("step", tokens=[6, 15])["tokens"] == [12, 30]


def test_it_says_what_it_is_and_its_log_what_it_captured(worker):
    assert worker.facts["attention"] == "SimpleNamespace" and worker.facts["tokens"] == 64
    (graph,) = worker.captured
    assert (graph.phase, graph.backend, graph.seconds, graph.memory_gb) == ("decode", "full", 1.5, 0.25)
    assert worker.ready_s > 0


def test_one_that_never_starts_tells_why(installed):
    with pytest.raises(ServerError, match="ended") as caught:
        TokenWorker(installed, ["--never"])
    assert caught.value.fault == "out of memory"
    assert any("never starts" in line for line in caught.value.log_lines)


def test_one_that_dies_within_a_step_is_told_and_leaves_no_process(installed):
    with TokenWorker(installed, ["--die"]) as dying:
        dying.ask("begin", prompts=PROMPTS)
        with pytest.raises(ServerError, match="ended instead of answering.*7"):
            dying.ask("step", tokens=[6, 15])
        pid = dying._process.pid
    assert gone(pid)
