"""An engine's mail: letters in order, each client its own, and nobody waits for one that has stopped."""

from __future__ import annotations

import functools
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.output import EngineCoreOutput
from engine.serving.engine_mailbox import EngineMailbox, Outbox
from engine.serving.letters import Admission, Dead, EngineCoreOutputs, EngineCoreRequestType, SchedulerStats
from engine.serving.mailbox import Mailbox
from engine.serving.wire import frame, loads
from support.mailboxes import mailbox, nobody_waits, read_letters
from support.small_requests import request_of

ADD, ABORT = EngineCoreRequestType.ADD, EngineCoreRequestType.ABORT
START_DP_WAVE = EngineCoreRequestType.START_DP_WAVE


def test_a_name_that_another_client_has_is_refused_until_it_ends():
    """Or one would be sent the answer of the other."""
    with mailbox() as (box, (one, two, _)):
        one.sendall(frame((ADD, request_of([1, 2]))))
        assert [kind for kind, _ in box.receive(1)] == [ADD]
        two.sendall(frame((ADD, request_of([3, 4]))))
        assert box.receive(1) == [(START_DP_WAVE, None)] and box.owner == {"r": 0}, "others were told of a request"
        letter = loads(two.recv(1 << 16)[4:])
        assert letter.refused == {"r": "request_id 'r': is in use"}
        one.sendall(frame((ABORT, ["r"])))
        box.receive(1)
        two.sendall(frame((ADD, request_of([3, 4]))))
        assert [kind for kind, _ in box.receive(1)] == [ADD] and box.owner == {"r": 1}


def test_a_letter_may_come_in_pieces():
    with mailbox() as (box, (client, *_)):
        data = frame((ADD, request_of([1, 2])))
        for piece in (data[:3], data[3:9]):
            client.sendall(piece)
            assert box.receive(0) == []
        client.sendall(data[9:] + frame((ABORT, ["r"])) + b"\0")
        (_, request), abort = box.receive(0)
        assert request.prompt_token_ids == [1, 2] and abort == (ABORT, ["r"])


def test_requests_end_with_a_client_that_is_found_gone_by_writing_to_it():
    """Not by reading: its end comes between the last look into the mail and the step's answer."""
    with mailbox() as (box, (first, second, _)):
        for name, client in (("r", first), ("s", second)):
            client.sendall(frame((ADD, request_of([1, 2], name))))
        assert len(box.receive(20)) == 2
        first.close()
        box.send(EngineCoreOutputs([EngineCoreOutput("r", [5])]))
        assert box.receive(0) == [(ABORT, ["r"])] and list(box.owner) == ["s"] and box.receive(0) == []


def test_a_client_that_has_stopped_holds_up_nobody_and_reads_everything_in_the_end():
    Outputs, Stats = EngineCoreOutputs, SchedulerStats
    output = EngineCoreOutput
    with mailbox() as (box, (stopped, other, coordinator)), nobody_waits(stopped, coordinator):
        for name, client in (("s", stopped), ("o", other)):
            client.sendall(frame((ADD, request_of([1, 2], name))))
        assert len(box.receive(20)) == 2
        for i in range(300):
            box.send(Outputs([output("s", [i] * 2000)]))
        waiting = len(box.clients[0].unsent)
        for i in range(2000):  # what only says how things are does not pile up, however long nobody reads it
            box.send(Outputs(scheduler_stats=Stats(i, 0, 0.0)))
        assert waiting > 100_000 and len(box.clients[0].unsent) == waiting and box.clients[0].state
        assert len(box.coordinator.unsent) < 1000 and box.coordinator.state and box.receive(0) == []
        with ThreadPoolExecutor(3) as reading:
            heard = [reading.submit(read_letters, sock) for sock in (stopped, other, coordinator)]
            while box.pending():
                assert box.receive(0.05) == []
            box.send(Outputs([output("o", [7] * (1 << 20))]))  # more than a socket holds: it waits for `close`
            box.send(Dead("the end"))
            box.close(), box.coordinator.sock.shutdown(socket.SHUT_WR)
            (*pieces, state, end), (*_, last, _), (*_, counts) = [future.result(20) for future in heard]
    assert [x.outputs[0].new_token_ids[0] for x in pieces] == list(range(300))
    assert state.scheduler_stats == Stats(1999, 0, 0.0) and end == Dead("the end")
    assert len(last.outputs[0].new_token_ids) == 1 << 20 and counts == (1, [0, 1999, 0.0])


def test_it_waits_for_a_letter_no_longer_than_it_is_asked_to():
    with mailbox() as (box, (client, *_)):
        start = time.monotonic()
        assert box.receive(0.05) == [] and time.monotonic() - start > 0.04
        client.sendall(frame((ABORT, ["r"])))
        start = time.monotonic()
        assert box.receive(20) == [(ABORT, ["r"])] and time.monotonic() - start < 10
        threading.Timer(0.05, lambda: client.sendall(frame((ABORT, ["s"])))).start()
        assert box.receive(None) == [(ABORT, ["s"])]


