"""What a server died of, told by its last words."""

import pytest

from cglab.serving.diagnosis import NEXT_STEP, Diagnosis, Fault, describe_exit, diagnose


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("launch_server.py: error: unrecognized arguments: --foo 1", Fault.ARGUMENT),
        ("launch_server.py: error: argument --dtype: invalid choice: 'int3'", Fault.ARGUMENT),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Fault.MEMORY),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", Fault.MEMORY),
        ("OSError: /m does not appear to have a file named config.json.", Fault.MODEL),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/config.json'", Fault.MODEL),
        (
            "[Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
            Fault.PORT,
        ),
    ],
)
def test_a_line_of_the_log_tells_the_kind(line, fault):
    lines = ["Load weight begin.", line, "Traceback (most recent call last):", "SystemExit"]
    assert diagnose(lines, 1) == Diagnosis(fault, line)


def test_the_most_certain_sign_wins_over_a_later_one():
    lines = ["OSError: Can't load the configuration of x", "error: unrecognized arguments: --x"]
    assert diagnose(lines, 2).fault is Fault.ARGUMENT


def test_a_port_that_sglang_steps_over_is_no_fault():
    assert diagnose(["INFO Port 30001 is already in use, trying port 30002"], 1) == Diagnosis(Fault.DIED)


def test_a_server_that_the_system_killed_most_likely_took_too_much_memory():
    assert diagnose(["Load weight begin."], -9).fault is Fault.MEMORY
    assert diagnose(["Load weight begin."], -11).fault is Fault.DIED


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "signal SIGKILL"), (-99, "signal 99")],
)
def test_exit_statuses_in_words(code, words):
    assert describe_exit(code) == words


def test_every_fault_has_a_next_step():
    assert set(NEXT_STEP) == set(Fault)
