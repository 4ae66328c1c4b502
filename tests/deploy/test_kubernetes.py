"""deploy/kubernetes: every overlay is valid, its parts find each other, and its settings are ours."""

import re
import tomllib

import kubernetes_validate
import pytest

from streamrl import __version__
from streamrl.command.resolve import resolve
from streamrl.command.serve import check_final
from streamrl.command.settings import SERVICE_SETTINGS, Settings
from streamrl.command.sites import at_site
from streamrl.kafka.topics import Topics
from tests.deploy.dockerfile import configuration, read_stages
from tests.deploy.manifests import OVERLAYS, Workload, built, of_kind, one, selects, values_of, workloads
from tests.deploy.schemas import KUBERNETES_VERSION, ROOT, problems_of, strimzi_schema

STAGES = read_stages((ROOT / "deploy" / "Dockerfile").read_text())
OURS = ("trainer", "generator", "scheduler", "weights")
SITES = ("two-sites/training", "two-sites/generation")
MADE_BY_HAND = {
    "database": {"password"},
    "training-kafka-ca": {"ca.crt"},
    "training-kafka-mirror": {"user.crt", "user.key"},
}
"""Secrets that deploy/README.md has one make, and their keys."""
TRUST = {
    f"trust-{name}": {"ca.pem", "tokens.json", *(f"{name}.{kind}" for kind in ("pem", "key", "token"))} for name in OURS
}
"""Those of the sites' services, which are made in a loop: what `Identity.load` reads."""
OPTIONAL = {"model-hub": {"token"}}
_STRIMZI = "kafka.strimzi.io/v1"

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def resolved(overlay: str, workload: Workload | None, folder, monkeypatch) -> Settings:
    """The settings as a service has them: the mounted file, and the environment of its pod."""
    for config_map in ("run",):
        for name, value in one(overlay, "ConfigMap", config_map)["data"].items():
            monkeypatch.setenv(name, value)
    if workload is not None:
        for name, value in workload.environment.items():
            if name.startswith("STREAMRL_"):
                monkeypatch.setenv(name, value)
    file = folder / "settings.toml"
    file.write_text(one(overlay, "ConfigMap", "settings")["data"]["settings.toml"])
    settings = resolve(file, [], must_have_id=True)
    if workload is None:
        return settings
    site = [argument for argument in workload.container["args"] if argument.startswith("--site=")]
    assert bool(site) == (overlay in SITES)
    return at_site(settings, site[0].removeprefix("--site="), workload.name) if site else settings


@every_overlay
def test_built_in_resources_are_valid_and_have_no_unknown_field(overlay):
    for resource in built(overlay):
        if resource["apiVersion"] != _STRIMZI:
            kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)


@every_overlay
def test_strimzi_s_resources_are_valid_and_have_no_unknown_field(overlay):
    found = [resource for resource in built(overlay) if resource["apiVersion"] == _STRIMZI]
    assert {resource["kind"] for resource in found} >= {"Kafka", "KafkaNodePool", "KafkaTopic", "KafkaUser"}
    for resource in found:
        name = f"{resource['kind']} {resource['metadata']['name']}"
        assert problems_of(resource, strimzi_schema(resource["kind"])) == [], name


@every_overlay
def test_each_mounted_settings_file_is_understood_by_the_service_that_mounts_it(overlay, tmp_path, monkeypatch):
    for workload in workloads(overlay):
        if workload.name not in OURS:
            continue
        with monkeypatch.context() as environment:
            settings = resolved(overlay, workload, tmp_path, environment)
        check_final(workload.name, settings)
        SERVICE_SETTINGS[workload.name].model_validate_json(settings.model_dump_json())
        (mount,) = [mount for mount in workload.container["volumeMounts"] if mount["name"] == "settings"]
        assert workload.container["args"][0] == f"{mount['mountPath']}/settings.toml"


def test_every_settings_file_of_the_manifests_is_mounted_by_some_overlay():
    mounted = {one(overlay, "ConfigMap", "settings")["data"]["settings.toml"] for overlay in OVERLAYS}
    files = {file.read_text() for file in (ROOT / "deploy").rglob("*.toml")}
    assert mounted == files
    assert all(tomllib.loads(text) for text in files)


