"""The Kubernetes manifests are valid, name only what is there, and agree with docker-compose.yml and the commands."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml  # type: ignore[import-untyped]

from draftstore.assembly.sources import Sources
from draftstore.cli import cli
from draftstore.remote.addresses import Address
from services.cli.serve import serve
from services.cli.worker import worker
from services.common.http import HEALTH
from services.lookup.settings import LookupSettings
from services.worker.settings import WorkerSettings
from tests import ROOT
from tests.journey.test_compose import AUTH, interpolated

Mapping = dict[str, Any]

FOLDER = ROOT / "packaging" / "kubernetes"
VERSIONS = ("1.27", kubernetes_validate.latest_version())
"""The oldest that the manifests are for, and the newest that is known."""
SECRET = "draftstore"
VALUES = {"POSTGRES_PASSWORD": "draftstore", "READER_PASSWORD": "reader", "PREFECT_AUTH_STRING": AUTH}
"""What compose has for some keys of the secret in `interpolated`; others are empty there."""
OURS = {"POSTGRES_PASSWORD", "READER_PASSWORD", "DRAFTSTORE_TOKEN"}
"""Variables that containers have beyond compose's: parts of others, and the token."""
DIFFERENT = {
    "serve": {"socket", "tokens", "anonymous", "allow_hosts", "notice_seconds"},
    "worker": {"lookup", "deadline", "tokens", "anonymous", "allow_hosts"},
}
"""Options with other values than in compose, where only one machine reaches the services."""
UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def read(name: str) -> list[Mapping]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def header(name: str) -> str:
    """Return the comment at the top of a file, without its line breaks."""
    lines = (FOLDER / name).read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    return " ".join(line.removeprefix("#").strip().removesuffix("\\") for line in lines)


(KUSTOMIZATION,) = read("kustomization.yaml")
GUIDE = header("kustomization.yaml")
MANIFESTS = [manifest for name in KUSTOMIZATION["resources"] for manifest in read(name)]
WORKLOADS = [each for each in MANIFESTS if each["kind"] in ("Deployment", "StatefulSet")]
COMPOSE: Mapping = yaml.safe_load(interpolated((ROOT / "docker-compose.yml").read_text(encoding="utf-8")))


def found(kind: str) -> dict[str, Mapping]:
    return {each["metadata"]["name"]: each for each in MANIFESTS if each["kind"] == kind}


def every(key: str, within: Any = MANIFESTS) -> Iterator[Any]:
    """Yield the values of a key, at whatever depth."""
    if isinstance(within, dict) and key in within:
        yield within[key]
    inner = within.values() if isinstance(within, dict) else within if isinstance(within, list) else ()
    for each in inner:
        yield from every(key, each)


def pod(workload: Mapping) -> Mapping:
    spec: Mapping = workload["spec"]["template"]["spec"]
    return spec


def labels(workload: Mapping) -> Mapping:
    given: Mapping = workload["spec"]["template"]["metadata"]["labels"]
    return given


def containers(workload: Mapping) -> list[Mapping]:
    return [*pod(workload).get("initContainers", []), *pod(workload)["containers"]]


def ports(workload: Mapping) -> list[str]:
    return [port["name"] for each in containers(workload) for port in each.get("ports", [])]


def places() -> set[tuple[str, int]]:
    """Return the names and ports of services."""
    return {(name, port["port"]) for name, each in found("Service").items() for port in each["spec"]["ports"]}


def selected(selector: Mapping) -> Mapping:
    """Return the one workload that a selector selects."""
    (workload,) = (each for each in WORKLOADS if selector.items() <= labels(each).items())
    return workload


CONTAINERS = [each for workload in WORKLOADS for each in containers(workload)]
SHARED = {
    each["name"]: (workload, each)
    for workload in WORKLOADS
    for each in containers(workload)
    if each["name"] in COMPOSE["services"]
}
"""What compose has too: each container with its workload."""


