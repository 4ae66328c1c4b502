"""How idle the generators are, and what weight traffic costs: from what scheduler and weights_svc report. Pure."""

from dataclasses import dataclass

from streamrl.v1.scheduler_pb2 import INSTANCE_STATE_DEAD, GetFleetResponse
from streamrl.v1.weights_pb2 import ListVersionsResponse
from trainer_svc.figures import mean


@dataclass(slots=True)
class _Reading:
    busy_s: float
    heard_at_s: float
    counted: bool


class BusyMeter:
    """The share of time in which instances had work, from the busy seconds in their heartbeats.

    An instance counts from its first heartbeat to its last, life by life; times between two heartbeats count when both
    were heard while counting was on (it is off during blocking evaluations).
    """

    def __init__(self, busy_s: float = 0.0, available_s: float = 0.0) -> None:
        """
        Args:
            busy_s, available_s: before a checkpoint that this run continues.
        """
        self._last: dict[int, _Reading] = {}
        self.busy_s = busy_s
        self.available_s = available_s

    def add(self, fleet: GetFleetResponse, now_s: float, *, counted: bool) -> None:
        """Takes the state of the fleet as of `now_s`."""
        for instance in fleet.instances:
            if instance.state == INSTANCE_STATE_DEAD or not instance.HasField("heartbeat"):
                continue
            reading = _Reading(instance.heartbeat.busy_s, now_s - instance.heartbeat_age_s, counted)
            last = self._last.get(instance.incarnation)
            if last is not None and last.counted and counted and reading.heard_at_s > last.heard_at_s:
                available_s = reading.heard_at_s - last.heard_at_s
                self.available_s += available_s
                self.busy_s += min(available_s, max(0.0, reading.busy_s - last.busy_s))
            self._last[instance.incarnation] = reading

    @property
    def idle_share(self) -> float:
        """0 to 1; 0 before anything was counted."""
        return 1.0 - self.busy_s / self.available_s if self.available_s > 0 else 0.0


class CutMeter:
    """How long answers were that ran when they were dropped: those since the last look, from the scheduler's totals."""

    def __init__(self) -> None:
        self._cut = self._cut_tokens = 0

    def figures(self, fleet: GetFleetResponse) -> dict[str, float]:
        """Nothing where there were none."""
        if fleet.cut < self._cut:  # a scheduler that was started again counts from 0
            self._cut = self._cut_tokens = 0
        cut, cut_tokens = fleet.cut - self._cut, fleet.cut_tokens - self._cut_tokens
        self._cut, self._cut_tokens = fleet.cut, fleet.cut_tokens
        return {"length/cut_mean": cut_tokens / cut} if cut else {}


def fleet_size_figures(fleet: GetFleetResponse) -> dict[str, float]:
    """How many instances live, and how full they are."""
    live = [instance for instance in fleet.instances if instance.state != INSTANCE_STATE_DEAD]
    return {
        "fleet/instances": float(len(live)),
        "fleet/running": float(sum(instance.heartbeat.running for instance in live)),
        "fleet/waiting": float(sum(instance.heartbeat.waiting for instance in live)),
        "fleet/moved": float(fleet.moved),
        "fleet/moved_tokens": float(fleet.moved_tokens),
    }


def length_figures(fleet: GetFleetResponse) -> dict[str, float]:
    """How well the scheduler's length ranker foretells new prompts; nothing as long as it does not know."""
    if not fleet.HasField("length_recall"):
        return {}
    recall = fleet.length_recall
    return {
        "ranker/recall_longest_20": recall.longest_fifth,
        "ranker/recall_longest_10": recall.longest_tenth,
        "ranker/recall_longest_5": recall.longest_twentieth,
    }


def weight_figures(versions: ListVersionsResponse) -> dict[str, float]:
    """Traffic so far, and how the instances' last switches went."""
    instances = [receiver for receiver in versions.receivers if not receiver.serving_address]  # the others are relays
    acknowledged = [receiver.acknowledged for receiver in instances if receiver.HasField("acknowledged")]
    figures = {
        "weights/bytes_full": float(versions.bytes_full),
        "weights/bytes_sent": float(versions.bytes_sent),
    }
    if acknowledged:
        figures |= {
            "weights/fetch_s": mean(one.fetch_s for one in acknowledged),
            "weights/switch_s": mean(one.switch_s for one in acknowledged),
        }
    scored = [one for one in acknowledged if one.canary_num_tokens > 0]
    if scored:
        figures |= {
            "mismatch/canary_abs_diff_mean": mean(one.canary_abs_diff_mean for one in scored),
            "mismatch/canary_abs_diff_max": max(one.canary_abs_diff_max for one in scored),
        }
    return figures
