"""Whether a run moves, from what its scheduler says: for the watchdogs of the trainer and of the command. Pure."""

from collections.abc import Hashable

from streamrl.v1.scheduler_pb2 import GetFleetResponse


def fleet_mark(fleet: GetFleetResponse) -> Hashable:
    """What changes when generation moves: steps of engines, answers, versions loaded, samples accepted.

    What can go round for ever (leases lost and granted, samples dispatched again, restarts) is not in it.
    """
    instances = tuple(
        sorted(
            (
                instance.instance,
                beat.weight_version,
                beat.phase,
                beat.finished_samples,
                beat.generated_tokens,
                sum(latency.num_steps for latency in beat.step_latencies),
            )
            for instance in fleet.instances
            for beat in (instance.heartbeat,)
        )
    )
    batches = tuple(sorted((batch.purpose, batch.batch, batch.accepted) for batch in fleet.batches))
    return instances, batches, fleet.newest_weight_version
