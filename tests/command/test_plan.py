import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.command.plan import parse_request, plan_dispatch
from streamrl.planning.dispatch import POLICIES

REQUEST: dict[str, Any] = {
    "lengths": [10, 400, 30, 20, 300, 40, 50, 60, 70, 80],
    "num_instances": 3,
    "ptl_ms": {"1": 8.0, "8": 10.0},
    "max_batch": 4,
    "policy": "paper",
    "length_p50": 45,
    "length_p90": 310,
}


def planned(**changes: Any) -> dict[str, Any]:
    return plan_dispatch(parse_request(json.dumps({**REQUEST, **changes})))


def test_the_command_reads_a_file_or_standard_input(tmp_path: Path) -> None:
    text = json.dumps(REQUEST)
    file = tmp_path / "request.json"
    file.write_text(text)
    command = [sys.executable, "-m", "streamrl.command.main", "plan", "dispatch"]
    piped = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    read = subprocess.run([*command, str(file)], capture_output=True, text=True, check=True)
    assert json.loads(piped.stdout) == json.loads(read.stdout) == planned()
    refused = subprocess.run(command, input="{", capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    closed = subprocess.run(["/bin/sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, text=True)
    assert closed.returncode == 2
    assert closed.stderr == "error: plan dispatch: standard input cannot be read: it is closed\n"


def test_the_documented_request_is_one() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "dispatching.md").read_text()
    plan = plan_dispatch(parse_request(text.partition("```json\n")[2].partition("```")[0]))
    assert plan["instances"][0][0] == 2


def test_the_long_tail_gets_the_first_instances() -> None:
    plan = planned()
    assert plan == {
        "policy": "paper",
        "long_tail_instances": 1,
        "regular_instances": 2,
        "instances": [[1, 4], [9, 7, 5, 3], [8, 6, 2, 0]],
        "estimated_s": pytest.approx([310 * (8 + 2 / 7) / 1000, *[45 * (8 + 6 / 7) / 1000] * 2]),
    }


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"paper", "paper_max"}))
def test_other_policies_have_no_long_tail(policy: str) -> None:
    plan = planned(policy=policy, length_p50=None, length_p90=None)
    assert plan["long_tail_instances"] is plan["regular_instances"] is None
    assert sorted(index for share in plan["instances"] for index in share) == list(range(10))
    assert len(plan["estimated_s"]) == 3


def test_lengths_that_differ_by_less_than_a_token_are_still_dealt_the_longest_first() -> None:
    assert planned(policy="round_robin", lengths=[2.1, 2.4, 2.2, 2.3])["instances"] == [[1, 0], [3], [2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "papper"}, "'papper' is unknown: expected one of paper, paper_max"),
        ({"lengths": []}, "lengths: list should have at least 1 item"),
        ({"lengths": [3, -1]}, r"lengths\.1: input should be greater than 0, got -1"),
        ({"lengths": [3, "4"]}, r"lengths\.1"),
        ({"num_instances": 0}, "num_instances: input should be greater than 0"),
        ({"num_instances": 2.5}, "num_instances"),
        ({"num_instances": True}, "num_instances"),
        ({"num_instances": 10**9}, "num_instances: input should be less than or equal to 100000"),
        ({"lengths": [1e300, 1e308], "policy": "makespan"}, r"lengths\.0: input should be less than or equal to"),
        ({"lengths": [1, math.nan]}, r"lengths\.1: input should be a finite number, got nan"),
        ({"lengths": [-1] * 1000}, r"lengths\.4: [^;]*; and 995 more$"),
        ({"ptl_ms": {"1": 1e300}, "policy": "makespan"}, r"ptl_ms\.1: input should be less than or equal to"),
        ({"ptl_ms": {}}, "ptl_ms"),
        ({"ptl_ms": {"none": 1.0}}, "ptl_ms"),
        ({"ptl_ms": {"1": 0}}, r"ptl_ms\.1"),
        ({"max_batch": None}, "max_batch"),
        ({"alpha": 1.5}, "alpha"),
        ({"length_p90": None}, "policy paper needs length_p90"),
        ({"lenghts": [1]}, "lenghts is unknown: expected lengths"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned(**changes)


@pytest.mark.parametrize("text", ["", "[]", "3", '{"lengths": ', "[" * 100_000, f'{{"lengths": [{"9" * 5000}]}}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plan dispatch: expected a JSON object, got "):
        parse_request(text)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="max_batch is missing"):
        parse_request(json.dumps({key: value for key, value in REQUEST.items() if key != "max_batch"}))
