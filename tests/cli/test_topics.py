"""The topics of options name only existing options, each once."""

from __future__ import annotations

from dataclasses import fields

import pytest

from holdfast.cli.chat import ChatConfig
from holdfast.cli.topics import COMMON, TOPICS, common, titled
from holdfast.core.config import AppConfig
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig


@pytest.mark.parametrize("config", [EngineConfig, ServerConfig, AppConfig])
def test_topics_and_common_options_exist_and_are_listed_once(config: type) -> None:
    names = {field.name for field in fields(config)}
    in_topics = [name for members in TOPICS.get(config.__name__, {}).values() for name in members]
    assert set(in_topics) | set(COMMON[config.__name__]) <= names
    assert len(set(in_topics)) == len(in_topics)


def test_options_without_a_topic_come_last_under_the_configs_own_title() -> None:
    assert titled(EngineConfig, "the engine", ["new_option", "device", "tuning"]) == [
        ("the engine: the model", ["device"]),
        ("the engine: tuning", ["tuning"]),
        ("the engine", ["new_option"]),
    ]


def test_a_config_without_a_choice_shows_all_of_its_options() -> None:
    assert common(ChatConfig, ["url", "load"]) == ["url", "load"]
    assert common(ServerConfig, ["port", "idle_seconds"]) == ["port"]
