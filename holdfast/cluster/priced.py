"""The priced router: sends each turn where its first token is expected soonest, and moves idle conversations.

The price of a replica is the sum of its waiting time, the time to copy state to it, and the computing time, in ms by
the cost model. State of another replica is copied or computed again, whichever is faster. Other systems' routers guess
where state is from a tree of prefixes or a hash. This router records it for each conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp

from holdfast.cluster.baselines import ready
from holdfast.cluster.router_state import PrefixMap, PricedRequest, Requests
from holdfast.cluster.turns import Choice, FoundAt, Move, Price, ReplicaState, ReplicaView, RouterName, Turn
from holdfast.core.cost import CostModel
from holdfast.core.types import Found

DIGEST = 32
"""Size of a digest in bytes."""
EQUAL = 1.0
"""Maximum difference in ms between prices that count as equal."""
PREFILLS = 4096
"""Maximum number of remembered durations. Most replicas lack all of a prompt, so their prices share one duration."""
RECENT = 64
"""Maximum number of a replica's idle conversations, the most recently used, that are considered for moves at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """Limits of the priced router. Raises ValueError for values out of range."""

    block_size: int = 16
    """Number of tokens per block of a chain."""
    step_tokens: int = 2048
    """Number of tokens of a replica's full step."""
    fair_ratio: float = 1.5
    fair_ms: float = 1000.0
    """A replica gets no turns while its load exceeds the lowest by both this many ms and `fair_ratio`."""
    thrift: float = 0.5
    """Extra weight of computing time in a price. Computing also delays later turns."""
    settle: float = 30.0
    """Seconds after a conversation changed its replica in which it neither returns nor moves again while idle."""
    window: float = 60.0
    """Seconds in which the recorded work of a replica decays to 1/e."""
    uneven: float = 0.2
    """Excess of a replica's recent work over the mean, as a share of the mean, from which conversations move away."""
    most_moves: int = 4
    """Maximum number of moves from one replica that `rebalance` returns at a time."""
    most_conversations: int = 1 << 16
    most_prefixes: int = 1 << 18
    most_blocks: int = 1 << 21
    """Maximum number of blocks in the chains of all conversations. A block takes 32 bytes."""

    def __post_init__(self) -> None:
        for name in ("block_size", "step_tokens", "most_moves", "most_conversations", "most_prefixes", "most_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.fair_ratio < 1:
            raise ValueError(f"fair_ratio is {self.fair_ratio}; it must be at least 1")
        for name in ("fair_ms", "thrift", "settle", "uneven"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not self.window > 0:
            raise ValueError(f"window is {self.window}; it must be above 0")


class Pricing:
    """Duration of a replica's work in ms, by the cost model."""

    def __init__(self, cost: CostModel, step_tokens: int) -> None:
        self._cost, self._step_tokens = cost, step_tokens
        self.step = cost.linear(step_tokens) * 1e3
        """Milliseconds of a full step, without its attention."""
        self._durations = lru_cache(PREFILLS)(self._duration)

    def prefill(self, start: int, stop: int) -> float:
        """Return the ms to compute positions [start, stop) of a prompt in full steps."""
        return self._durations(start, stop)

    def _duration(self, start: int, stop: int) -> float:
        tokens = stop - start
        if tokens <= 0:
            return 0.0
        full = self._step_tokens
        linear = self._cost.linear(tokens) if tokens < full else self._cost.linear(full) * tokens / full
        return (linear + self._cost.attention(tokens, stop)) * 1e3

    def token(self, context: int) -> float:
        """Return the ms that one decode at this context length adds to a step of many decodes."""
        rows = self._cost.decode_rows[-1] if self._cost.decode_rows else 64
        return (self._cost.decode(rows, context) + self._cost.decode_only(rows) / rows) * 1e3


@dataclass(slots=True)
class Conversation:
    """The router's record of one conversation."""

    owner: str | None
    """Replica that has the conversation's state; None if the state is lost."""
    chain: bytes = b""
    """Digests of the conversation's blocks, joined."""
    tokens: int = 0
    last: float = 0.0
    """Time of the last activity, in seconds."""
    work: float = 0.0
    """Cost in ms of the recent turns. Decayed up to the time `worked`."""
    worked: float = 0.0
    turns: int = 0
    """Number of turns so far."""
    underway: int = 0
    left: str | None = None
    """Replica that the conversation left last; None if it has not left any."""
    left_at: float = 0.0
    moving: bool = False
    tail: bytes = b""
    """Digest that identifies the conversation's next turn if that has no key."""


class PricedRouter:
    """Router that chooses replicas by price. See the module's docstring for the rules."""

    name: RouterName = "priced"

    def __init__(self, cost: CostModel, rules: RoutingRules | None = None) -> None:
        self.rules = rules or RoutingRules()
        self.pricing = Pricing(cost, self.rules.step_tokens)
        self.requests = Requests()
        self.prefixes = PrefixMap(self.rules.most_prefixes)
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        """Conversations by key, the least recently active first."""
        self._tails: dict[bytes, str] = {}
        """Key of a conversation, by the digest of the last block of its latest prompt."""
        self._idle: dict[str, OrderedDict[str, None]] = {}
        """Keys of each replica's idle conversations, the least recently active first."""
        self._blocks = 0
        """Number of blocks in all conversations' chains."""
        self._work: dict[str, tuple[float, float]] = {}
        """Recent work in ms of each replica's conversations, and the time up to which it is decayed."""
        self._links: dict[str, float] = {}
        """Time in seconds at which the requested copies to and from each replica will have ended."""

    def __len__(self) -> int:
        """Number of known conversations."""
        return len(self._conversations)

    def owner(self, key: str) -> str | None:
        """Return the replica that has a conversation's state; None if it is unknown."""
        conversation = self._conversations.get(key)
        return conversation.owner if conversation is not None else None

    def load(self, replica: str, now: float) -> float:
        """Return the work in ms at a replica: prompts still to compute, and the decode time of answers."""
        backlog = self.requests[replica]
        return backlog.wait(now, self.pricing.step) + backlog.decode

    def known(self, turn: Turn) -> dict[str, tuple[Found, int]]:
        """Return how much of a prompt each replica has, by the router's map. Replicas without any are left out.

        The first value is what a replica has when its current requests are computed. The second value is the number of
        tokens that other replicas may copy now.
        """
        most, size = max(0, turn.prompt_tokens - 1), self.rules.block_size
        held = self.prefixes.find(turn.chain).items()
        return {name: (Found(min(most, each.expected * size)), min(most, each.computed * size)) for name, each in held}

    def unknown(self, turn: Turn) -> int:
        """See `Router.unknown`."""
        conversation = self._conversations.get(self._key(turn) or "")
        if conversation is not None and conversation.owner is not None:
            return 0
        return turn.prompt_tokens - max((found.tokens for found, _ in self.known(turn).values()), default=0)

    def choose(self, turn: Turn, replicas: Sequence[ReplicaView], now: float, found: FoundAt | None = None) -> Choice:
        """Choose the cheapest eligible replica. See `Router.choose`.

        Among replicas within a millisecond of the cheapest one, the one with the least recent work is chosen. So idle
        replicas share conversations by cost, not by number. A replica that would compute again what the conversation's
        owner holds does not count as equal to the owner: short prompts take nearly as long to find as to compute, and a
        conversation that changed its replica at each turn would never find any of its state.

        A replica is not eligible if its load exceeds the lowest load by both `fair_ms` and the factor `fair_ratio`. A
        conversation does not return to the replica that it left less than `settle` seconds ago, unless no other replica
        is eligible.
        """
        able = ready(replicas)
        for replica in replicas:
            size = None if replica.most_tokens is None else replica.most_tokens // self.rules.block_size
            self.prefixes.resize(replica.name, size)
        known = self.known(turn)
        if found is not None:
            answers = {replica.name: found(replica.name) for replica in replicas}
            # A copy is made from host tier to host tier, so state in lower tiers cannot be copied.
            known |= {name: (held, held.device + held.host) for name, held in answers.items() if held is not None}
        loads = {replica.name: self._load(replica, now) for replica in able}
        fair = self.fair(loads)
        conversation = self._conversations.get(self._key(turn) or "")
        if conversation is not None and now - conversation.left_at < self.rules.settle and conversation.left in fair:
            fair = fair - {conversation.left} or fair
        nothing = Found(), 0
        sources = {replica.name: known.get(replica.name, nothing)[1] for replica in replicas}
        source = max(sources, key=lambda name: (sources[name], -self._links.get(name, 0.0)))
        prices = {
            replica.name: self.price(turn, replica, known.get(replica.name, nothing)[0], source, sources[source], now)
            for replica in able
        }
        ranks = {name: self._rank(prices[name]) for name in fair}
        cheapest = min(ranks.values())
        near = [name for name in ranks if ranks[name] <= cheapest + EQUAL]
        owned = prices.get(conversation.owner or "") if conversation is not None else None
        held = 0 if owned is None else owned.found.tokens

        def preference(name: str) -> tuple[bool, float, float, str]:
            computes_again = prices[name].found.tokens + prices[name].fetched < held
            return computes_again, self._recent_work(name, now), ranks[name], name

        chosen = min(near, key=preference)
        return Choice(chosen, source if prices[chosen].fetched else None, prices)

    def price(self, turn: Turn, replica: ReplicaView, found: Found, source: str, elsewhere: int, now: float) -> Price:
        """Return the price of a turn at a replica that has `found`. `source` has `elsewhere` tokens to copy."""
        wait = self._wait(turn, replica, found, now)
        lift = found.host * replica.host_ms_per_token + found.lower * replica.lower_ms_per_token
        have, brought, bring, copied = found.tokens, 0, 0.0, 0.0
        work = self.pricing.prefill(have, turn.prompt_tokens)
        if elsewhere > have and replica.link_ms_per_token is not None:
            tokens = elsewhere - have
            link = self._link_wait(source, replica.name, now) + tokens * replica.link_ms_per_token
            rest = self.pricing.prefill(elsewhere, turn.prompt_tokens)
            if link + tokens * replica.host_ms_per_token + rest < work:
                brought, work, copied = tokens, rest, tokens * replica.link_ms_per_token
                bring = max(0.0, link - wait)
                lift += tokens * replica.host_ms_per_token
        # Each step that computes the prompt includes the decodes, and so does the step for which the prompt waits.
        slower = self.requests[replica.name].per_token * (1 + work / self.pricing.step)
        displaced = self._displaced(replica.name, turn.prompt_tokens + turn.output_estimate - have)
        return Price(wait + slower, bring + lift, work, found, brought, copied, displaced)

    def fair(self, loads: Mapping[str, float]) -> set[str]:
        """Return the replicas that may get a turn, from the load of each in ms."""
        least = min(loads.values())
        limit = max(least * self.rules.fair_ratio, least + self.rules.fair_ms)
        return {name for name, load in loads.items() if load <= limit}

    def sent(self, request: str, turn: Turn, choice: Choice, now: float) -> None:
        """See `Router.sent`."""
        price = choice.priced.get(choice.replica) if choice.priced else None
        work = price.work if price else self.pricing.prefill(0, turn.prompt_tokens)
        token = self.pricing.token(turn.prompt_tokens + turn.output_estimate // 2)
        if choice.move_from is not None and price is not None:
            self._occupy(choice.move_from, choice.replica, price.link, now)
            self.prefixes.drop_first(turn.chain, choice.move_from)
        key = self._key(turn) or (turn.chain[-1].hex() if turn.chain else None)
        underway = PricedRequest(choice.replica, work, token * turn.output_estimate, token, turn.chain, key)
        self.requests.sent(request, underway, now)
        self.prefixes.add(turn.chain, choice.replica, computed=False)
        if key is None:
            self._add_work(choice.replica, work + underway.decode, now)
            return
        conversation = self._conversations.get(key)
        if conversation is None:
            conversation = self._conversations[key] = Conversation(choice.replica)
        self._leave_idle(key, conversation)
        conversation.underway += 1
        conversation.turns += 1
        self._give(conversation, choice.replica, now)
        self._add_work(choice.replica, work + underway.decode, now)
        conversation.work = self._faded(conversation.work, conversation.worked, now) + work + underway.decode
        conversation.worked = now
        self._remember(key, conversation, turn.chain, turn.prompt_tokens, now)
        if turn.chain and turn.key is None:
            self._tails.pop(conversation.tail, None)
            conversation.tail = turn.chain[-1]
            self._tails[conversation.tail] = key
        self._forget_oldest()

    def started(self, request: str, now: float) -> None:
        """See `Router.started`."""
        underway = self.requests.started(request, now)
        if underway is not None:
            self.prefixes.add(underway.chain, underway.replica, computed=True)

    def ended(self, request: str, now: float, chain: Sequence[bytes] = ()) -> None:
        """See `Router.ended`."""
        underway = self.requests.ended(request, now)
        if underway is None:
            return
        if chain:
            self.prefixes.add(chain, underway.replica, computed=True)
        conversation = self._conversations.get(underway.key or "")
        if underway.key is None or conversation is None:
            return
        conversation.underway -= 1
        if chain and conversation.owner == underway.replica:
            self._remember(underway.key, conversation, chain, len(chain) * self.rules.block_size, now)
        self._enter_idle(underway.key, conversation)
        self._forget_oldest()

    def moved(self, move: Move, tokens: int, now: float) -> None:
        """See `Router.moved`. If nothing arrived, nothing changes, and the move may be tried again."""
        conversation = self._conversations.get(move.key)
        if conversation is not None:
            conversation.moving = False
        if tokens < self.rules.block_size:
            return
        before = self._computed(move.chain, move.target)
        self.prefixes.add(move.chain[: before + tokens // self.rules.block_size], move.target, computed=True)
        self.prefixes.drop_first(move.chain, move.source)
        if conversation is not None and conversation.owner == move.source:
            self._hand_over(move.key, conversation, move.target, now)

    def lost(self, replica: str) -> None:
        """See `Router.lost`."""
        self.prefixes.forget(replica)
        for underway in self.requests.forget(replica):
            conversation = self._conversations.get(underway.key or "")
            if conversation is not None:
                conversation.underway -= 1
        for by_replica in (self._idle, self._work, self._links):
            by_replica.pop(replica, None)
        for conversation in self._conversations.values():
            if conversation.owner == replica:
                conversation.owner = None
                conversation.moving = False
            if conversation.left == replica:
                conversation.left = None

    def rebalance(self, now: float, replicas: Sequence[ReplicaView]) -> list[Move]:
        """Return moves of idle conversations. See `Router.rebalance`.

        A replica is overloaded if its conversations' recent work exceeds the mean by the share `uneven`. The mean
        counts as at least half of the time, so mostly idle replicas are not rebalanced. Conversations with more than
        one turn leave an overloaded replica, the costliest first, as long as that brings it closer to the least loaded
        one. All conversations leave a draining replica. A conversation moves only if copying its state is faster than
        computing it again.
        """
        able = {replica.name: replica for replica in replicas if replica.state is ReplicaState.READY}
        if not able:
            return []
        loads = {name: self._recent_work(name, now) for name in able}
        mean = sum(loads.values()) / len(loads)
        most = mean + self.rules.uneven * max(mean, self.rules.window * 1e3 / 2)
        moves: list[Move] = []
        for replica in replicas:
            draining = replica.state is ReplicaState.DRAINING
            if draining or loads[replica.name] > most:
                moves += self._moves_from(replica.name, able, loads, now, draining)
        for move in moves:
            self._conversations[move.key].moving = True
            self._occupy(move.source, move.target, move.tokens * (able[move.target].link_ms_per_token or 0.0), now)
        return moves

    def _moves_from(
        self, source: str, able: Mapping[str, ReplicaView], loads: dict[str, float], now: float, draining: bool
    ) -> list[Move]:
        """Return the moves away from one replica. Updates `loads`, in ms, as if the moves had already happened."""
        targets = [name for name, replica in able.items() if name != source and replica.link_ms_per_token is not None]
        moves: list[Move] = []
        for key in self._movable(source, now, draining) if targets else ():
            conversation = self._conversations[key]
            allowed = [name for name in targets if name != conversation.left] or targets
            target = min(allowed, key=lambda name: (loads[name], name))
            work = self._faded(conversation.work, conversation.worked, now)
            if not draining and loads[target] + work >= loads[source]:
                continue
            chain, link = unpack(conversation.chain), able[target].link_ms_per_token or 0.0
            lacking = (len(chain) - self._computed(chain, target)) * self.rules.block_size
            if link * lacking >= self.pricing.prefill(0, conversation.tokens):
                continue
            if not draining:
                loads[source] -= work
            loads[target] += work
            if not lacking:
                self._hand_over(key, conversation, target, now)
                continue
            moves.append(Move(key, chain, lacking, source, target))
            if len(moves) == self.rules.most_moves:
                break
        return moves

    def _movable(self, source: str, now: float, draining: bool) -> Collection[str]:
        """Return the keys of idle conversations that may leave a replica, the costliest first."""
        recent = []
        for key in reversed(self._idle.get(source, {})):
            conversation = self._conversations[key]
            settled = now - conversation.left_at >= self.rules.settle or conversation.left is None
            if (draining or (settled and conversation.turns > 1)) and conversation.chain and not conversation.moving:
                recent.append(key)
                if len(recent) == RECENT:
                    break
        conversations = self._conversations
        return sorted(recent, key=lambda key: -self._faded(conversations[key].work, conversations[key].worked, now))

    def _wait(self, turn: Turn, replica: ReplicaView, found: Found, now: float) -> float:
        """Return the ms until a new turn could begin at a replica."""
        backlog = self.requests[replica.name]
        wait = backlog.wait(now, self.pricing.step) if replica.waiting_ms is None else replica.waiting_ms
        if replica.free_tokens is not None:
            short = turn.prompt_tokens - found.device + turn.output_estimate - replica.free_tokens
            if short > 0 and backlog.running:
                wait += backlog.decode / len(backlog.running)
        return wait

    def _recent_work(self, replica: str, now: float) -> float:
        """Return a replica's recent work in ms. The work of each turn decays with its age."""
        return self._faded(*self._work.get(replica, (0.0, now)), now)

    def _add_work(self, replica: str, work: float, now: float) -> None:
        self._work[replica] = max(0.0, self._recent_work(replica, now) + work), now

    def _faded(self, work: float, at: float, now: float) -> float:
        return work * exp((at - now) / self.rules.window)

    def _link_wait(self, source: str, target: str, now: float) -> float:
        """Return the ms until the requested copies have left both replicas' links free."""
        until = max(self._links.get(source, 0.0), self._links.get(target, 0.0))
        return max(0.0, (until - now) * 1e3)

    def _occupy(self, source: str, target: str, ms: float, now: float) -> None:
        self._links[source] = self._links[target] = now + (self._link_wait(source, target, now) + ms) / 1e3

    def _displaced(self, replica: str, tokens: int) -> float:
        """Return the estimated ms of recomputing the state that `tokens` new tokens displace at a replica.

        Not all displaced state is needed again. The estimate counts the share of recently dropped blocks that were
        needed later and that no replica had then.
        """
        prefixes = self.prefixes
        beyond = tokens - prefixes.room(replica) * self.rules.block_size
        if beyond <= 0 or not prefixes.dropped:
            return 0.0
        return beyond * prefixes.missed / prefixes.dropped * self.pricing.step / self.rules.step_tokens

    def _load(self, replica: ReplicaView, now: float) -> float:
        if replica.waiting_ms is None:
            return self.load(replica.name, now)
        return replica.waiting_ms + self.requests[replica.name].decode

    def _rank(self, price: Price) -> float:
        return price.total + self.rules.thrift * price.work + (1 + self.rules.thrift) * price.displaced

    def _key(self, turn: Turn) -> str | None:
        """Return the key of the conversation that a turn continues: its own, or that of its longest known prefix."""
        if turn.key is not None:
            return turn.key
        tails = self._tails
        return next((tails[digest] for digest in reversed(turn.chain) if digest in tails), None) if tails else None

    def _give(self, conversation: Conversation, replica: str, now: float) -> None:
        """Record that a replica now has a conversation's state and will get its next turns."""
        if conversation.owner not in (replica, None):
            conversation.left, conversation.left_at = conversation.owner, now
            work = self._faded(conversation.work, conversation.worked, now)
            self._add_work(conversation.owner or "", -work, now)
            self._add_work(replica, work, now)
        conversation.owner = replica

    def _remember(self, key: str, conversation: Conversation, chain: Sequence[bytes], tokens: int, now: float) -> None:
        self._blocks += len(chain) - len(conversation.chain) // DIGEST
        conversation.chain, conversation.tokens, conversation.last = b"".join(chain), tokens, now
        self._conversations.move_to_end(key)

    def _hand_over(self, key: str, conversation: Conversation, replica: str, now: float) -> None:
        """Record that a replica now has most or all of an idle conversation's state."""
        self._leave_idle(key, conversation)
        self._give(conversation, replica, now)
        self._enter_idle(key, conversation)

    def _computed(self, chain: Sequence[bytes], replica: str) -> int:
        """Return the number of blocks of a chain that a replica has computed or received."""
        held = self.prefixes.find(chain).get(replica)
        return 0 if held is None else held.computed

    def _enter_idle(self, key: str, conversation: Conversation) -> None:
        if conversation.owner is not None and not conversation.underway:
            self._idle.setdefault(conversation.owner, OrderedDict())[key] = None

    def _leave_idle(self, key: str, conversation: Conversation) -> None:
        if conversation.owner in self._idle:
            self._idle[conversation.owner].pop(key, None)

    def _forget_oldest(self) -> None:
        """Forget the least recently active conversations beyond the router's limits."""
        rules = self.rules
        while len(self._conversations) > 1 and (
            len(self._conversations) > rules.most_conversations or self._blocks > rules.most_blocks
        ):
            key, conversation = self._conversations.popitem(last=False)
            self._leave_idle(key, conversation)
            self._tails.pop(conversation.tail, None)
            self._blocks -= len(conversation.chain) // DIGEST


def unpack(chain: bytes) -> list[bytes]:
    """Split a joined chain into its digests."""
    return [chain[start : start + DIGEST] for start in range(0, len(chain), DIGEST)]
