"""The messages of a worker that have reached the store, as known to all its processes."""

from __future__ import annotations

import os
import threading

from celery_dlock.messaging import receive_order
from celery_dlock.messaging.receive_order import ReceiveOrder

SIZE = receive_order._SIZE
RANK = 2**53 - 1


def test_numbers_are_never_given_twice_and_begin_above_none() -> None:
    """0 is no message."""
    order = ReceiveOrder()
    assert [order.next_number() for _ in range(3)] == [1, 2, 3]


def test_what_was_not_noted_has_not_arrived() -> None:
    order = ReceiveOrder()
    number = order.next_number()
    assert not order.has_recorded(number)
    assert order.rank_us(number) == 0


def test_what_was_noted_has_arrived_at_its_rank() -> None:
    order = ReceiveOrder()
    for number, rank in [(1, 5), (2, RANK), (SIZE - 1, 2**63)]:
        order.record(number, rank)
        assert order.has_recorded(number)
        assert order.rank_us(number) == rank
    assert not order.has_recorded(3)


def test_who_needs_no_place_has_arrived_without_a_rank() -> None:
    order = ReceiveOrder()
    order.record(1, 0)
    assert order.has_recorded(1)
    assert order.rank_us(1) == 0


def test_noting_it_again_keeps_the_first_rank() -> None:
    """As a run does that ends after it began; who has read the rank must not see another."""
    order = ReceiveOrder()
    order.record(1, 5)
    order.record(1, 9)
    assert order.rank_us(1) == 5


def test_one_so_old_that_its_place_was_taken_has_arrived_and_its_rank_is_forgotten() -> None:
    order = ReceiveOrder()
    order.record(7, 5)
    order.record(7 + SIZE, 6)
    assert order.has_recorded(7)
    assert order.rank_us(7) == 0
    assert order.rank_us(7 + SIZE) == 6


def test_a_late_note_of_an_old_one_does_not_undo_a_younger_ones() -> None:
    order = ReceiveOrder()
    order.record(7 + SIZE, 6)
    order.record(7, 5)
    assert order.rank_us(7 + SIZE) == 6
    assert not order.has_recorded(7 + 2 * SIZE)


def test_neighbours_do_not_share_a_place() -> None:
    order = ReceiveOrder()
    for number in range(1, SIZE + 1):
        order.record(number, number * 10)
    assert all(order.rank_us(number) == number * 10 for number in range(1, SIZE + 1))


def test_what_a_child_notes_its_parent_knows_and_the_other_way_round() -> None:
    """Mapped before the fork, without a message or a lock."""
    order = ReceiveOrder()
    order.record(1, 11)
    told_read, told_write = os.pipe()
    child = os.fork()
    if not child:
        order.record(2, order.rank_us(1) + 1)
        os.read(told_read, 1)
        os._exit(0 if order.rank_us(3) == 33 else 1)
    order.record(3, 33)
    os.write(told_write, b"x")
    _, status = os.waitpid(child, 0)
    os.close(told_read)
    os.close(told_write)
    assert os.waitstatus_to_exitcode(status) == 0
    assert order.has_recorded(2)
    assert order.rank_us(2) == 12


def test_two_orders_are_two() -> None:
    one, other = ReceiveOrder(), ReceiveOrder()
    one.record(1, 5)
    assert not other.has_recorded(1)


def test_who_reads_while_others_write_sees_a_rank_of_that_number_or_none() -> None:
    """The rank is written before the number that says whose it is."""
    order, wrong, over = ReceiveOrder(), [], threading.Event()

    def read() -> None:
        while not over.is_set():
            numbers = (1 + SIZE * turn for turn in range(50))
            wrong.extend(number for number in numbers if order.rank_us(number) not in {0, number * 3})

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(200):
        for turn in range(50):
            order.record(1 + SIZE * turn, (1 + SIZE * turn) * 3)
    over.set()
    reader.join(10)
    assert not wrong
