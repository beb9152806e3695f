"""What coverage counts beside hits and misses."""

from cglab.graphs.coverage import Coverage, Miss, Reason


def test_live_sizes_are_counted_whether_or_not_a_step_was_captured():
    counts = Coverage()
    counts.hit("4", 4, 3)
    counts.hit("4", 4, 4)
    before = counts.copy()
    counts.hit("8", 8, 5)
    counts.miss(Miss(Reason.ABOVE_LARGEST), 3)
    counts.miss(Miss(Reason.EMPTY_BATCH), 0)
    assert counts.live_sizes == {3: 2, 4: 1, 5: 1, 0: 1}
    assert (counts - before).live_sizes == {5: 1, 3: 1, 0: 1}
    assert sum(counts.live_sizes.values()) == counts.steps
    counts.clear()
    assert not counts.live_sizes and not counts.steps


def test_the_share_of_padding_is_over_all_replays_of_a_bucket():
    counts = Coverage()
    for live in (1, 2, 3):
        counts.hit("4", 4, live)
    counts.hit("8", 8, 8)
    assert counts.padding == {"4": 0.5, "8": 0.0}


def test_what_is_cleared_is_as_new():
    counts = Coverage()
    counts.hit("4", 4, 1)
    counts.miss(Miss(Reason.CAPTURE_FAILED, "why"), 2)
    counts.clear()
    assert counts == Coverage()
