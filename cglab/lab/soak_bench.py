"""The soak bench: one fixed sequence of decode steps over and over, from the same state, each round hashed.

A recording that reads what an earlier step left behind, or a pool whose blocks wander, shows after hours and not in a
test of seconds. So batches grow and shrink through all buckets, requests end and start anew, each step's tokens are
those that the step before chose, and every bit of every step's logits goes into the round's hash on the device. All
rounds must end with the same hash, and that of a round run eager at the padded sizes; memory must not grow. A round
begins with noise in every slot of the cache: zeros would make what is read from a wrong slot look right.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cglab.engine.workload import steady_decode
from cglab.errors import InputError, no_such
from cglab.lab.facade import Lab
from cglab.lab.opening import open_lab
from cglab.lab.step_metrics import Progress, model_facts, silent
from cglab.measure.machine import describe_device, versions
from cglab.measure.record import Record, make_record, new_run
from cglab.measure.records import load
from cglab.measure.tree import tree_hash
from cglab.runners.base import Runner

STEPS: Final = 1000
ARM: Final = "full"
FACTOR: Final = 6364136223846793005
"""Odd, so that a hash loses nothing when it is multiplied by it modulo 2 ** 64."""
HASHED: Final = 2**48 - 1
"""Bits of a hash that are compared: as many as a record's figures hold exactly."""
SIZES: Final[Mapping[str, dict[str, int]]] = {
    "pico-gqa": {"max_batch": 8, "max_context": 256},
    "qwen3-8b": {"max_batch": 16, "max_context": 1024},
}


