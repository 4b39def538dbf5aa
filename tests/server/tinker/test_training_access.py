"""Scopes of API keys for Tinker's protocol: training needs `adapters`, sessions and futures any of three."""

from __future__ import annotations

import pytest

from holdfast.server.routes.access import scopes_for


@pytest.mark.parametrize("path", ["forward_backward", "create_model", "training_runs/m/checkpoints/weights/a/ttl"])
def test_training_needs_the_scope_adapters(path: str) -> None:
    assert scopes_for("POST", f"/api/v1/{path}") == ("adapters", "operator")


@pytest.mark.parametrize("path", ["create_session", "retrieve_future", "client/config", "asample"])
def test_sessions_and_futures_are_for_keys_that_train_or_generate(path: str) -> None:
    assert scopes_for("POST", f"/api/v1/{path}") == ("use", "adapters", "operator")