@every_overlay
def test_pods_are_as_many_as_the_settings_say(overlay, tmp_path, monkeypatch):
    settings = resolved(overlay, None, tmp_path, monkeypatch)
    for workload in workloads(overlay):
        gpus = workload.container["resources"]["limits"].get("nvidia.com/gpu")
        if workload.name == "trainer":
            spec = workload.resource["spec"]
            assert spec["completions"] == spec["parallelism"] == settings.trainer.num_nodes
            assert gpus in (None, settings.trainer.num_ranks // settings.trainer.num_nodes)
            budget = one(overlay, "PodDisruptionBudget", "trainer")
            assert budget["spec"]["minAvailable"] == settings.trainer.num_nodes
        elif workload.name == "generator":
            assert workload.resource["spec"]["replicas"] == settings.generator.num_instances
            assert gpus in (None, settings.generator.tensor_parallel_size)
        else:
            assert gpus is None
            assert workload.resource["spec"]["replicas"] == 1


@every_overlay
def test_topics_are_those_that_the_services_would_make(overlay, tmp_path, monkeypatch):
    settings = resolved(overlay, None, tmp_path, monkeypatch)
    topics, kafka = Topics(settings.run.id), settings.kafka
    expected = {
        topics.prompts: 1,
        topics.assignments: settings.scheduler.max_instances,
        topics.rollouts: kafka.rollout_partitions,
        topics.dead_letters: 1,
        topics.spans: 1,
    }
    if overlay == "two-sites/generation":
        del expected[topics.prompts]
    specs = [topic["spec"] for topic in of_kind(overlay, "KafkaTopic")]
    assert {spec["topicName"]: spec["partitions"] for spec in specs} == expected
    for spec in specs:
        assert spec["replicas"] == kafka.replication_factor
        assert spec["config"] == {
            "retention.ms": int(kafka.retention_hours * 3_600_000),
            "retention.bytes": kafka.retention_bytes,
            "max.message.bytes": kafka.max_message_bytes,
        }


def test_assignments_are_mirrored_one_way_and_what_generators_write_the_other(tmp_path, monkeypatch):
    overlay = "two-sites/generation"
    topics = Topics(resolved(overlay, None, tmp_path, monkeypatch).run.id)
    every = (topics.prompts, topics.assignments, topics.rollouts, topics.dead_letters, topics.spans)
    ways = {}
    for mirror in of_kind(overlay, "KafkaMirrorMaker2"):
        (way,) = mirror["spec"]["mirrors"]
        config = way["sourceConnector"]["config"]
        assert config["replication.policy.class"] == "org.apache.kafka.connect.mirror.IdentityReplicationPolicy"
        ends = way["source"]["alias"], mirror["spec"]["target"]["alias"]
        ways[ends] = [topic for topic in every if re.fullmatch(way["topicsPattern"], topic)]
    assert ways == {
        ("training", "generation"): [topics.assignments],
        ("generation", "training"): [topics.rollouts, topics.dead_letters, topics.spans],
    }


def test_the_mirrors_reach_the_training_site_where_it_listens_for_them():
    (listener,) = [
        listener
        for listener in one("two-sites/training", "Kafka", "kafka")["spec"]["kafka"]["listeners"]
        if listener["type"] == "loadbalancer"
    ]
    assert listener["tls"] is True and listener["authentication"] == {"type": "tls"}
    (name,) = listener["configuration"]["bootstrap"]["alternativeNames"]
    mirrors = of_kind("two-sites/generation", "KafkaMirrorMaker2")
    remote = {
        end["bootstrapServers"]
        for mirror in mirrors
        for end in (mirror["spec"]["target"], mirror["spec"]["mirrors"][0]["source"])
        if end["alias"] == "training"
    }
    assert remote == {f"{name}:{listener['port']}"}
    for overlay in SITES:
        assert one(overlay, "KafkaUser", "mirror")["spec"]["authentication"] == {"type": "tls"}


def test_both_sites_have_one_run_and_one_settings_file():
    for name in ("run", "settings"):
        training, generation = (one(overlay, "ConfigMap", name)["data"] for overlay in SITES)
        assert training == generation


@every_overlay
def test_every_image_is_a_target_of_ours_or_pinned(overlay):
    for workload in workloads(overlay):
        name, _, tag = workload.container["image"].rpartition(":")
        if name == "postgres":
            assert re.match(r"\d+\.\d+-", tag)
            continue
        target = name.removeprefix("streamrl/")
        assert target in STAGES
        variant = "cpu" if overlay == "one-cluster" else "cuda"
        assert tag == (f"{__version__}-{variant}" if target in ("trainer", "generator") else __version__)
        assert set(workload.ports.values()) - {29500} == configuration(STAGES, target).ports
    version = one(overlay, "Kafka", "kafka")["spec"]["kafka"]["version"]
    assert all(mirror["spec"]["version"] == version for mirror in of_kind(overlay, "KafkaMirrorMaker2"))


@every_overlay
def test_every_config_map_secret_claim_and_volume_exists(overlay):
    config_maps = {resource["metadata"]["name"] for resource in of_kind(overlay, "ConfigMap")}
    claims = {resource["metadata"]["name"] for resource in of_kind(overlay, "PersistentVolumeClaim")}
    users = {resource["metadata"]["name"] for resource in of_kind(overlay, "KafkaUser")}
    # Those that Strimzi makes: a certificate for each user, and the cluster's authority.
    secrets = {"kafka-cluster-ca-cert": {"ca.crt"}, **{user: {"user.crt", "user.key", "ca.crt"} for user in users}}
    secrets |= MADE_BY_HAND | TRUST
    for workload in workloads(overlay):
        pod, container = workload.pod, workload.container
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in workload.resource["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        for key in ("configMap", "configMapRef"):
            assert {named["name"] for named in values_of(pod, key)} <= config_maps
        assert {named["claimName"] for named in values_of(pod, "persistentVolumeClaim")} <= claims
        assert {named["secretName"] for named in values_of(pod, "secret")} <= set(secrets)
        for named in values_of(pod, "secretKeyRef"):
            assert named["key"] in (secrets | OPTIONAL)[named["name"]]
            assert named.get("optional", False) == (named["name"] in OPTIONAL)
    for mirror in of_kind(overlay, "KafkaMirrorMaker2"):
        for named in values_of(mirror, "certificateAndKey"):
            assert {named["certificate"], named["key"]} <= secrets[named["secretName"]]
        for trusted in values_of(mirror, "trustedCertificates"):
            assert {named["secretName"] for named in trusted} <= set(secrets)


@every_overlay
def test_librdkafka_s_files_are_mounted_where_the_settings_say(overlay, tmp_path, monkeypatch):
    client = resolved(overlay, None, tmp_path, monkeypatch).kafka.client
    files = {str(value) for name, value in client.items() if name.endswith(".location")}
    for workload in workloads(overlay):
        if workload.labels.get("streamrl/kafka-client") != "true":
            continue
        mounted = {mount["name"]: mount["mountPath"] for mount in workload.container["volumeMounts"]}
        there = {f"{mounted['kafka-ca']}/ca.crt", *(f"{mounted['kafka-user']}/user.{kind}" for kind in ("crt", "key"))}
        assert files == there


@every_overlay
def test_every_address_of_the_settings_is_a_service_and_every_service_leads_to_a_port(overlay, tmp_path, monkeypatch):
    settings = resolved(overlay, None, tmp_path, monkeypatch)
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay, "Service")}
    # Strimzi's: bootstrap of listener `tls`.
    (listener,) = [
        listener
        for listener in one(overlay, "Kafka", "kafka")["spec"]["kafka"]["listeners"]
        if listener["type"] == "internal"
    ]
    assert settings.kafka.bootstrap_servers == f"kafka-kafka-bootstrap:{listener['port']}"
    addresses = [settings.rpc.scheduler_address, settings.rpc.weights_address]
    if overlay != "two-sites/generation":
        addresses.append(settings.mlflow.tracking_uri.removeprefix("http://"))
    for address in addresses:
        host, _, port = address.rpartition(":")
        service = services[host]
        if service.get("type") != "ExternalName":
            assert int(port) in {entry["port"] for entry in service["ports"]}
    for name, service in services.items():
        if service.get("type") == "ExternalName":
            continue
        (workload,) = [workload for workload in workloads(overlay) if selects_all(service["selector"], workload)]
        for port in service["ports"]:
            assert workload.ports[port["targetPort"]] == port["port"], name


