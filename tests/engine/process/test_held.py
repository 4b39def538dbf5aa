"""HeldRequests: how long requests are held without a client, and what is dropped when there is no more room."""

from __future__ import annotations

from typing import Any

from holdfast.core.types import FinishReason, Identity, Request, SamplingParams, SequenceOutput, TokenLogprobs
from holdfast.engine.process.held import ENDED_SECONDS, GRACE_SECONDS, LOGPROBS_COST, HeldRequest, HeldRequests


def held(own_id: str, prompt: int = 2, owner: int = 1, tenant: str = "") -> HeldRequest:
    request = Request(own_id, tuple(range(prompt)), SamplingParams(max_tokens=4), identity=Identity("m", tenant=tenant))
    return HeldRequest(f"{owner}:{own_id}", request, b"note", owner)


def output(id: str, *tokens: int, reason: FinishReason | None = None, **more: Any) -> SequenceOutput:
    return SequenceOutput(id, tokens, reason, 7, 1.0, **more)


def test_a_held_request_has_all_tokens_of_its_answer_and_the_figures_of_its_first_step() -> None:
    requests, one = HeldRequests(), held("a")
    requests.add(one)
    requests.take(output("1:a", 5, cached_by_tier=(1, 2, 4)), now=1.0)
    requests.take(output("1:a", 6, 7, reason=FinishReason.LENGTH)._replace(cached_tokens=0), now=2.0)
    requests.take(output("1:other", 9), now=3.0)
    assert [*one.tokens] == [5, 6, 7]
    assert (one.first.cached_tokens, one.first.cached_by_tier) == (7, (1, 2, 4))
    assert (one.finish_reason, one.ended_at) == (FinishReason.LENGTH, 2.0)


def test_a_request_is_found_by_its_own_tenant_alone() -> None:
    requests, one = HeldRequests(), held("a", tenant="ada")
    requests.add(one)
    assert requests.find("ada", "a") is one
    assert requests.find("ben", "a") is None and requests.find("ada", "b") is None


def test_a_lost_request_is_due_after_its_grace_and_an_adopted_one_is_not() -> None:
    requests, lost, adopted = HeldRequests(), held("lost"), held("adopted")
    for each in (lost, adopted):
        requests.add(each)
        each.lose(10.0)
    adopted.move(2)
    assert [*requests.due(10.0 + GRACE_SECONDS)] == []
    assert [*requests.due(10.1 + GRACE_SECONDS)] == [lost]
    assert requests.find("", "lost") is None and requests.of(2) == [adopted] and requests.of(1) == []


def test_an_ended_request_is_held_for_late_readers_and_then_dropped_without_an_abort() -> None:
    requests, one = HeldRequests(), held("a")
    requests.add(one)
    requests.take(output("1:a", 5, reason=FinishReason.STOP), now=10.0)
    one.lose(11.0)
    assert [*requests.due(10.0 + ENDED_SECONDS)] == [] and requests.find("", "a") is one
    assert [*requests.due(10.1 + ENDED_SECONDS)] == [], "nothing runs that could be aborted"
    assert requests.find("", "a") is None


def test_a_request_counts_once_for_each_of_its_tokens() -> None:
    requests = HeldRequests(limit=12)
    requests.add(held("a", 2))
    for token in (5, 6, 7):
        requests.take(output("1:a", token), now=1.0)
    assert requests.add(held("b", 7)) and not requests.add(held("c", 1))


def test_requests_that_ended_first_make_room_and_running_ones_stay() -> None:
    requests, running, first, last = HeldRequests(limit=12), held("running", 4), held("first", 4), held("last", 3)
    for each in (running, first, last):
        assert requests.add(each)
    last.end(2.0)
    first.end(1.0)
    assert requests.add(held("new", 3))
    assert requests.find("", "first") is None and requests.find("", "last") is last
    assert not requests.add(held("long", 9)), "the running ones leave no room for it"
    assert requests.find("", "running") is running and requests.find("", "long") is None


def test_log_probabilities_count_for_the_limit() -> None:
    requests, ended = HeldRequests(limit=LOGPROBS_COST + 4), held("ended")
    requests.add(ended)
    requests.take(output("1:ended", 5, reason=FinishReason.LENGTH), now=1.0)
    requests.add(held("a"))
    requests.take(output("1:a", 5, logprobs=(TokenLogprobs(-1.0, (), ()),)), now=2.0)
    assert requests.find("", "ended") is None, "it made room for them"


def test_a_dropped_request_leaves_its_room_to_others() -> None:
    requests, one = HeldRequests(limit=6), held("a", 6)
    for _ in range(3):
        assert requests.add(one)
        requests.drop(one)
        requests.drop(one)
    assert requests.add(held("b", 6))


def test_a_request_under_the_same_id_replaces_one_that_has_lost_its_client() -> None:
    requests, old, new = HeldRequests(limit=4), held("a"), held("a", owner=2)
    assert requests.add(old) and not requests.add(new), "it has a client"
    assert requests.get("1:a") is old
    old.lose(1.0)
    assert requests.add(new)
    assert requests.find("", "a") is new and requests.get("1:a") is None
    assert requests.add(held("b")), "the earlier one takes no room"
