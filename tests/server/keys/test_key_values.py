"""Keys as values: what is accepted and what is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from holdfast.server.keys.values import (
    Key,
    Limits,
    Secret,
    check_secret,
    digest_of,
    new_secret,
    seconds_of,
    tenant_of_secret,
)

FIELDS: dict[str, Any] = {"name": "a", "tenant": "t", "scopes": ("use",), "created": 0.0}


@pytest.mark.parametrize(("text", "seconds"), [("90d", 7776000), ("12h", 43200), ("1.5m", 90), ("45s", 45)])
def test_durations_have_a_unit(text: str, seconds: float) -> None:
    assert seconds_of(text, "expires") == seconds


@pytest.mark.parametrize("text", ["90", "d", "-1d", "1y", "1d2h", "inf", ""])
def test_other_durations_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="expires is"):
        seconds_of(text, "expires")


@pytest.mark.parametrize("changes", [
    {"name": ""}, {"name": "a b"}, {"name": "x" * 64}, {"name": "-a"}, {"tenant": ""}, {"tenant": "a/b"},
    {"scopes": ()}, {"scopes": ("use", "root")},
])  # fmt: skip
def test_a_key_with_an_invalid_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="key"):
        Key(**{**FIELDS, **changes})


def test_a_tenant_may_be_a_digest() -> None:
    assert Key(**{**FIELDS, "tenant": tenant_of_secret("x")}).tenant == tenant_of_secret("x")


@pytest.mark.parametrize("value", [0, -1, 1 << 53])
def test_a_limit_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"streams is {value}"):
        Limits(streams=value)


def test_a_key_ends_when_it_expires_or_is_revoked() -> None:
    assert Key(**FIELDS).valid(1e12)
    assert Key(**FIELDS, expires=5.0).valid(4.9)
    assert not Key(**FIELDS, expires=5.0).valid(5.0)
    assert not Key(**FIELDS, revoked=5.0).valid(0.0)


def test_a_secret_ends_before_its_key_at_the_earliest_of_both() -> None:
    key = Key(**FIELDS, expires=5.0)
    assert Secret(key, 3.0).valid(2.9) and not Secret(key, 3.0).valid(3.0)
    assert not Secret(key, 9.0).valid(5.0)


def test_new_secrets_differ_and_pass_their_own_check() -> None:
    made = {new_secret() for _ in range(100)}
    assert len(made) == 100 and all(len(each) == 55 for each in made)
    assert {check_secret(f" {each}\n") for each in made} == made


@pytest.mark.parametrize("secret", ["", " ", "a b", "a,b", "é", "a\nb"])
def test_a_secret_that_no_header_carries_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII"):
        check_secret(secret)


def test_the_tenant_of_a_key_is_that_of_earlier_versions() -> None:
    """Conversations of earlier versions are stored under this digest."""
    expected = hashlib.sha256(b"holdfast tenant\0" + b"sesame").hexdigest()
    assert tenant_of_secret("sesame") == expected
    assert digest_of(b"sesame") != expected
