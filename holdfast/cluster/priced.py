"""The priced router: each turn goes where its first token comes soonest, and idle conversations leave crowded replicas.

The price of a replica is the wait there, what copying state there adds, and the work that is left, in ms by the cost
model. What another replica has is copied or computed again, whichever is less. Routers of other systems guess where a
conversation's state lies, from a tree of prefixes or a hash; this one keeps a map of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp

from holdfast.cluster.baselines import ready
from holdfast.cluster.books import PrefixMap, Requests, Underway
from holdfast.cluster.turns import Choice, FoundAt, Move, Price, ReplicaState, ReplicaView, RouterName, Turn
from holdfast.core.cost import CostModel
from holdfast.core.types import Found

DIGEST = 32
"""Bytes of a digest."""
EQUAL = 1.0
"""Milliseconds within which prices count as equal."""
RECENT = 64
"""Of a replica's idle conversations, so many of those used last are looked at for a move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """The limits of the priced router. Raises ValueError for values out of range."""

    block_size: int = 16
    """Tokens of each block of a chain."""
    step_tokens: int = 2048
    """Tokens of a full step of a replica."""
    fair_ratio: float = 1.5
    fair_ms: float = 1000.0
    """A replica gets no turn while its load exceeds the least load by more than this, and by more than the ratio."""
    thrift: float = 0.5
    """How much a ms of computing weighs beyond itself, as it also delays the turns that come later."""
    settle: float = 30.0
    """Seconds after a change of replica in which a conversation does not go back, nor move ahead of need."""
    window: float = 60.0
    """Seconds in which work that a replica got fades to 1/e: the time over which its share is judged."""
    uneven: float = 0.2
    """Conversations move away from a replica whose work of late exceeds the mean by more than this share of it."""
    most_moves: int = 4
    """Moves ahead of need that `rebalance` gives for one replica at a time."""
    most_conversations: int = 1 << 16
    most_prefixes: int = 1 << 18
    most_blocks: int = 1 << 21
    """Of all conversations' chains together, at 32 bytes each."""

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
    """Milliseconds of a replica's work, by the cost model."""

    def __init__(self, cost: CostModel, step_tokens: int) -> None:
        self._cost, self._step_tokens = cost, step_tokens
        self.step = cost.linear(step_tokens) * 1e3
        """A full step without its attention."""

    def prefill(self, start: int, stop: int) -> float:
        """Computing positions [start, stop) of a prompt in full steps."""
        tokens = stop - start
        if tokens <= 0:
            return 0.0
        full = self._step_tokens
        linear = self._cost.linear(tokens) if tokens < full else self._cost.linear(full) * tokens / full
        return (linear + self._cost.attention(tokens, stop)) * 1e3

    def token(self, context: int) -> float:
        """What one decode at this context adds to a step of many."""
        rows = self._cost.decode_rows[-1] if self._cost.decode_rows else 64
        return (self._cost.decode(rows, context) + self._cost.decode_only(rows) / rows) * 1e3


@dataclass(slots=True)
class Conversation:
    """What the router knows of a conversation."""

    owner: str | None
    """The replica that has its state; None once that is lost."""
    chain: bytes = b""
    """The digests of its blocks, joined."""
    tokens: int = 0
    last: float = 0.0
    """When it was last active, in seconds."""
    work: float = 0.0
    """What its turns of late cost, in ms, fading, and when that was so."""
    worked: float = 0.0
    turns: int = 0
    """Turns so far."""
    underway: int = 0
    left: str | None = None
    """The replica that it left last."""
    left_at: float = 0.0
    moving: bool = False
    tail: bytes = b""
    """The digest by which its next turn is known where that has no key."""


