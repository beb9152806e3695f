"""What a server says of its graphs: ``/server_info``, ``/metrics`` and its log, as one set of facts.

The versions tell different things in different places: 0.5.16 has graph memory and capture seconds in its log
alone, 0.5.23 also in metrics; captured prefill sizes are in neither's metrics. What is not told is None and has a
reason: SGLang's gauges start at 0.0, which would pass for a measurement.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from cglab.serving.endpoint import Endpoint, odd, read_json, without_key

Sample = tuple[Mapping[str, str], float]
"""Labels and value."""
Gauges = Mapping[str, list[Sample]]
"""Samples by the metric's name."""

_CAPTURE = re.compile(
    r"Capture (?P<name>.+?) (?:cuda|cpu|npu|xpu) ?graph (?P<edge>begin|end)\.(?P<facts>.*)", re.IGNORECASE
)
_DISABLED = re.compile(
    r"(Disabl(?:e|ing) [^\n]*graph[^\n]*|cuda graph is disabled[^\n]*|[^\n\]]*'layers' attribute[^\n]*)",
    re.IGNORECASE,
)
_LISTS = re.compile(r"\b(?:num_tokens|bs)=\[([\d, ]*)\]")
_BACKEND = re.compile(r"\bbackend=(\w+)")
_SECONDS = re.compile(r"elapsed[=:] ?([\d.]+) ?s", re.IGNORECASE)
_MEMORY = re.compile(r"mem usage=([\d.]+) GB")
_PASSES = "sglang:cuda_graph_passes_total"
NO_ARGUMENTS: Final = ("internal_states", "api_key", "admin_api_key")
"""What of ``/server_info`` does not describe an arm: a key is of one start, and nobody's to know."""


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """One phase that was captured at the start.

    Attributes:
        phase: ``prefill``, ``decode``, ``target_verify``, ``draft_decode``, ... by the newer version's names.
        backend: ``full`` or ``breakable``; None where it is not told.
        sizes: captured requests, or tokens of prefill; None where they are not told.
        seconds: of the capture; None where they are not told.
        memory_gb: that the graphs took, in GB; None where it is not told.
    """

    phase: str
    backend: str | None = None
    sizes: tuple[int, ...] | None = None
    seconds: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Scrape:
    """Facts of one server at one moment.

    Attributes:
        version: of SGLang.
        arguments: every resolved server argument but its keys.
        captures: the phases that were captured; empty if none was.
        disabled: what the log says of graphs that are off.
        passes: forward passes by mode since the start, such as ``decode_cuda_graph`` and ``prefill_none``.
        accept_length: tokens that a verify pass commits, over the server's life.
        occupancy: forward occupancy now, percent.
        running, queued: requests now.
        missing: why a field above is None.
    """

    version: str
    arguments: Mapping[str, Any]
    captures: tuple[GraphCapture, ...]
    disabled: tuple[str, ...]
    passes: Mapping[str, int] | None
    accept_length: float | None
    occupancy: float | None
    running: int | None
    queued: int | None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def in_flight(self) -> int | None:
        """Requests that run or wait; None where the server has no metrics."""
        return None if self.running is None or self.queued is None else self.running + self.queued

    def passes_since(self, earlier: Scrape) -> dict[str, int] | None:
        """Passes by mode between two scrapes of one server; None where it has no metrics."""
        if self.passes is None or earlier.passes is None:
            return None
        return {mode: count - earlier.passes.get(mode, 0) for mode, count in self.passes.items()}

    def capture(self, phase: str) -> GraphCapture | None:
        """What was captured for a phase; None if nothing was."""
        return next((each for each in self.captures if each.phase == phase), None)

    def metrics(self) -> dict[str, float | None]:
        """Flat figures for a record: graph memory in GB and capture seconds, in all and by phase."""
        known = [each.memory_gb for each in self.captures if each.memory_gb is not None]
        took = [each.seconds for each in self.captures if each.seconds is not None]
        all_of = (
            len(self.captures) or None
        )  # what was not captured took no memory, but nothing was measured either
        flat: dict[str, float | None] = {
            "graph_memory_gb": sum(known) if len(known) == all_of else None,
            "capture_seconds": sum(took) if len(took) == all_of else None,
        }
        for each in self.captures:
            flat |= {
                f"graph_memory_gb_{each.phase}": each.memory_gb,
                f"capture_seconds_{each.phase}": each.seconds,
            }
        return flat

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the server's arguments left out."""
        return {name: value for name, value in asdict(self).items() if name != "arguments"}


def graph_share(passes: Mapping[str, int] | None, phase: str) -> float | None:
    """Share of a phase's passes that replayed a graph.

    Args:
        passes: by mode.
        phase: ``prefill`` or ``decode``.

    Returns:
        0 to 1; None without passes of the phase.
    """
    if passes is None:
        return None
    ours = {mode: count for mode, count in passes.items() if mode.startswith(f"{phase}_")}
    whole = sum(ours.values())
    return (
        None
        if whole == 0
        else sum(count for mode, count in ours.items() if not mode.endswith("_none")) / whole
    )


