"""Orders: class before arrival, arrival before number."""

from dataclasses import replace

from holdfast.scheduler.priority import priority
from tests.scheduling import create_requests, create_scheduler, spans


def test_the_class_goes_before_the_arrival_and_the_arrival_before_the_number():
    (request,) = create_requests(3)
    urgent = replace(request, priority=-1, arrival=9.0)
    early = replace(request, arrival=1.0)
    late = replace(request, arrival=2.0)
    ranks = [priority(urgent, 3), priority(early, 2), priority(late, 0), priority(late, 1)]
    assert ranks == sorted(ranks)


def test_waiting_requests_start_by_class_then_first_come_first_served():
    scheduler = create_scheduler()
    requests = create_requests(2, 2, 2, 2)
    for request, level in zip(requests, (1, 0, 1, 0), strict=True):
        scheduler.add(replace(request, priority=level))
    assert [name for name, _, _ in spans(scheduler.schedule(0.0))] == ["1", "3", "0", "2"]
