"""The queue of one model: its order, and whose turn it is."""

from anvil_mux.config.config import Config
from anvil_mux.scheduler.model import ModelQueue
from anvil_mux.scheduler.slot import Ticket
from tests.scheduler.driver import A, B
from tests.scheduler.fleet import Fleet


def queue_of(*senders):
    """A queue with a ticket from each sender, numbered and one second apart."""
    queue = ModelQueue()
    for number, sender in enumerate(senders, 1):
        queue.join(Ticket(number, "m", float(number), sender=sender))
    return queue


def numbers(queue):
    return [ticket.id for ticket in queue]


def anybody(ticket):
    return True


def test_who_comes_back_comes_last_and_who_leaves_takes_nobodys_turn():
    queue = queue_of("a", "a", "b", "c")
    assert queue.take(anybody).id == 1
    queue.leave(next(ticket for ticket in queue if ticket.id == 3))
    queue.join(Ticket(5, "m", 5.0, sender="b"))
    assert [queue.take(anybody).id for _ in range(3)] == [4, 2, 5]
    queue.join(Ticket(6, "m", 6.0, sender="x"))
    queue.clear()
    queue.join(Ticket(7, "m", 7.0, sender="y"))
    assert queue.take(anybody).id == 7


def test_a_turn_goes_to_the_first_that_can_use_it():
    queue = queue_of("a", "b", "a")
    assert queue.take(lambda ticket: ticket.id == 9) is None
    assert [queue.take(lambda ticket: ticket.id > 1).id for _ in range(2)] == [3, 2]
    assert queue.take(lambda ticket: ticket.id > 1) is None
    assert queue.take(anybody).id == 1


def test_who_wants_no_lease_has_no_turn():
    queue = queue_of()
    queue.join(Ticket(1, "m", 0.0, takes_lease=False))
    assert queue.take(anybody) is None
    assert numbers(queue) == [1]


def test_a_queue_that_goes_on_after_a_reload_keeps_who_waits_and_is_overdue_no_later():
    fleet = Fleet(A, B, max_wait=30.0)
    fleet.request("a", 0.0)
    fleet.request("b", 1.0)
    queue = fleet.core.layout.models["b"].queue
    for most, overdue_at in ((60.0, 31.0), (5.0, 6.0)):
        fleet.core.reconfigured(Config((A, B), policy="eager", max_wait=most), 2.0)
        assert (numbers(queue), queue.overdue_at) == ([2], overdue_at)