def test_every_file_is_applied() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")}
    assert files == {"kustomization.yaml", *KUSTOMIZATION["resources"]}
    assert found("Namespace").keys() == {KUSTOMIZATION["namespace"]}
    assert {each["name"] for each in CONTAINERS} == {"kernels", *SHARED}
    theirs = {name: each.get("profiles", ["gpu"]) for name, each in COMPOSE["services"].items()}
    assert SHARED.keys() == {name for name, profiles in theirs.items() if "gpu" in profiles}
    built = {each["image"].partition(":")[0] for each in COMPOSE["services"].values() if "build" in each}
    assert {image["name"] for image in KUSTOMIZATION["images"]} == built


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_manifests_are_valid(manifest: Mapping, version: str) -> None:
    validated = kubernetes_validate.validate(manifest, version, strict=True)
    assert version.startswith(validated)


def test_manifests_name_what_is_there() -> None:
    assert set(every("claimName")) == found("PersistentVolumeClaim").keys()
    assert {each["name"] for each in every("configMap")} == found("ConfigMap").keys()
    assert set(every("subPath")) <= {key for each in found("ConfigMap").values() for key in each["data"]}
    assert {each["name"] for each in every("secretKeyRef")} | set(every("secretName")) == {SECRET}
    assert set(every("serviceName")) <= found("Service").keys()
    assert not set(every("serviceAccountName"))
    for workload in WORKLOADS:
        assert all(each == labels(workload) for each in every("matchLabels", workload))
        made = [each["metadata"] for each in workload["spec"].get("volumeClaimTemplates", [])]
        volumes = {each["name"] for each in [*pod(workload).get("volumes", []), *made]}
        mounts = chain.from_iterable(every("volumeMounts", workload))
        assert {each["name"] for each in mounts} == volumes
    for service in found("Service").values():
        of = ports(selected(service["spec"]["selector"]))
        assert all(port["targetPort"] in of for port in service["spec"]["ports"])
    for budget in found("PodDisruptionBudget").values():
        assert selected(budget["spec"]["selector"]["matchLabels"])["spec"]["replicas"] > 1


def test_pods_have_no_rights() -> None:
    for each in map(pod, WORKLOADS):
        context = each["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"]
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not each["automountServiceAccountToken"]
        assert not each["enableServiceLinks"]  # variables named after services would be settings of Prefect
    assert all(each["securityContext"] == UNPRIVILEGED for each in CONTAINERS)


def environment(container: Mapping) -> dict[str, str]:
    """Return the variables of a container, with the values that compose has for the secrets."""
    values: dict[str, str] = {}
    for each in container.get("env", []):
        if "valueFrom" in each:
            values[each["name"]] = VALUES.get(each["valueFrom"]["secretKeyRef"]["key"], "")
        else:  # only variables before it are filled in
            values[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], each["value"])
    return values


