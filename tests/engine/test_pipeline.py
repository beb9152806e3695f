"""A decoder over two and three processes: tokens of one process, and no rank that waits for a lost one (B79)."""

import json
import multiprocessing
import re
import time
from dataclasses import dataclass

import pytest
import torch

import cglab
from cglab.engine.batches import SchedulerOptions
from cglab.engine.cache import paged_kv
from cglab.engine.links import Joint, StageLinks
from cglab.engine.memory import CacheLayout
from cglab.engine.pipeline import Pipeline
from cglab.errors import InputError
from cglab.graphs.options import Options
from cglab.models.loading import load_model
from cglab.runners.base import GraphGroup
from cglab.runners.pipeline_stage import PipelineStageRunner

from .pipeline_rank import BUCKETS, BUDGET, CONTEXT, even, mixed, run

pytestmark = pytest.mark.end_to_end

CPU = torch.device("cpu")
START = 120  # seconds that processes may take to load on a busy machine; deadlines count from after that

TAKEN = {
    "pico-gqa": {"hidden_states": [[256], "torch.float32"]},
    "pico-dsa": {"hidden_states": [[128], "torch.float32"], "topk_indices": [[64], "torch.int32"]},
}
"""What the second stage takes by model, a token: whichever the cut, that of pico-dsa begins with a layer that shares."""


FORKS = multiprocessing.get_context("forkserver")
"""Ranks are processes forked from one that has loaded all modules and nothing else."""
FORKS.set_forkserver_preload(["torch._dynamo", "cglab.lab.sparse_prefill"])


@dataclass
class Ended:
    """What a rank told and said beside it, its exit status, and after how many seconds all had ended."""

    told: dict
    said: str
    status: int
    seconds: float


@pytest.fixture
def ranks(tmp_path):
    """Starts the ranks of a pipeline and ends them, whatever happens: files for ports, and a deadline for all."""
    started = []

    def start(count, *, model="pico-gqa", modes=("breakable",), deadline=30.0, device="cpu", **plan):
        plan |= {
            "count": count,
            "model": model,
            "modes": modes,
            "deadline": deadline,
            "device": device,
            "folder": str(tmp_path),
        }
        for rank in range(count):
            started.append(FORKS.Process(target=run, args=(plan | {"rank": rank},)))
            started[-1].start()
        limit = time.monotonic() + START
        while len(list(tmp_path.glob("ready*"))) < count and time.monotonic() < limit:
            time.sleep(0.05)
        begun = time.monotonic()
        for process in started:
            process.join(START)
        seconds = time.monotonic() - begun
        told = [tmp_path / f"told{rank}" for rank in range(count)]
        return [
            Ended(json.loads(each.read_text()) if each.exists() else {}, (tmp_path / f"said{rank}").read_text()[-2000:],
                  started[rank].exitcode, seconds)
            for rank, each in enumerate(told)
        ]  # fmt: skip

    yield start
    for process in started:
        process.kill()
        process.join()


def alone(model="pico-gqa", device="cpu"):
    """Tokens of the same requests in one process, eager."""
    with cglab.open(model, device=device, dtype=torch.float32, max_batch=8, max_context=CONTEXT, token_budget=BUDGET,
                    prefix_reuse=False, ops="portable") as lab:  # fmt: skip
        lab.captures.decode = lab.captures.prefill = "eager"
        asked = mixed() + even()
        list(lab.stream(asked))
    return [request.output for request in asked]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("model", TAKEN)
