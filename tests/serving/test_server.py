"""A server is one object: healthy or a clear error within the deadline, and nothing of it is left."""

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from cglab.engine.load import Load
from cglab.errors import ClosedError, InputError, ModelError, NotInstalledError, PortTakenError, ServerError
from cglab.serving import guarded
from cglab.serving import server as serving
from cglab.serving.arm import ServerArm
from cglab.serving.benchmark import run_benchmark
from cglab.serving.scrape import scrape
from cglab.serving.workload import Workload
from tests.serving.processes import gone, wait_for

OWNER = """
import os, sys, time
from pathlib import Path
from cglab.serving import guarded
from cglab.serving.arm import ServerArm
from cglab.serving.server import launch

guarded.GRACE = 0.3
python, folder, ending = sys.argv[1:]
environment = {"FAKE_PIDS": folder + "/pids"}
server = launch(ServerArm("fake", "pico-gqa", environment=environment, python=Path(python)), log_folder=folder)
fork = os.fork() if ending == "fork" else 0  # which holds all pipes of its parent
if fork or ending != "fork":
    print(server.pid, server.port, fork, flush=True)
if ending == "exit":
    sys.exit()
time.sleep(600)  # longer than anybody waits for its end
"""


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_is_asked_and_leaves_no_process_and_no_port(launch, pids):
    server = launch()
    assert server.alive() and server.started_s is not None and server.url == f"http://127.0.0.1:{server.port}"
    assert server.post("/generate", {"input_ids": [4, 5]}).json()["output_ids"] == [6]
    assert 'mode="decode_none"' in server.get("/metrics").text
    assert server.log_tail(1) == ["The server is fired up and ready to roll!"]
    family = pids()
    assert family[0] == server.pid and not any(map(gone, family))
    server.close()
    assert all(map(gone, family)) and not listens(server.port) and not server.alive()
    server.close()
    assert "Load weight begin." in server.log.read_text()
    with pytest.raises(ClosedError, match="arm fake was closed"):
        server.get("/health")


def asked_plainly(server, path):
    """The status that somebody without the key gets."""
    try:
        with urllib.request.urlopen(server.url + path) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_nobody_without_its_key_is_answered_and_nothing_tells_the_key(launch, pids):
    server = launch()
    assert [asked_plainly(server, path) for path in ("/server_info", "/health", "/metrics")] == [
        401,
        200,
        200,
    ]
    assert len(server.key) > 40 and server.get("/server_info").json()["api_key"] == server.key
    running = Path(f"/proc/{pids()[0]}/cmdline").read_text()
    assert "start_server.py" in running and server.key not in running
    log = server.log.read_text()
    assert log.count("api_key='***'") == 2 and server.key not in log
    told = server.get("/server_info").json()["env"]
    assert server.key not in str(told) and not [name for name in told if "KEY" in name]
    facts = scrape(server)
    assert facts.arguments["port"] == server.port and facts.arguments["nested"][0]["api_key"] == "***"
    assert not {"api_key", "admin_api_key"} & facts.arguments.keys(), (
        "arms that differ in nothing else are equal"
    )
    assert server.key not in str(facts) and server.key not in repr(server)
    assert launch().key != server.key


def test_a_key_that_a_log_tells_is_not_quoted_and_the_log_is_its_owners_alone(launch):
    server = launch("tells the key")
    assert server.key in server.log.read_text()
    assert [path.stat().st_mode & 0o777 for path in (server.log, server.log.parent)] == [0o600, 0o700]
    (told,) = scrape(server).disabled
    assert "api_key='***'" in told and server.key not in told
    with pytest.raises(ServerError) as caught:
        server.post("/generate", {"text": "die"})
    assert "api_key='***'" in str(caught.value.log_lines)
    assert server.key not in f"{caught.value}{caught.value.log_lines}{server.log_tail(400)}"


def test_a_server_that_wants_another_key_says_so(launch):
    server = launch()
    server._client.headers["Authorization"] = "Bearer another"
    with pytest.raises(
        ServerError, match=r"refused GET /server_info with status 401: it wants another key"
    ) as caught:
        server.get("/server_info")
    assert caught.value.fault == "refused"


