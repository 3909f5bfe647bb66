"""The manifests under k8s/: what they render to, and what KubeRay and a restricted namespace would say to it.

OSDP_KUBERAY_CRDS names a folder with KubeRay's own ray.io_rayjobs.yaml; without it the checks against that are skipped.
"""

import copy
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from osdp_ray.units import parse_bytes

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from k8s_rules import operator_violations, security_violations  # noqa: E402
from k8s_schema import (  # noqa: E402
    containers,
    crd_validator,
    entrypoint,
    json_patched,
    load,
    one,
    pod_templates,
    quantity,
    ray_groups,
    render,
    schema_violations,
    strict,
)

K8S = ROOT / "k8s"
GUIDE = ROOT / "docs" / "kubernetes.md"
DIRECTORIES = {"base": K8S / "base", "cpu": K8S / "overlays" / "cpu", "gpu": K8S / "overlays" / "gpu"}
RENDERED = {name: render(directory) for name, directory in DIRECTORIES.items()}
JOB_FLAGS = {
    *("--num-workers", "--memory-budget", "--global-batch", "--micro-batch", "--steps", "--data", "--layers"),
    *("--hidden", "--heads", "--seq", "--lr", "--seed", "--save-every", "--resume", "--out", "--address"),
}
every_rendering = pytest.mark.parametrize("name", RENDERED)


def rayjob(name):
    return copy.deepcopy(one(RENDERED[name], "RayJob"))


def options(argv):
    """{flag: value} of the entry point, whose flags all take one value."""
    return dict(zip(argv[2::2], argv[3::2], strict=True))


