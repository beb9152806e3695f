"""An arm is all that its server is started with, checked against the version before anything starts."""

import pytest

from cglab.errors import InputError, ModelError, ToggleError
from cglab.serving.arm import SHIM, START, ServerArm, command, model_path, takes_key


def flags(argv):
    """Flags and the values that follow them."""
    return {
        each: None if following.startswith("--") else following
        for each, following in zip(argv, [*argv[1:], "--"], strict=True)
        if each.startswith("--")
    }


def test_the_command_is_the_arms_and_nothing_else(root, installed):
    arm = ServerArm(
        "full", "pico-gqa", {"decode": "full"}, ("--tp-size", "2"), {"SGLANG_FAKE": "x", "MINE": "y"}
    )
    inherited = {
        "PATH": "/bin", "SGLANG_FAKE": "inherited", "CGLAB_DEVICE": "cpu", "PYTHONPATH": "/site",
        "PYTHONHASHSEED": "1", "TRITON_INTERPRET": "1",
    }  # fmt: skip
    found = command(arm, installed, 1234, inherited)
    assert found.argv[:3] == (str(installed.python), str(START), "--model-path")
    assert flags(found.argv) == {
        "--model-path": str(root / "data" / "models" / "pico-gqa"), "--host": "127.0.0.1", "--port": "1234",
        "--enable-metrics": None, "--cuda-graph-backend-decode": "full", "--tp-size": "2",
    }  # fmt: skip
    assert found.environment == {
        "PATH": "/bin", "PYTHONPATH": "/site", "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1", "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost", "HF_HUB_OFFLINE": "1", "SGLANG_FAKE": "x", "MINE": "y",
    }  # fmt: skip


def test_arms_that_differ_in_a_toggle_differ_in_its_flag_alone(installed):
    commands = [
        command(ServerArm(value, "pico-gqa", {"prefill": value}), installed, 1, {}).argv
        for value in ("full", "eager")
    ]
    assert [pair for pair in zip(*commands, strict=True) if pair[0] != pair[1]] == [("full", "disabled")]


def test_a_server_on_a_cpu_gets_what_it_needs_and_the_shim_on_its_path_alone(installed):
    found = command(ServerArm("a", "pico-gqa", device="cpu"), installed, 1, {"PYTHONPATH": "/site"})
    given = flags(found.argv)
    assert given["--device"] == "cpu" and given["--cuda-graph-backend-decode"] == "disabled"
    assert given["--attention-backend"] == "torch_native" and "--disable-overlap-schedule" in given
    assert found.environment["PYTHONPATH"] == f"{SHIM}:/site"
    assert (SHIM / "vllm" / "_custom_ops.py").is_file()
    assert "PYTHONPATH" not in command(ServerArm("a", "pico-gqa"), installed, 1, {}).environment
    alone = command(ServerArm("a", "pico-gqa", device="cpu"), installed, 1, {})
    assert alone.environment["PYTHONPATH"] == str(SHIM)


def test_a_cpu_servers_sizes_give_way_to_the_arms_own(installed):
    arm = ServerArm("a", "pico-gqa", {"decode": "eager"}, ("--max-total-tokens=512",), device="cpu")
    argv = command(arm, installed, 1, {}).argv
    assert [each for each in argv if "max-total-tokens" in each] == ["--max-total-tokens=512"]
    assert argv.count("--cuda-graph-backend-decode") == 1


