"""The `usage` object of replies."""

from holdfast.server.replies import RequestUsage


def test_cached_tokens_are_reported_by_tier_if_any_came_from_another_tier_than_the_device():
    usage = RequestUsage(prompt_tokens=100, cached_tokens=64)
    assert usage.reply()["prompt_tokens_details"] == {"cached_tokens": 64}
    usage.add_tiers((16, 32, 0))
    assert usage.reply()["prompt_tokens_details"] == {
        "cached_tokens": 64,
        "cached_tokens_by_tier": {"device": 16, "host": 16, "disk": 32, "remote": 0},
    }
