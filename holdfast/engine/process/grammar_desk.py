"""GrammarDesk: compiles the grammars of requests before they are queued. It takes threads, not the loop's time."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

from holdfast.core.types import Grammar, Request
from holdfast.engine import messages
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.sources import GrammarError

THREADS, OWN_THREADS = 4, 2
"""Grammars that are compiled at a time, and most of them for one tenant."""
MOST_TENANTS = 16
"""Tenants of which one grammar at least is compiled at a time: none waits for another's."""

log = logging.getLogger("holdfast.engine")


class _Job:
    """A grammar that is compiled for some requests."""

    def __init__(self, grammar: Grammar, tenant: str) -> None:
        self.grammar, self.tenant = grammar, tenant
        """The tenant of the first request."""
        self.requests: dict[str, Request] = {}
        self.began = self.tested = self.announced = self.done = False
        self.error: Exception | None = None
        """Why the grammar cannot be compiled, once it is done."""


class GrammarDesk:
    """Takes requests that have a grammar. For the thread of the loop, but for what compiles.

    Requests with one grammar wait for one job. Tenants take turns, so none waits for the jobs of another.
    """

    def __init__(
        self,
        add: Callable[[Request], None],
        compiler: GrammarCompiler | None,
        refusal: str = "",
        announce: Callable[[Grammar], None] = lambda grammar: None,
    ) -> None:
        """`add` queues a request. Without a compiler every grammar is refused, with the reason `refusal`.

        `announce` is called for each request when its grammar was tested: whoever compiles it too should begin.
        """
        self.wake: Callable[[], None] = lambda: None
        """Called in another thread when a grammar has been tested or compiled."""
        self._add, self._compiler, self._refusal, self._announce = add, compiler, refusal, announce
        self._jobs: dict[Grammar, _Job] = {}
        """All that wait or run."""
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()
        """By tenant, jobs that have not begun; first the tenant whose turn it is."""
        self._refused: list[messages.Refused] = []

    @property
    def busy(self) -> bool:
        """Whether an answer will come without any step of the loop."""
        return bool(self._jobs or self._refused)

    def submit(self, request: Request) -> None:
        """Begin to compile a request's grammar; then `answers` queues it, or says why not."""
        grammar, tenant = request.params.grammar, request.identity.tenant
        assert grammar is not None
        if self._compiler is None:
            self._refused.append(messages.Refused(request.id, self._refusal, "grammar"))
            self.wake()
            return
        if (job := self._jobs.get(grammar)) is None:
            job = self._jobs[grammar] = _Job(grammar, tenant)
            self._waiting.setdefault(tenant, deque()).append(job)
        job.requests[request.id] = request
        if job.announced:
            self._announce(grammar)
        self._begin_jobs()

    def abort(self, request_id: str) -> None:
        """Forget a request that is not queued yet."""
        for job in self._jobs.values():
            if job.requests.pop(request_id, None) is not None:
                if not job.requests and not job.began:
                    del self._jobs[job.grammar]
                    self._waiting[job.tenant].remove(job)
                return

    def answers(self) -> Iterator[messages.FromEngine]:
        """Queue the requests whose grammar is compiled; the refusals of others."""
        refused, self._refused = self._refused, []
        yield from refused
        for job in [job for job in self._jobs.values() if job.began]:
            done = job.done  # what it did before is visible then
            if job.tested and not job.announced:
                job.announced = True
                for _ in job.requests:
                    self._announce(job.grammar)
            if done:
                del self._jobs[job.grammar]
                yield from self._ended(job)
        self._begin_jobs()

    def close(self) -> None:
        """Compile no more."""
        self._waiting.clear()
        if self._compiler is not None:
            self._compiler.close()

    def _ended(self, job: _Job) -> Iterator[messages.FromEngine]:
        """Queue a job's requests, or refuse them."""
        for request in job.requests.values():
            if job.error is not None:
                yield messages.Refused(request.id, str(job.error), "grammar")
                continue
            try:
                self._add(request)
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
                    self._begin(waiting.popleft())
                    running.append(tenant)
                    self._waiting.move_to_end(tenant)
                    begun = True

    def _begin(self, job: _Job) -> None:
        job.began = True
        threading.Thread(target=self._work, args=(job,), name="holdfast-grammar", daemon=True).start()

    def _work(self, job: _Job) -> None:
        """Test and compile a job's grammar, once for each request that has come; in a thread."""
        compiler = self._compiler
        assert compiler is not None
        try:
            compiler.test(job.grammar)
            job.tested = True
            self.wake()
            for _ in list(job.requests):
                compiler.prepare(job.grammar)
        except GrammarError as error:
            job.error = error
        except Exception as error:
            log.exception("holdfast: a grammar could not be compiled")
            job.error = GrammarError(f"the grammar could not be compiled: {type(error).__name__}")
        job.done = True
        self.wake()
