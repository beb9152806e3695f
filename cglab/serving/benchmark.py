"""SGLang's own serving benchmark against a server, and its figures in the lab's terms.

The benchmark runs in the server's Python, all points of a server in one process
(``scripts/serving_benchmark.py``). Each request's facts become the same :class:`LoadResult` as those of
the lab's own engine, so that one definition of TTFT, TPOT, E2E and rates stands behind both.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from cglab.engine.load import LoadResult
from cglab.engine.timing import RequestTiming
from cglab.errors import InputError, ResultsError, ServerError
from cglab.measure.latency import Latency, latency
from cglab.serving.arm import plain_environment
from cglab.serving.endpoint import Endpoint, with_key
from cglab.serving.workload import Workload, write_data_file

SCRIPT = Path(__file__).with_name("scripts") / "serving_benchmark.py"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class PointResult:
    """What one server made of one workload.

    Attributes:
        workload: what was asked.
        payload: sha256 of what was really sent, taken down where it was sent.
        result: each request's facts. Queueing and reuse of prefixes are not told by a client.
        latency: percentiles and rates.
        benchmark: the line that SGLang's benchmark wrote.
        unseen_first_tokens: requests whose first chunk held several tokens, so that TTFT is that of the last of
            them; always so where an engine commits several tokens at once.
    """

    workload: Workload
    payload: str
    result: LoadResult
    latency: Latency
    benchmark: Mapping[str, Any]
    unseen_first_tokens: int

    @property
    def accept_length(self) -> float | None:
        """Tokens that a verify pass commits, as SGLang tells it; None without speculation."""
        return self.benchmark.get("accept_length")

    def metrics(self) -> dict[str, float | int | None]:
        """Flat figures for a record: the latency's, ``accept_length`` and ``unseen_first_tokens``."""
        return {
            **self.latency.as_dict(),
            "accept_length": self.accept_length,
            "unseen_first_tokens": self.unseen_first_tokens,
        }

    def samples(self) -> dict[str, list[float]]:
        """Raw samples of completed requests: ``ttft_ms``, ``tpot_ms``, ``e2e_ms``."""
        done = [each for each in self.result.requests if each.completed]
        return {
            f"{name}_ms": [1e3 * seconds for each in done if (seconds := getattr(each, name)) is not None]
            for name in ("ttft", "tpot", "e2e")
        }


