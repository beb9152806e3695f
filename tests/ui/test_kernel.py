"""The workspace in a live kernel, without a browser: what a front end sends on the wire, and how kernels end."""

import json
import subprocess
import sys
import time

import pytest
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.end_to_end

OPEN = """
import json
import cglab
lab = cglab.open("pico-gqa", device="cpu", max_batch=1, max_context=32, buckets=[1])
board = lab.dashboard("decode")
board.wait(60)
print(json.dumps({"radio": board.toggles.modes["decode"].model_id, "start": board.start.model_id}))
"""
TELL = "board.wait(120); print(json.dumps([lab.captures.decode, board.workspace.errors, board.workspace.running]))"


class Kernel:
    def __init__(self, environment):
        self.manager = KernelManager()
        self.manager.kernel_spec.argv = [
            sys.executable,
            "-m",
            "ipykernel_launcher",
            "-f",
            "{connection_file}",
        ]
        self.manager.start_kernel(env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code):
        """What a cell prints."""
        said = []
        reply = self.client.execute_interactive(
            code, timeout=180, allow_stdin=False,
            output_hook=lambda message: said.append(message["content"].get("text", "")),
        )  # fmt: skip
        assert reply["content"]["status"] == "ok", reply["content"]
        return "".join(said)

    def send(self, model, data):
        """A message of the front end to a widget."""
        content = {"comm_id": model, "data": data}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(environment):
    made = Kernel(environment)
    yield made
    made.close()


@pytest.mark.slow
def test_messages_on_the_wire_toggle_run_and_are_answered(kernel):
    models = json.loads(kernel.run(OPEN))
    kernel.send(models["radio"], {"method": "update", "state": {"index": 1}, "buffer_paths": []})
    assert json.loads(kernel.run(TELL)) == ["breakable", {}, False]
    kernel.send(models["start"], {"method": "custom", "content": {"event": "click"}})
    assert json.loads(kernel.run(TELL)) == ["breakable", {}, False]
    assert kernel.run("print(dict(board.workspace.results.parity))") == "{'breakable': 'bitwise'}\n"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pass", "lab.close()", "import sys; sys.exit(0)"])
def test_n12_the_interpreter_ends_in_the_middle_of_a_run(ending, environment):
    code = (
        "import cglab, threading\n"
        "lab = cglab.open('pico-gqa', device='cpu', max_batch=1, max_context=32, buckets=[1])\n"
        "board = lab.dashboard('decode')\n"
        "board.wait(60)\n"
        "begun = threading.Event()\n"
        "board.workspace.observe(lambda change: 'timing' in change.new and begun.set(), 'doing')\n"
        "board.run()\n"
        "assert begun.wait(60)\n"
        f"{ending}\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr


LAB = """
import json, os, signal
import cglab
from cglab.graphs import faults
from cglab.graphs.breaks import capturing
from cglab.measure.record import make_record, new_run
from cglab.measure.records import append, load

def record(arm):
    append("killed.jsonl", [make_record(bench="killed", arm=arm, device="cpu", run=new_run(), metrics={})])

class Ends(RuntimeError):
    def __init__(self, message):
        os.kill(os.getpid(), ending)

def tokens(decode):
    lab.captures.decode = decode
    made = lab.generate(["def f(x):", "import os"], max_new_tokens=4)
    return made.tokens, made.coverage.captured

lab = cglab.open("pico-gqa", device="cpu", max_batch=2, max_context=32, buckets=[1, 2])
"""
EAGER = "print(json.dumps(tokens('eager')[0]))"
CAPTURED = "print(json.dumps([*tokens('full'), capturing(), [each.arm for each in load('.').records]]))"


def in_the_middle(ending):
    """A cell that is ended within the capture of a step."""
    return f"ending = signal.{ending}\nwith faults.planned(60, Ends):\n    tokens('full')"


@pytest.mark.slow
def test_n12_a_kernel_that_is_killed_within_a_capture_loses_nothing_and_the_next_one_is_right(
    environment, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    first = Kernel(environment)
    try:
        first.run(LAB)
        wanted = json.loads(first.run(EAGER))
        first.run("record('before')")
        first.client.execute(in_the_middle("SIGKILL"))
        deadline = time.monotonic() + 60
        while first.manager.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not first.manager.is_alive(), "it was to die within the capture"
    finally:
        first.close()
    assert [path.name for path in tmp_path.iterdir()] == ["killed.jsonl"]
    second = Kernel(environment)
    try:
        second.run(LAB)
        second.run("record('after')")
        got, captured, inside, arms = json.loads(second.run(CAPTURED))
    finally:
        second.close()
    assert got == wanted and captured > 0 and not inside and arms == ["before", "after"]


@pytest.mark.slow
def test_n12_a_kernel_that_is_interrupted_within_a_capture_goes_on(kernel, tmp_path):
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    kernel.run(LAB)
    wanted = json.loads(kernel.run(EAGER))
    kernel.run("record('before')")
    cell = in_the_middle("SIGINT")
    reply = kernel.client.execute_interactive(cell, timeout=60, allow_stdin=False, output_hook=id)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    got, captured, inside, arms = json.loads(kernel.run(CAPTURED))
    assert got == wanted and captured > 0 and not inside and arms == ["before"]
    assert json.loads(kernel.run(EAGER)) == wanted
