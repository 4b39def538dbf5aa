"""The options of the server: an invalid one is refused with its value and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.server.config import ServerConfig


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"root_path": "llm"}, "root_path is llm; it must look like /llm"),
        ({"root_path": "/llm/"}, "without / at its end"),
        ({"root_path": "/a b"}, "must look like /llm"),
        ({"allowed_origin": ("app.example",)}, "allowed_origin is app.example; it must look like https://app.example"),
        ({"allowed_origin": ("https://app.example/",)}, "must look like"),
        ({"ssl_keyfile": "key.pem"}, "ssl_keyfile is key.pem, and there is no ssl_certfile"),
        ({"port": 65536}, "port is 65536; it must lie between 0 and 65535"),
    ],
)
def test_invalid_options_are_refused(given: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError) as refused:
        ServerConfig(**given)
    assert part in str(refused.value)


@pytest.mark.parametrize("root_path", ["", "/llm", "/a/b-c.d_e~f"])
def test_a_root_path_may_have_several_parts(root_path: str) -> None:
    assert ServerConfig(root_path=root_path).root_path == root_path
