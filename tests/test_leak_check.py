"""The leak check of conftest.py: each kind of leak fails its test, and everything that goes away in time passes."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

HEADER = """
import multiprocessing, os, signal, socket, subprocess, threading
from multiprocessing.shared_memory import SharedMemory
import pytest, zmq

kept = []
"""

LEAKS = {
    "child process": ("kept.append(subprocess.Popen(['sleep', '600']))", "process * (sleep, *): sleep 600"),
    "orphaned grandchild": (
        "subprocess.run(['sh', '-c', 'setsid sleep 601 > /dev/null 2>&1 &'], check=True)",
        "process * (sleep, *): sleep 601",
    ),
    "thread": (
        "threading.Thread(target=threading.Event().wait, name='lazybones', daemon=True).start()",
        "thread 'lazybones' at *threading.py:* in wait",
    ),
    "ZeroMQ context": ("kept.append(zmq.Context())", "<zmq.Context() at *>"),
    "ZeroMQ socket": (
        "kept.append(zmq.Context.instance().socket(zmq.PULL))",
        "<zmq.Socket(zmq.PULL) at *>",
    ),
    "semaphore": (
        "kept.append(multiprocessing.get_context('spawn').Lock())",
        "shared-memory file /dev/shm/sem.mp-*",
    ),
    "shared-memory file": ("open(os.environ['SHM_FILE'], 'w').close()", "shared-memory file /dev/shm/leak-check-*"),
    "listening port": (
        "kept.append(socket.create_server(('127.0.0.1', 0)))",
        "listening TCP port * of process *pytest*",
    ),
    "listening IPv6 port": (
        "kept.append(socket.create_server(('::1', 0), family=socket.AF_INET6))",
        "listening TCP port * of process *pytest*",
    ),
}


@pytest.fixture
def leaky_suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.Pytester]:
    """An empty suite with our conftest, run in a process of its own since what it leaks must not be ours."""
    shm_file = Path(f"/dev/shm/leak-check-{uuid.uuid4().hex}")
    monkeypatch.setenv("SHM_FILE", str(shm_file))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makeini("[pytest]\nleak_grace = 0.2")
    yield pytester
    shm_file.unlink(missing_ok=True)


def run(suite: pytest.Pytester, source: str) -> pytest.RunResult:
    suite.makepyfile(HEADER + source)
    return suite.runpytest_subprocess("-p", "no:cacheprovider", timeout=60)


@pytest.mark.parametrize("kind", LEAKS)
def test_what_is_left_behind_fails_its_test_and_no_other(leaky_suite: pytest.Pytester, kind: str) -> None:
    statement, line = LEAKS[kind]
    result = run(leaky_suite, f"def test_leaks():\n    {statement}\n\ndef test_does_not():\n    pass\n")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks*", "this test left behind:", f"  {line}"])


def test_what_is_cleaned_up_by_the_test_passes(leaky_suite: pytest.Pytester) -> None:
    result = run(
        leaky_suite,
        """
def test_cleans_up():
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind("tcp://127.0.0.1:*")
    segment = SharedMemory(create=True, size=64)
    segment.close()
    segment.unlink()
    socket.create_server(("127.0.0.1", 0)).close()
""",
    )
    result.assert_outcomes(passed=1)


def test_what_goes_away_within_the_grace_passes(leaky_suite: pytest.Pytester) -> None:
    result = run(
        leaky_suite,
        """
def test_ends_its_process_and_thread_a_moment_later():
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    ended = threading.Event()
    threading.Thread(target=ended.wait).start()
    ended.set()
    child.stdin.close()
""",
    )
    result.assert_outcomes(passed=1)


def test_what_a_module_fixture_started_may_outlive_each_test(leaky_suite: pytest.Pytester) -> None:
    result = run(
        leaky_suite,
        """
@pytest.fixture(scope="module")
def daemon():
    with subprocess.Popen(["sleep", "600"]) as child, zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.bind("tcp://127.0.0.1:*")
        yield
        child.kill()

def test_first(daemon): pass

def test_second(daemon): pass
""",
    )
    result.assert_outcomes(passed=2)


def test_helpers_that_multiprocessing_and_pyzmq_keep_are_no_leak_but_a_worker_is(leaky_suite: pytest.Pytester) -> None:
    result = run(
        leaky_suite,
        """
forkserver = multiprocessing.get_context("forkserver")

def test_starts_helpers():
    worker = forkserver.Process(target=os.getpid)
    worker.start()
    worker.join()
    zmq.Frame(b"sent without a copy", copy=False)

def test_leaks_a_worker():
    kept.append(forkserver.Process(target=signal.pause, daemon=True))
    kept[0].start()
""",
    )
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*ERROR at teardown of test_leaks_a_worker*", "  process *multiprocessing.forkserver*"]
    )


def test_a_file_that_only_another_test_run_holds_is_no_leak(
    leaky_suite: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("FIFO", str(fifo))
    result = run(
        leaky_suite,
        """
def test_sees_the_file_of_a_stranger():
    stranger = 'exec 3> $SHM_FILE; env -i setsid sh -c "read line < $FIFO" > /dev/null 2>&1 &'
    subprocess.run(["sh", "-c", stranger], check=True)
    assert os.path.exists(os.environ["SHM_FILE"])
""",
    )
    with fifo.open("r+b", buffering=0) as end_of_the_stranger:
        end_of_the_stranger.write(b"\n")
    result.assert_outcomes(passed=1)
