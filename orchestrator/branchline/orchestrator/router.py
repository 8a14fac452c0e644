"""Takes a request to the replica that holds its session. Ray runs it in every process that has a handle.

`handle.options(session_id=<replica's unique id>)` names the replica. Ray's own consistent hashing gives affinity, not
ownership; `FIFOMixin` hands a chosen replica to the oldest waiting request and must not be mixed in here.
"""

from __future__ import annotations

import random
import time

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from branchline.orchestrator.routing_policy import Decision, decide


class BranchRouter(RequestRouter):
    """Pins by session id; without one the replica with the shortest queue is taken."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, best first; none: ask again after the backoff."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this an empty answer would be asked for again at once, for ever, on the caller's loop.
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        known = [replica.replica_id.unique_id for replica in candidate_replicas]
        match decide(wanted, known, time.time() - pending_request.created_at):
            case Decision.PINNED:
                return [[candidate_replicas[known.index(wanted)]]]
            case Decision.WAIT:
                return []
            case Decision.ANY:
                # Ray takes the first of those with equally short queues.
                return [random.sample(candidate_replicas, len(candidate_replicas))]
