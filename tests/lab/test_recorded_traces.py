"""The traces in data/traces: the engine still makes them, and plans for them on costs recorded on an H200."""

import pytest
import torch

from cglab.engine.batches import SchedulerOptions
from cglab.engine.engine import Engine
from cglab.engine.load import drive
from cglab.graphs.keys import ShapeKey
from cglab.graphs.ledger import CaptureCost
from cglab.graphs.options import Options
from cglab.lab.bucket_costs import measured_costs
from cglab.lab.loads import LOADS
from cglab.lab.phases import LabPhases
from cglab.lab.planning import plan
from cglab.lab.recorded import recorded
from cglab.lab.size_trace import SizeTrace, load_size_trace
from cglab.lab.techniques import Captures
from cglab.models.config import ModelConfig
from cglab.models.kv import PagedKV
from cglab.models.loading import random_model
from cglab.runners.base import GraphGroup

CPU, PAGE, BUDGET = torch.device("cpu"), 16, 8192
CONFIG = ModelConfig(
    "Qwen3ForCausalLM", vocab_size=512, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, num_kv_heads=1,
    head_dim=16, max_position=16384, qk_norm=True, tie_embeddings=True,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_the_engine_makes_the_recorded_sizes_with_any_model(name):
    """Sizes follow from lengths, budget and cache: one of these traces was recorded on a GPU, with 28 layers."""
    load, captures, group = LOADS[name], Captures(), GraphGroup(CPU)
    captures.decode = captures.prefill = "eager"
    kv = PagedKV(
        CONFIG, pages=load.concurrency * (-(-load.longest // PAGE) + 1) + 1, page_size=PAGE, rows=load.concurrency + 1,
        max_context=load.longest, device=CPU, dtype=torch.float32,
    )  # fmt: skip
    model = random_model(CONFIG, device=CPU, dtype=torch.float32, seed=0)
    phases = LabPhases(
        model, kv, group, captures, buckets=[load.concurrency], prefill_buckets=[BUDGET], options=Options()
    )
    engine = Engine(model, kv, phases, SchedulerOptions(BUDGET))
    with engine.watched() as steps:
        drive(engine, load, CONFIG.vocab_size)
    assert SizeTrace.from_steps(name, steps).phases == load_size_trace(name).phases
    phases.close()
    group.close()


def ledger(samples):
    """A recorded ledger, line by line."""
    names = ("bucket", "bucket_warmup_ms", "bucket_capture_ms", "bucket_pool_bytes", "bucket_device_bytes")
    return [
        CaptureCost(ShapeKey(int(size)), warm / 1e3, taken / 1e3, int(pool), int(device), None, 0, 1)
        for size, warm, taken, pool, device in zip(*(samples[name] for name in names), strict=True)
    ]


def prefill_costs():
    """Of ``qwen3-8b``; below the smallest size that was timed a step takes what its launches take."""
    (lines,) = (
        r.samples for r in recorded("prefill").records if r.workload.get("captured") and r.model == "qwen3-8b"
    )
    times = {
        arm: {
            r.workload["tokens"]: r.metrics["prefill_ms"]
            for r in recorded("ttft").records
            if r.arm == arm and r.workload["concurrency"] == 1 and not r.workload["cached"]
        }
        for arm in ("eager", "breakable")
    }
    return measured_costs(ledger(lines), *({1: t[min(t)], **t} for t in (times["breakable"], times["eager"])))


def decode_costs():
    """Of ``qwen3-8b``."""
    full, eager = (
        {r.workload["batch"]: r for r in recorded("decode").records if (r.model, r.arm) == ("qwen3-8b", arm)}
        for arm in ("full", "eager")
    )
    return measured_costs(
        ledger(full[64].samples),
        *({b: r.metrics["step_ms"] for b, r in arm.items()} for arm in (full, eager)),
    )


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", LOADS)
def test_at_sglangs_memory_a_plan_on_recorded_costs_is_never_slower(name, phase):
    found = plan(load_size_trace(name), phase, {"prefill": prefill_costs, "decode": decode_costs}[phase]())
    chosen, listed = found.plan.chosen, found.plan.sglang
    assert chosen.time_ms <= listed.time_ms and chosen.memory_bytes <= listed.memory_bytes
    assert chosen.captured_steps + chosen.eager_steps == listed.captured_steps + listed.eager_steps
