"""Grammars: compiled before the requests that have them are queued. It takes threads, not the loop's time."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator

from holdfast.core.contract import ContractRefused
from holdfast.core.types import Grammar, Request
from holdfast.engine import messages
from holdfast.engine.process.handler import Gate, Handler
from holdfast.engine.process.part_builder import PartBuilder, Served
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.sources import GrammarError
from holdfast.lm.parts.grammars.device import GrammarDevice

THREADS, OWN_THREADS = 4, 2
"""Most grammars that are compiled at a time, in all and for one tenant."""
MOST_TENANTS = 16
"""Tenants of which at least one grammar is compiled at a time: none waits for another's grammar."""

log = logging.getLogger("holdfast.engine")


class _Job:
    """A grammar that is compiled for some requests."""

    def __init__(self, grammar: Grammar, tenant: str) -> None:
        self.grammar, self.tenant = grammar, tenant
        """The tenant of the first request."""
        self.requests: dict[str, Request] = {}
        self.began = self.tested = self.announced = self.done = False
        self.reason = ""
        """Why the grammar cannot be compiled, once it is done."""

    def begin(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        """Test and compile in a thread, and call `wake` after each of the two."""
        self.began = True
        threading.Thread(target=self._work, args=(compiler, wake), name="holdfast-grammar", daemon=True).start()

    def announce(self) -> int:
        """Announce the grammar for all requests so far. Returns how often to announce it: 0 if this was done before."""
        if not self.tested or self.announced:
            return 0
        self.announced = True
        return len(self.requests)

    def _work(self, compiler: GrammarCompiler, wake: Callable[[], None]) -> None:
        """Test and compile the grammar, once for each request that has come."""
        try:
            compiler.test(self.grammar)
            self.tested = True
            wake()
            for _ in list(self.requests):
                compiler.prepare(self.grammar)
        except GrammarError as error:
            self.reason = str(error)
        except Exception as error:
            log.exception("holdfast: a grammar could not be compiled")
            self.reason = f"the grammar could not be compiled: {type(error).__name__}"
        self.done = True
        wake()


class GrammarHandler(Handler, Gate):
    """Takes requests that have a grammar. For the thread of the loop, apart from the compiling threads.

    Requests with one grammar wait for one job. Tenants take turns, so none waits for the jobs of another.
    """

    def __init__(
        self,
        add: Callable[[Request], None],
        compiler: GrammarCompiler,
        wake: Callable[[], None],
        announce: Callable[[Grammar], None] = lambda grammar: None,
        gates: Collection[Gate] = (),
    ) -> None:
        """`add` queues a request. `wake` is called in another thread when a grammar has been tested or compiled.

        `announce` is called for each request when its grammar was tested: a rank that compiles it too should begin.

        The `gates` are those that a request has passed before. It must pass them again once its grammar is compiled:
        the engine may have fallen asleep meanwhile.
        """
        self._add, self._compiler, self._wake, self._announce = add, compiler, wake, announce
        self._gates = gates
        self._jobs: dict[Grammar, _Job] = {}
        """All jobs that wait or run."""
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """By tenant, jobs that have not begun; first the tenant whose turn it is."""

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def take(self, request: Request) -> bool:
        """Begin to compile a request's grammar, if it has one; then `answers` queues it, or says why not."""
        grammar, tenant = request.params.grammar, request.identity.tenant
        if not grammar:
            return False
        if grammar not in self._jobs:
            self._jobs[grammar] = _Job(grammar, tenant)
            self._waiting.setdefault(tenant, deque()).append(self._jobs[grammar])
        job = self._jobs[grammar]
        job.requests[request.id] = request
        if job.announced:
            self._announce(grammar)
        self._begin_jobs()
        return True

    def abort(self, request_id: str) -> None:
        for job in self._jobs.values():
            if request_id in job.requests:
                del job.requests[request_id]
                if not job.requests and not job.began:
                    del self._jobs[job.grammar]
                    self._waiting[job.tenant].remove(job)
                return

    def answers(self) -> Iterator[messages.FromEngine]:
        """Queue the requests whose grammar is compiled; give the refusals of others."""
        for job in [job for job in self._jobs.values() if job.began]:
            done = job.done  # what it did before is visible then
            for _ in range(job.announce()):
                self._announce(job.grammar)
            if done:
                del self._jobs[job.grammar]
                yield from self._ended(job)
        self._begin_jobs()

    def stop(self) -> None:
        self._waiting.clear()
        self._compiler.close()

    def _ended(self, job: _Job) -> Iterator[messages.FromEngine]:
        """Queue a job's requests, or refuse them."""
        for request in job.requests.values():
            if job.reason:
                yield messages.Refused(request.id, job.reason, "grammar")
                continue
            if any(gate.take(request) for gate in self._gates):
                continue
            try:
                self._add(request)
            except ContractRefused as error:
                yield messages.ContractRefusal(request.id, error.refusal)
            except ValueError as error:
                yield messages.Refused(request.id, str(error))

    def _begin_jobs(self) -> None:
        """Begin the jobs that may begin now, one of each tenant in turn."""
        running = [job.tenant for job in self._jobs.values() if job.began]
        begun = True
        while begun:
            begun = False
            for tenant in list(self._waiting):
                if not (waiting := self._waiting[tenant]):
                    del self._waiting[tenant]
                    continue
                own = running.count(tenant)
                if len(set(running)) < MOST_TENANTS if own == 0 else len(running) < THREADS and own < OWN_THREADS:
                    waiting.popleft().begin(self._compiler, self._wake)
                    running.append(tenant)
                    self._waiting.move_to_end(tenant)
                    begun = True


class GrammarBuilder(PartBuilder):
    """Builds the handler of requests with grammars, over the device's compiler."""

    name = "grammars"

    def handlers(self, served: Served) -> Iterable[Handler]:
        site = self.site
        compiler = site.device.part(GrammarDevice).compiler
        device, add, wake = site.device, served.scheduler.add, site.order.wake
        gates = [handler for handler in served.handlers if isinstance(handler, Gate)]
        if isinstance(device, ManyDevice) and site.config.layout.drawing_rank:
            return (GrammarHandler(add, compiler, wake, device.expect, gates=gates),)
        return (GrammarHandler(add, compiler, wake, gates=gates),)