def pinned_ray_version():
    (version,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return version


def test_every_manifest_is_yaml_and_belongs_to_a_kustomization():
    listed = {directory / "kustomization.yaml" for directory in DIRECTORIES.values()}
    for directory in DIRECTORIES.values():
        (kustomization,) = load(directory / "kustomization.yaml")
        listed |= {directory / entry for entry in kustomization["resources"] if (directory / entry).is_file()}
        listed |= {directory / patch["path"] for patch in kustomization.get("patches", [])}

    files = {path for path in K8S.rglob("*") if path.is_file() and not path.is_symlink()}

    assert files == listed
    assert all(load(path) for path in files)


def test_the_job_manifest_is_also_found_at_its_short_path():
    assert load(K8S / "rayjob-train-gpt.yaml") == load(K8S / "base" / "rayjob-train-gpt.yaml")


@every_rendering
def test_every_document_lies_in_the_one_namespace(name):
    namespace = one(RENDERED[name], "Namespace")["metadata"]["name"]
    others = [document for document in RENDERED[name] if document["kind"] != "Namespace"]
    assert {document["kind"] for document in others} == {"NetworkPolicy", "PersistentVolumeClaim", "RayJob"}
    assert {document["metadata"]["namespace"] for document in others} == {namespace}


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_rendering_equals_that_of_kustomize(name):
    tools = {"kustomize": ["kustomize", "build"], "kubectl": ["kubectl", "kustomize"]}
    command = next((command for tool, command in tools.items() if shutil.which(tool)), None)
    if command is None:
        pytest.skip("neither kustomize nor kubectl is on PATH")
    out = subprocess.run(
        [*command, str(DIRECTORIES[name])],
        env=os.environ | {"KUBECONFIG": os.devnull},  # rendering needs no cluster and must not look for one
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    by_kind = {document["kind"]: document for document in yaml.safe_load_all(out)}

    assert by_kind == {document["kind"]: document for document in RENDERED[name]}


@every_rendering
def test_operator_accepts_the_job_and_its_ray_version_is_the_pinned_one(name):
    assert operator_violations(rayjob(name)) == []
    assert rayjob(name)["spec"]["rayClusterSpec"]["rayVersion"] == pinned_ray_version()


@every_rendering
def test_the_cluster_ends_with_the_job_and_no_job_runs_for_ever(name):
    spec = rayjob(name)["spec"]
    assert spec["submissionMode"] == "K8sJobMode"
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] > 0
    assert spec["activeDeadlineSeconds"] > 0
    assert spec["backoffLimit"] == 0


@every_rendering
def test_entry_point_runs_a_job_of_this_project_with_flags_that_it_has(name):
    argv = entrypoint(rayjob(name))
    assert argv[0] == "python"
    assert (ROOT / argv[1]).is_file()
    assert set(options(argv)) <= JOB_FLAGS


@every_rendering
def test_the_job_s_own_parser_reads_the_entry_point(name):
    argv = entrypoint(rayjob(name))
    build_parser = runpy.run_path(str(ROOT / argv[1]))["build_parser"]

    arguments = build_parser().parse_args(argv[2:])

    assert arguments.num_workers == int(options(argv)["--num-workers"])


@pytest.mark.parametrize(("name", "resource"), [("base", "num-cpus"), ("cpu", "num-cpus"), ("gpu", "num-gpus")])
def test_num_workers_is_what_the_worker_groups_offer(name, resource):
    groups = rayjob(name)["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    offered = sum(group["replicas"] * int(group["rayStartParams"][resource]) for group in groups)
    assert int(options(entrypoint(rayjob(name)))["--num-workers"]) == offered


@every_rendering
def test_every_ray_pod_mounts_the_claim_that_the_run_directory_lies_in(name):
    claim = one(RENDERED[name], "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    out = Path(options(entrypoint(rayjob(name)))["--out"])
    for _, group in ray_groups(rayjob(name)):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {Path(mount["mountPath"]): volumes[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts[out.parent]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@every_rendering
def test_memory_holds_shared_memory_and_on_cpu_the_budget_too(name):
    for where, group in ray_groups(rayjob(name)):
        pod = group["template"]["spec"]
        (shm_bytes,) = [
            quantity(volume["emptyDir"]["sizeLimit"])
            for volume in pod["volumes"]
            if volume.get("emptyDir", {}).get("medium") == "Memory"
        ]
        object_store_bytes = int(group["rayStartParams"]["object-store-memory"])
        limit_bytes = quantity(pod["containers"][0]["resources"]["limits"]["memory"])
        assert object_store_bytes < shm_bytes
        budget_bytes = parse_bytes(options(entrypoint(rayjob(name)))["--memory-budget"])
        on_cpu = where != "head" and "num-gpus" not in group["rayStartParams"]
        assert shm_bytes + budget_bytes * on_cpu < limit_bytes


@every_rendering
def test_the_head_trains_nothing_and_is_reachable_inside_the_cluster_only(name):
    head = rayjob(name)["spec"]["rayClusterSpec"]["headGroupSpec"]
    assert head["serviceType"] == "ClusterIP"
    assert not head.get("enableIngress")
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert head["rayStartParams"].get("num-gpus", "0") == "0"


def test_gpu_overlay_gives_every_worker_its_gpus_and_hides_them_from_the_head():
    cluster = rayjob("gpu")["spec"]["rayClusterSpec"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in head["env"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == group["rayStartParams"]["num-gpus"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]


def test_cpu_overlay_asks_for_no_gpu():
    assert "nvidia" not in yaml.safe_dump(RENDERED["cpu"]).lower()


def test_images_of_an_overlay_replace_the_placeholder_everywhere(tmp_path):
    (tmp_path / "job.yaml").write_text((K8S / "rayjob-train-gpt.yaml").read_text())
    kustomization = {"resources": ["job.yaml"], "images": [{"name": "osdp-ray", "newName": "mine", "newTag": "7"}]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))

    (job,) = render(tmp_path)

    images = [container["image"] for _, _, pod in pod_templates(job) for container in containers(pod["spec"])]
    assert images == ["mine:7"] * 3


@every_rendering
def test_pods_meet_the_standard_that_their_namespace_enforces_and_no_manifest_carries_a_token(name):
    labels = one(RENDERED[name], "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert [text for document in RENDERED[name] for text in security_violations(document)] == []


@every_rendering
def test_token_authentication_refers_to_the_secret_that_the_guide_makes(name):
    auth = rayjob(name)["spec"]["rayClusterSpec"]["authOptions"]
    assert auth == {"mode": "token", "secretName": "osdp-ray-auth"}
    assert "kubectl -n osdp-ray create secret generic osdp-ray-auth --from-file=auth_token=" in GUIDE.read_text()


@every_rendering
def test_network_policy_covers_every_pod_of_the_job_and_admits_nobody_else(name):
    policy = one(RENDERED[name], "NetworkPolicy")["spec"]
    ours = policy["podSelector"]["matchLabels"]
    for _, _, pod in pod_templates(rayjob(name)):
        assert ours.items() <= pod["metadata"]["labels"].items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert all(rule.get("from") for rule in policy["ingress"])  # an empty 'from' admits the world
    assert all(rule.get("to") for rule in policy["egress"])
    operator_rules = [rule for rule in policy["ingress"] if "namespaceSelector" in rule["from"][0]]
    assert [rule["ports"] for rule in operator_rules] == [[{"protocol": "TCP", "port": 8265}]]


HEAD_POD = "/spec/rayClusterSpec/headGroupSpec/template/spec"
WORKER = "/spec/rayClusterSpec/workerGroupSpecs/0"
POD = f"{WORKER}/template/spec"
CONTAINER = f"{POD}/containers/0"
FIRST_GROUP = rayjob("cpu")["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"/metadata/name": "a" * 48}, "48 characters"),
        ({"/metadata/name": "7days"}, "DNS-1035"),
        ({"/spec/submissionMode": "Nope"}, "submissionMode 'Nope'"),
        ({"/spec/shutdownAfterJobFinishes": False}, "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"),
        ({"/spec/ttlSecondsAfterFinished": -1}, "ttlSecondsAfterFinished is negative"),
        ({"/spec/suspend": True, "/spec/shutdownAfterJobFinishes": False}, "suspend needs shutdown"),
        ({"/spec/deletionStrategy": {"deletionRules": [{"policy": "DeleteSelf"}]}}, "deletionRules exclude"),
        ({"/spec/clusterSelector": {"a": "b"}}, "exactly one"),
        ({"/spec/clusterSelector": {"a": "b"}, "/spec/suspend": True}, "clusterSelector excludes suspend"),
        ({"/spec/clusterSelector": {"a": "b"}, "/spec/submissionMode": "SidecarMode"}, "excludes SidecarMode"),
        ({"/spec/clusterSelector": {"a": "b"}, "/spec/backoffLimit": 1}, "clusterSelector excludes backoffLimit"),
        ({"/spec/submissionMode": "InteractiveMode", "/spec/backoffLimit": 1}, "InteractiveMode excludes"),
        ({"/spec/submissionMode": "SidecarMode"}, "SidecarMode excludes submitterPodTemplate"),
        ({"/spec/submissionMode": "SidecarMode"}, "SidecarMode excludes submitterConfig"),
        ({"/spec/submissionMode": "SidecarMode", f"{HEAD_POD}/restartPolicy": "Always"}, "restartPolicy Never"),
        ({"/spec/activeDeadlineSeconds": 0}, "activeDeadlineSeconds is not positive"),
        ({"/spec/preRunningDeadlineSeconds": 0}, "preRunningDeadlineSeconds is not positive"),
        ({"/spec/backoffLimit": -1}, "backoffLimit is negative"),
        ({"/spec/runtimeEnvYAML": "env_vars: {"}, "does not parse"),
        ({"/spec/runtimeEnvYAML": "[]"}, "no mapping"),
        ({"/spec/runtimeEnvYAML": "env_vars: {WAIT: 60}"}, "WAIT is no string"),
        ({"/spec/rayClusterSpec/rayVersion": 2.6}, "no version string"),
        ({"/spec/rayClusterSpec/rayVersion": "2.51.0"}, "needs Ray 2.52"),
        ({"/spec/rayClusterSpec/authOptions/enableK8sTokenAuth": True}, "enableK8sTokenAuth"),
        ({"/spec/rayClusterSpec/workerGroupSpecs/-": FIRST_GROUP}, "names repeat"),
        ({f"{WORKER}/replicas": 3}, "maxReplicas 2 fails"),
        ({f"{WORKER}/rayStartParams/labels": "a=b"}, "labels belong beside"),
        ({f"{WORKER}/resources": {"CPU": "1"}}, "given in rayStartParams and beside it"),
        ({f"{POD}/containers": []}, "no container"),
    ],
)
def test_a_job_that_the_operator_would_refuse_is_caught(changes, text):
    operations = [{"op": "add", "path": path, "value": value} for path, value in changes.items()]
    assert text in "; ".join(operator_violations(json_patched(rayjob("cpu"), operations)))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (f"{POD}/hostNetwork", True, "hostNetwork is on"),
        (f"{POD}/securityContext/runAsNonRoot", False, "runAsNonRoot is not true"),
        (f"{POD}/securityContext/runAsUser", 0, "runAsUser is root"),
        (f"{POD}/securityContext/seccompProfile", {"type": "Unconfined"}, "seccompProfile"),
        (f"{POD}/automountServiceAccountToken", True, "token is mounted"),
        (f"{POD}/volumes/-", {"name": "x", "hostPath": {"path": "/"}}, "volume x is a hostPath"),
        (f"{CONTAINER}/securityContext/privileged", True, "privileged"),
        (f"{CONTAINER}/securityContext/runAsUser", 0, "runs as root"),
        (f"{CONTAINER}/securityContext/allowPrivilegeEscalation", True, "allowPrivilegeEscalation"),
        (f"{CONTAINER}/securityContext/capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}, "not dropped"),
        (f"{CONTAINER}/ports", [{"containerPort": 1, "hostPort": 1}], "hostPort"),
        (f"{CONTAINER}/resources", {"limits": {"cpu": "1", "memory": "1Gi"}}, "requests are not limits"),
        (f"{CONTAINER}/env", [{"name": "RAY_AUTH_TOKEN", "value": "x"}], "RAY_AUTH_TOKEN"),
        (f"{CONTAINER}/env", [{"name": "X", "value": "0123456789abcdef" * 2}], "looks like a token"),
        (f"{CONTAINER}/image", "osdp-ray:latest", "not pinned"),
        (f"{CONTAINER}/image", "registry.example:5000/osdp-ray:1", "names a registry host"),
    ],
)
def test_an_unsafe_pod_is_caught(path, value, text):
    broken = json_patched(rayjob("cpu"), [{"op": "add", "path": path, "value": value}])
    assert text in "; ".join(security_violations(broken))


def test_a_secret_in_a_manifest_is_caught():
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}, "stringData": {"auth_token": "y"}}
    assert security_violations(secret) == ["a Secret does not belong into a manifest"]


def test_renderer_refuses_what_it_cannot_render(tmp_path):
    (tmp_path / "kustomization.yaml").write_text("resources: []\nnamePrefix: x-\n")
    with pytest.raises(ValueError, match="namePrefix"):
        render(tmp_path)


def test_a_patch_of_one_pod_leaves_the_pods_that_share_its_yaml_anchor_alone():
    path = f"{CONTAINER}/securityContext/allowPrivilegeEscalation"
    broken = json_patched(rayjob("cpu"), [{"op": "replace", "path": path, "value": True}])
    assert security_violations(broken) == ["workers: ray-worker: allowPrivilegeEscalation is not false"]


def test_a_patch_of_a_place_that_does_not_exist_is_refused():
    with pytest.raises(KeyError, match="nothing is there"):
        json_patched({"spec": {}}, [{"op": "replace", "path": "/spec/replica", "value": 1}])


def test_strict_schema_is_closed_where_properties_are_named_and_open_elsewhere():
    schema = {
        "type": "object",
        "properties": {
            "port": {"x-kubernetes-int-or-string": True, "type": "string"},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "free": {"type": "object", "properties": {}, "x-kubernetes-preserve-unknown-fields": True},
            "time": {"type": "string", "nullable": True, "default": "x"},
        },
    }
    assert strict(schema) == {
        "type": "object",
        "properties": {
            "port": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "free": {"type": "object", "properties": {}},
            "time": {"type": ["string", "null"]},
        },
        "additionalProperties": False,
    }


@pytest.fixture(scope="module")
def kuberay():
    folder = os.environ.get("OSDP_KUBERAY_CRDS")
    if not folder:
        pytest.skip("OSDP_KUBERAY_CRDS does not name a folder with KubeRay's ray.io_rayjobs.yaml")
    return crd_validator(Path(folder) / "ray.io_rayjobs.yaml")


@every_rendering
def test_job_is_valid_under_the_crd(name, kuberay):
    assert schema_violations(kuberay, rayjob(name)) == []


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("/spec/ttlSecondAfterFinished", 60, "'ttlSecondAfterFinished' was unexpected"),
        (f"{CONTAINER}/securityContext/allowPriviledgeEscalation", False, "'allowPriviledgeEscalation' was unexpected"),
        ("/spec/rayClusterSpec/rayVersion", 2.60, "2.6 is not of type 'string'"),
        (f"{WORKER}/replicas", "2", "'2' is not of type 'integer'"),
        (f"{WORKER}/rayStartParams/num-cpus", 1, "1 is not of type 'string'"),
        ("/spec/rayClusterSpec/authOptions/mode", "tokens", "'tokens' is not one of"),
        (f"{CONTAINER}/resources/limits/memory", "4 GB", "does not match"),
        (f"{POD}/volumes/0/name", None, "None is not of type 'string'"),
    ],
)
def test_a_mistake_is_caught_by_the_crd(path, value, text, kuberay):
    broken = json_patched(rayjob("cpu"), [{"op": "add", "path": path, "value": value}])
    assert text in "; ".join(schema_violations(kuberay, broken))


def test_guide_names_files_that_exist_and_the_pinned_ray():
    text = GUIDE.read_text()
    for path in re.findall(r"(k8s/[\w/.-]*\w)", text):
        assert (ROOT / path).exists() or path == "k8s/overlays/cpu/rayjob-four.yaml", path  # the one to write
    assert f"rayproject/ray:{pinned_ray_version()}-py311" in text


def test_pods_that_the_guide_shows_meet_the_restricted_standard():
    blocks = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    pods = [document for block in blocks for document in yaml.safe_load_all(block) if isinstance(document, dict)]
    pods = [document for document in pods if document.get("kind") == "Pod"]
    assert len(pods) == 1
    assert security_violations(pods[0]) == []