class FixedSequence:
    """A fixed sequence of steps on a lab's cache, whose pages are held by requests.

    Args:
        lab: with room for its largest batch at its longest context.
        rows: [largest batch] int64, rows of the page table.
        steps: of a round.
        seed: of batches, lengths, first tokens and the noise that is in the cache before them.
    """

    def __init__(self, lab: Lab, rows: Tensor, steps: int, seed: int = 0) -> None:
        self.lab, self.kv = lab, lab.engine.kv
        draws, most, longest = np.random.default_rng(seed), len(rows), lab.max_context
        lengths = draws.integers(1, longest // 2, most)
        self.live: list[int] = []
        positions = np.zeros((steps, most), np.int64)
        batch = most
        for step in range(steps):
            batch = int(np.clip(batch + draws.integers(-3, 4), 1, most))
            self.live.append(batch)
            lengths = np.where(lengths >= longest, 1, lengths)  # ended, and a new one in its row
            positions[step] = lengths - 1
            lengths[:batch] += 1
        self.rows, self.positions = rows, torch.from_numpy(positions).to(rows.device)
        self.first = torch.from_numpy(draws.integers(0, lab.config.vocab_size, most)).to(rows.device)
        self.noise, self.seed = torch.Generator(rows.device), seed
        self.hash = torch.zeros((), dtype=torch.int64, device=rows.device)
        self.weights = torch.arange(1, 2 * most * lab.config.vocab_size, 2, device=rows.device)

    def run(self, runner: Runner[int], *, padded_eager: bool = False) -> int:
        """One round from the reset state: the same noise in the cache, the first tokens, a zero hash."""
        self.noise.manual_seed(self.seed)
        for cached in self.kv.caches().values():
            cached.normal_(generator=self.noise)
        newest, found = self.first.clone(), self.hash.zero_()
        for live, positions in zip(self.live, self.positions, strict=True):
            rows, places = self.rows[:live], positions[:live]
            inputs = {
                "input_ids": newest[:live], "positions": places, "request_rows": rows, "seq_lens": places + 1,
                "out_slots": self.kv.full.slots(rows, places.unsqueeze(1)).flatten(),
            }  # fmt: skip
            if padded_eager:
                size = runner.captured.pad(live)
                if not isinstance(size, int):
                    raise InputError(f"a batch of {live} has no bucket: {size}")
                tokens, logits = runner.run_padded_eager(live, size, **inputs)
            else:
                tokens, logits = runner.run(live, **inputs)
            newest[:live] = tokens
            bits = logits.flatten().view(torch.int16 if logits.dtype.itemsize == 2 else torch.int32).long()
            found.mul_(FACTOR).add_((bits * self.weights[: len(bits)]).sum())
        return int(found.item()) & HASHED


def soak(
    device: torch.device,
    *,
    quick: bool = False,
    progress: Progress = silent,
    models: Sequence[str] | None = None,
    rounds: int | None = None,
    seconds: float = 400.0,
    after: str = "",
) -> Iterator[Record]:
    """A fixed sequence of decode steps, many times: hashes, and memory after every round.

    Args:
        device: what is tested.
        quick: few short rounds of the shipped model.
        progress: called with a line for every hundredth round.
        models: names in ``SIZES``; by default all of them on a GPU, and pico-gqa on a CPU or with ``quick``.
        rounds: of each model; by default 1,000 of pico-gqa and 10 of larger ones.
        seconds: after which a model's rounds end, to be gone on with by ``after``.
        after: folder of earlier records; rounds of the same sequence by the same code and versions are added to:
            their hash is the one to meet, and what was unequal or grew in them stays so.

    Yields:
        A record for each model.

    Raises:
        InputError: for an unknown model, one that only a GPU's full bench runs, or fewer than two rounds.
    """
    large = device.type == "cuda" and not quick
    known = tuple(SIZES) if large else ("pico-gqa",)
    names = known if models is None else models
    if unknown := [name for name in names if name not in known]:
        more = "" if large else "; larger ones need a GPU and no quick"
        raise InputError(no_such("model of a soak here", unknown[0], known) + more)
    if rounds is not None and rounds < 2:
        raise InputError(f"{rounds} rounds compare nothing; give rounds=2 or more")
    run = new_run()
    for name in names:
        sizes = SIZES[name] if large else {"max_batch": 4, "max_context": 64}
        progress(f"{name}: open")
        with open_lab(name, device=device, **sizes) as lab:  # type: ignore[arg-type]
            count = rounds or ((1000 if name == "pico-gqa" else 10) if large else 3)
            yield _record(lab, STEPS if large else 40, count, seconds, after, run, progress)


def _record(
    lab: Lab, steps: int, count: int, seconds: float, after: str, run: str, progress: Progress
) -> Record:
    most = lab.engine.largest_batch
    workload = {"steps": steps, "batch": most, "cache": lab.max_context, "ops": lab.ops}
    done = _done(after, lab, workload) if after else None
    with steady_decode(lab.engine, most, lab.max_context, compute=False) as held:
        sequence, runner = FixedSequence(lab, held.inputs["request_rows"], steps), lab.runner(ARM)
        progress("a round eager, at the padded sizes")
        hashes, memory = [sequence.run(runner, padded_eager=True)], []
        started = time.perf_counter()
        for index in range(count):
            if index > 1 and time.perf_counter() - started > seconds:
                break
            if index % 100 == 0:
                progress(f"{lab.name}: round {index + 1} of {count}")
            hashes.append(sequence.run(runner))
            memory.append(lab.memory()["device"])
        coverage = runner.coverage().as_dict()
    rounds, equal = float(len(memory)), len(set(hashes)) == 1
    grown = {
        f"{kind}_growth_bytes": float(max(each[kind] for each in memory[1:]) - memory[0][kind])
        for kind in ("allocated", "reserved")
    }
    if done is not None:
        rounds += _figure(done, "rounds")
        equal = equal and done.metrics["hashes_equal"] is True and _figure(done, "hash") == hashes[0]
        grown = {name: max(most, _figure(done, name)) for name, most in grown.items()}
    return make_record(
        bench="soak", arm=ARM, device=lab.device, run=run, workload=workload, coverage={"decode": coverage},
        metrics={
            "rounds": rounds, "total_steps": rounds * steps, "hash": float(hashes[0]),
            "hashes_equal": equal, "memory_growth_bytes": max(grown.values()), **grown,
            "batches": float(len(set(sequence.live))), "seconds": time.perf_counter() - started,
            "ok": equal and max(grown.values()) <= 0,
        },
        notes="The first hash is of a round run eager at the padded sizes.", **model_facts(lab),
    )  # fmt: skip


def _done(folder: str, lab: Lab, workload: Mapping[str, object]) -> Record | None:
    """The newest earlier record of the same sequence, code, versions and device; None without one."""
    wanted = {
        "bench": "soak", "tree": tree_hash(), "versions": versions(), "device": describe_device(lab.device),
        "workload": workload, **model_facts(lab),
    }  # fmt: skip
    for record in reversed(load(folder).records):
        if all(getattr(record, name) == value for name, value in wanted.items()):
            return record
    return None


def _figure(record: Record, name: str) -> float:
    """A number that every record of this bench holds."""
    return float(record.metrics[name] or 0)