@pytest.mark.parametrize("end", ["aborted", "finished", "refused"])
def test_a_name_is_free_when_its_request_has_ended(end):
    with mailbox() as (box, (a, b, _)):
        a.sendall(frame((ADD, request_of([1], "x"))))
        assert len(box.receive(0)) == 1
        if end == "aborted":
            a.sendall(frame((ABORT, ["x"])))
            box.receive(0)
        elif end == "finished":
            box.send(EngineCoreOutputs([EngineCoreOutput("x", [5], "length")]))
        else:
            box.send(EngineCoreOutputs(refused={"x": "too long"}))
        b.sendall(frame((ADD, request_of([2], "x"))))
        assert [kind for kind, _ in box.receive(0)] == [ADD]


def test_the_coordinator_hears_of_queues_not_of_steps():
    with mailbox() as (box, (*_, coordinator)):
        for stats in ((1, 2, 0.5), (1, 1, 0.6, 1), (1, 0, 0.6, 3)):  # those that are passed over wait, too
            box.send(EngineCoreOutputs(scheduler_stats=SchedulerStats(*stats)))
        found = Mailbox(coordinator).receive(0)
        assert found == [(1, [2, 1, 0.5]), (1, [3, 1, 0.6])], "waiting before running"


def test_a_step_for_nobody_is_told_to_all_and_one_for_the_dead_to_none():
    with mailbox() as (box, _):
        empty = EngineCoreOutputs(scheduler_stats=SchedulerStats(0, 0, 0.0))
        assert box.split(empty) == {0: empty, 1: empty}
        assert box.split(EngineCoreOutputs([EngineCoreOutput("unknown", [5])])) == {}
        box.owner |= {"mine": 0, "yours": 1}
        parts = box.split(EngineCoreOutputs(preempted=["mine", "gone"]))
        assert {index: part.preempted for index, part in parts.items()} == {0: ["mine"]}


def letter(kind, content):
    return frame((kind, content))


@pytest.mark.parametrize(
    "said",
    [(1 << 31).to_bytes(4, "big"), b"\0\0\0\1.", b"\0\0\0\4junk", frame(7), frame((1, 2, 3)),
     letter(EngineCoreRequestType.ADD, 5), letter(EngineCoreRequestType.ABORT, 5),
     letter(EngineCoreRequestType.UTILITY, ()), frame(functools.partial(print))],
)  # fmt: skip
def test_a_client_that_sends_no_letter_is_gone_and_the_others_are_served(said):
    """Its length is bounded, its pickle names nothing but letters, and what it says it says to its own connection."""
    (good, ours), (bad, theirs) = socket.socketpair(), socket.socketpair()
    with good, ours, bad, theirs:
        mailbox = EngineMailbox([ours, theirs], None, 0)
        mailbox.owner["theirs"] = 1
        bad.sendall(said)
        abort = EngineCoreRequestType.ABORT
        assert mailbox.receive(5) == [(abort, ["theirs"])] and [*mailbox.clients] == [0]
        good.sendall(letter(abort, ["x"]))
        assert mailbox.receive(5) == [(abort, ["x"])]


def test_each_client_gets_its_part_of_everything_in_a_letter():
    with mailbox() as (box, _):
        box.owner |= {"mine": 0, "yours": 1}
        parts = box.split(EngineCoreOutputs(
            [EngineCoreOutput(name, [5]) for name in ("mine", "yours", "gone")],
            admitted={name: Admission(0.5, 16, 0) for name in ("mine", "gone")},
        ))  # fmt: skip
        assert {i: [o.request_id for o in part.outputs] for i, part in parts.items()} == {0: ["mine"], 1: ["yours"]}
        assert parts[0].admitted == {"mine": Admission(0.5, 16, 0)} and parts[1].admitted == {}


def test_letters_arrive_in_the_order_they_were_sent_in_whatever_they_say():
    """How things were must not be read after what came of it."""
    ours, theirs = socket.socketpair()
    box, big = Outbox(ours), Dead("x" * (1 << 21))  # more than a socket holds
    with nobody_waits(theirs), ThreadPoolExecutor(1) as pool:
        then = Dead("then")
        for letter, is_state in ((big, False), ([1], True), ([2], True), (then, False), ([3], True)):
            box.put(letter, is_state)
        heard = pool.submit(read_letters, theirs)
        while box.pending:
            box.flush()
        ours.close()
        assert heard.result(20) == [big, [2], then, [3]]


def test_nothing_waits_for_a_reader_that_has_gone():
    """Or `select` would call its socket ready for ever, and an idle engine would spin."""
    with mailbox() as (box, (*_, coordinator)):
        coordinator.close()
        for i in range(2):
            box.send(EngineCoreOutputs(scheduler_stats=SchedulerStats(i, 0, 0.0)))
        assert box.coordinator.gone and not box.pending()