def test_sglangs_own_benchmark_is_handed_the_key_and_never_somebody_elses(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    point = Workload("point", Load(2, 1, 3, 2), 90, warmups=1)
    (result,) = run_benchmark(launch(), [point], tmp_path / "bench", deadline=60)
    assert result.latency.completed == 2 and result.latency.errors == 0
    (unkeyed,) = run_benchmark(launch(arguments=("--tokenizer-worker-num", "2")), [point], tmp_path / "bench")
    assert unkeyed.latency.completed == 2


def test_a_key_that_looks_like_an_option_is_never_made(launch, monkeypatch):
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"\xf8" * count)  # "-Pj4..." in base 64
    server = launch()
    assert server.get("/server_info").json()["api_key"] == server.key == "f8" * 32


def test_where_sglang_refuses_a_key_the_server_has_none(launch):
    server = launch(arguments=("--tokenizer-worker-num=2",))
    assert server.key is None and asked_plainly(server, "/server_info") == 200
    assert server.get("/server_info").json()["api_key"] is None


@pytest.mark.parametrize(
    ("mode", "fault", "said"),
    [
        ("out of memory", "out of memory", "Not enough memory"),
        ("killed", "out of memory", "SIGKILL"),
        ("wrong model", "wrong model", "does not appear to have a file named config.json"),
        ("died", "died", "exit status 7"),
    ],
)
def test_a_server_that_dies_at_start_is_one_error_with_the_logs_last_lines(launch, mode, fault, said):
    with pytest.raises(ServerError, match=said) as caught:
        launch(mode)
    assert caught.value.fault == fault
    assert caught.value.log_lines[0] == "Load weight begin."
    assert "fake-1.log" in str(caught.value)


@pytest.mark.parametrize("mode", ["never healthy", "hang"])
def test_a_server_that_never_gets_healthy_is_ended_at_the_deadline(launch, pids, tmp_path, monkeypatch, mode):
    """The clock stands still until the server is there, and then jumps past the deadline."""
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if (tmp_path / "pids").exists() else 0.0)
    monkeypatch.setattr(serving, "time", clock)
    with pytest.raises(ServerError, match=r"not healthy after 3 s.*deadline_s") as caught:
        launch(mode, deadline_s=3)
    assert caught.value.fault == "not healthy in time"
    assert all(map(gone, pids()))


def test_ctrl_c_while_it_is_started_waits_until_nothing_is_left(launch, monkeypatch):
    guardians = []

    def interrupt(guardian):
        guardians.append(guardian)
        if len(guardians) == 1:
            raise KeyboardInterrupt
        return guardian.stdout

    monkeypatch.setattr(guarded, "_report", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch()
    assert guardians[0].returncode is not None


def test_a_port_that_is_taken_is_said_before_anything_starts(launch, tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(PortTakenError, match="leave port out"):
            launch(port=holder.getsockname()[1])
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_what_is_no_port_is_refused_before_anything_starts(launch, port, tmp_path):
    with pytest.raises(PortTakenError, match="leave port out"):
        launch(port=port, deadline_s=5)
    assert not (tmp_path / "logs").exists()


def test_a_port_that_is_lost_to_another_is_told_by_the_log(launch, monkeypatch):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        monkeypatch.setattr(serving, "free_port", lambda: holder.getsockname()[1])
        with pytest.raises(ServerError, match="Address already in use") as caught:
            launch()
    assert caught.value.fault == "port taken"


def test_a_port_can_be_had_again_right_after_its_server(launch):
    first = launch()
    first.post("/generate", {"input_ids": [1]})
    first.close()
    second = launch(port=first.port)
    assert second.port == first.port and second.alive()
    assert [path.name for path in sorted(second.log.parent.iterdir())] == ["fake-1.log", "fake-2.log"]


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"arguments": ("--cuda-graph-backend-decod", "full")}, InputError, "--cuda-graph-backend-decode"),
        ({"environment": {"SGLANG_FAKER": "1"}}, InputError, "SGLANG_FAKE"),
        ({"toggles": {"seed_step": "eager"}}, InputError, "no switch"),
    ],
)
def test_what_this_version_does_not_have_is_said_before_anything_starts(
    launch, tmp_path, options, kind, said
):
    with pytest.raises(kind, match=said):
        launch(**options)
    assert not (tmp_path / "logs").exists()


