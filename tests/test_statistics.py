"""What is counted, over which window, and which verdict follows from it: values in, values out."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_reading_service.messages import Phase, WorkerReport
from rpc_reading_service.protocol import BATCH_OVERHEAD_BYTES
from rpc_reading_service.statistics import NOTHING, WINDOW_S, Place, Recorder, Statistics, WorkerStatistics, judge

PLACES = [Place(0, "cpu1:5555", "running"), Place(1, "cpu2:5555", "running")]


def report(worker: int, attempt: int = 0, **seconds: float) -> WorkerReport:
    names = ("idle", "graph", "replay", "encoding", "credit", "wire")
    return WorkerReport(worker, attempt, Phase.GRAPH, 0, 0, 0, *(seconds.get(name, 0.0) for name in names))


def snapshot(recorder: Recorder, now: float, losses: int = 0, recoveries: int = 0) -> Statistics:
    return recorder.snapshot(PLACES, True, losses, recoveries, now)


class Session(Recorder):
    """A recorder, and what the training has taken of the epoch."""

    def __init__(self) -> None:
        self.consumed = [0, 0]
        super().__init__(lambda: [*self.consumed])

    def consume(self, worker: int, nbytes: int) -> None:
        self.arrive(worker, 1, BATCH_OVERHEAD_BYTES + nbytes)
        self.consumed[worker] += 1


@pytest.fixture
def recorder() -> Session:
    """In epoch 1, since 100.0, with two workers."""
    recorder = Session()
    recorder.begin_epoch(1, 2, 100.0)
    return recorder


# ---------------------------------------------------------------------------------------------------- counting


def test_before_the_first_epoch_nothing_is_counted() -> None:
    assert snapshot(Session(), 5.0, losses=1) == replace(NOTHING, losses=1, verdict="no epoch has begun")


def test_batches_and_bytes_are_those_that_the_training_took(recorder: Session) -> None:
    recorder.consume(0, 300)
    recorder.consume(0, 100)
    recorder.consume(1, 50)
    now = snapshot(recorder, 104.0)
    assert (now.epoch, now.seconds, now.batches, now.nbytes, now.batches_per_s) == (1, 4.0, 3, 450, 0.75)
    assert [(w.worker, w.address, w.state, w.batches, w.nbytes, w.batches_per_s) for w in now.workers] == [
        (0, "cpu1:5555", "running", 2, 400, 0.5),
        (1, "cpu2:5555", "running", 1, 50, 0.25),
    ]


def test_a_wait_counts_for_the_one_worker_that_is_waited_for(recorder: Session) -> None:
    recorder.wait([1], 100.0)
    recorder.go_on(101.0)
    recorder.wait([0, 1], 102.0)
    recorder.go_on(104.0)
    recorder.go_on(104.5)
    now = snapshot(recorder, 106.0)
    assert (now.waited_s, now.waiting) == (3.0, 0.5)
    assert [worker.waited_s for worker in now.workers] == [0.0, 1.0]


def test_a_wait_that_is_not_over_counts_up_to_now_and_once(recorder: Session) -> None:
    recorder.wait([0], 101.0)
    assert [snapshot(recorder, now).waited_s for now in (102.0, 103.0)] == [1.0, 2.0]
    recorder.go_on(104.0)
    assert snapshot(recorder, 110.0).waited_s == 3.0


def test_shares_are_of_the_time_that_the_reports_cover(recorder: Session) -> None:
    recorder.report([report(0, graph=3.0, encoding=1.0), report(1, replay=1.0, credit=1.0, wire=2.0)], 104.0)
    first, second = snapshot(recorder, 106.0).workers
    assert (first.graph, first.encoding, first.busy) == (0.75, 0.25, 1.0)
    assert (second.replay, second.credit, second.wire, second.busy) == (0.25, 0.25, 0.5, 0.75)


def test_idle_time_before_the_epoch_does_not_count() -> None:
    recorder = Session()
    recorder.report([report(0, idle=1.0)], 90.0)
    recorder.begin_epoch(1, 2, 100.0)
    recorder.report([report(0, idle=11.0, graph=4.0)], 104.0)
    assert snapshot(recorder, 104.0).workers[0].graph == 1.0


def test_what_workers_did_in_the_last_epoch_does_not_count_nor_what_was_taken_in_it(recorder: Session) -> None:
    recorder.consume(0, 100)
    recorder.wait([0], 100.0)
    recorder.report([report(0, graph=10.0)], 110.0)
    recorder.consumed = [30, 30]  # it goes on from a checkpoint
    recorder.begin_epoch(2, 2, 110.0)
    recorder.report([report(0, graph=11.0, credit=1.0)], 112.0)
    now = snapshot(recorder, 112.0)
    assert (now.epoch, now.batches, now.waited_s, now.workers[0].graph) == (2, 0, 0.0, 0.5)


def test_a_new_process_of_a_shard_counts_from_its_start() -> None:
    recorder = Session()
    recorder.report([report(0, graph=10.0)], 100.0)
    recorder.begin_epoch(1, 2, 100.0)
    recorder.report([report(0, attempt=1, graph=1.0, replay=3.0)], 104.0)
    now = snapshot(recorder, 104.0, losses=1, recoveries=1)
    assert (now.workers[0].graph, now.workers[0].replay) == (0.25, 0.75)
    assert (now.losses, now.recoveries) == (1, 1)


def test_the_window_ends_with_the_epoch(recorder: Session) -> None:
    recorder.report([report(0, graph=3.0)], 103.0)
    recorder.end(104.0)
    recorder.end(120.0)
    recorder.report([report(0, graph=4.0, idle=100.0)], 204.0)
    now = snapshot(recorder, 300.0)
    assert (now.seconds, now.workers[0].graph) == (4.0, 1.0)


def test_the_window_is_the_last_minute_of_a_long_epoch(recorder: Session) -> None:
    for second in range(1, 201):
        recorder.consume(0, 10)
        recorder.report([report(0, graph=second)], 100.0 + second)
    now = snapshot(recorder, 300.5)
    assert now.seconds == pytest.approx(WINDOW_S, abs=1.0)
    assert now.batches == WINDOW_S
    assert now.workers[0].graph == pytest.approx(1.0, abs=0.02)
    assert len(recorder._marks) <= WINDOW_S + 2


def test_what_a_process_has_replayed_is_known_of_that_process_alone() -> None:
    recorder = Session()
    recorder.report([WorkerReport(1, 2, Phase.REPLAY, 0, 0, 7, *[0.0] * 6)], 1.0)
    assert [recorder.replayed(*each) for each in ((0, 2), (1, 1), (1, 2))] == [0, 0, 7]


def test_a_dispatching_worker_has_no_batches_of_its_own(recorder: Session) -> None:
    recorder.report([report(2, graph=1.0)], 101.0)
    now = recorder.snapshot([*PLACES, Place(2, "cpu1:5555", "running")], True, 0, 0, 101.0)
    assert (now.workers[2].batches, now.workers[2].graph) == (0, 1.0)


@given(
    st.lists(st.floats(0, 1e6), min_size=6, max_size=6),
    st.lists(st.floats(0, 1e6), min_size=6, max_size=6),
    st.floats(0, 1e6),
)
def test_shares_are_shares_whatever_is_reported(early: list[float], late: list[float], seconds: float) -> None:
    recorder = Session()
    recorder.report([WorkerReport(0, 0, Phase.IDLE, 0, 0, 0, *early)], 0.0)
    recorder.begin_epoch(1, 2, 0.0)
    recorder.report([WorkerReport(0, 0, Phase.IDLE, 0, 0, 0, *late)], seconds)
    worker = snapshot(recorder, seconds).workers[0]
    assert all(
        0.0 <= share <= 1.0 for share in (worker.graph, worker.replay, worker.encoding, worker.credit, worker.wire)
    )


# ---------------------------------------------------------------------------------------------------- the verdict


def shard(number: int, waited_s: float = 0.0, **shares: float) -> WorkerStatistics:
    names = ("graph", "replay", "encoding", "credit", "wire")
    rates: Any = (10, 1_000_000, 1.0)
    shares_of = (shares.get(name, 0.0) for name in names)
    return WorkerStatistics(number, f"cpu{number}:5555", "running", *rates, waited_s, *shares_of)


def verdict(waiting: float, *shards: WorkerStatistics, dispatching: int = 0, in_order: bool = True) -> str:
    waited = sum(each.waited_s for each in shards)
    statistics = Statistics(1, 10.0, 20, 50_000_000, 2.0, waited, waiting, 0, 0, shards, "")
    return judge(statistics, len(shards) - dispatching, in_order)


WAITS = "training waits for data 38 % of the time: "


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ([shard(0), shard(1)], "what the workers do is not known yet; they report every 2 s"),
        (
            [shard(0, 2.0, graph=0.9), shard(1, 1.8, graph=1.0)],
            "workers are busy in the graph; about 2 more workers would keep up",
        ),
        ([shard(0, 3.8, graph=0.7, credit=0.3)], "workers are busy in the graph; about 1 more worker would keep up"),
        (
            [shard(0, 2.0, encoding=0.9, graph=0.1), shard(1, 1.8, encoding=0.8, graph=0.2)],
            "workers are busy encoding batches: fewer, larger tensors are encoded faster; "
            "about 2 more workers would keep up",
        ),
        (
            [shard(0, 2.0, wire=0.8, graph=0.1), shard(1, 1.8, wire=0.9, graph=0.1)],
            "the network brings 5.0 MB/s, and batches are under way for 85 % of the workers' time: send less (uint8 "
            "instead of float32, crops instead of images), or have a faster link",
        ),
        (
            [shard(0, 2.0, replay=0.9), shard(1, 1.8, replay=0.8)],
            "workers replay what had arrived before, after a loss or from a checkpoint; that ends by itself",
        ),
        (
            [shard(0, 2.0, credit=0.6, graph=0.3), shard(1, 1.8, credit=0.7, graph=0.3)],
            "although the workers wait for credit 65 % of theirs: batches come unevenly, or the window is too small: "
            "raise worker_prefetch_cnt, or prefetch_bytes",
        ),
        (
            [shard(0, 0.1, graph=0.3, credit=0.7), shard(1, 3.7, graph=1.0), shard(2, 0.0, graph=0.2, credit=0.8)],
            "one slow shard, worker 1 on cpu1:5555, holds the others up (it is busy in the graph); its part of the "
            "data, its machine or its link is slower than the others': in_order=False does not wait for it",
        ),
        (
            [shard(0, 3.7, wire=0.9, graph=0.1), shard(1, 0.1, graph=0.1, credit=0.9)],
            "one slow shard, worker 0 on cpu0:5555, holds the others up (its batches are long under way); its part of "
            "the data, its machine or its link is slower than the others': in_order=False does not wait for it",
        ),
    ],
)
def test_the_verdict_says_why_the_training_waits(shards: list[WorkerStatistics], words: str) -> None:
    assert verdict(0.38, *shards) == WAITS + words


def test_one_shard_that_replays_is_not_slow() -> None:
    text = (
        "worker 1 on cpu1:5555 replays what had arrived before, after a loss or from a checkpoint; that ends by itself"
    )
    assert verdict(0.38, shard(0, 0.1, credit=0.9), shard(1, 3.7, replay=1.0)) == WAITS + text


@pytest.mark.parametrize("state", ["vacant", "starting"])
def test_a_shard_that_was_lost_and_does_not_run_is_why(state: str) -> None:
    lost = replace(shard(1, 3.7), state=state)
    assert (
        verdict(0.38, shard(0, 0.1, credit=0.9), lost) == WAITS + "worker 1, lost on cpu1:5555, does not run again yet"
    )


def test_a_window_ends_though_no_daemon_reports_any_more(recorder: Session) -> None:
    for second in range(3):
        recorder.report([report(0)], 101.0 + second)
    recorder.consume(0, 300)
    assert snapshot(recorder, 103.0 + 2 * WINDOW_S).seconds == 2 * WINDOW_S


def test_one_shard_that_all_waiting_is_for_is_not_slow_if_all_are_as_busy() -> None:
    """In lock step the second one's batch is always there when the first one's has come."""
    assert "workers are busy in the graph" in verdict(0.38, shard(0, 3.8, graph=1.0), shard(1, 0.0, graph=0.9))


def test_out_of_order_a_shard_that_others_need_not_wait_for_is_not_advised_against() -> None:
    slow = verdict(0.38, shard(0, 3.8, graph=0.9), shard(1, 0.0, graph=0.1), in_order=False)
    assert "one slow shard, worker 0" in slow
    assert "in_order" not in slow


def test_a_training_that_hardly_ever_finds_a_batch_needs_far_more() -> None:
    assert verdict(0.97, shard(0, 9.7, graph=1.0)).endswith("the training needs far more than 1 worker")


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        (
            [shard(n, graph=0.3, credit=0.7) for n in range(4)],
            "the training step keeps the workers waiting 70 % of their time; about 2 of these 4 workers would keep up",
        ),
        ([shard(0, graph=0.3, credit=0.7)], "the training step keeps the workers waiting 70 % of their time"),
        ([shard(0, graph=0.9, credit=0.1)], "the workers keep up, with little to spare"),
    ],
)
def test_a_training_that_hardly_waits_is_told_whether_it_has_too_many(shards: list[Any], words: str) -> None:
    assert verdict(0.02, *shards) == f"training waits for data 2 % of the time: {words}"


def test_a_dispatching_worker_that_is_always_busy_is_named() -> None:
    shards = [shard(0, 3.8, graph=0.9), shard(1, 0.0, graph=0.9)]
    assert verdict(0.38, *shards, shard(2, graph=0.95), dispatching=1) == (
        f"{WAITS}the dispatching worker on cpu2:5555, through which every element goes, is busy 95 % of its time: let "
        "less be done before sharding_round_robin_dispatch, and more after it"
    )
    assert "dispatching" not in verdict(0.38, *shards, shard(2, graph=0.2), dispatching=1)


# ---------------------------------------------------------------------------------------------------- to be read


def test_it_is_printed_as_a_table_of_eighty_columns() -> None:
    workers = (shard(0, graph=0.97, encoding=0.02, credit=0.01), shard(1, graph=0.2, replay=0.3, wire=0.5))
    text = str(Statistics(3, 10.0, 1234, 50_000_000, 123.4, 3.8, 0.38, 1, 1, workers, "the verdict"))
    assert text.splitlines() == [
        "epoch 3, 10 s: 1,234 batches, 123.4 batches/s, 5.0 MB/s; 1 worker lost, 1 recovered",
        "the verdict",
        "worker  address    state       batches/s     MB/s  graph  encode  credit   wire",
        "     0  cpu0:5555  running           1.0      0.1   97 %     2 %     1 %    0 %",
        "     1  cpu1:5555  running           1.0      0.1   50 %     0 %     0 %   50 %",
    ]
    assert "lost" not in str(replace(NOTHING, epoch=1, workers=workers))


def test_before_the_first_epoch_the_verdict_is_all_that_is_printed() -> None:
    assert str(NOTHING) == (
        "this reading service has not been initialized; DataLoader2 uses a copy: ask loader.reading_service"
    )
