"""Arms are equal in all but what is compared, or there is no comparison."""

import pytest

from cglab.errors import InputError
from cglab.serving.arm import ServerArm
from cglab.serving.fairness import flags, overruled, require_equal_arms, require_equal_servers, seeded


def arm(name, *arguments, **fields):
    return ServerArm(name, fields.pop("model", "pico-gqa"), arguments=arguments, **fields)


def test_toggles_may_differ_and_nothing_else():
    eager, graph = (
        arm(name, "--dtype", "float32", toggles={"prefill": value})
        for name, value in (("off", "eager"), ("on", "breakable"))
    )
    require_equal_arms([eager, graph])
    for other, told in (
        (arm("on", "--dtype", "bfloat16"), r"--dtype: \('float32',\) and \('bfloat16',\)"),
        (arm("on", "--dtype", "float32", model="other/model"), "model: 'pico-gqa' and 'other/model'"),
        (arm("on", "--dtype", "float32", "--tp-size", "2"), r"--tp-size: None and \('2',\)"),
        (arm("on", "--dtype", "float32", environment={"SGLANG_X": "1"}), "SGLANG_X: None and '1'"),
        (arm("on", "--dtype=float32", device="cpu"), "device: None and 'cpu'"),
    ):
        with pytest.raises(InputError, match=told):
            require_equal_arms([eager, other])


def test_a_forks_own_switch_is_declared():
    off, on = arm("off", environment={"SGLANG_MINE": "1"}), arm("on")
    with pytest.raises(InputError, match="declare the difference"):
        require_equal_arms([off, on])
    require_equal_arms([off, on], declared=["SGLANG_MINE"])


def test_two_arms_of_different_names_are_needed():
    for arms in ([arm("a")], [arm("a"), arm("a")]):
        with pytest.raises(InputError, match="two arms or more"):
            require_equal_arms(arms)


def test_a_flag_is_read_in_both_spellings():
    words = ("--bs", "1", "2", "--dtype=half", "--enable-metrics")
    assert flags(words) == {"--bs": ("1", "2"), "--dtype": ("half",), "--enable-metrics": ()}


def test_the_seed_is_fixed_unless_it_is_given():
    assert seeded(arm("a", "--dtype", "half"))[-2:] == ("--random-seed", "0")
    assert seeded(arm("a", "--random-seed", "7")) == ("--random-seed", "7")


def test_what_the_servers_made_of_it_must_be_equal_too(installed):
    off = arm("off", toggles={"decode": "eager"})
    on = arm("on", toggles={"decode": "full"})
    common = {"dtype": "bfloat16", "max_total_tokens": 8192}
    eager = {**common, "port": 1, "cuda_graph_config": {"decode": "disabled"}, "disable_cuda_graph": True}
    graph = {**common, "port": 2, "cuda_graph_config": {"decode": "full"}, "disable_cuda_graph": False}
    require_equal_servers((off, eager), (on, graph), installed)
    with pytest.raises(InputError, match="max_total_tokens: 8192 and 7000"):
        require_equal_servers((off, eager), (on, {**graph, "max_total_tokens": 7000}), installed)
    # Equal arms have no toggle that would explain a difference of graphs.
    with pytest.raises(InputError, match="cuda_graph_config"):
        require_equal_servers((off, eager), (off, graph), installed)


def test_a_toggle_that_a_server_took_back_is_told(installed):
    arm = ServerArm("on", "pico-gqa", {"decode": "full", "prefill": "breakable"})
    made = {"cuda_graph_config": {"decode": {"backend": "full"}, "prefill": {"backend": "disabled"}}}
    assert overruled(arm, made, installed) == {"--cuda-graph-backend-prefill": "disabled"}
    assert overruled(arm, {}, installed) == {}  # not told
    assert overruled(ServerArm("none", "pico-gqa"), made, installed) == {}