def test_a_wrong_model_folder_is_said_before_anything_starts(tmp_path, fake_python):
    with pytest.raises(ModelError, match=r"no config\.json"):
        serving.launch(ServerArm("a", str(tmp_path), python=fake_python), log_folder=tmp_path / "logs")
    with pytest.raises(NotInstalledError, match="make test-sglang"):
        serving.launch(ServerArm("a", "pico-gqa", python=tmp_path / "python"), log_folder=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_a_server_that_dies_between_requests_is_told_with_its_log(launch):
    server = launch()
    with pytest.raises(ServerError, match=r"POST /generate.*exit status 3") as caught:
        server.post("/generate", {"text": "die"})
    assert caught.value.log_lines[-1] == "Traceback: told to die" and caught.value.fault == "died"
    assert not server.alive()
    with pytest.raises(ServerError, match="exit status 3"):
        server.get("/metrics")


def test_no_answer_in_time_and_a_refusal_are_errors_of_a_server_that_lives(launch):
    server = launch()
    with pytest.raises(ServerError, match="ReadTimeout") as late:
        server.post("/generate", {"text": "hang"}, timeout=0.5)
    with pytest.raises(ServerError, match="status 404") as refused:
        server.get("/no/such/path")
    assert (late.value.fault, refused.value.fault) == ("no answer", "refused")
    assert server.alive()


def test_ctrl_c_while_a_server_starts_leaves_nothing(launch, pids, monkeypatch):
    def interrupted(server, deadline_s):
        wait_for(lambda: listens(server.port))
        raise KeyboardInterrupt

    monkeypatch.setattr(serving.RunningServer, "wait_until_healthy", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        launch()
    assert all(map(gone, pids()))
    assert caught.tb  # a notebook keeps the last traceback, and with it all that its frames hold


@pytest.mark.parametrize("ending", ["exit", "kill", "fork"])
def test_nothing_is_left_when_the_interpreter_exits_or_is_killed(root, tmp_path, fake_python, pids, ending):
    command = [sys.executable, "-c", OWNER, str(fake_python), str(tmp_path), ending]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as owner:
        pid, port, fork = map(int, owner.stdout.readline().split())
        family = pids()
        assert family[0] == pid
        if ending != "exit":
            assert not any(map(gone, family))
            owner.send_signal(signal.SIGKILL)
        assert owner.wait(200) == (0 if ending == "exit" else -signal.SIGKILL)
        if ending == "exit":  # it waits for the end itself
            assert all(map(gone, family))
    try:
        wait_for(lambda: all(map(gone, family)))
    finally:
        if fork:
            os.kill(fork, signal.SIGKILL)
    assert not listens(port)


def test_a_guardian_that_is_killed_takes_the_server_along(launch, pids):
    server = launch()
    _, deaf, plain = pids()
    server._process._guardian.kill()
    wait_for(lambda: gone(server.pid))
    assert not server.alive()
    server.close()
    wait_for(lambda: gone(plain))
    os.kill(deaf, signal.SIGKILL)  # it left the group, and nobody is left who knows of it


def test_a_fork_of_the_owner_that_exits_ends_nothing(launch):
    """It has the finalizers of its parent, and runs them at its exit."""
    server = launch()
    child = os.fork()
    if not child:
        try:
            server.close()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert server.alive() and server.get("/health").is_success


def test_an_ended_server_tells_how_it_ended(launch):
    server = launch()
    assert server._process.exit_code() is None
    server.close()
    assert server._process.exit_code() == -signal.SIGTERM


def test_a_dropped_server_is_ended(launch, pids, tmp_path, make_arm):
    server = serving.launch(make_arm(), log_folder=tmp_path)
    family = pids()
    del server
    wait_for(lambda: all(map(gone, family)))


def test_logs_are_kept_apart_and_messages_stay_short(launch, tmp_path):
    server = launch()
    with server.log.open("a") as log:
        log.write("x" * 5000 + "\n\n\n")
    assert server.log_tail(1) == ["x" * 5000]
    with pytest.raises(ServerError) as caught:
        server.get("/none")
    assert max(map(len, caught.value.log_lines)) == serving.WIDEST
    assert Path(tmp_path / "logs" / "fake-1.log") == server.log
