"""The queue of one model: its order, its bound, and whose turn it is."""

from math import inf

from anvil_mux.scheduler.model import FairQueue, ModelQueue
from anvil_mux.scheduler.slot import Ticket


def queue_of(*senders, limited=True, bound=60.0):
    """A queue with a ticket from each sender, numbered and one second apart."""
    queue = ModelQueue(limited=limited)
    queue.bound = bound
    for number, sender in enumerate(senders, 1):
        queue.join(Ticket(number, "m", float(number), sender=sender))
    return queue


def numbers(queue):
    return [ticket.id for ticket in queue]


def anybody(ticket):
    return True


def test_who_comes_back_comes_last_and_who_leaves_takes_nobodys_turn():
    turns = FairQueue()

    for sender, ticket in ("a1", "a2", "b1", "c1"):
        turns.join(sender, ticket)
    assert turns.take(anybody) == "1"
    turns.leave("b", "1")
    turns.leave("b", "never there")
    turns.join("b", "2")
    assert [turns.take(anybody) for _ in range(3)] == ["1", "2", "2"]
    turns.join("x", "1")
    turns.clear()
    turns.join("y", "9")
    assert turns.take(anybody) == "9"


def test_a_turn_goes_to_the_first_that_can_use_it():
    turns = FairQueue()
    for sender, ticket in ("a1", "b2", "a3"):
        turns.join(sender, ticket)
    assert turns.take(lambda ticket: ticket == "9") is None
    assert [turns.take(lambda ticket: ticket > "1") for _ in range(3)] == ["3", "2", None]
    assert turns.take(lambda ticket: True) == "1"


def test_a_queue_keeps_the_order_in_which_requests_came_and_senders_take_turns_in_it():
    queue = queue_of("a", "a", "b", "a")
    assert numbers(queue) == [1, 2, 3, 4]
    assert [queue.take(anybody).id for _ in range(4)] == [1, 3, 2, 4]
    assert not queue
    assert queue.take(anybody) is None


def test_who_leaves_is_never_taken():
    queue = queue_of("a", "b")
    queue.leave(queue.first)
    assert numbers(queue) == [2]
    assert queue.take(anybody).id == 2
    assert queue.take(anybody) is None


def test_who_wants_no_lease_has_no_turn():
    queue = queue_of()
    queue.join(Ticket(1, "m", 0.0, takes_lease=False))
    assert queue.take(anybody) is None
    assert numbers(queue) == [1]


def test_a_queue_is_overdue_its_bound_after_its_first_request_came():
    assert queue_of("a", "b", bound=30.0).overdue_at == 31.0


def test_while_a_model_is_ready_nobody_waits_for_a_load():
    queue = queue_of("a", bound=30.0)
    queue.left = 100.0
    assert queue.overdue_at == 130.0


def test_a_queue_that_goes_on_keeps_who_waits_and_is_overdue_no_later():
    longer, shorter = queue_of("a", "b", bound=30.0, limited=False), queue_of("a", "b", bound=30.0)
    longer.go_on(limited=True, most=60.0)
    shorter.go_on(limited=False, most=5.0)
    assert (longer.overdue_at, shorter.overdue_at) == (31.0, 6.0)
    assert numbers(longer) == numbers(shorter) == [1, 2]
    assert [longer.take(anybody).id for _ in range(2)] == [1, 2]


def test_a_queue_in_which_nobody_waits_passes_on_no_bound():
    queue = ModelQueue()
    queue.go_on(limited=False, most=60.0)
    assert queue.bound == inf