class PricedRouter:
    """As `Router`; the module says how it chooses."""

    name: RouterName = "priced"

    def __init__(self, cost: CostModel, rules: RoutingRules | None = None) -> None:
        self.rules = rules or RoutingRules()
        self.pricing = Pricing(cost, self.rules.step_tokens)
        self.requests = Requests()
        self.prefixes = PrefixMap(self.rules.most_prefixes)
        self._conversations: OrderedDict[str, Conversation] = OrderedDict()
        """By key, the least recently active first."""
        self._tails: dict[bytes, str] = {}
        """The key of a conversation, by the last block of its latest prompt."""
        self._idle: dict[str, OrderedDict[str, None]] = {}
        """By replica, the keys of its conversations without a request under way, the least recently active first."""
        self._blocks = 0
        """Of all conversations' chains."""
        self._work: dict[str, tuple[float, float]] = {}
        """By replica, the work of late of the conversations that it has, in ms, fading, and when that was so."""
        self._links: dict[str, float] = {}
        """By replica, when the copies to and from it that this router asked for end."""

    def __len__(self) -> int:
        """Conversations that it knows."""
        return len(self._conversations)

    def owner(self, key: str) -> str | None:
        """The replica that has a conversation's state, as far as is known."""
        conversation = self._conversations.get(key)
        return conversation.owner if conversation is not None else None

    def load(self, replica: str, now: float) -> float:
        """Milliseconds of work at a replica: prompts to compute, and what answers add to its steps."""
        backlog = self.requests[replica]
        return backlog.wait(now, self.pricing.step) + backlog.decode

    def known(self, turn: Turn) -> dict[str, tuple[Found, int]]:
        """By the router's own map, what replicas hold of a prompt; without those that hold nothing.

        For each, what it has once it has computed what was sent to it, and the tokens that others may copy now.
        """
        most, size = max(0, turn.prompt_tokens - 1), self.rules.block_size
        held = self.prefixes.find(turn.chain).items()
        return {name: (Found(min(most, each.expected * size)), min(most, each.there * size)) for name, each in held}

    def unknown(self, turn: Turn) -> int:
        """As `Router.unknown`."""
        conversation = self._conversations.get(self._key(turn) or "")
        if conversation is not None and conversation.owner is not None:
            return 0
        return turn.prompt_tokens - max((found.tokens for found, _ in self.known(turn).values()), default=0)

    def choose(self, turn: Turn, replicas: Sequence[ReplicaView], now: float, found: FoundAt | None = None) -> Choice:
        """As `Router.choose`: the cheapest of those that are fair to choose.

        Of those within a millisecond of it, the one that got the least work of late: where all are idle, conversations
        are spread by what they cost, not by their number.

        A replica is fair to choose unless its load exceeds the least one's by more than `fair_ms` and more than the
        factor `fair_ratio`. A conversation does not go back to the replica that it left less than `settle` seconds ago
        while another is fair to choose.
        """
        able = ready(replicas)
        for replica in replicas:
            size = None if replica.most_tokens is None else replica.most_tokens // self.rules.block_size
            self.prefixes.resize(replica.name, size)
        known = self.known(turn)
        if found is not None:
            told = {replica.name: found(replica.name) for replica in replicas}
            # Copies go from host tier to host tier: what lies lower stays where it is.
            known |= {name: (held, held.device + held.host) for name, held in told.items() if held is not None}
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
        chosen = min(near, key=lambda name: (self._recent_work(name, now), ranks[name], name))
        return Choice(chosen, source if prices[chosen].fetched else None, prices)

    def price(self, turn: Turn, replica: ReplicaView, found: Found, source: str, elsewhere: int, now: float) -> Price:
        """What this turn costs at a replica that holds `found`, if the replica `source` holds `elsewhere` tokens."""
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
        # Each step of the prompt carries the decodes along, and so does the one that it waits for.
        slower = self.requests[replica.name].per_token * (1 + work / self.pricing.step)
        displaced = self._displaced(replica.name, turn.prompt_tokens + turn.output_estimate - have)
        return Price(wait + slower, bring + lift, work, found, brought, copied, displaced)

    def fair(self, loads: Mapping[str, float]) -> set[str]:
        """The replicas that may get a turn under these loads in ms."""
        least = min(loads.values())
        limit = max(least * self.rules.fair_ratio, least + self.rules.fair_ms)
        return {name for name, load in loads.items() if load <= limit}

    def sent(self, request: str, turn: Turn, choice: Choice, now: float) -> None:
        """As `Router.sent`."""
        price = choice.priced.get(choice.replica) if choice.priced else None
        work = price.work if price else self.pricing.prefill(0, turn.prompt_tokens)
        token = self.pricing.token(turn.prompt_tokens + turn.output_estimate // 2)
        if choice.move_from is not None and price is not None:
            self._occupy(choice.move_from, choice.replica, price.link, now)
            self.prefixes.give_way(turn.chain, choice.move_from)
        key = self._key(turn) or (turn.chain[-1].hex() if turn.chain else None)
        underway = Underway(choice.replica, work, token * turn.output_estimate, token, turn.chain, key)
        self.requests.sent(request, underway, now)
        self.prefixes.add(turn.chain, choice.replica, there=False)
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
        """As `Router.started`."""
        underway = self.requests.started(request, now)
        if underway is not None:
            self.prefixes.add(underway.chain, underway.replica, there=True)

    def ended(self, request: str, now: float, chain: Sequence[bytes] = ()) -> None:
        """As `Router.ended`."""
        underway = self.requests.ended(request, now)
        if underway is None:
            return
        if chain:
            self.prefixes.add(chain, underway.replica, there=True)
        conversation = self._conversations.get(underway.key or "")
        if underway.key is None or conversation is None:
            return
        conversation.underway -= 1
        if chain and conversation.owner == underway.replica:
            self._remember(underway.key, conversation, chain, len(chain) * self.rules.block_size, now)
        self._enter_idle(underway.key, conversation)
        self._forget_oldest()

    def moved(self, move: Move, tokens: int, now: float) -> None:
        """As `Router.moved`. A move of which nothing arrived changes nothing, and may be tried again."""
        conversation = self._conversations.get(move.key)
        if conversation is not None:
            conversation.moving = False
        if tokens < self.rules.block_size:
            return
        before = self._there(move.chain, move.target)
        self.prefixes.add(move.chain[: before + tokens // self.rules.block_size], move.target, there=True)
        self.prefixes.give_way(move.chain, move.source)
        if conversation is not None and conversation.owner == move.source:
            self._hand_over(move.key, conversation, move.target, now)

    def lost(self, replica: str) -> None:
        """As `Router.lost`."""
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
        """As `Router.rebalance`.

        A replica is overloaded if the work of its conversations of late exceeds the mean by the share `uneven`, where
        the mean counts as half of the time at least: among replicas that mostly idle there is no need. Of the
        conversations with more than one turn, those that cost most leave it first, as far as that brings its work
        nearer to the least one's. All conversations leave one that drains. Each is moved only if its state can be
        copied faster than it can be computed again.
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
        """Moves away from one replica. `loads`, the work of late in ms, is changed as if they had ended."""
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
            lacking = (len(chain) - self._there(chain, target)) * self.rules.block_size
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
        """Keys of idle conversations that may leave a replica, those of the costliest turns first."""
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
        """Milliseconds until a new turn would begin at a replica."""
        backlog = self.requests[replica.name]
        wait = backlog.wait(now, self.pricing.step) if replica.waiting_ms is None else replica.waiting_ms
        if replica.free_tokens is not None:
            short = turn.prompt_tokens - found.device + turn.output_estimate - replica.free_tokens
            if short > 0 and backlog.running:
                wait += backlog.decode / len(backlog.running)
        return wait

    def _recent_work(self, replica: str, now: float) -> float:
        """The work in ms that a replica got of late, each turn's fading with its age."""
        return self._faded(*self._work.get(replica, (0.0, now)), now)

    def _add_work(self, replica: str, work: float, now: float) -> None:
        self._work[replica] = max(0.0, self._recent_work(replica, now) + work), now

    def _faded(self, work: float, at: float, now: float) -> float:
        return work * exp((at - now) / self.rules.window)

    def _link_wait(self, source: str, target: str, now: float) -> float:
        """Milliseconds until the copies that this router asked for leave both links free."""
        until = max(self._links.get(source, 0.0), self._links.get(target, 0.0))
        return max(0.0, (until - now) * 1e3)

    def _occupy(self, source: str, target: str, ms: float, now: float) -> None:
        self._links[source] = self._links[target] = now + (self._link_wait(source, target, now) + ms) / 1e3

    def _displaced(self, replica: str, tokens: int) -> float:
        """Work in ms that will be done again as `tokens` new tokens of state drive out other state at a replica.

        Of what had to go so far, a share came back when no replica had it any more. That much is expected of what has
        to go next.
        """
        prefixes = self.prefixes
        beyond = tokens - prefixes.room(replica) * self.rules.block_size
        if beyond <= 0 or not prefixes.given_up:
            return 0.0
        return beyond * prefixes.missed / prefixes.given_up * self.pricing.step / self.rules.step_tokens

    def _load(self, replica: ReplicaView, now: float) -> float:
        if replica.waiting_ms is None:
            return self.load(replica.name, now)
        return replica.waiting_ms + self.requests[replica.name].decode

    def _rank(self, price: Price) -> float:
        return price.total + self.rules.thrift * price.work + (1 + self.rules.thrift) * price.displaced

    def _key(self, turn: Turn) -> str | None:
        """The conversation that a turn continues: by its key, or by the longest known prompt that it begins with."""
        if turn.key is not None:
            return turn.key
        tails = self._tails
        return next((tails[digest] for digest in reversed(turn.chain) if digest in tails), None) if tails else None

    def _give(self, conversation: Conversation, replica: str, now: float) -> None:
        """From now on this replica has the conversation's state, and with it the work to come."""
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
        """This replica has the state of a conversation that is idle, or the most of it."""
        self._leave_idle(key, conversation)
        self._give(conversation, replica, now)
        self._enter_idle(key, conversation)

    def _there(self, chain: Sequence[bytes], replica: str) -> int:
        """Blocks of a chain that a replica has computed or got."""
        held = self.prefixes.find(chain).get(replica)
        return 0 if held is None else held.there

    def _enter_idle(self, key: str, conversation: Conversation) -> None:
        if conversation.owner is not None and not conversation.underway:
            self._idle.setdefault(conversation.owner, OrderedDict())[key] = None

    def _leave_idle(self, key: str, conversation: Conversation) -> None:
        if conversation.owner in self._idle:
            self._idle[conversation.owner].pop(key, None)

    def _forget_oldest(self) -> None:
        """Forget the conversations that were active longest ago, down to the bounds of the map."""
        rules = self.rules
        while len(self._conversations) > 1 and (
            len(self._conversations) > rules.most_conversations or self._blocks > rules.most_blocks
        ):
            key, conversation = self._conversations.popitem(last=False)
            self._leave_idle(key, conversation)
            self._tails.pop(conversation.tail, None)
            self._blocks -= len(conversation.chain) // DIGEST


def unpack(chain: bytes) -> list[bytes]:
    """The digests of a joined chain."""
    return [chain[start : start + DIGEST] for start in range(0, len(chain), DIGEST)]
