from tests.deploy.schemas import problems_of

SCHEMA = {
    "type": "object",
    "properties": {
        "spec": {
            "type": "object",
            "properties": {
                "replicas": {"type": "integer"},
                "rules": {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}},
                "config": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            },
        }
    },
}


def test_what_a_schema_names_passes():
    spec = {"replicas": 3, "rules": [{"name": "a"}], "config": {"anything": {"at": "all"}}, "labels": {"any": "name"}}
    assert problems_of({"kind": "Kafka", "metadata": {"name": "kafka"}, "spec": spec}, SCHEMA) == []


def test_an_unknown_field_is_refused_wherever_it_stands():
    spec = {"replica": 3, "rules": [{"name": "a"}, {"nam": "b"}]}
    assert problems_of({"spec": spec}, SCHEMA) == [".spec.replica: unknown field", ".spec.rules[1].nam: unknown field"]


def test_a_value_of_the_wrong_type_is_refused():
    assert problems_of({"spec": {"replicas": "three"}}, SCHEMA) == ["$.spec.replicas: 'three' is not of type 'integer'"]