def selects_all(selector: dict[str, str], workload: Workload) -> bool:
    return selects({"matchLabels": selector}, workload.labels)


@every_overlay
def test_a_service_listens_where_its_probes_ask(overlay, tmp_path, monkeypatch):
    for workload in workloads(overlay):
        if workload.name not in OURS:
            assert {"readinessProbe", "livenessProbe"} <= set(workload.container)
            continue
        with monkeypatch.context() as environment:
            settings = resolved(overlay, workload, tmp_path, environment)
        address = getattr(settings.rpc, f"{workload.name}_address")
        assert address == f"0.0.0.0:{workload.ports['grpc']}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = {key: value for key, value in workload.container[probe].items() if key in ("grpc", "exec")}
            if settings.rpc.trust is None:
                assert asked == {"grpc": {"port": workload.ports["grpc"]}}
            else:
                command = ["python", "-m", "streamrl.rpc.probe", f"127.0.0.1:{workload.ports['grpc']}"]
                command += ["--trust", str(settings.rpc.trust), "--role", workload.name]
                assert asked == {"exec": {"command": command}}


@pytest.mark.parametrize("overlay", SITES)
def test_between_sites_every_service_has_the_certificate_and_token_of_its_role(overlay, tmp_path, monkeypatch):
    for workload in workloads(overlay):
        if workload.name not in OURS:
            continue
        with monkeypatch.context() as environment:
            trust = resolved(overlay, workload, tmp_path, environment).rpc.trust
        (mount,) = [mount for mount in workload.container["volumeMounts"] if mount["mountPath"] == str(trust)]
        (volume,) = [volume for volume in workload.pod["volumes"] if volume["name"] == mount["name"]]
        assert volume["secret"]["secretName"] == f"trust-{workload.name}"


