"""GrammarDesk: compiles the grammars of requests before they are queued. It takes threads, not the loop's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from holdfast.core.types import Grammar, Request
from holdfast.engine import messages
from holdfast.lm.grammar.compiler import GrammarCompiler, GrammarError

THREADS = 2
"""Grammars that are compiled at a time."""


class GrammarDesk:
    """Takes requests that have a grammar. For the thread of the loop, but for what compiles."""

    def __init__(
        self,
        add: Callable[[Request], None],
        compiler: GrammarCompiler | None,
        refusal: str = "",
        announce: Callable[[Grammar], None] = lambda grammar: None,
    ) -> None:
        """`add` queues a request. Without a compiler every grammar is refused, with the reason `refusal`.

        `announce` is called when a request comes: whoever compiles its grammar too should begin.
        """
        self.wake: Callable[[], None] = lambda: None
        """Called in another thread when a grammar has been compiled."""
        self._add, self._compiler, self._refusal, self._announce = add, compiler, refusal, announce
        self._threads = ThreadPoolExecutor(THREADS, "holdfast-grammar")
        self._compiling: dict[str, tuple[Request, Future[object]]] = {}
        """By id, the requests that wait for their grammar."""
        self._refused: list[messages.Refused] = []

    @property
    def busy(self) -> bool:
        """Whether an answer will come without any step of the loop."""
        return bool(self._compiling or self._refused)

    def submit(self, request: Request) -> None:
        """Begin to compile a request's grammar; then `answers` queues it, or says why not."""
        grammar, compiler = request.params.grammar, self._compiler
        assert grammar is not None
        if compiler is None:
            self._refused.append(messages.Refused(request.id, self._refusal, "grammar"))
            self.wake()
            return
        self._announce(grammar)
        compiling: Future[object] = self._threads.submit(compiler.prepare, grammar)
        self._compiling[request.id] = request, compiling
        compiling.add_done_callback(lambda _: self.wake())

    def abort(self, request_id: str) -> None:
        """Forget a request that is not queued yet."""
        self._compiling.pop(request_id, None)

    def answers(self) -> Iterator[messages.FromEngine]:
        """Queue the requests whose grammar is compiled; the refusals of others."""
        refused, self._refused = self._refused, []
        yield from refused
        for request_id, (request, compiling) in list(self._compiling.items()):
            if compiling.done():
                del self._compiling[request_id]
                try:
                    compiling.result()
                    self._add(request)
                except GrammarError as error:
                    yield messages.Refused(request_id, str(error), "grammar")
                except ValueError as error:
                    yield messages.Refused(request_id, str(error))

    def close(self) -> None:
        """Compile no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
