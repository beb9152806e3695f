"""How soon the workspace answers, and that it stays as large as it was.

Times are recorded in ``artifacts/workspace-times.json``. What is asserted of them is five times what is promised: that
holds on a machine that has other things to do.
"""

import gc
import json
import time
from statistics import median

import pytest
import torch
from ipywidgets.widgets.widget import _instances

import cglab

TOGGLE_SECONDS, COMPARE_SECONDS, LENIENT = 0.2, 10.0, 5


def browser_sets(widget, **state):
    widget._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})


@pytest.fixture(scope="module")
def board():
    with cglab.open("pico-gqa", device="cpu", max_batch=4, max_context=128) as lab:
        made = lab.dashboard()
        assert made.wait(60)
        yield made
        made.close()


def seconds(work):
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@pytest.mark.slow
def test_a_toggle_and_a_compare_answer_in_time(board, root):
    space = board.workspace
    toggles = []
    for turn in range(20):
        mode = turn % 3
        toggles.append(seconds(lambda mode=mode: browser_sets(board.toggles.modes["decode"], index=mode)))
        assert space.requested["decode"] == board.toggles.modes["decode"].options[mode]  # the state is shown
    assert space.wait(60)
    compares = []
    for _ in range(3):
        compares.append(seconds(lambda: (board.run(), space.wait(300))))
        assert space.errors == {}
    told = {"toggle_s": median(toggles), "compare_s": median(compares), "lenient": LENIENT}
    (root / "artifacts").mkdir(exist_ok=True)
    (root / "artifacts" / "workspace-times.json").write_text(json.dumps(told) + "\n")
    assert told["toggle_s"] < LENIENT * TOGGLE_SECONDS and told["compare_s"] < LENIENT * COMPARE_SECONDS


def held(lab):
    gc.collect()
    tensors = sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
    return tensors, lab.memory()["pool_bytes"], len(_instances)


def test_fifty_toggles_in_a_row_leave_memory_level(board):
    lab, radio = next(iter(board.workspace.sources.values()))().lab, board.toggles.modes["decode"]

    def toggle(times):
        for turn in range(times):
            browser_sets(radio, index=turn % 3)
            board.wait(60)

    toggle(6)  # every mode is captured once: the one that it starts with when it is chosen again
    before = held(lab)
    toggle(50)
    assert held(lab) == before
