"""VectorPart: an embedding comes with the token of its request, and to nobody else."""

from dataclasses import replace

from holdfast.lm.parts.vectors.values import VectorResult
from tests.scheduling import answer, create_requests, create_scheduler


def test_an_embedding_goes_to_the_request_that_asks():
    scheduler = create_scheduler()
    plain, asking = create_requests(3, 4, max_tokens=1)
    scheduler.add(plain)
    scheduler.add(replace(asking, params=replace(asking.params, embed=True)))
    plan = scheduler.schedule(0.0)
    outputs = scheduler.update(plan, answer(plan).with_parts(VectorResult((b"", b"state"))), 0.0)
    assert [(output.request_id, output.tokens, output.vector) for output in outputs] == [
        ("0", (7,), b""),
        ("1", (7,), b"state"),
    ]


def test_an_aborted_request_gets_no_embedding():
    scheduler = create_scheduler()
    (request,) = create_requests(3, max_tokens=1, embed=True)
    scheduler.add(request)
    plan = scheduler.schedule(0.0)
    scheduler.abort(request.id)
    assert not list(scheduler.update(plan, answer(plan).with_parts(VectorResult((b"state",))), 0.0))
