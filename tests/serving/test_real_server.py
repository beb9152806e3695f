"""A real SGLang server on the CPU, and what its version says of itself; started once for all of this file."""

import httpx
import pytest
import torch

import cglab
from cglab.errors import InputError
from cglab.serving import arm as arms
from cglab.serving import toggles
from cglab.serving.arm import ServerArm
from cglab.serving.installed import ask, find_python
from cglab.serving.scrape import scrape
from cglab.serving.server import launch
from cglab.serving.toggles import KNOWN, Missing, rows, switch
from tests.serving.processes import wait_for

pytestmark = pytest.mark.sglang

# How the source documents call their own switches; no version has them.
OWN = (
    "SGLANG_FROZEN_KV_MTP_DISABLE_SEED_CG",
    "SGLANG_ENABLE_DSA_PREFILL_ATTN_IN_CUDA_GRAPH",
    "SGLANG_ENABLE_DSA_PREFILL_INDEXER_PREP_IN_CUDA_GRAPH",
    "SGLANG_ENABLE_NEXTN_DRAFT_PREFILL_CUDA_GRAPH",
)


@pytest.fixture(scope="module")
def version():
    return ask(find_python())


@pytest.mark.parametrize("toggle", toggles.TECHNIQUES)
def test_each_row_of_the_table_is_what_the_installed_version_has(version, toggle):
    assert version.version in KNOWN, f"add a column for {version.version} to cglab/serving/toggles.py"
    known = KNOWN[version.version][toggle]
    assert switch(toggle, version) == known
    assert rows(version)[toggles.TECHNIQUES[toggle]][version.version] == known.as_dict()
    if isinstance(known, Missing):
        assert not version.variables.intersection(OWN)


def test_the_installed_version_knows_all_that_a_cpu_server_is_given(version):
    for flag, value in arms._CPU:
        argument = version.argument(flag)
        assert argument.takes_value == (value is not None)
        assert argument.choices is None or value in argument.choices
    assert {"--host", "--port", "--model-path", "--device", "--enable-metrics"} <= set(version.arguments)
    assert {"sglang.launch_server", "sglang.bench_serving"} <= version.modules


def test_an_unknown_flag_is_said_before_the_real_one_starts(version, tmp_path):
    arm = ServerArm("a", "pico-gqa", arguments=("--cuda-graph-backend-decod", "full"))
    with pytest.raises(
        InputError, match=f"SGLang {version.version} has no .* did you mean --cuda-graph-backend-decode"
    ):
        launch(arm, log_folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_real_server_is_the_installed_version_on_loopback_with_what_the_arm_says(real_server, version):
    facts = real_server.get("/server_info").json()
    asked = {
        path: httpx.get(real_server.url + path, trust_env=False).status_code
        for path in ("/server_info", "/generate", "/health")
    }
    assert asked == {"/server_info": 401, "/generate": 401, "/health": 200}, "without its key"
    assert real_server.key not in real_server.log.read_text(errors="replace")
    assert real_server.key not in str(scrape(real_server))
    assert facts["version"] == version.version == real_server.installed.version
    assert (facts["host"], facts["port"]) == ("127.0.0.1", real_server.port)
    assert (facts["device"], facts["dtype"], facts["max_total_tokens"]) == ("cpu", "float32", 8192)
    assert "sglang:max_total_num_tokens{" in real_server.get("/metrics").text
    # It says so after its first healthy answer, and much more once other tests have asked it.
    wait_for(lambda: "ready to roll" in real_server.log.read_text(errors="replace"), seconds=30)


def test_greedy_tokens_of_a_real_server_are_the_labs_own_on_ten_prompts(real_server):
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, 4096, (4 + 3 * row,), generator=generator).tolist() for row in range(10)]
    greedy = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    answers = real_server.post("/generate", {"input_ids": prompts, "sampling_params": greedy}).json()
    lab = cglab.open("pico-gqa", device="cpu", dtype=torch.float32)
    try:
        own = lab.generate(prompts, 24, stop_at_end=False).tokens
    finally:
        lab.close()
    assert [answer["output_ids"] for answer in answers] == own
    assert len({tuple(tokens) for tokens in own}) == 10