def test_generators_take_weights_from_their_sites_relay_which_takes_them_from_the_training_site(tmp_path, monkeypatch):
    overlay = "two-sites/generation"
    by_name = {workload.name: workload for workload in workloads(overlay)}
    with monkeypatch.context() as environment:
        relay = resolved(overlay, by_name["weights"], tmp_path, environment)
    with monkeypatch.context() as environment:
        generator = resolved(overlay, by_name["generator"], tmp_path, environment)
    assert relay.weights.found_at == generator.rpc.weights_address == "weights:7003"
    assert one(overlay, "Service", "weights")["spec"].get("type") != "ExternalName"
    host, _, port = relay.weights.upstream.rpartition(":")
    assert one(overlay, "Service", host)["spec"]["type"] == "ExternalName"
    (link,) = one("two-sites/training", "Service", "weights-link")["spec"]["ports"]
    assert int(port) == link["port"]


@every_overlay
def test_pods_meet_the_restricted_standard_and_say_what_they_need(overlay):
    for workload in workloads(overlay):
        pod, container = workload.pod, workload.container
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        if workload.name in OURS:
            # Files that Strimzi's secrets bring, and volumes, belong to the user of the image.
            user = int(configuration(STAGES, workload.name).user.partition(":")[0])
            assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == user


