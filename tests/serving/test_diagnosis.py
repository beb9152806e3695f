"""What a server died of, told by its last words."""

import pytest

from cglab.serving.diagnosis import NEXT_STEP, Diagnosis, Fault, describe_exit, diagnose

# What a server of 0.5.16 or 0.5.23 says while it kills itself because a part of it failed.
ITS_END = [
    "[2026-11-30 12:37:38] Received sigquit from a child process. It usually means the child failed.",
    "[2026-11-30 12:37:38] kill_process_tree called: parent_pid=19423, include_parent=True, pid=19423",
]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        # As real servers said it, on a CPU.
        ("sglang serve: error: argument --max-running-requests: invalid int value: 'many'", Fault.ARGUMENT),
        (
            "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=1e-05.",
            Fault.MEMORY,
        ),
        ("RuntimeError: Cannot find any model weights with `/m`", Fault.MODEL),
        (
            "ValueError: The checkpoint you are trying to load has model type `nosuch` but Transformers does not recognize this architecture.",
            Fault.MODEL,
        ),
        # As their source, argparse, torch, transformers and the system say it.
        ("launch_server.py: error: unrecognized arguments: --foo 1", Fault.ARGUMENT),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", Fault.MEMORY),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", Fault.MEMORY),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9).", Fault.MEMORY),
        ("OSError: /m does not appear to have a file named config.json.", Fault.MODEL),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/m/config.json'", Fault.MODEL),
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use",
            Fault.PORT,
        ),
    ],
)
@pytest.mark.parametrize(("after", "exit_code"), [([], 1), (ITS_END, -9)])
def test_an_error_of_the_log_tells_the_kind(line, fault, after, exit_code):
    lines = ["Load weight begin.", "Traceback (most recent call last):", line, *after]
    assert diagnose(lines, exit_code) == Diagnosis(fault, line)


@pytest.mark.parametrize(
    "warning",
    [
        "Failed to load generation config for /m: /m does not appear to have a file named generation_config.json.",
        "INFO Port 30001 is already in use, trying port 30002",
        "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.",
        "mem_fraction_static lowered to avoid out of memory errors",
    ],
)
def test_a_warning_is_no_fault(warning):
    assert diagnose([warning], 1) == Diagnosis(Fault.DIED)
    assert diagnose([warning, "KeyError: 'x'"], 1) == Diagnosis(Fault.DIED, "KeyError: 'x'")


def test_what_follows_from_an_error_does_not_hide_it():
    """Ranks that lose their peer fail later, and say less."""
    first = "torch.OutOfMemoryError: CUDA out of memory."
    assert diagnose([first, "torch.distributed.DistBackendError: NCCL error"], 1) == Diagnosis(
        Fault.MEMORY, first
    )


def test_a_server_that_the_system_killed_most_likely_took_too_much_memory():
    assert diagnose(["Load weight begin."], -9).fault is Fault.MEMORY
    assert diagnose(["Load weight begin."], -11).fault is Fault.DIED


def test_a_server_that_killed_itself_did_not_run_out_of_memory_for_that():
    assert diagnose(["KeyError: 'x'", *ITS_END], -9) == Diagnosis(Fault.DIED, "KeyError: 'x'")
    assert diagnose(ITS_END, -9) == Diagnosis(Fault.DIED)


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "signal SIGKILL"), (-99, "signal 99")],
)
def test_exit_statuses_in_words(code, words):
    assert describe_exit(code) == words


def test_every_fault_has_a_next_step():
    assert set(NEXT_STEP) == set(Fault)
