"""The engine of an application of cells: finds it, makes its workers, and joins them to the client's messages.

An application has an engine process of its own. So its planning and the code that unfolds its requests share Python's
interpreter with no other application, and the message about a failure names the one that failed.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch

from holdfast.cells import applications
from holdfast.cells.application import Application, UnfoldsMany
from holdfast.cells.cell import Field, sizes_by_type
from holdfast.cells.plan import CellOutput, CellRequest, CellRequests
from holdfast.cells.types import number
from holdfast.cells.workers import Turns, Workers, use_device
from holdfast.core.config import AppConfig
from holdfast.core.device_turns import DeviceTurns
from holdfast.core.stages import Stages
from holdfast.engine import messages
from holdfast.engine.ledger import NO_GPU, DeviceLedger
from holdfast.engine.link import Parent
from holdfast.engine.process.app_profiles import Found, find_profile, measure_profile
from holdfast.engine.process.tensors import pack, unpack

LEAST_TOGETHER = 8
"""Smallest number of requests that are unfolded together. For fewer, that costs more than one by one."""
MOST_TOGETHER = 64
"""Largest number of requests that are unfolded together, so that devices do not wait for more."""
MESSAGE_MARGIN = 1 << 20
"""Bytes of a message that are left for everything besides outputs."""

log = logging.getLogger("holdfast.engine")


class WorkerFailed(RuntimeError):
    """A worker has failed, so nothing runs any longer; the message says why."""


def find(app: str) -> Application:
    """The application of a name, or of module:object. Raises ValueError if there is none, or if it cannot be served."""
    application = applications.find(app)
    for kind, fields in (("input", application.inputs), ("output", application.outputs)):
        names = [field.name for field in fields]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"app {app} has two {kind}s named {twice[0]}; give each its own name")
    return application


def devices_of(config: AppConfig) -> list[str]:
    """The device of each worker: those of the configuration, else the first GPU, or the CPU."""
    if not config.app_device:
        return ["cuda:0" if torch.cuda.is_available() else "cpu"]
    return list(config.devices)


class SharedDevice(Turns):
    """An application's turns on a device, by the news of a language model."""

    def __init__(self, turns: DeviceTurns, ledger: DeviceLedger, device: str) -> None:
        self._turns, self._ledger = turns, ledger
        self._gpu = -1 if device == "cpu" else int(device.partition(":")[2])
        """Number of the GPU; -1 for the CPU."""

    def pause(self, now: float) -> float:
        news = self._ledger.read()
        same = self._gpu < news.gpus if self._gpu >= 0 else news.gpus == NO_GPU
        return self._turns.pause(now, news.working_until if same else 0.0, news.late_until)

    def spent(self, seconds: float) -> None:
        self._turns.spent(seconds)