@every_overlay
def test_every_service_of_ours_has_a_disruption_budget_and_a_network_policy_that_means_it(overlay):
    found = workloads(overlay)
    for workload in found:
        policies = [
            policy
            for policy in of_kind(overlay, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"], workload.labels)
        ]
        names = {policy["metadata"]["name"] for policy in policies}
        assert {"default-deny", "names", workload.name} <= names
        if workload.name in OURS:
            budget = one(overlay, "PodDisruptionBudget", workload.name)
            assert selects(budget["spec"]["selector"], workload.labels)
    for policy in of_kind(overlay, "NetworkPolicy"):
        assert any(selects(policy["spec"]["podSelector"], workload.labels) for workload in found)


def _allowed(overlay: str, workload: Workload, direction: str) -> list[tuple[dict, set]]:
    """Peers' pod selectors, with the ports that are open for them (none: all)."""
    allowed = []
    for policy in of_kind(overlay, "NetworkPolicy"):
        if not selects(policy["spec"]["podSelector"], workload.labels):
            continue
        for rule in policy["spec"].get(direction, []):
            ports = {port["port"] for port in rule.get("ports", [])}
            for peer in rule.get({"ingress": "from", "egress": "to"}[direction], []):
                if "podSelector" in peer:
                    allowed.append((peer["podSelector"], ports))
    return allowed


@pytest.mark.parametrize("overlay", ["one-cluster", *SITES])
def test_network_policies_let_through_the_calls_that_services_make(overlay):
    pods = {workload.name: workload for workload in workloads(overlay)}
    calls = [
        ("trainer", "scheduler"),
        ("trainer", "weights"),
        ("trainer", "tracker"),
        ("trainer", "trainer"),
        ("scheduler", "weights"),
        ("tracker", "database"),
        ("generator", "scheduler"),
        ("generator", "weights"),
    ]
    for caller, callee in calls:
        if caller not in pods or callee not in pods:
            continue
        ports = pods[callee].ports
        for name, number in ports.items():
            for pod, direction, other in (
                (pods[caller], "egress", pods[callee]),
                (pods[callee], "ingress", pods[caller]),
            ):
                assert any(
                    selects(selector, other.labels) and (not open_ports or {name, number} & open_ports)
                    for selector, open_ports in _allowed(overlay, pod, direction)
                ), f"{caller} to {callee}:{name} by {direction}"


def test_the_ranks_meet_at_pod_0_by_the_name_that_its_service_gives_it():
    for overlay in ("one-cluster", "two-sites/training"):
        (job,) = [workload for workload in workloads(overlay) if workload.name == "trainer"]
        service = one(overlay, "Service", "trainer")["spec"]
        assert job.resource["spec"]["completionMode"] == "Indexed"
        assert job.environment["MASTER_ADDR"] == f"{job.name}-0.{job.pod['subdomain']}"
        assert job.pod["subdomain"] == "trainer"
        assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
        assert int(job.environment["MASTER_PORT"]) == job.ports["rendezvous"]
        (rank,) = [entry for entry in job.container["env"] if entry["name"] == "NODE_RANK"]
        assert "job-completion-index" in rank["valueFrom"]["fieldRef"]["fieldPath"]
        claim = one(overlay, "PersistentVolumeClaim", "runs")
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@every_overlay
def test_a_config_map_s_keys_are_settings(overlay):
    assert set(one(overlay, "ConfigMap", "run")["data"]) == {"STREAMRL_RUN__ID"}


def test_the_readme_makes_the_secrets_that_are_made_by_hand_and_names_what_is_there():
    text = (ROOT / "deploy" / "README.md").read_text()
    for name, keys in {**MADE_BY_HAND, **OPTIONAL}.items():
        commands = re.findall(rf"create secret generic {name} .*?(?=\n\n|\n```|\nkubectl|\nrm)", text, flags=re.DOTALL)
        assert commands and all(f"{key}=" in command for command in commands for key in keys), name
    (loop,) = re.findall(r"for service in ([\w/ ]+); do\n(.*?)\ndone", text, flags=re.DOTALL)
    served = {f"{overlay.partition('/')[2]}/{one.name}" for overlay in SITES for one in workloads(overlay)}
    assert set(loop[0].split()) == {service for service in served if service.partition("/")[2] in OURS}
    for key in TRUST["trust-trainer"]:
        assert f"--from-file={key.replace('trainer', '$role')}=" in loop[1]
    for path in re.findall(r"deploy/[\w/.-]+[\w]", text):
        assert (ROOT / path).exists() or path == "deploy/.env", path
    for overlay in OVERLAYS:
        assert f"deploy/kubernetes/overlays/{overlay}" in text
