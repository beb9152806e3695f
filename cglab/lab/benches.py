"""The recorded benches: each measures its arms in turns and returns result records.

A bench says what it did with its own numbers: times unprofiled, busy time from a run apart, parity and coverage
beside them, and what was predicted from the eager trace before anything was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from cglab.lab import suites
from cglab.lab.accept_bench import accept
from cglab.lab.capture_bench import capture
from cglab.lab.choices_bench import choices
from cglab.lab.decode_bench import decode
from cglab.lab.dflash_bench import dflash
from cglab.lab.differential_bench import differential
from cglab.lab.doctor_bench import doctor_overhead
from cglab.lab.dsa_ablation_bench import dsa_ablation
from cglab.lab.dsa_arms_bench import dsa_arms
from cglab.lab.dsa_bench import dsa
from cglab.lab.engines_bench import engines
from cglab.lab.fault_sweep import fault_bench
from cglab.lab.first_token_bench import first_token
from cglab.lab.growth_bench import growth
from cglab.lab.load_bench import load
from cglab.lab.mtp_bench import mtp
from cglab.lab.parity_benches import parity, recovery, requests, speculation
from cglab.lab.peers_bench import peers
from cglab.lab.pipeline_bench import pipeline
from cglab.lab.planner_bench import planner
from cglab.lab.prefill_bench import prefill
from cglab.lab.replay_bench import replay
from cglab.lab.scheduler_bench import scheduler
from cglab.lab.soak_bench import soak
from cglab.lab.ttft_bench import ttft
from cglab.lab.zoo_bench import zoo
from cglab.measure.record import Record


@dataclass(frozen=True)
class Bench:
    """One bench.

    Attributes:
        text: what it measures.
        run: called with the device, ``quick`` and a progress function; gives the records, each when it is made.
        quick: settings that a quick run decides itself, whatever they are given as.
    """

    text: str
    run: Callable[..., Iterable[Record]]
    quick: tuple[str, ...] = ()


BENCHES: Mapping[str, Bench] = {
    "decode": Bench(
        "decode step: eager, full, breakable and transformers in turns; launches, gaps, floor, capture cost",
        decode,
    ),
    "choices": Bench(
        "captured decode step with each choice of the compiled form taken back, in turns; predicted and found gain",
        choices,
    ),
    "growth": Bench(
        "decode step, eager and full in turns, by batch and context; its terms beside their least", growth
    ),
    "prefill": Bench(
        "prefill step: the arms in turns at several sizes; wall over busy, breaks, padding",
        prefill,
    ),
    "capture": Bench(
        "all buckets captured in one go: seconds and bytes, where they go, and how they grow", capture
    ),
    "replay": Bench("what a replay costs the host over the bare graph's, verb by verb", replay),
    "ttft": Bench("time to first token under concurrency, prefill eager, breakable and full in turns", ttft),
    "load": Bench(
        "three loads with decoding, prefill eager and breakable in turns: latency, occupancy", load
    ),
    "engines": Bench(
        "the lab's engine and a real SGLang server on the same requests, in turns: TTFT, TPOT, rates", engines
    ),
    "scheduler": Bench(
        "the host's part of a decode step against requests that run and that wait, and whether it must grow so",
        scheduler,
    ),
    "peers": Bench(
        "one decode token, host to host, by the lab, torch.compile, transformers, SGLang and others in turns",
        peers,
    ),
    "first-token": Bench(
        "one prompt of 128 to 8192 tokens to its first token, host to host, by peers in turns, in several processes",
        first_token,
    ),
    "accept": Bench(
        "tokens that a verify pass commits on held-out prompts, beside a look-up draft",
        accept,
        quick=("prompts", "new_tokens"),
    ),
    "mtp": Bench(
        "loads with drafts, the assistant's seed step eager, captured and fused in turns: rates, TPOT, TTFT",
        mtp,
    ),
    "pipeline": Bench(
        "prefill over stages in processes by cap and concurrency, eager and captured in turns; stage profile",
        pipeline,
        quick=("caps", "concurrencies", "requests"),
    ),
    "dflash": Bench(
        "loads with block drafts, the sampler untimed, timed and in the graph in turns: occupancy, step time, launches",
        dflash,
        quick=("new_tokens",),
    ),
    "dsa": Bench(
        "requests on sparse attention by what prefill leaves to breaks, in turns: TTFT, TPOT, E2E, memory, the floor",
        dsa,
        quick=("new_tokens", "floor_tokens"),
    ),
    "dsa-ablation": Bench(
        "requests on sparse attention with a NextN layer by the three switches, in turns: TTFT, TPOT, E2E, memory",
        dsa_ablation,
        quick=("new_tokens",),
    ),
    "dsa-arms": Bench(
        "mixed requests on sparse attention: every arm to the bit, from the bucket floor on that is measured first",
        dsa_arms,
        quick=("dtypes",),
    ),
    "planner": Bench("the best buckets for the traces of three loads, beside SGLang's list", planner),
    "recovery": Bench(
        "a fault at every recorded operation of a capture, and what is left afterwards", recovery
    ),
    "faults": Bench(
        "a fault at recorded operations and no memory at buckets, in the captures of every technique's runners",
        fault_bench,
        quick=("sample",),
    ),
    "parity": Bench("random sequences of batches against the three oracles", parity, quick=("cases",)),
    "differential": Bench(
        "very many random steps of every technique, each to the bit beside padded eager",
        differential,
        quick=("steps",),
    ),
    "requests": Bench("whole requests in every mode against the three oracles", requests),
    "speculation": Bench(
        "held-out prompts drafted and verified in every form, against plain decoding and the three oracles",
        speculation,
        quick=("prompts", "new_tokens", "padding"),
    ),
    "soak": Bench("a fixed sequence of decode steps, many times from the same state: hashes, memory", soak),
    "zoo": Bench("modules that nobody here wrote: the doctor's findings, what is captured, parity", zoo),
    "doctor": Bench(
        "an examination by the doctor beside a plain call, for functions of several kinds: overhead",
        doctor_overhead,
    ),
    "notebooks": Bench("every notebook under nbval, on the model of CGLAB_MODEL", suites.notebooks),
    "gpu-tests": Bench("the tests that need a CUDA device", suites.gpu_tests),
}
