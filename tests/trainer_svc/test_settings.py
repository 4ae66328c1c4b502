from typing import Any

import pytest
from pydantic import ValidationError

from trainer_svc.settings import TrainerSettings


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"trainer": {"algorithm": "gpro"}}, "unknown algorithm 'gpro'"),
        ({"trainer": {"steps_per_batch": 33}}, r"steps_per_batch is 33: a batch has 32 prompts"),
        (
            {"trainer": {"algorithm": "ppo", "max_refill_prompts": 1}, "data": {"samples_per_prompt": 1}},
            "one answer has nothing to differ",
        ),
        ({"trainer": {"overlong_buffer_tokens": 600}}, "overlong_buffer_tokens is 600, more than an answer can have"),
        (
            {"trainer": {"algorithm": "dapo"}, "data": {"extra_prompts": 2}},
            "extra_prompts is 2, and up to 96 prompts of a batch are replaced",
        ),
        ({"trainer": {"learning_rte": 1e-4}}, "learning_rte"),
        ({"trainer": {"zero_stage": 4}}, "zero_stage"),
        ({"data": {"samples_per_prompt": 1}}, "data.samples_per_prompt is 1: grpo compares .* needs 2 or more"),
        ({"trainer": {"num_ranks": 300}}, "fewer than trainer.num_ranks"),
        ({"trainer": {"num_ranks": 3, "num_nodes": 2}}, r"num_ranks \(3\) cannot be spread evenly"),
        ({"generator": {"max_tokens": 2_000_000}}, "kafka.max_message_bytes"),
        ({"generator": {"top_p": 0.9}}, "generator.top_p is 0.9"),
        ({"generator": {"max_tokens": 60, "max_model_len": 60}}, "leaves no room for a prompt"),
        ({"trainer": {"learning_rate": float("inf")}}, "finite number"),
        ({"run": {"seed": -1}}, "greater than or equal to 0"),
        (
            {"trainer": {"learning_rate_schedule": "cosine", "num_iterations": 10, "warmup_steps": 10}},
            "the policy's 10 steps none is left over which learning_rate_schedule cosine could fall",
        ),
        ({"trainer": {"final_learning_rate_share": 0.1}}, "the learning rate stays constant"),
        ({"trainer": {"lora_alpha": 16}}, "trainer.lora_alpha is set, and trainer.lora_rank is 0"),
        ({"trainer": {"lora_targets": ["q_proj"]}}, "trainer.lora_targets is set, and trainer.lora_rank is 0"),
        ({"trainer": {"lora_publish": "adapters"}}, "lora_publish is adapters, and trainer.lora_rank is 0"),
        (
            {"trainer": {"lora_publish": "adapters", "lora_rank": 8}, "weights": {"fabric": "rail"}},
            "lora_publish is adapters, and weights.fabric is 'rail'",
        ),
        ({"trainer": {"kl_coefficient": 0.1}}, "trainer.kl_coefficient is set, and trainer.kl is none"),
        ({"trainer": {"kl_estimator": "k2"}}, "trainer.kl_estimator is set, and trainer.kl is none"),
        ({"trainer": {"value_clip": 0.2}}, "trainer.value_clip is set, and trainer.algorithm is grpo, which has no"),
        (
            {"trainer": {"critic_warmup_iterations": 2}},
            "critic_warmup_iterations is set, and trainer.algorithm is grpo",
        ),
        (
            {"trainer": {"algorithm": "ppo", "critic_warmup_iterations": 5, "num_iterations": 5}},
            "critic_warmup_iterations is 5: the policy would learn in none of the run's 5 iterations",
        ),
        (
            {
                "trainer": {
                    "algorithm": "ppo",
                    "critic_warmup_iterations": 4,
                    "num_iterations": 10,
                    "learning_rate_schedule": "linear",
                    "warmup_steps": 6,
                }
            },
            "the policy's 6 steps none is left",
        ),
        ({"trainer": {"offload": ["reference"]}}, "there is none to move: trainer.kl is none"),
        ({"trainer": {"offload": ["reference"], "kl": "loss", "lora_rank": 8}}, "it is the policy itself"),
        ({"trainer": {"offload": ["critic"]}}, "offload"),
        ({"reward": {"functions": []}}, "at least one reward function"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerSettings(**sections)


def test_reward_names_alone_weigh_one_each() -> None:
    for functions in ("exact_match", ["exact_match"], {"exact_match": 1.0}):
        settings = TrainerSettings.model_validate({"reward": {"functions": functions}})
        assert settings.reward.functions == {"exact_match": 1.0}


def test_runs_are_logged_beside_each_other_unless_told_otherwise() -> None:
    default = TrainerSettings.model_validate({"run": {"dir": "/somewhere"}})
    assert default.mlflow_tracking_uri == "sqlite:////somewhere/mlflow.db"
    assert TrainerSettings.model_validate({"mlflow": {"tracking_uri": "off"}}).mlflow_tracking_uri == ""
    server = TrainerSettings.model_validate({"mlflow": {"tracking_uri": "http://tracker:5000"}})
    assert server.mlflow_tracking_uri == "http://tracker:5000"


def test_every_setting_says_what_it_is_for() -> None:
    for section in TrainerSettings().__class__.model_fields:
        fields = type(getattr(TrainerSettings(), section)).model_fields
        undocumented = [name for name, field in fields.items() if not field.description]
        assert undocumented == [], section


def test_what_is_left_out_is_what_the_algorithm_is_published_with() -> None:
    settings = TrainerSettings.model_validate({"trainer": {"algorithm": "dapo"}, "generator": {"max_tokens": 100}})
    assert settings.trainer.clip_range == (0.2, 0.28)
    assert (settings.max_refill_prompts, settings.overlong_buffer_tokens) == (96, 20)
    grpo = TrainerSettings.model_validate({"trainer": {"learning_rate": 1e-5}})
    assert (grpo.max_refill_prompts, grpo.overlong_buffer_tokens) == (0, 0)
    assert grpo.trainer.critic_rate == pytest.approx(1e-4)
    given = {"algorithm": "dapo", "max_refill_prompts": 5, "overlong_buffer_tokens": 0}
    settings = TrainerSettings.model_validate({"trainer": given})
    assert (settings.max_refill_prompts, settings.overlong_buffer_tokens) == (5, 0)
    kinds = [TrainerSettings.model_validate({"trainer": {"kl": kl}}).trainer.estimator for kl in ("reward", "loss")]
    assert kinds == ["k1", "k3"]


def test_adapters_weigh_twice_their_rank_unless_told_otherwise() -> None:
    for given, alpha in (({}, 16.0), ({"lora_alpha": 4}, 4.0)):
        assert TrainerSettings.model_validate({"trainer": {"lora_rank": 8, **given}}).trainer.adapter_alpha == alpha


def test_what_older_versions_drew_is_corrected_where_versions_differ() -> None:
    for mode, expected in (("sync", "ratio"), ("colocated", "ratio"), ("async", "truncated")):
        assert TrainerSettings.model_validate({"pipeline": {"mode": mode}}).off_policy == expected
        for algorithm in ("gspo", "rloo"):
            of_answers = {"pipeline": {"mode": mode}, "trainer": {"algorithm": algorithm}}
            assert TrainerSettings.model_validate(of_answers).off_policy == "truncated"
    given = {"pipeline": {"mode": "async"}, "trainer": {"off_policy": "none"}}
    assert TrainerSettings.model_validate(given).off_policy == "none"


def test_answers_need_not_be_compared_where_advantages_are_those_of_the_batch() -> None:
    for algorithm in ("ppo", "reinforce_pp"):
        TrainerSettings.model_validate({"trainer": {"algorithm": algorithm}, "data": {"samples_per_prompt": 1}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"data": {"easy_pass_rate": 0.5, "hard_pass_rate": 0.5}}, r"data\.hard_pass_rate is 0\.5, expected less than"),
        ({"data": {"curriculum": True}}, r"data\.train is counting, expected reasoning_gym:TASK"),
        ({"reward": {"functions": ["graded", "graded"]}}, "graded stands there more than once"),
        ({"reward": {"timeout_s": 0}}, "timeout_s"),
    ],
)
def test_rewards_and_selections_that_cannot_be_meant_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerSettings.model_validate(section)
