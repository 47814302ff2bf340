"""Ray Serve's router of calls, as far as a door needs one: a call goes to the replica that it names.

The only file that knows Ray's alpha API for routers. Which replica a request goes to is decided before, by
`stoker.routing`; here the call is brought there, and the roster is told which replicas there are. Ray copies
this module by value, so nothing in it is shared with others.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from stoker.errors import ServerLostError
from stoker.ray.roster import Roster, roster_of

NAMED = "replica"
"""The keyword argument of a call that names its replica."""
LOAD = "load"
"""In the statistics of a replica: what it has to do, as one number."""


class NamedReplicaRouter(RequestRouter):
    """Brings a call to the replica that its keyword argument `replica` names, else to the least loaded.

    A call to one that is gone fails with `ServerLostError`; no other replica is tried for it.
    """

    @property
    def supports_rejection_protocol(self) -> bool:
        """Replicas take what they are given: Stoker's own line orders it. Saves a message a call."""
        return False

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """See `RequestRouter`."""
        roster = self._roster
        name = pending_request.kwargs.get(NAMED) if pending_request is not None else None
        if pending_request is None or not name:
            free = [one for one in candidate_replicas if roster.has(one.replica_id.unique_id)]
            return [[one] for one in sorted(free or candidate_replicas, key=_load)]
        pending_request.routing_context.should_backoff = True
        for one in candidate_replicas:
            if one.replica_id.unique_id == name:
                return [[one]]
        if not pending_request.future.done():
            text = f"the replica {name} of {self._deployment_id.name} is gone"
            pending_request.future.set_exception(ServerLostError(text, param="url", url=name))
        return [candidate_replicas]  # a call that has its answer ends at the first choice

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`. One that ends is kept while a door still has requests there."""
        told = {one.replica_id.unique_id for one in replicas}
        roster = self._roster
        kept = [
            one
            for one in self.curr_replicas.values()
            if one.replica_id.unique_id not in told and roster.holds(one.replica_id.unique_id)
        ]
        super().update_replicas([*replicas, *kept])
        roster.replace(tuple(one.replica_id.unique_id for one in replicas))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """See `RequestRouter`."""
        super().on_replica_actor_died(replica_id)
        self._roster.remove(replica_id.unique_id)

    @property
    def _roster(self) -> Roster:
        return roster_of(self._deployment_id.app_name, self._deployment_id.name)


def _load(replica: RunningReplica) -> Any:
    return replica.routing_stats.get(LOAD, 0.0)
