"""From file, environment and arguments to final settings."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from streamrl.command.resolve import new_run_id, resolve, with_addresses


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "job.toml"
    file.write_text("[trainer]\nnum_iterations = 3\nlearning_rate = 1e-5\n[kafka.client]\nsecurity.protocol = 'SSL'\n")
    return file


def test_later_sources_win(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_TRAINER__NUM_ITERATIONS", "7")
    monkeypatch.setenv("STREAMRL_TRAINER__BETAS", "[0.8, 0.9]")
    monkeypatch.setenv("STREAMRL_REWARD__FUNCTIONS", "graded")
    settings = resolve(config, ["trainer.num_iterations=8", "trainer.num_iterations=9"])
    assert settings.trainer.num_iterations == 9
    assert settings.trainer.learning_rate == 1e-5
    assert settings.trainer.betas == (0.8, 0.9)
    assert settings.reward.functions == {"graded": 1.0}
    assert settings.kafka.client == {"security.protocol": "SSL"}


def test_the_environment_wins_over_the_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_TRAINER__NUM_ITERATIONS", "7")
    assert resolve(config, []).trainer.num_iterations == 7


def test_all_problems_stand_in_one_message(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("[trainer]\nnum_iteration = 3\nzero_stage = 9\n[generator]\ntop_p = 0.5\n")
    monkeypatch.setenv("STREAMRL_TRANER__ZERO_STAGE", "1")
    monkeypatch.setenv("STREAMRL_EVAL__EVRY", "1")
    with pytest.raises(ValueError, match="6 problems") as caught:
        resolve(config, ["kafka.bootstrap_server=x"])
    message = str(caught.value)
    for part in (
        "did you mean trainer.num_iterations?",
        "trainer.zero_stage: input should be less than or equal to 3, got 9",
        "generator.top_p is 0.5",
        "environment variable STREAMRL_TRANER__ZERO_STAGE: unknown; did you mean STREAMRL_TRAINER__KEY?",
        "environment variable STREAMRL_EVAL__EVRY: unknown; did you mean eval.every?",
        "(--set kafka.bootstrap_server=x): unknown; did you mean kafka.bootstrap_servers?",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("assignments", "part"),
    [
        (["data.samples_per_prompt=1"], "data.samples_per_prompt is 1"),
        (["trainer.num_iterations=true"], "trainer.num_iterations: expected no truth value, got True"),
        (["trainer.betas=[0.9, true]"], "trainer.betas: expected no truth value"),
        (["reward.functions={ exact_match = true }"], "reward.functions: expected no truth value"),
        (["pipeline.mode=sync", "pipeline.max_staleness=1"], "pipeline.max_staleness is 1 in mode sync"),
        (["generator.num_instances=3", "scheduler.max_instances=2"], "more than scheduler.max_instances"),
        (["kafka.replication_factor=3"], "the embedded broker is a single one"),
        (
            ["weights.one_version_per_batch=true", "weights.swap=in_flight"],
            "which changes the version in the middle of a batch",
        ),
        (
            ["weights.one_version_per_batch=true", "pipeline.max_staleness=4"],
            "Set weights.keep_versions to 5 at least",
        ),
        (["run.id=a b"], "run.id: expected letters"),
        (["trainer=5"], "expected SECTION.KEY=VALUE"),
        (["generator.top_k=5"], "generator.top_k is 5"),
    ],
)
def test_rules_between_sections_hold(config: Path, assignments: list[str], part: str) -> None:
    with pytest.raises(ValueError) as caught:
        resolve(config, assignments)
    assert part in str(caught.value)
    assert str(caught.value).count(part) == 1


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml is missing"):
        resolve(tmp_path / "nowhere.toml", [])
    broken = tmp_path / "broken.toml"
    broken.write_text("[trainer\n")
    with pytest.raises(ValueError, match=r"broken\.toml is not a TOML file"):
        resolve(broken, [])


def test_a_run_without_a_name_gets_one_unless_it_must_have_one(config: Path) -> None:
    settings = resolve(config, [])
    assert settings.run.id.startswith("job-")
    assert settings.run.dir == Path("runs").resolve()
    with pytest.raises(ValueError, match=r"run\.id is empty"):
        resolve(config, [], must_have_id=True)


def test_a_made_up_name_is_legal_and_new(tmp_path: Path) -> None:
    now = datetime(2026, 11, 29, 12, 30, 5, tzinfo=UTC)
    assert new_run_id(Path("my job (1).toml"), tmp_path, now) == "my-job-1-20261129-123005"
    (tmp_path / "job-20261129-123005").mkdir()
    assert new_run_id(Path("job.toml"), tmp_path, now) == "job-20261129-123005-2"


def test_free_ports_are_chosen_for_those_who_must_be_found(config: Path) -> None:
    settings = with_addresses(resolve(config, ["rpc.weights_address=127.0.0.1:4321"]))
    ports = [
        address.rpartition(":")[2]
        for address in (settings.rpc.trainer_address, settings.rpc.scheduler_address, settings.rpc.weights_address)
    ]
    assert "0" not in ports and len(set(ports)) == 3 and ports[2] == "4321"
    assert settings.rpc.generator_address == "127.0.0.1:0"


def test_a_table_given_whole_replaces_the_earlier_one(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("[reward.functions]\ngraded = 0.5\n'my:f' = 0.5\n[trainer]\nnum_iterations = 3\n")
    assert resolve(config, ["reward.functions={ 'my:f' = 1.0 }"]).reward.functions == {"my:f": 1.0}
    assert resolve(config, ["reward.functions.graded=0.25"]).reward.functions == {"graded": 0.25, "my:f": 0.5}
    assert resolve(config, ["reward.functions={ a = 1.0 }", "reward.functions.b=2"]).reward.functions == {
        "a": 1,
        "b": 2,
    }
    monkeypatch.setenv("STREAMRL_REWARD__FUNCTIONS__GRADED", "2.0")
    assert resolve(config, []).reward.functions == {"graded": 2.0, "my:f": 0.5}
    monkeypatch.delenv("STREAMRL_REWARD__FUNCTIONS__GRADED")
    monkeypatch.setenv("STREAMRL_REWARD__FUNCTIONS", "{ graded = 3.0 }")
    assert resolve(config, []).reward.functions == {"graded": 3.0}


def test_sections_merge_key_by_key_even_when_given_whole(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMRL_TRAINER", "{ learning_rate = 2e-5 }")
    settings = resolve(config, ["kafka.client.'sasl.password'=secret"])
    assert (settings.trainer.num_iterations, settings.trainer.learning_rate) == (3, 2e-5)
    assert settings.kafka.client == {"security.protocol": "SSL", "sasl.password": "secret"}


def test_a_run_cannot_take_the_name_of_the_link_to_the_newest(config: Path) -> None:
    with pytest.raises(ValueError, match="'latest' is the name of the link"):
        resolve(config, ["run.id=latest"])


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("kafka.patience_s=3e6", "less than or equal to 604800"),
        ("kafka.patience_s=0.001", "greater than or equal to 0.1"),
        ("rpc.patience_s=1e10", "less than or equal to 604800"),
        ("rpc.deadline_s=1e10", "less than or equal to 604800"),
        ("run.no_progress_s=1e10", "less than or equal to 604800"),
        ("scheduler.lease_s=1e10", "less than or equal to 604800"),
        ("scheduler.fleet_wait_s=1e10", "less than or equal to 604800"),
        ("generator.drain_timeout_s=1e10", "less than or equal to 604800"),
        ("kafka.max_message_bytes=2000000000", "less than or equal to 1000000000"),
        ("generator.kv_cache_gib=1e308", "less than or equal to 1000000"),
        ("kafka.retention_hours=1e308", "less than or equal to 876000"),
        ("kafka.bootstrap_servers=,,,", "host:port of one or more brokers"),
        ("kafka.bootstrap_servers=:", "host:port of one or more brokers"),
        ("kafka.bootstrap_servers=127.0.0.1:99999", "ports from 1 to 65535"),
        ("kafka.bootstrap_servers=kafka", "host:port of one or more brokers"),
        ("mlflow.experiment=''", "at least 1 character"),
        ("run.attempt=5", "leave it out"),
        ("data.samples_per_prompt=100000000000000000000000", "less than or equal to 1000000"),
        ("eval.num_prompts=100000000000000000000000", "less than or equal to 2147483647"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_name_value_and_what_was_expected(
    config: Path, assignment: str, expected: str
) -> None:
    name, _, value = assignment.partition("=")
    with pytest.raises(ValueError, match=f"^{re.escape(name)}") as caught:
        resolve(config, [assignment])
    assert expected in str(caught.value)
    if "e" not in value:
        assert value in str(caught.value)


@pytest.mark.parametrize(
    "assignment",
    [
        "kafka.bootstrap_servers='a:1, [::1]:9092,SASL_SSL://b.c:3'",
        "kafka.patience_s=86400",
        "run.no_progress_s=0",
        "rpc.deadline_s=0.01",
    ],
)
def test_a_value_that_is_merely_unusual_is_taken(config: Path, assignment: str) -> None:
    resolve(config, [assignment])
