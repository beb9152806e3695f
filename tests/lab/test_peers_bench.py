"""The peers bench: the same step for all, tokens compared, and nobody silently missing."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cglab.engine.workload import steady_decode
from cglab.errors import InputError, NotInstalledError
from cglab.graphs.breaks import eager_break, staged
from cglab.lab import peers_bench, transformers_arm
from cglab.lab.opening import open_lab
from cglab.lab.peer import LocalPeer, Point, lab_peer, plain_model, plain_peer
from cglab.lab.peer_graphs import PackageBreaks, compiled_step
from cglab.lab.peer_sglang import SglangPeer, worker_arguments
from cglab.lab.peer_transformers import StaticStep, _tokens, eager_peer, shared_weights
from cglab.lab.peers_bench import ARMS, LOCAL, peers

CPU = torch.device("cpu")
FEW = ("full", "plain-graph", "torch-compile", "transformers", "sglang")


@pytest.fixture(scope="module")
def records():
    def nowhere(*_):
        raise NotInstalledError("no SGLang on this machine")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_bench, "find_python", nowhere)
        return list(peers(CPU, quick=True, arms=FEW, batches=(2,), apart=False))


@pytest.fixture(scope="module")
def point():
    with (
        open_lab("pico-gqa", device=CPU, max_batch=4, max_context=64) as lab,
        steady_decode(lab.engine, 3, 33) as step,
    ):
        yield Point.of(lab, step)


@pytest.fixture(scope="module")
def wanted(point):
    """The tokens of the eager step."""
    return point.lab.runner("eager").run_live_eager(point.step.live, **point.step.inputs)[0].tolist()


def test_every_arm_has_a_record_in_one_run_and_the_floor_is_among_them(records):
    assert [record.arm for record in records] == [*FEW, "floor"]
    assert len({record.run for record in records}) == 1 and {record.bench for record in records} == {"token"}
    assert all(record.workload == records[0].workload for record in records)
    assert all(record.metrics["floor_ms"] == records[-1].metrics["token_ms"] for record in records)


def test_one_that_ran_has_its_times_tokens_and_note(records):
    ran = {record.arm: record for record in records if record.arm in ("full", "plain-graph", "transformers")}
    for record in ran.values():
        assert "error" not in record.metrics, record.metrics
        assert record.parity["verdict"] == "bitwise" and record.parity["compared"] == 2
        assert record.notes and "error" not in record.metrics and record.samples["token_ms"]
        assert all(record.metrics[name] > 0 for name in ("token_ms", "replay_ms", "host_us", "over_floor"))
    assert ran["full"].metrics["ratio_to_ours"] is None
    times = {arm: record.metrics["token_ms"] for arm, record in ran.items()}
    assert ran["transformers"].metrics["ratio_to_ours"] == pytest.approx(
        times["transformers"] / times["full"]
    )


def test_one_that_cannot_run_is_a_record_with_the_reason(records):
    reasons = {
        record.arm: record.metrics.get("error") for record in records if "token_ms" not in record.metrics
    }
    assert set(reasons) == {"torch-compile", "sglang"}
    assert "CUDA device" in reasons["torch-compile"] and "no SGLang" in reasons["sglang"]


def test_one_that_fails_takes_no_other_with_it(monkeypatch):
    @contextmanager
    def broken(point, fails):
        def fail():
            raise RuntimeError("lost its way")

        yield LocalPeer(CPU, fail if fails else (lambda: [0]), lambda: None, "a note")

    monkeypatch.setitem(LOCAL, "eager", partial(broken, fails=True))
    monkeypatch.setitem(LOCAL, "piecewise", partial(broken, fails=False))
    found = {
        record.arm: record
        for record in peers(CPU, quick=True, arms=("eager", "piecewise"), batches=(1,), apart=False)
    }
    assert found["eager"].metrics["error"] == "RuntimeError: lost its way"
    assert found["full"].metrics["token_ms"] > 0
    assert found["piecewise"].parity["verdict"] == "corrupted"  # it computes something else: the bench fails
    assert found["full"].metrics.keys() >= {"token_ms", "over_floor"}


def test_ours_alone_is_measured_all_the_same():
    full, floor = peers(CPU, quick=True, arms=("full",), batches=(1,), apart=False)
    assert (full.arm, floor.arm) == ("full", "floor") and full.metrics["token_ms"] > 0


def test_an_unknown_arm_is_refused_with_the_good_ones():
    with pytest.raises(InputError, match="transformers-compile"):
        list(peers(CPU, quick=True, arms=("vllm",)))


@pytest.mark.parametrize("mode", ["eager", "full", "breakable"])
def test_the_labs_peer_is_the_engines_own_step(point, wanted, mode):
    counts = point.lab.runner(mode).coverage().copy()
    with lab_peer(point, mode, "") as peer:
        assert peer.tokens() == wanted
        assert peer.seconds() > 0
    assert (point.lab.runner(mode).coverage() - counts).captured == (0 if mode == "eager" else 3)


@pytest.mark.parametrize("cache", ["DynamicCache", "StaticCache"])
def test_transformers_has_room_for_every_launch_on_either_cache(point, wanted, monkeypatch, cache):
    monkeypatch.setattr(transformers_arm, "CACHES", (cache,))
    lab = point.lab
    with eager_peer(point, shared_weights(lab.model, device=CPU, dtype=lab.dtype)) as peer:
        assert peer.tokens() == wanted and cache in peer.note
        assert peer.replay_seconds(8) > 0 and peer.host_us() > 0


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_plain_modules_compute_the_same(point, wanted, mode):
    with plain_peer(point, mode, "") as peer:
        assert peer.tokens() == wanted and peer.replay_seconds(2) > 0 and peer.host_us() > 0


def test_a_plain_model_shares_the_weights_and_leaves_the_labs_own_form_alone(point):
    model = point.lab.model
    body, plain = model.body, plain_model(model)
    assert model.body is body and plain.body is not body and plain.body.name == "portable"
    assert [p.data_ptr() for p in plain.parameters()] == [p.data_ptr() for p in model.parameters()]


def test_the_plain_step_is_one_graph_to_the_compiler_and_leaves_the_labs_cache_alone(point, wanted):
    before = {name: tensor.clone() for name, tensor in point.lab.engine.kv.caches().items()}
    step = compiled_step(point, backend="eager")
    with torch.no_grad():
        assert step(**point.step.inputs).tolist() == step(**point.step.inputs).tolist() == wanted
    assert all(torch.equal(tensor, before[name]) for name, tensor in point.lab.engine.kv.caches().items())


def test_transformers_holds_the_labs_memory_and_its_static_cache_rewinds(point, wanted):
    lab = point.lab
    model = shared_weights(lab.model, device=CPU, dtype=lab.dtype)
    ours = {parameter.untyped_storage().data_ptr() for parameter in lab.model.parameters()}
    assert {parameter.untyped_storage().data_ptr() for parameter in model.parameters()} == ours
    step = StaticStep(model, "StaticCache", point.step.live, point.step.context, length=lab.max_context)
    for _ in range(2):
        step.restart()
        assert _tokens(step, point) == wanted


def test_the_package_gets_the_labs_breaks_and_nothing_else():
    met = []

    def no_graph(body):
        def run(*args, **kwargs):
            met.append((body, args, kwargs))
            return body(*args, **kwargs)

        return run

    @eager_break
    def double(x, *, by):
        return x * by

    with staged(PackageBreaks(no_graph)):
        assert double(3, by=2) == 6
    assert met == [(double.body, (3,), {"by": 2})]
    assert double(3, by=2) == 6 and len(met) == 1


class Worker:
    """Counts what the batch holds: a token of it is its length."""

    def __init__(self):
        self.installed = SimpleNamespace(version="0.5.16")
        self.facts = {"attention": "TritonAttnBackend", "torch": "2.11.0"}
        self.captured, self.ready_s, self.seen = (), 1.0, []

    def ask(self, do, **what):
        if do == "begin":
            self.length = len(what["prompts"][0])
            self.seen.append([])
        if do == "step":
            assert what["tokens"] == [self.length] * 3
            self.length += 1
            self.seen[-1].append(self.length)
        return {"seconds": 0.5, "tokens": [self.length] * 3}


def test_a_turn_of_sglang_ends_at_the_labs_context_and_no_step_is_longer(point):
    worker = Worker()
    peer = SglangPeer(worker, point, turn=4)
    assert [peer.seconds() for _ in range(8)] == [0.5] * 8
    assert worker.seen == [[30, 31, 32, 33]] * 2 and point.step.context == 33
    assert "TritonAttnBackend" in peer.note and "PyTorch sampling" in peer.note and "0.5.16" in peer.note


def test_sglang_begins_anew_after_another_question_than_a_step(point):
    worker = Worker()
    peer = SglangPeer(worker, point, turn=4)
    peer.seconds()
    peer.replay_seconds(2)
    assert peer.seconds() == 0.5 and worker.seen[-1] == [30]
    with pytest.raises(InputError, match="before a context"):
        SglangPeer(worker, point, turn=33)


@pytest.mark.parametrize(("model", "on_gpu"), [("qwen3-8b", True), ("pico-gqa", False)])
def test_sglang_gets_the_labs_sizes_and_a_shape_its_random_weights(tmp_path, model, on_gpu):
    words = worker_arguments(model, tmp_path / "m", torch.bfloat16, batch=16, context=1024, on_gpu=on_gpu)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert given["--context-length"] == "1024" and given["--max-total-tokens"] == "16384"
    assert given["--sampling-backend"] == "pytorch" and given["--dtype"] == "bfloat16"
    assert given["--attention-backend"] == ("triton" if on_gpu else "torch_native")
    assert (given.get("--load-format") == "dummy") == (model == "qwen3-8b")


@pytest.mark.gpu
def test_every_local_peer_runs_on_a_gpu_and_chooses_the_same_tokens():
    arms = [arm for arm in ARMS if arm != "sglang"]
    for record in peers(torch.device("cuda"), quick=True, arms=arms, batches=(2,)):
        if "not installed" not in str(record.metrics.get("error")):
            assert record.metrics["token_ms"] > 0, record.metrics
            assert record.arm == "floor" or record.parity["verdict"] in ("bitwise", "drift")