def test_what_a_cluster_needs_is_passed_through(installed):
    several = (
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--dist-init-addr",
        "10.0.0.1:5000",
        "--tensor-parallel-size",
        "16",
    )
    assert command(ServerArm("a", "pico-gqa", arguments=several), installed, 1, {}).argv[-8:] == several


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arguments": ("--cuda-graph-backend-decoed", "full")}, "did you mean --cuda-graph-backend-decode"),
        ({"arguments": ("--nothing-like-it",)}, r"no argument --nothing-like-it; `.*--help` lists them"),
        (
            {"arguments": ("--dtype", "int3")},
            r"--dtype of SGLang 0\.5\.23 cannot be 'int3'; good values: auto",
        ),
        ({"arguments": ("--dtype=int3",)}, "cannot be 'int3'"),
        ({"arguments": ("--dtype",)}, "cannot be None"),
        ({"arguments": ("--nnodes", "1", "--nnodes=2")}, "given twice"),
        ({"arguments": ("--port", "1")}, "--port of arm a is given by the lab itself"),
        ({"arguments": ("--api-key", "x")}, "--api-key of arm a would stand in its command line and its"),
        (
            {"arguments": ("--admin-api-key=x",)},
            "leave it out: the server listens on 127.0.0.1 alone, with a key",
        ),
        (
            {"arguments": ("--config", "x.yaml")},
            "--config of arm a names a file whose arguments no check and no",
        ),
        ({"arguments": ("--config=x.yaml",)}, "give them as words"),
        ({"arguments": ("--model", "x")}, "--model of arm a is given by the lab itself"),
        (
            {"arguments": ("--cuda-graph-backend-decode", "full"), "toggles": {"decode": "eager"}},
            "--cuda-graph-backend-decode of arm a is given by the lab itself",
        ),
        ({"environment": {"SGLANG_FAK": "1"}}, r"no variable SGLANG_FAK; did you mean SGLANG_FAKE\?"),
        ({"toggles": {"draft_sampler": "eager"}}, "not available in 0.5.23"),
    ],
)
def test_what_the_version_does_not_have_is_refused_by_name(installed, options, said):
    with pytest.raises(InputError, match=said):
        command(ServerArm("a", "pico-gqa", **options), installed, 1, {})


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"name": "a/b"}, InputError, "names no arm"),
        ({"name": ""}, InputError, "names no arm"),
        ({"device": "tpu"}, InputError, "good values: cuda, cpu or None"),
        ({"device": "cpu", "toggles": {"decode": "full"}}, ToggleError, "no CUDA graphs"),
        ({"device": "cpu", "toggles": {"verify": "full"}}, ToggleError, "leave verify out"),
        ({"device": "cpu", "toggles": {"prefill": "breakable"}}, ToggleError, "leave prefill out"),
        ({"arguments": "--tp-size 2"}, InputError, "give a tuple of words"),
        ({"arguments": ("--tp-size", 2)}, InputError, "give a tuple of words"),
        ({"environment": {"SIZE": 2}}, InputError, "SIZE=2 in the environment"),
        ({"environment": {"SIZE": "2\0"}}, InputError, "is no variable with a text"),
        ({"environment": {"A=B": "2"}}, InputError, "is no variable with a text"),
    ],
)
def test_an_arm_that_makes_no_sense_is_not_made(options, kind, said):
    with pytest.raises(kind, match=said):
        ServerArm(**{"name": "a", "model": "pico-gqa", **options})


def test_an_arm_cannot_be_changed_through_what_it_was_made_of():
    toggles, arguments = {"decode": "full"}, ["--nnodes", "1"]
    arm = ServerArm("a", "pico-gqa", toggles, arguments)
    toggles["decode"] = "eager"
    arguments.clear()
    assert arm.toggles["decode"] == "full" and arm.arguments == ("--nnodes", "1")
    with pytest.raises(TypeError):
        arm.toggles["decode"] = "eager"
    assert arm == ServerArm("a", "pico-gqa", {"decode": "full"}, ("--nnodes", "1"))


def test_a_model_is_a_folder_or_a_hub_id(tmp_path, root, monkeypatch, installed):
    assert model_path("pico-gqa") == str(root / "data" / "models" / "pico-gqa")
    assert model_path("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert "HF_HUB_OFFLINE" not in command(ServerArm("a", "Qwen/Qwen3-8B"), installed, 1, {}).environment
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no config\.json"):
        model_path("mine")
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert model_path("mine") == str(tmp_path / "mine")
    with pytest.raises(ModelError, match=r"no model '/no/such': .*pico-gqa"):
        model_path("/no/such")
    with pytest.raises(ModelError, match="no model ''"):
        model_path("")


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ((), True), (("--tokenizer-worker-num", "1"), True), (("--tokenizer-worker-num=1",), True),
        (("--tokenizer-worker-num", "2"), False), (("--tokenizer-worker-num=2", "--tp-size", "1"), False),
        (("--grpc-port", "4000"), False), (("--smg-grpc-mode",), False), (("--nnodes", "2"), True),
    ],
)  # fmt: skip
def test_a_server_has_a_key_unless_sglang_refuses_one(arguments, taken):
    assert takes_key(ServerArm("a", "pico-gqa", arguments=arguments)) is taken
