"""One rank of a pipeline: what ``test_pipeline`` starts once a stage.

A plan may say which rank does what it should not, and where.
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.cache import paged_kv
from cglab.engine.links import StageLinks
from cglab.engine.memory import CacheLayout
from cglab.engine.pipeline import Pipeline
from cglab.engine.requests import Request, Sampling
from cglab.errors import RankError
from cglab.graphs.options import Options
from cglab.lab.sparse_prefill import stage_runner
from cglab.models.loading import find_model, load_model
from cglab.models.stages import cut
from cglab.runners.base import GraphGroup

BUCKETS, BUDGET, CONTEXT = (8, 16, 32), 32, 80
VOCABULARY = 512


def requests(lengths, limit, *, heat=0.0):
    """Prompts of these lengths with up to ``limit`` new tokens, every second one sampled."""
    drawn = torch.Generator().manual_seed(11)
    prompts = [torch.randint(0, VOCABULARY, (length,), generator=drawn).tolist() for length in lengths]
    return [
        Request(index, prompt, 1 + index % limit, Sampling(heat * (index % 2), index))
        for index, prompt in enumerate(prompts)
    ]


def mixed():
    """Some in chunks, some several to a step; one is longer than what pico-dsa keeps."""
    return requests((3, 75, 8, 17, 1, 33, 9), 4, heat=0.8)


def even():
    """Every forward is as long as a bucket, so that nothing is padded."""
    return requests((64, 32, 64, 32, 32), 1)


class Faulty(Pipeline):
    """Does at its third batch what the plan says."""

    begun, how = 0, None

    def _launch(self, lane):
        self.begun += 1
        if self.begun == 3 and self.how is not None:
            fail(self.how)
        super()._launch(lane)


def fail(how):
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stalls":
        time.sleep(8)  # beyond the deadline of the others
    else:
        raise ValueError("a planned fault")


def wait_for(plan):
    """Deadlines count from here: until then a slow machine loads modules."""
    folder = Path(plan["folder"])
    (folder / f"ready{plan['rank']}").touch()
    while len(list(folder.glob("ready*"))) < plan["count"]:
        time.sleep(0.05)


def main(plan):
    rank, count, fault, device = (
        plan["rank"],
        plan["count"],
        plan.get("fault", {}),
        torch.device(plan["device"]),
    )
    at, how = (fault["at"], fault["how"]) if fault.get("rank") == rank else (None, None)
    source = find_model(plan["model"])
    stage = cut(source.config.num_layers, count)[rank]
    model = load_model(source, device=device, dtype=torch.float32, stage=stage).model
    layout = CacheLayout.for_requests(9, CONTEXT, 16, budget=BUDGET)
    wait_for(plan)
    links = StageLinks(
        device, deadline=plan["deadline"], store=Path(plan["folder"], "store"), rank=rank, count=count,
        staged=plan.get("staged", False),
    )  # fmt: skip
    told = {}
    for mode in plan["modes"]:
        kv = paged_kv(layout, model.config, device=device, dtype=torch.float32, layers=stage.layers)
        runner = stage_runner(model, kv, GraphGroup(device), BUCKETS, Options(mode))
        if at == "capture" and how != "skips":
            fail(how)
        if at != "capture":
            runner.capture()
        pipeline = Faulty(runner, links, SchedulerOptions(BUDGET, prefix_reuse=False))
        pipeline.how = how if at == "step" else None
        asked = [mixed(), even()]
        if at == "requests":
            asked[0][2].prompt[0] ^= 1
        for each in asked:
            kv.full.keys.zero_()
            kv.full.values.zero_()
            pipeline.run(each)
        for lane in pipeline.lanes:
            lane.scheduler.check_invariants()
        counts = runner.coverage()
        told[mode] = {
            "tokens": [request.output for request in asked[0] + asked[1]], "captured": counts.captured,
            "reasons": counts.reasons, "largest": pipeline.largest, "layers": kv.full.layers,
            "taken": {proxy.name: [list(proxy.columns), str(proxy.dtype)] for proxy in runner.taken},
            "kv": [hashlib.sha1(cache[:, 16:].cpu().numpy().tobytes()).hexdigest() for cache in kv.caches().values()],
            "joined": str(links.joint),
        }  # fmt: skip
    links.close()
    return told


def run(plan):
    """The rank of a plan in this process: what it has to tell, and what it says beside that, are left in files."""
    folder, rank = Path(plan["folder"]), plan["rank"]
    os.dup2(os.open(folder / f"said{rank}", os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    try:
        told = main(plan)
    except (RankError, ValueError) as error:
        told = {"error": str(error)}
    (folder / f"told{rank}").write_text(json.dumps(told))
