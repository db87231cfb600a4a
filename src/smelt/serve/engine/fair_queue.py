"""Start-time fair queueing of waiting requests between tenants (Goyal, Vin and Cheng, SIGCOMM 1996).

Each request gets a start tag: the virtual time now, or when the requests of its tenant before it have been served, at
the tenant's share. Requests start in the order of their tags, so that a tenant with hundreds of waiting requests does
not delay the first of another; the requests of one tenant start in the order of arrival. The cost of a request is its
tokens. Its output is estimated until it has finished, then the estimate is corrected for the tenant's next request.
"""

from __future__ import annotations

from dataclasses import dataclass

from smelt.serve.engine.request import Request, RequestStatus

EXPECTED_OUTPUT = 256  # tokens at most


@dataclass
class _TenantQueue:
    served_until: float = 0.0  # virtual time
    num_waiting: int = 0  # requests that have not started yet
    last_start: float = 0.0  # the start tag of the last of them


class FairQueue:
    """Tag requests. With a single tenant the order of the tags is that of arrival."""

    def __init__(self) -> None:
        self._now = 0.0  # virtual time: the start tag of the last request that has started
        self._tenants: dict[str, _TenantQueue] = {}

    def on_arrival(self, request: Request) -> None:
        tenant = self._tenants.setdefault(request.tenant.name, _TenantQueue())
        after = tenant.last_start if tenant.num_waiting else 0.0  # a correction must not let it overtake them
        request.start_tag = tenant.last_start = max(self._now, tenant.served_until, after)
        tenant.num_waiting += 1
        tenant.served_until = request.start_tag + _expected_cost(request) / request.tenant.weight

    def on_start(self, request: Request) -> None:
        self._now = max(self._now, request.start_tag)
        if not request.preemptions:
            self._tenants[request.tenant.name].num_waiting -= 1

    def on_finish(self, request: Request) -> None:
        """Correct the cost of a request, which is still in the state that it finishes from."""
        tenant = self._tenants[request.tenant.name]
        has_run = request.state is RequestStatus.RUNNING or request.preemptions > 0
        tenant.num_waiting -= not has_run
        cost = len(request.tokens) if has_run else 0
        tenant.served_until += (cost - _expected_cost(request)) / request.tenant.weight


def _expected_cost(request: Request) -> int:
    prompt = len(request.prompt)
    return prompt + min(EXPECTED_OUTPUT, request.limit - prompt)