def run_benchmark(
    server: Endpoint,
    workloads: Sequence[Workload],
    folder: str | Path,
    *,
    deadline: float = 1800.0,
    devices: int = 1,
    arguments: Sequence[str] = (),
) -> Iterator[PointResult]:
    """Runs workloads one after the other, and gives each result when it is there.

    Args:
        server: healthy, with nothing else to do.
        workloads: points, of different names.
        folder: for the data files, results and the benchmark's own log.
        deadline: seconds for all of them.
        devices: GPUs that the server runs on, for rates for each.
        arguments: more words for SGLang's benchmark, the same for all arms.

    Raises:
        InputError: for two workloads of one name.
        ServerError: if the server dies, the benchmark fails or the time is over. Results given before stay good.
    """
    names = [workload.name for workload in workloads]
    if len(set(names)) != len(names):
        raise InputError(f"two workloads have one name: {names}; results are told apart by it")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    points = [_point(workload, folder / f"point-{index}") for index, workload in enumerate(workloads)]
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"url": server.url, "arguments": list(arguments), "points": points}), "utf-8")
    with (folder / "benchmark.log").open("wb") as log:
        process = subprocess.Popen(
            [str(server.installed.python), str(SCRIPT), str(plan.resolve())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=folder, start_new_session=True,
            env=with_key(server, plain_environment(os.environ)),
        )  # fmt: skip
        try:
            ends = time.monotonic() + deadline
            for workload, each in zip(workloads, points, strict=True):
                _wait_for(Path(each["result"]), process, server, ends, workload, Path(log.name))
                yield read_point(Path(each["result"]), workload, devices=devices)
        finally:
            process.kill()
            process.wait()


def read_point(file: str | Path, workload: Workload, *, devices: int = 1) -> PointResult:
    """Reads what the benchmark wrote for one workload.

    Args:
        file: the result file.
        workload: what was asked.
        devices: GPUs that the server ran on.

    Raises:
        ResultsError: if the file is none, or what was sent is not what was asked.
    """
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        facts, payload, line = found["requests"], found["payload"], found["benchmark"]
        limits = [body["sampling_params"]["max_new_tokens"] for body in workload.bodies()]
        timings = tuple(_timing(fact, limits[fact["index"]]) for fact in facts)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ResultsError(f"{file} is no result of the serving benchmark: {error!r}") from error
    if payload != workload.payload:
        raise ResultsError(
            f"{workload.name}: the benchmark sent requests of sha256 {payload[:12]}, asked were "
            f"{workload.payload[:12]}; this version of SGLang changes the payload, so nothing can be compared"
        )
    ends = [each.finished_at for each in timings if each.finished_at is not None]
    starts = [each.arrived_at for each in timings if each.arrived_at is not None]
    seconds = max(ends) - min(starts) if ends and starts else 0.0
    result = LoadResult(workload.load, payload, timings, (), seconds, 0)
    unseen = sum(1 for fact in facts if fact["success"] and fact["new_tokens"] - len(fact["gaps"]) > 1)
    return PointResult(workload, payload, result, latency(result, devices=devices), line, unseen)


def _point(workload: Workload, stem: Path) -> dict[str, Any]:
    stem = stem.resolve()
    stem.with_suffix(".json").unlink(missing_ok=True)  # an earlier run's would pass for this one's
    write_data_file(stem.with_suffix(".jsonl"), workload)
    return {
        "requests": str(stem.with_suffix(".jsonl")), "result": str(stem.with_suffix(".json")),
        "concurrency": workload.load.concurrency, "lane_offset": workload.lane_offset,
        "warmups": workload.warm_bodies(), "prefix": workload.prefix_body(),
    }  # fmt: skip


def _wait_for(
    result: Path,
    process: subprocess.Popen[bytes],
    server: Endpoint,
    ends: float,
    workload: Workload,
    log: Path,
) -> None:
    kept = f"while {workload.name} was measured; results of earlier points are kept"
    while not result.exists():
        if not server.alive():
            raise ServerError(
                f"the server died {kept}. Its last lines:", fault="it died", log_lines=server.log_tail()
            )
        if process.poll() is not None and not result.exists():
            raise ServerError(
                f"SGLang's serving benchmark ended with status {process.returncode} {kept}. Its last lines:",
                fault="the benchmark failed", log_lines=_tail(log),
            )  # fmt: skip
        if time.monotonic() > ends:
            raise ServerError(
                f"the deadline passed {kept}. Give more seconds or fewer requests. The benchmark's last lines:",
                fault="too late", log_lines=_tail(log),
            )  # fmt: skip
        time.sleep(POLL_SECONDS)


def _tail(log: Path, lines: int = 12) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]


def _timing(fact: Mapping[str, Any], limit: int) -> RequestTiming:
    """A request as the client saw it: token times from its first token and the gaps after it.

    One with fewer tokens than the limit, which alone ends a request, is an error: it took less time for less work.
    """
    done, start, error = bool(fact["success"]), float(fact["start"]), str(fact["error"])
    if done and fact["new_tokens"] != limit:
        done, error = False, f"ended after {fact['new_tokens']} of {limit} tokens"
    # A first token that the client never saw is None, where it says 0.0.
    times = accumulate([start + fact["ttft"], *fact["gaps"]]) if done and fact["ttft"] > 0 else ()
    return RequestTiming(
        int(fact["index"]), int(fact["prompt_tokens"]), 0, "length" if done else "error", error, 0,
        start, None, start + fact["latency"] if done else None, tuple(times),
    )  # fmt: skip