def test_tokens_equal_one_process_and_captured_equals_eager_stages_to_the_bit(ranks, model, count):
    ended = ranks(count, model=model, modes=("eager", "breakable"))
    check_equal(ended, model, alone(model), joined="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("model", TAKEN)
def test_proxies_that_go_through_host_memory_change_no_token(ranks, model):
    """As on a GPU that two ranks share, where NCCL refuses them."""
    ended = ranks(2, model=model, modes=("eager", "breakable"), staged=True)
    check_equal(ended, model, alone(model), joined=SHARED)


@pytest.mark.gpu
@pytest.mark.parametrize("model", TAKEN)
def test_two_stages_on_one_gpu_give_the_tokens_of_one_process(ranks, model):
    ended = ranks(2, model=model, modes=("eager", "breakable"), device="cuda:0", deadline=60.0)
    check_equal(ended, model, alone(model, "cuda"), joined=SHARED)


SHARED = "gloo through host memory, one device shared by 2 stages"


def check_equal(ended, model, wanted, *, joined):
    """Tokens of one process, captured the eager stages' to the bit, and each stage with its own layers and proxies."""
    assert [each.status for each in ended] == [0] * len(ended), ended
    for each in ended:
        eager, captured = each.told["eager"], each.told["breakable"]
        assert eager["tokens"] == captured["tokens"] == wanted
        assert eager["joined"] == captured["joined"] == joined
        assert eager["kv"] == captured["kv"], "after forwards that were not padded"
        assert set(eager["reasons"]) == {"BACKEND_EAGER"} and eager["captured"] == 0
        assert captured["captured"] > 10 and set(captured["reasons"]) <= {"WASTE_CEILING"}
        assert captured["largest"] == BUDGET == eager["largest"], "no forward exceeds the aggregate cap"
    layers = [layer for each in ended for layer in each.told["breakable"]["layers"]]
    assert layers == list(range(len(layers))), "each stage caches its own"
    second, *others = (each.told["breakable"]["taken"] for each in ended[1:])
    assert second == TAKEN[model] and all(list(taken) == ["hidden_states"] for taken in others)
    assert len({json.dumps(each.told["breakable"]["reasons"]) for each in ended}) == 1, "P10: one decision"


LOST_IN_A_STEP = r"waited for (tokens of rank|proxies of rank|rank \d to take)"
"""Whether a rank is sending or receiving when it notices is a matter of time."""

FAULTS = {
    "dies in a step": ({"rank": 1, "at": "step", "how": "dies"}, LOST_IN_A_STEP),
    "raises in a step": ({"rank": 1, "at": "step", "how": "raises"}, LOST_IN_A_STEP),
    "dies in its capture": (
        {"rank": 1, "at": "capture", "how": "dies"},
        "waited for what all ranks agree on",
    ),
    "skips its capture": (
        {"rank": 1, "at": "capture", "how": "skips"},
        "rank 1 of 2 has skipped the capture",
    ),
    "has other requests": (
        {"rank": 1, "at": "requests", "how": "lies"},
        "ranks were given different requests",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_b79_where_a_rank_fails_all_stop_with_an_error_and_long_before_the_deadline(ranks, fault):
    plan, told = FAULTS[fault]
    ended = ranks(3 if fault == "dies in a step" else 2, fault=plan, deadline=60.0)
    for rank, each in enumerate(ended):
        if rank == plan["rank"] and plan["how"] in ("dies", "raises"):
            assert each.status == -9 or each.told == {"error": "a planned fault"}
        else:
            assert re.search(told, each.told.get("error", "")), each
    assert ended[0].seconds < 30, "a lost rank is noticed by its connection, not by the deadline"


@pytest.mark.slow
def test_b79_a_rank_that_stalls_ends_the_others_at_the_deadline(ranks):
    ended = ranks(2, fault={"rank": 0, "at": "capture", "how": "stalls"}, deadline=3.0)
    assert (
        "rank 1 of 2 waited for what all ranks agree on: lost, or not there within 3 s"
        in ended[1].told["error"]
    )


@pytest.fixture
def single(tmp_path):
    """A pipeline of one stage in this process."""
    links = StageLinks(CPU, deadline=10.0, store=tmp_path / "store", rank=0, count=1)
    model = load_model("pico-gqa", device=CPU, dtype=torch.float32).model
    kv = paged_kv(
        CacheLayout.for_requests(9, CONTEXT, 16, budget=BUDGET), model.config, device=CPU, dtype=torch.float32
    )
    runner = PipelineStageRunner(model, kv, GraphGroup(CPU), BUCKETS, Options("breakable"))
    runner.capture()

    def make(micro_batches):
        return Pipeline(
            runner, links, SchedulerOptions(BUDGET, prefix_reuse=False), micro_batches=micro_batches
        )

    yield make
    runner.close()
    links.close()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_micro_batches_share_no_row_and_no_page_and_change_no_token(single, micro_batches):
    pipeline, asked = single(micro_batches), mixed() + even()
    owned = [
        (set(lane.scheduler.memory.rows._free), set(lane.scheduler.memory.pages._free._free))
        for lane in pipeline.lanes
    ]
    for kind in range(2):
        assert sum(len(own[kind]) for own in owned) == len(set().union(*(own[kind] for own in owned)))
    pipeline.run(asked)
    assert [request.output for request in asked] == alone()
    assert len(pipeline.segments.drain()) == pipeline.runner.coverage().steps


def test_what_makes_no_pipeline_is_told(single):
    with pytest.raises(InputError, match="at least one micro-batch"):
        single(0)
    with pytest.raises(InputError, match="do not make 40 micro-batches"):
        single(40)


@pytest.mark.parametrize(
    ("kind", "devices", "told"),
    [
        ("cuda", (0, 1), "nccl"), ("cuda", (0, 0), SHARED), ("cuda", (1, 0, 1), SHARED), ("cpu", (0, 0), "gloo"),
        ("cuda", (2, 2, 2), SHARED.replace("2", "3")), ("cuda", (0,), "nccl"),
    ],
)  # fmt: skip
def test_stages_with_a_gpu_each_are_joined_by_nccl_and_those_that_share_one_through_host_memory(
    kind, devices, told
):
    assert str(Joint.of(kind, devices)) == told
    assert Joint.of(kind, devices).staged == (told not in ("nccl", "gloo"))
    assert Joint.of(kind, devices, staged=True).staged


def test_without_torchrun_and_store_there_is_no_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="start one process a stage with torchrun"):
        StageLinks(CPU, deadline=1.0)
