"""with_ids: an engine's activity with other ids in place of its requests' ids."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from holdfast.engine.activity import StepRecord
from holdfast.engine.messages import Activity
from holdfast.lm.scheduler.queue_report import QueueReport


def with_ids(activity: Activity, rename: Callable[[str], str]) -> Activity:
    """A copy of a report in which `rename` has replaced each request's id."""
    queues = activity.queues
    return msgspec.structs.replace(
        activity,
        steps=[_step(step, rename) for step in activity.steps],
        blocks=[row._replace(request=rename(row.request)) for row in activity.blocks],
        queues=None if queues is None else _queues(queues, rename),
    )


def _step(step: StepRecord, rename: Callable[[str], str]) -> StepRecord:
    chunks = [each._replace(request=rename(each.request)) for each in step.chunks]
    return msgspec.structs.replace(step, chunks=chunks, preempted=[rename(id) for id in step.preempted])


def _queues(queues: QueueReport, rename: Callable[[str], str]) -> QueueReport:
    first = tuple([each._replace(id=rename(each.id)) for each in queues.first])
    return queues._replace(first=first, rows=tuple([each._replace(id=rename(each.id)) for each in queues.rows]))