def scrape(server: Endpoint) -> Scrape:
    """Asks a server for all of it.

    Raises:
        ServerError: if it does not answer, or with something else.
    """
    info = read_json(server, "/server_info", server.get("/server_info"))
    state = (info.get("internal_states") or [{}])[0]
    try:
        gauges = _gauges(server.get("/metrics").text)
    except ValueError as error:
        raise odd(server, f"/metrics is no page of metrics: {error}") from error
    log = server.log.read_text(encoding="utf-8", errors="replace") if server.log.exists() else ""
    return gather(info, state, gauges, without_key(server.key, log))


def gather(
    info: Mapping[str, Any],
    state: Mapping[str, Any],
    gauges: Gauges,
    log: str,
) -> Scrape:
    """Puts together what was read.

    Args:
        info: ``/server_info``.
        state: its first internal state.
        gauges: samples of ``/metrics`` by name, each its labels and its value.
        log: the server's log so far.
    """
    missing: dict[str, str] = {}

    def told(name: str, value: Any, reason: str) -> Any:
        if value is None:
            missing[name] = reason
        return value

    without = "the server's metrics lack it; is it started with --enable-metrics?"
    passes = _passes(gauges) if gauges else None
    speculative = info.get("speculative_algorithm")
    accepted = state.get("avg_spec_accept_length") or _typical(gauges, "sglang:spec_accept_length")
    return Scrape(
        version=str(info.get("version", "unknown")),
        arguments={name: value for name, value in info.items() if name not in NO_ARGUMENTS},
        captures=captures(log, gauges),
        disabled=tuple(dict.fromkeys(match.strip() for match in _DISABLED.findall(log))),
        passes=told("passes", passes, without),
        accept_length=told(
            "accept_length",
            (accepted or None) if speculative else None,
            "no verify pass was counted yet"
            if speculative
            else "the server runs without speculative decoding",
        ),
        occupancy=told(
            "occupancy",
            _typical(gauges, "sglang:fwd_occupancy"),
            "idle, or the device is not timed; scrape under load with SGLANG_ENABLE_METRICS_DEVICE_TIMER=1"
            if gauges
            else without,
        ),
        running=told("running", _whole(_gauge(gauges, "sglang:num_running_reqs")), without),
        queued=told("queued", _whole(_gauge(gauges, "sglang:num_queue_reqs")), without),
        missing=missing,
    )


def _gauges(text: str) -> dict[str, list[Sample]]:
    """Samples by name. Ranks of one tensor-parallel group count the same passes, so the first one speaks."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("tp_rank", "0") == "0":
                found[sample.name].append((sample.labels, sample.value))
    return dict(found)


def _gauge(gauges: Gauges, name: str) -> float | None:
    """The sum over pipeline stages and replicas; None if it is not there or not a number, as when idle (P83)."""
    values = [value for _, value in gauges.get(name, []) if not math.isnan(value)]
    return sum(values) if values else None


def _typical(gauges: Gauges, name: str) -> float | None:
    """The mean over pipeline stages and replicas of what is a share or a ratio, which no sum is; None as above."""
    values = [value for _, value in gauges.get(name, []) if not math.isnan(value)]
    return fmean(values) if values else None


def _passes(gauges: Gauges) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for labels, value in gauges.get(_PASSES, []):
        counts[labels["mode"]] += int(value)
    return dict(counts)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def captures(log: str, gauges: Gauges) -> tuple[GraphCapture, ...]:
    """What was captured, by a log; memory and seconds from metrics where these are finer.

    Args:
        log: text of it.
        gauges: samples of metrics, by name; none where there are no metrics.
    """
    found: dict[str, dict[str, Any]] = {}
    for match in _CAPTURE.finditer(log):
        phase, facts = _phase(match["name"]), found.setdefault(_phase(match["name"]), {"ended": False})
        text = match["facts"]
        if (sizes := _LISTS.search(text)) is not None:
            facts["sizes"] = tuple(sorted(int(word) for word in sizes[1].replace(" ", "").split(",") if word))
        if (backend := _BACKEND.search(text)) is not None:
            facts["backend"] = backend[1]
        if match["edge"] == "end":
            facts["ended"] = True
            for name, gauge, pattern, over_stages in (
                # Stages capture side by side, each into memory of its own.
                ("seconds", "sglang:startup_cuda_graph_time_seconds", _SECONDS, max),
                ("memory_gb", "sglang:graph_memory_usage_gb", _MEMORY, sum),
            ):
                finer = [value for labels, value in gauges.get(gauge, []) if labels.get("phase") == phase]
                coarse = pattern.search(text)
                # A gauge that nobody set says 0.0.
                facts[name] = over_stages(finer or [0.0]) or (None if coarse is None else float(coarse[1]))
    return tuple(
        GraphCapture(phase, **{name: value for name, value in facts.items() if name != "ended"})
        for phase, facts in found.items()
        if facts["ended"]
    )


def _phase(name: str) -> str:
    """``target prefill`` and ``target decode`` are the plain phases in metrics; the others keep their role."""
    words = name.lower().replace("-", " ").split()
    if words[:1] == ["target"] and words[1:] in (["prefill"], ["decode"]):
        words = words[1:]
    return "_".join(words)