def seconds(text: str) -> int:
    return int(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


@pytest.mark.parametrize("name", SHARED)
def test_containers_agree_with_compose(name: str) -> None:
    (workload, container), service = SHARED[name], COMPOSE["services"][name]
    assert container["image"] == service["image"]
    assert container["resources"]["limits"]["memory"] == f"{service['mem_limit'].upper()}i"
    given = {
        key: str("" if value is None else value) for key, value in service.get("environment", {}).items()
    }
    ours = environment(container)
    assert given.items() <= ours.items()
    assert ours.keys() - given.keys() <= OURS
    if name not in ("lookup", "worker"):
        assert container.get("command", container.get("args")) == service["command"]
    if "stop_grace_period" in service:
        assert pod(workload)["terminationGracePeriodSeconds"] == seconds(service["stop_grace_period"])
    volumes = pod(workload).get("volumes", [])
    temporary = {each["name"] for each in volumes if "persistentVolumeClaim" not in each}
    mounts = [each for each in container.get("volumeMounts", []) if each["name"] not in temporary]
    kept = {(each["name"], each["mountPath"], each.get("readOnly", False)) for each in mounts}
    parts = [volume.split(":") for volume in service.get("volumes", [])]
    named = COMPOSE["volumes"].keys() - {"sockets"}  # clients connect by TCP
    assert kept == {(source, path, mode == ["ro"]) for source, path, *mode in parts if source in named}


@pytest.mark.parametrize("name", SHARED)
def test_probes_ask_for_what_is_served(name: str) -> None:
    container = SHARED[name][1]
    test = COMPOSE["services"][name].get("healthcheck", {}).get("test", [])
    probes = [probe for key, probe in container.items() if key.endswith("Probe")]
    assert bool(probes) == bool(test)
    for probe in probes:
        if "exec" in probe:
            assert probe["exec"]["command"] == test[1:]
        else:
            assert probe["httpGet"]["port"] in [port["name"] for port in container["ports"]]
            path = probe["httpGet"]["path"]
            assert path in HEALTH or f"{path}'" in test[-1]


def options(command: click.Command, words: list[str]) -> Mapping:
    name = str(command.name)
    return command.make_context(name, words[words.index(name) + 1 :]).params


@pytest.mark.parametrize(("name", "command"), [("lookup", serve), ("worker", worker)])
def test_commands_are_those_of_compose_but_for_access(name: str, command: click.Command) -> None:
    theirs = COMPOSE["services"][name]["command"]
    before = options(command, shlex.split(theirs[-1]) if theirs[0] == "sh" else theirs)
    ours = options(command, SHARED[name][1]["command"])
    assert {key for key in ours if ours[key] != before[key]} == DIFFERENT[str(command.name)]
    given = {key: value for key, value in ours.items() if value not in (None, ())}
    if name == "lookup":
        settings = LookupSettings.take(given)  # refuses to listen without tokens
        assert settings.notice_seconds < pod(SHARED[name][0])["terminationGracePeriodSeconds"]
    else:
        WorkerSettings.take(given).check_access(host=WorkerSettings.take(given).endpoint)
        assert Address.parse(str(Sources.take(given).lookup))[1:3] in places()


def test_addresses_are_those_of_services() -> None:
    values = " ".join(chain.from_iterable(environment(each).values() for each in CONTAINERS))
    named = set(re.findall(r"[@/]([a-z][\w-]*):(\d+)", values)) - {("localhost", "4200")}
    assert {(name, int(port)) for name, port in named} <= places()


def test_the_guide_makes_every_key_of_the_secret() -> None:
    assert not found("Secret")  # a default would be known to everybody
    optional = {each["key"] for each in every("secretKeyRef") if each.get("optional")}
    used = {each["key"] for each in [*every("secretKeyRef"), *chain.from_iterable(every("items"))]}
    literals = dict(re.findall(r"--from-literal=(\w+)=(\S+)", GUIDE))
    assert literals.keys() | set(re.findall(r"--from-file=([\w.]+)", GUIDE)) == used - optional
    assert all("$" in value for value in literals.values())
    assert all(key in GUIDE for key in optional)
    for words in re.findall(r"draftstore (tokens new [^)`]+)", GUIDE + header("prometheus.yml")):
        check_command(cli, shlex.split(words))


def check_command(command: click.Command, words: list[str]) -> None:
    """Check that a command and its options exist."""
    while isinstance(command, click.Group):
        with click.Context(command) as context:
            _, found, words = command.resolve_command(context, words)
        assert found
        command = found
    with suppress(click.exceptions.Exit):
        command.make_context(command.name, words)


def test_the_guide_makes_the_images_and_the_release_as_compose_does() -> None:
    images = {each["image"] for each in CONTAINERS if not each["image"].startswith("postgres:")}
    assert set(re.findall(r"docker build -t (\S+)", GUIDE)) == images
    assert f"EXTRAS={COMPOSE['services']['flows']['build']['args']['EXTRAS']} " in GUIDE
    run = re.compile(r"prefect (deployment run build-rest/default .+?\]\}')")
    (theirs,) = run.findall((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    (ours,) = run.findall(GUIDE)
    assert ours == theirs.replace("/corpora/", "/var/lib/draftstore/")


def test_prometheus_scrapes_the_lookup_service_and_the_worker() -> None:
    (configuration,) = read("prometheus.yml")
    (scrape,) = configuration["scrape_configs"]
    (discovery,) = scrape["kubernetes_sd_configs"]
    assert discovery["namespaces"]["names"] == [KUSTOMIZATION["namespace"]]
    kept = re.compile(scrape["relabel_configs"][0]["regex"])
    pods = {(labels(each)["app.kubernetes.io/name"], port) for each in WORKLOADS for port in ports(each)}
    assert {each for each in pods if kept.fullmatch(";".join(each))} == {
        ("lookup", "http"),
        ("worker", "http"),
    }
