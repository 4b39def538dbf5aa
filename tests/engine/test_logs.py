"""Logs in JSON: one object on one line for each record, from every process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys

from holdfast.engine.logs import FORMAT_VARIABLE, JsonFormatter, fields


def formatted(message: str, *values: object, extra: dict[str, object] | None = None, **record: object) -> str:
    """Return a record's line."""
    made = logging.LogRecord("holdfast.test", logging.WARNING, "file.py", 1, message, values, None)
    for name, value in {**(extra or {}), **record}.items():
        setattr(made, name, value)
    return JsonFormatter().format(made)


class TestFormat:
    """The form of one record."""

    def test_a_record_is_one_line_with_utc_time_level_logger_and_message(self) -> None:
        line = formatted("two\nlines of %s", "text", created=1_700_000_000.25)
        assert "\n" not in line
        assert json.loads(line) == {
            "time": "2023-11-14T22:13:20.250Z",
            "level": "warning",
            "logger": "holdfast.test",
            "message": "two\nlines of text",
        }

    def test_fields_are_those_of_the_object_and_may_replace_the_message(self) -> None:
        found = json.loads(formatted("ready", extra=fields(url="http://a", seconds=0.5, message="up")))
        assert (found["url"], found["seconds"], found["message"]) == ("http://a", 0.5, "up")

    def test_an_exception_is_a_field_on_the_same_line(self) -> None:
        try:
            raise KeyError("lost")
        except KeyError:
            line = formatted("failed", exc_info=sys.exc_info())
        assert "\n" not in line
        assert json.loads(line)["exception"].endswith("KeyError: 'lost'")

    def test_a_value_that_json_does_not_know_is_shown_as_text(self) -> None:
        assert json.loads(formatted("x", extra=fields(error=ValueError("bad"))))["error"] == "bad"


def lines(code: str, **environment: str) -> list[str]:
    """Run code in a process of its own. Returns the lines of its standard error."""
    found = {name: each for name, each in os.environ.items() if name != FORMAT_VARIABLE} | environment
    done = subprocess.run([sys.executable, "-c", IMPORTS + code], capture_output=True, text=True, env=found, check=True)
    return done.stderr.splitlines()


IMPORTS = "import logging, os, subprocess, sys, warnings\nfrom holdfast.engine.logs import log_as, log_as_parent\n"
FROM_ENGINE = "log_as_parent(); logging.getLogger('holdfast.engine').warning('from the engine')"


class TestConfiguration:
    """`log_as`, and the processes that are started afterwards."""

    def test_json_also_has_warnings_of_other_packages(self) -> None:
        shown = [
            json.loads(line)
            for line in lines(
                "log_as('json', 'info')\n"
                "logging.getLogger('holdfast.server').info('hello')\n"
                "logging.getLogger('other').info('not shown')\n"
                "warnings.warn('old name')\n"
            )
        ]
        assert [each["logger"] for each in shown] == ["holdfast.server", "py.warnings"]

    def test_text_begins_with_the_name_and_leaves_out_lower_levels(self) -> None:
        code = "log = logging.getLogger('holdfast.server'); log.warning('hello'); log.info('not shown')"
        assert lines(f"log_as('text', 'warning'); {code}") == ["holdfast: hello"]

    def test_text_has_the_time_if_asked(self) -> None:
        code = "log_as('text', 'info', timed=True); logging.getLogger('holdfast.server').info('hello')"
        (line,) = lines(code)
        assert line.startswith("20") and line.endswith(" holdfast: hello")

    def test_a_process_that_is_started_later_writes_json_too(self) -> None:
        child = f"subprocess.run([sys.executable, '-c', {IMPORTS + FROM_ENGINE!r}])"
        (line,) = lines(f"log_as('json', 'warning'); {child}")
        assert json.loads(line)["message"] == "from the engine"

    def test_an_engine_of_a_parent_that_writes_text_configures_nothing(self) -> None:
        assert lines(FROM_ENGINE) == lines(FROM_ENGINE, **{FORMAT_VARIABLE: "text"}) == ["from the engine"]

    def test_serve_gives_the_form_to_the_engine_that_it_starts(self) -> None:
        code = (
            "from holdfast.cli.command import main\n"
            "from holdfast.engine import spawn\n"
            "def begin(device):\n"
            f"    raise OSError(os.environ[{FORMAT_VARIABLE!r}])\n"
            "spawn.EngineProcess = begin\n"
            "sys.exit(main(['serve', '--port', '0', '--device', 'cpu', '--log-format', 'json']) - 1)\n"
        )
        assert lines(code) == ["holdfast: json"]
