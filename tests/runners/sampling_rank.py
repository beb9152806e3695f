"""One of two ranks that choose tokens together: what ``test_draft_sampler`` starts twice."""

import sys

import torch
import torch.distributed as dist

from cglab.graphs.captured import Captured
from cglab.graphs.options import Options
from cglab.graphs.slots import Slot
from cglab.runners.draft_sampler import DraftSampler, Shard
from cglab.runners.ranks import ProcessRanks
from tests.runners.test_draft_sampler import (
    BLOCK,
    BUCKETS,
    HIDDEN,
    WHOLE,
    planted,
    spelt_out,
    target_with,
    whole_numbers,
)


def main(rank, store):
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    generator = torch.Generator().manual_seed(5)
    weight, half = planted(97, torch.float32, generator), 48
    shard = Shard(half, 97 - half) if rank else Shard(0, half)
    mine = weight[shard.first : shard.first + shard.tokens]
    sampler = DraftSampler(target_with(mine), BLOCK, shard=shard, ranks=ProcessRanks())
    slots = {"hidden": Slot(shape=(-1, HIDDEN), dtype=torch.float32, pad=0.0, width=BLOCK)}
    parted = 0
    with Captured("sampler", sampler, slots, BUCKETS, torch.device("cpu"), Options(strict=True)) as one:
        one.capture()
        for step in range(32):
            hidden = whole_numbers(((1 + step % 8) * BLOCK, HIDDEN), 3, torch.float32, generator)
            parted += not torch.equal(one(hidden=hidden), spelt_out(hidden, weight, WHOLE)[0])
        gathers = one.inspect(8).count("cglab::gather_ranks")
        counts = one.counts
    dist.destroy_process_group()
    told = f"{counts.captured} steps captured, {counts.eager} eager, {parted} parted"
    sys.stdout.write(f"{told}, {gathers} collective each\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
