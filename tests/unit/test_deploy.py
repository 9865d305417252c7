"""scripts/deploy/: what manifests name exists: flags, ports, paths, metrics, volumes."""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from twinfer.serving import cli
from twinfer.shared.models.arguments import settle_model

from .test_dashboard import exported

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "deploy"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
KINDS = {
    "RayService": "ray.io/v1",
    "RayCluster": "ray.io/v1",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "Deployment": "apps/v1",
    "Service": "v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
}


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def nodes(value):
    """All mappings inside of a document."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, (dict, list)):
            yield from nodes(inner)


def containers(document):
    """Each container, with the pod that it is in."""
    for node in nodes(document):
        for container in node.get("containers", ()):
            yield node, container


def serving(document):
    """Containers that serve, each with its pod and the words behind `twinfer`."""
    for pod, container in containers(document):
        text = " ".join([*container.get("command", ()), *container.get("args", ())])
        if found := re.search(r"\btwinfer (serve [^;&]*)", text):
            yield pod, container, shlex.split(found[1])


def parsed(words):
    """The arguments of a command, as the command line takes them."""
    arguments, unknown = cli._parser()[0].parse_known_args(words)
    assert not settle_model(arguments, unknown)
    return arguments


def test_there_is_one_for_each_way():
    kinds = [document["kind"] for name in FILES for document in documents(name)]
    assert {"RayCluster", "RayService", "LeaderWorkerSet", "InferencePool"} <= set(kinds)
    assert kinds.count("LeaderWorkerSet") == 2


@pytest.mark.parametrize("name", FILES)
def test_versions_images_and_volumes(name):
    for document in documents(name):
        assert document["apiVersion"] == KINDS[document["kind"]]
        assert document["metadata"]["name"]
        for pod, container in containers(document):
            assert container["image"]
            mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
            assert mounted <= {volume["name"] for volume in pod.get("volumes", ())}


@pytest.mark.parametrize("name", [name for name in FILES if name != "rayservice.yaml"])
def test_commands_probes_and_drains(name):
    found = [one for document in documents(name) for one in serving(document)]
    assert found
    for pod, container, words in found:
        arguments = parsed(words)
        assert arguments.host == "0.0.0.0"
        assert arguments.port in [port["containerPort"] for port in container["ports"]]
        for probe, path in (
            ("startup", "/ready"),
            ("readiness", "/ready"),
            ("liveness", "/health"),
        ):
            asked = container[f"{probe}Probe"]["httpGet"]
            assert asked == {"path": path, "port": arguments.port}
        # The drain has to end before the pod is killed.
        assert pod["terminationGracePeriodSeconds"] > arguments.drain_timeout + 10


def test_devices_are_as_many_as_shards():
    for name in ("kuberay-tpu.yaml", "lws-tpu.yaml", "lws-gpu.yaml"):
        document = documents(name)[0]
        (words,) = [words for _, _, words in serving(document)]
        spec = document["spec"]
        if document["kind"] == "RayCluster":
            (group,) = spec["workerGroupSpecs"]
            hosts, pod = group["numOfHosts"], group["template"]["spec"]
        else:
            template = spec["leaderWorkerTemplate"]
            hosts, pod = template["size"], template["workerTemplate"]["spec"]
        (limits,) = [container["resources"]["limits"] for container in pod["containers"]]
        devices = sum(
            int(n) for kind, n in limits.items() if kind in ("google.com/tpu", "nvidia.com/gpu")
        )
        assert hosts * devices == parsed(words).tensor_parallel_size
        topology = pod["nodeSelector"].get("cloud.google.com/gke-tpu-topology")
        if topology:
            sides = [int(side) for side in topology.split("x")]
            assert sides[0] * sides[1] == hosts * devices


def test_ray_serve_imports_what_is_there():
    """The application, its one argument, its deployment; each replica has a GPU for each shard, and
    pods of the cluster have as many.
    """
    (document,) = documents("rayservice.yaml")
    config = yaml.safe_load(document["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    module, name = application["import_path"].split(":")
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    defined = {node.name: node for node in tree.body if hasattr(node, "name")}
    assert isinstance(defined[name], ast.FunctionDef)
    (deployment,) = application["deployments"]
    assert isinstance(defined[deployment["name"]], ast.ClassDef)
    assert set(application["args"]) == {"serve"}
    arguments = parsed(["serve", *shlex.split(application["args"]["serve"])])
    gpus = deployment["ray_actor_options"]["num_gpus"]
    assert arguments.tensor_parallel_size == gpus
    cluster = document["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    pod = group["template"]["spec"]
    (container,) = pod["containers"]
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == gpus
    assert group["maxReplicas"] == deployment["autoscaling_config"]["max_replicas"]
    assert pod["terminationGracePeriodSeconds"] > arguments.drain_timeout + 10
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert config["http_options"]["port"] in [port["containerPort"] for port in head["ports"]]
    for one in (head, container):
        assert {"name": "PYTHONPATH", "value": "/app/deploy"} in one["env"]


def test_the_pool_finds_pods_and_metrics():
    made = {(d["kind"], d["metadata"]["name"]): d for d in documents("inference-pool.yaml")}
    pool = made["InferencePool", "twinfer"]["spec"]
    server = made["Deployment", "twinfer"]["spec"]["template"]
    picker = made["Deployment", "twinfer-picker"]["spec"]["template"]["spec"]["containers"][0]
    assert pool["selector"]["matchLabels"].items() <= server["metadata"]["labels"].items()
    (container,) = server["spec"]["containers"]
    assert [p["number"] for p in pool["targetPorts"]] == [
        p["containerPort"] for p in container["ports"]
    ]
    assert ("Service", pool["endpointPickerRef"]["name"]) in made
    words = dict(word.removeprefix("--").split("=", 1) for word in picker["args"])
    assert words["pool-name"] == "twinfer"
    assert int(words["grpc-port"]) == pool["endpointPickerRef"]["port"]["number"]
    metrics = [value for key, value in words.items() if key.endswith("-metric")]
    assert len(metrics) == 2
    assert set(metrics) <= exported()


@pytest.mark.parametrize("name", FILES)
def test_services_reach_what_serves(name):
    made = documents(name)
    labels = [
        n["metadata"]["labels"] for d in made for n in nodes(d) if "labels" in n.get("metadata", {})
    ]
    ports = {p["containerPort"] for d in made for _, c in containers(d) for p in c.get("ports", ())}
    for service in (d["spec"] for d in made if d["kind"] == "Service"):
        assert any(service["selector"].items() <= one.items() for one in labels)
        assert {port["targetPort"] for port in service["ports"]} <= ports


def test_the_image_has_extras_that_there_are_and_the_name_that_manifests_ask_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (FOLDER / "Dockerfile").read_text()
    for extras in re.findall(r"EXTRAS=([a-z,]+)", text):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    tags = set(re.findall(r"-t (\S+)", text))
    asked = {
        container["image"]
        for name in FILES
        for document in documents(name)
        for _, container in containers(document)
        if container["image"].startswith("twinfer")
    }
    assert tags == asked == {f"twinfer:{project['version']}"}


def test_the_image_gets_the_package_and_nothing_else():
    """What is not copied cannot be installed: every room, and what the build reads."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {name.split(".")[1] for name in setup["tool"]["setuptools"]["packages"] if "." in name}
    read = {setup["project"]["readme"], *setup["project"]["license-files"], "pyproject.toml"}
    assert kept == rooms | read | {"*.py", *setup["tool"]["setuptools"]["package-data"]["twinfer"]}
    assert all(any(ROOT.glob(name)) for name in kept)
