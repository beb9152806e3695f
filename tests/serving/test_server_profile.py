"""A server's profile through the lab's trace reader."""

import gzip
import json
from pathlib import Path

import pytest

from cglab.errors import InputError, ServerError
from cglab.serving.profile import profile
from cglab.serving.workload import point
from tests.serving.stand_in import StandIn, generate

EVENTS = [
    {"ph": "X", "cat": "kernel", "name": "k", "ts": 20, "dur": 5, "args": {"device": 0, "stream": 7, "correlation": 1}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 10, "dur": 2, "tid": 1, "args": {"correlation": 1}},
]  # fmt: skip
BODIES = point(4, 2, 1, vocabulary=50, count=2).bodies()


def server(write, **settings):
    """Writes its traces when the profile ends, as SGLang does: into the folder that it was told."""
    told = {}
    return StandIn({
        "/start_profile": lambda body: told.update(body) or "started",
        "/generate": generate(),
        "/stop_profile": lambda _: write(Path(told["output_dir"])) or "stopped",
    })  # fmt: skip


def whole(folder, rank):
    (folder / f"1796040555.37-{rank}.trace.json.gz").write_bytes(
        gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())
    )


def test_every_rank_has_its_trace_and_the_requests_ran_in_between(tmp_path):
    asked = server(lambda folder: [whole(folder, rank) for rank in ("TP-0", "TP-0-PP-1")])
    found = profile(asked, BODIES, tmp_path, activities=("CPU",))
    assert set(found) == {"TP-0", "TP-0-PP-1"} and len(found["TP-0"].device_events) == 1
    assert [path for path, _ in asked.posted] == ["/start_profile", "/generate", "/generate", "/stop_profile"]
    assert asked.posted[0][1]["activities"] == ["CPU"]
    again = server(lambda folder: whole(folder, "TP-0"))
    assert set(profile(again, BODIES, tmp_path)) == {"TP-0"}  # an earlier profile's files are not its own


def test_a_trace_that_is_never_whole_is_an_error_with_the_log(tmp_path):
    half = server(
        lambda folder: (folder / "1-TP-0.trace.json.gz").write_bytes(gzip.compress(b"x" * 99)[:20]) and None
    )
    with pytest.raises(ServerError, match=r"no whole trace(.|\n)*the last line"):
        profile(half, BODIES, tmp_path, deadline=0.6)
    with pytest.raises(ServerError, match="no trace in"):
        profile(server(lambda _: None), BODIES, tmp_path, deadline=0.6)


def test_a_profile_ends_also_when_a_request_fails(tmp_path):
    broken = server(lambda folder: whole(folder, "TP-0"))
    broken.answers["/generate"] = 500
    with pytest.raises(ServerError, match="refused /generate"):
        profile(broken, BODIES, tmp_path)
    assert broken.posted[-1][0] == "/stop_profile"
    with pytest.raises(InputError, match="at least one body"):
        profile(broken, [], tmp_path)
