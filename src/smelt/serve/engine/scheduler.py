"""Which tokens of which requests the next step computes (Yu et al., OSDI 2022, with blocks handed out on demand).

The batch is chosen again at every step. Running requests come first, in order; each gets its next token, or the next
chunk of its prompt. Then waiting ones are admitted in order, as long as the whole of each fits; the first that does not
fit ends the step, so that nobody is overtaken for ever. Who read a long prompt is promised some room for the answer:
reading it again would cost more than the room does. When blocks run out all the same, the last running request is
preempted: its blocks are given back and it computes all its tokens again later; none of those already known is lost.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from smelt.errors import RequestError
from smelt.serve.engine.kv_cache_manager import Memory
from smelt.serve.engine.request import Request, State

ANSWERED = 8  # a prompt that is so many times as long as its answer is not read twice


@dataclass(slots=True)  # not frozen: one is made for every token
class Piece:
    """Tokens `start` to `start + count` of a request. The last of all its tokens gives the next one."""

    request: Request
    start: int
    count: int
    gives: bool


@dataclass
class Step:
    """What is computed at once."""

    pieces: list[Piece] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks that are copied before: from, to

    @property
    def tokens(self) -> int:
        return sum(piece.count for piece in self.pieces)


class Scheduler:
    """`most_tokens` are computed in a step, of at most `most_requests`, of each at most `chunk`."""

    def __init__(
        self, memory: Memory, *, most_tokens: int = 2048, most_requests: int = 256, chunk: int | None = None,
        most_waiting: int = 4096, watermark: float = 0.01,
    ) -> None:  # fmt: skip
        self.memory, self.most_tokens, self.most_requests = memory, most_tokens, most_requests
        self.chunk = chunk or most_tokens
        self.most_waiting = most_waiting
        self.spare = int(watermark * memory.pool.blocks)  # blocks kept free when a request is admitted beside others
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._slots = deque(range(most_requests))
        self._arrivals = 0

    def add(self, request: Request) -> None:
        if len(self.waiting) >= self.most_waiting:
            raise RequestError(f"{self.most_waiting:,} requests are waiting already; try again later.")
        longest = self.memory.longest(request)
        if len(request.prompt) + 1 > longest:
            raise RequestError(
                f"a prompt of {len(request.prompt):,} tokens is longer than the cache's {longest - 1:,}."
            )
        request.limit = longest
        request.arrival = self._arrivals
        self._arrivals += 1
        self._wait(request)

    def end(self, request: Request, reason: str) -> None:
        """Finish or abort a request. Its blocks are free at once: a step under way was launched before any that could
        write to them."""
        if request.state is State.ENDED:
            return
        if request.state is State.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request, reason)
        request.state, request.reason = State.ENDED, reason

    def schedule(self) -> Step:
        """The next step. Everything in it counts as computed from now on."""
        step = Step()
        budget = self._go_on(step)
        if not step.preempted:
            self._admit(step, budget)
        for piece in step.pieces:
            piece.request.computed += piece.count
            piece.request.under_way += piece.gives
        step.copies, self.memory.copies = self.memory.copies, []
        return step

    def received(self, request: Request, token: int) -> None:
        """A step gave this token."""
        request.under_way -= 1
        request.tokens.append(token)
        self.memory.settle(request)

    def computed(self, request: Request) -> None:
        """A step that gave no token is done."""
        self.memory.settle(request)

    def _go_on(self, step: Step) -> int:
        budget, place = self.most_tokens, 0
        while place < len(self.running) and budget:
            request = self.running[place]
            planned, computed = request.planned, request.computed
            count = self.memory.count(request, budget, self.chunk)
            ends = planned >= request.limit and request.under_way > 0  # the token under way is its last
            if count and not ends:
                if not self._make_room(request, count, step):
                    break
                step.pieces.append(Piece(request, computed, count, computed + count == planned))
                budget -= count
            place += 1
        return budget

    def _make_room(self, request: Request, count: int, step: Step) -> bool:
        """Blocks for so many more tokens, if need be at the cost of those that came last; False: at its own."""
        wanted = self.memory.needed(request, request.computed + count) - len(request.blocks)
        if wanted <= 0:
            return True
        while not self.memory.fits(wanted):
            victim = self.running[-1]  # nobody before it in this step: they are in order
            self._preempt(victim, step)
            if victim is request:
                return False
        self.memory.grow(request, request.computed + count)
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        self._leave(request, "")
        request.computed = 0
        request.preemptions += 1
        step.preempted.append(request)
        self._wait(request)

    def _admit(self, step: Step, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.most_requests:
            request = self.waiting[0]
            if request.under_way or not self._ready(request):  # its last token is not known yet
                break
            if not self.memory.admit(request, self._promised(request)):
                break
            count = self.memory.count(request, budget, self.chunk)
            if not count:  # only whole chunks, and this one comes with the next step
                self.memory.leave(request, "")
                request.computed = 0
                break
            self.waiting.pop(0)
            request.parent = None
            if not request.preemptions:
                request.cached = request.computed
            self.memory.grow(request, request.computed + count)
            request.slot, request.state = self._slots.popleft(), State.RUNNING
            insort(self.running, request, key=lambda running: running.order)
            step.pieces.append(Piece(request, request.computed, count, request.computed + count == request.planned))
            budget -= count

    def _ready(self, request: Request) -> bool:
        """A sibling waits for the prompt that it shares."""
        parent = request.parent
        return parent is None or parent.state is State.ENDED or parent.computed >= len(parent.prompt)

    def _promised(self, request: Request) -> int:
        """Blocks beside those for the tokens that a request has now: what running ones were admitted with and have not
        taken yet, what it will be promised itself, and some to spare; nothing where it is alone."""
        if not self.running:
            return 0
        needed = self.memory.needed
        open_ = sum(needed(running, _foreseen(running)) - len(running.blocks) for running in self.running)
        return open_ + needed(request, _foreseen(request)) - needed(request, request.planned) + self.spare

    def _leave(self, request: Request, reason: str) -> None:
        self.running.remove(request)
        self.memory.leave(request, reason)
        self._slots.append(request.slot)
        request.slot = -1

    def _wait(self, request: Request) -> None:
        request.state = State.WAITING
        insort(self.waiting, request, key=lambda waiting: waiting.order)


def _foreseen(request: Request) -> int:
    """Tokens that a request is promised room for: with an answer up to a share of what it would have to read again."""
    return max(request.planned, min(request.limit, len(request.prompt) + len(request.prompt) // ANSWERED))
