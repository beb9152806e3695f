"""Side streams, followed without a device: stand-ins note who waits for whom. On a GPU tests/graphs/test_cuda.py."""

import pytest
import torch

from cglab.graphs import streams
from cglab.graphs.cuda import CudaTake
from cglab.graphs.streams import StreamWatch


class StandIn:
    """A stream by its number; an event is the stream that recorded it."""

    def __init__(self, number):
        self.cuda_stream, self.waits = number, []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waits.append(event)


@pytest.fixture
def main():
    return StandIn(0)


@pytest.fixture
def side():
    return StandIn(1)


@pytest.fixture
def part_of_the_capture(monkeypatch):
    """Streams that a capture has reached; filled by a test."""
    reached = []
    monkeypatch.setattr(streams, "_is_capturing", reached.__contains__)
    return reached


def test_b08_what_a_break_leaves_on_a_side_stream_is_waited_for_at_every_replay(main, side, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    for _ in range(2):
        with CudaTake.guard():
            streams._active.watch.entered(side)
            assert main.waits == []
        assert main.waits == [side]
        main.waits.clear()


def test_b08_an_error_in_a_break_is_told_and_ends_the_watch(main, side, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    with pytest.raises(ValueError, match="in the break"), CudaTake.guard():
        raise ValueError("in the break")
    assert streams._active.watch is None


def test_b09_p48_a_stream_that_was_forked_is_joined_once_before_its_segment_ends(
    main, side, part_of_the_capture
):
    watch = StreamWatch(main)
    watch.recording = True
    part_of_the_capture.append(side)
    assert not watch.absorbs(side, main), "the fork itself is made"
    watch.join()
    watch.join()
    assert main.waits == [side]
    (place,) = watch.joined
    assert place.file == __file__


def test_p48_a_stream_that_the_user_joined_is_not_joined_again(main, side, part_of_the_capture):
    watch = StreamWatch(main)
    watch.recording = True
    part_of_the_capture.append(side)
    watch.absorbs(side, main)
    assert not watch.absorbs(main, side), "the user's own join is made"
    watch.join()
    assert main.waits == [] and watch.joined == []


def test_p49_a_wait_for_a_side_stream_that_was_joined_is_skipped(main, side, part_of_the_capture):
    watch = StreamWatch(main)
    watch.recording = True
    part_of_the_capture.append(side)
    watch.absorbs(side, main)
    watch.join()
    part_of_the_capture.clear()  # its segment has ended, and the next one never forked it
    assert watch.absorbs(main, side)
    part_of_the_capture.append(side)
    assert not watch.absorbs(main, side), "forked again, it is waited for again"


def test_b09_a_stream_that_nobody_forked_is_noted_with_its_line(main, side):
    watch = StreamWatch(main)
    watch.recording = True
    watch.entered(side)
    assert watch.foreign.file == __file__ and "watch.entered(side)" in watch.foreign.code