class AppEngine:
    """An application's requests, from messages to its workers and back. All in one thread but `_note` and `_fail`."""

    def __init__(self, start: messages.StartApp, application: Application, parent: Parent) -> None:
        """Measure the cells if that was asked for, and make them ready. Raises ValueError, MemoryError, OSError."""
        config = start.config
        if start.threads:
            torch.set_num_threads(start.threads)
        self._application, self._config, self._parent = application, config, parent
        self._devices = devices_of(config)
        use_device(self._devices[0])
        types = number(application.cells)
        if start.measure:
            found: Found | None = measure_profile(
                start.app,
                application,
                types,
                self._devices[0],
                start.measure,
                lambda stage: parent.send(messages.Progress(stage)),
            )
        else:
            found = find_profile(start.app, types, self._devices, config.app_profile)
        self._profile_path, measured = ("", None) if found is None else (str(found.path), found.profile.sizes)
        self._sizes = sizes_by_type(types, measured)
        parent.send(messages.Progress("making cells ready"))
        self._ended: SimpleQueue[Sequence[CellOutput]] = SimpleQueue()
        self._failure = ""
        self._ledgers = [DeviceLedger(start.ledger)] if start.ledger else []
        self._share_memory()
        self._workers = Workers(
            application,
            self._devices,
            types=types,
            sizes=self._sizes,
            max_tasks=config.app_max_tasks,
            capacity=config.app_capacity,
            clock=time.monotonic,
            on_outputs=self._note,
            on_failure=self._fail,
            turns=self._turns(),
        )

    def _turns(self) -> dict[str, Turns]:
        """The turns of each device on which a language model may run, too."""
        share = self._config.app_share / max(1, len(self._config.app))
        return {
            device: SharedDevice(DeviceTurns(share), ledger, device)
            for ledger in self._ledgers
            for device in self._devices
        }

    def _share_memory(self) -> None:
        """Take no more of a GPU's memory than this application's part, if a language model may be there, too."""
        for device in self._devices if self._ledgers else ():
            if device != "cpu":
                fraction = self._config.app_memory_fraction / max(1, len(self._config.app))
                torch.cuda.set_per_process_memory_fraction(fraction, torch.device(device))

    def info(self, stages: Stages) -> messages.AppInfo:
        """The facts about the application that clients get."""
        application = self._application
        return messages.AppInfo(
            name=application.name,
            inputs=tuple(map(field_of, application.inputs)),
            outputs=tuple(map(field_of, application.outputs)),
            cells=self._workers.stats().types,
            sizes=self._sizes,
            profile_path=self._profile_path,
            devices=tuple(self._devices),
            capacity=self._config.app_capacity,
            started_in=stages.elapsed(),
            stages=tuple(stages.done),
        )

    def serve(self) -> None:
        """Handle messages and send results until a message asks the engine to end. Raises WorkerFailed."""
        while True:
            self._parent.wait()
            asked: list[messages.Infer] = []
            for message in self._parent.waiting():
                if isinstance(message, messages.Infer):
                    asked.append(message)
                    if len(asked) < MOST_TOGETHER:
                        continue
                self._infer(asked)
                asked = []
                if not isinstance(message, messages.Infer) and not self._handle(message):
                    return
            self._infer(asked)
            results = [result for output in self._all_ended() for result in self._result(output)]
            if results:
                self._send(results)
            if self._failure:
                raise WorkerFailed(self._failure)

    def close(self) -> None:
        """Stop the workers. Requests that have not ended are lost."""
        self._workers.close()
        for ledger in self._ledgers:
            ledger.close()

    def _handle(self, message: messages.ToEngine) -> bool:
        """Handle one message. False if it asks the engine to end."""
        match message:
            case messages.Abort(request_id):
                self._workers.abort(request_id)
            case messages.Ask(number):
                self._parent.send(messages.AppAnswer(number, self._stats()))
            case messages.Shutdown():
                return False
            case _:
                raise RuntimeError(f"the engine of an application was sent {type(message).__name__}")
        return True

    def _infer(self, asked: Sequence[messages.Infer]) -> None:
        """Unfold and submit requests: together if the application can, else one by one."""
        application = self._application
        if (
            len(asked) < LEAST_TOGETHER
            or not isinstance(application, UnfoldsMany)
            or not self._infer_together(application, asked)
        ):
            for message in asked:
                self._infer_one(message)

    def _infer_together(self, application: UnfoldsMany, asked: Sequence[messages.Infer]) -> bool:
        """Unfold and submit requests. False if one of them is unusable; then none is submitted."""
        try:
            graphs = application.unfold_many([_inputs(message) for message in asked])
            self._workers.submit(CellRequests([message.request_id for message in asked], graphs))
        except ValueError:
            return False
        except Exception:
            if not self._failure:
                log.error("unfold_many of %s failed: %s", self._application.name, traceback.format_exc())
            return False
        return True

    def _infer_one(self, message: messages.Infer) -> None:
        try:
            graph = self._application.unfold(_inputs(message))
            self._workers.submit(CellRequest(message.request_id, graph, message.arrival))
        except ValueError as error:
            self._parent.send(messages.Refused(message.request_id, " ".join(str(error).split())))
        except Exception:
            if not self._failure:
                self._blame("unfold", message.request_id)

    def _result(self, output: CellOutput) -> list[messages.AppResult]:
        """A client's results of a request that has ended. Empty if the application fails on it; the failure is sent."""
        try:
            given = self._application.finish(output.results)
            outputs = {field.name: pack(as_declared(field, given)) for field in self._application.outputs}
            size = sum(len(tensor.data) for tensor in outputs.values())
            if size > messages.MESSAGE_LIMIT - MESSAGE_MARGIN:
                raise OverflowError(f"the outputs have {size} bytes; at most {messages.MESSAGE_LIMIT - MESSAGE_MARGIN}")
            return [messages.AppResult(output.request_id, outputs, output.scheduled_at)]
        except Exception:
            self._blame("finish", output.request_id)
            return []

    def _blame(self, method: str, request_id: str) -> None:
        """Log the error of the application's own code, and report to the client that its request has failed."""
        log.error("%s of the application %s failed: %s", method, self._application.name, traceback.format_exc())
        self._parent.send(messages.Failed(request_id))

    def _send(self, results: list[messages.AppResult]) -> None:
        """Send results in as few messages as the limit of their size permits."""
        batch: list[messages.AppResult] = []
        held = 0
        for result in results:
            size = sum(len(tensor.data) for tensor in result.outputs.values())
            if batch and held + size > messages.MESSAGE_LIMIT // 2:
                self._parent.send(messages.Results(batch))
                batch, held = [], 0
            batch.append(result)
            held += size
        self._parent.send(messages.Results(batch))

    def _stats(self) -> messages.AppStats:
        stats = self._workers.stats()
        kinds = zip(stats.types, stats.ready, stats.tasks, map(dict, stats.batches), strict=True)
        return messages.AppStats(
            waiting=stats.waiting,
            running=stats.running,
            rows_used=stats.rows_used,
            rows_total=stats.rows_total,
            cells=tuple(messages.CellTypeStats(*kind) for kind in kinds),
        )

    def _all_ended(self) -> list[CellOutput]:
        """The outputs that the workers have given since the last call."""
        found: list[CellOutput] = []
        while True:
            try:
                found += self._ended.get_nowait()
            except Empty:
                return found

    def _note(self, outputs: Sequence[CellOutput]) -> None:
        """Called by workers, in their threads, with the requests that have ended."""
        self._ended.put(outputs)
        self._parent.wake()

    def _fail(self, reason: str) -> None:
        """Called by a worker, in its thread, when it fails."""
        self._failure = reason
        self._parent.wake()


def _inputs(message: messages.Infer) -> dict[str, np.ndarray]:
    return {name: unpack(tensor) for name, tensor in message.inputs.items()}


def field_of(field: Field) -> messages.TensorField:
    """A field as clients see it."""
    return messages.TensorField(field.name, field.dtype, tuple(field.shape), field.limit, field.help)


def as_declared(field: Field, given: Mapping[str, Any]) -> np.ndarray:
    """An output that the application gave. Raises TypeError unless it fits its field."""
    if field.name not in given:
        raise TypeError(f"finish gave no output {field.name}; it gave {', '.join(given)}")
    array = np.asarray(given[field.name])
    is_text = array.dtype.kind in "OUS"
    if is_text != (field.dtype == "string") or not (is_text or array.dtype.name == field.dtype):
        raise TypeError(f"output {field.name} is {array.dtype.name}; it is declared as {field.dtype}")
    if not fits(array.shape, field.shape):
        raise TypeError(f"output {field.name} has the shape {list(array.shape)}; {list(field.shape)} is declared")
    return array


def fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    """Whether a shape is as declared, where -1 stands for any size."""
    return len(shape) == len(declared) and all(
        wanted in (-1, size) for size, wanted in zip(shape, declared, strict=True)
    )
