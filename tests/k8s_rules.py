"""Rules on manifests that no schema states: those of KubeRay's operator, of pod security, and this project's own.

Each function returns what is wrong as sentences, an empty list for a good document.
"""

import re
from typing import Any

import yaml
from k8s_schema import containers, pod_templates, scalars

Document = dict[str, Any]

SUBMISSION_MODES = ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode")
# The volume kinds that the restricted pod security standard allows.
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


def operator_violations(rayjob: Document) -> list[str]:
    """What KubeRay 1.7's operator would refuse although its schema allows it."""
    spec, name = rayjob["spec"], rayjob["metadata"]["name"]
    mode = spec.get("submissionMode", "K8sJobMode")
    shutdown, retries = spec.get("shutdownAfterJobFinishes", False), spec.get("backoffLimit", 0)
    selector, deletion_rules = "clusterSelector" in spec, spec.get("deletionStrategy", {}).get("deletionRules")
    rules = [
        (len(name) > 47, f"name {name!r} has {len(name)} characters, more than 47"),
        (not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), f"name {name!r} is no DNS-1035 label"),
        (mode not in SUBMISSION_MODES, f"submissionMode {mode!r} is none of {SUBMISSION_MODES}"),
        (spec.get("ttlSecondsAfterFinished", 0) < 0, "ttlSecondsAfterFinished is negative"),
        (
            spec.get("ttlSecondsAfterFinished", 0) > 0 and not shutdown,
            "ttlSecondsAfterFinished needs shutdownAfterJobFinishes",
        ),
        (bool(spec.get("suspend")) and not shutdown, "suspend needs shutdownAfterJobFinishes"),
        (bool(deletion_rules) and shutdown, "deletionRules exclude shutdownAfterJobFinishes"),
        (selector == ("rayClusterSpec" in spec), "exactly one of rayClusterSpec and clusterSelector is needed"),
        (selector and bool(spec.get("suspend")), "clusterSelector excludes suspend"),
        (selector and mode == "SidecarMode", "clusterSelector excludes SidecarMode"),
        (selector and retries > 0, "clusterSelector excludes backoffLimit"),
        (mode == "InteractiveMode" and retries > 0, "InteractiveMode excludes backoffLimit"),
        (mode == "SidecarMode" and "submitterPodTemplate" in spec, "SidecarMode excludes submitterPodTemplate"),
        (mode == "SidecarMode" and "submitterConfig" in spec, "SidecarMode excludes submitterConfig"),
        (spec.get("activeDeadlineSeconds", 1) <= 0, "activeDeadlineSeconds is not positive"),
        (spec.get("preRunningDeadlineSeconds", 1) <= 0, "preRunningDeadlineSeconds is not positive"),
        (retries < 0, "backoffLimit is negative"),
    ]
    violations = [text for broken, text in rules if broken] + _runtime_env_violations(spec.get("runtimeEnvYAML", "{}"))
    return violations + (_cluster_violations(spec["rayClusterSpec"], mode) if "rayClusterSpec" in spec else [])


def _runtime_env_violations(text: str) -> list[str]:
    try:
        runtime_env = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"runtimeEnvYAML does not parse: {error}"]
    if not isinstance(runtime_env, dict):
        return ["runtimeEnvYAML is no mapping"]
    env_vars = runtime_env.get("env_vars", {})
    return [f"runtimeEnvYAML: {key} is no string" for key, value in env_vars.items() if not isinstance(value, str)]


def _cluster_violations(cluster: Document, mode: str) -> list[str]:
    auth, version = cluster.get("authOptions", {}), cluster.get("rayVersion")
    head, workers = cluster["headGroupSpec"], cluster.get("workerGroupSpecs", [])
    numbers = re.fullmatch(r"(\d+)\.(\d+)\.\d+", version) if isinstance(version, str) else None
    names = [group["groupName"] for group in workers]
    rules = [
        (numbers is None, f"rayVersion {version!r} is no version string"),
        (
            numbers is not None and auth.get("mode") == "token" and (int(numbers[1]), int(numbers[2])) < (2, 52),
            f"token authentication needs Ray 2.52, not {version}",
        ),
        (bool(auth.get("enableK8sTokenAuth")), "a RayJob cannot use enableK8sTokenAuth"),
        (len(set(names)) < len(names), f"worker group names repeat: {names}"),
        (
            mode == "SidecarMode" and head["template"]["spec"].get("restartPolicy", "Never") != "Never",
            "SidecarMode needs the head's restartPolicy Never",
        ),
    ]
    violations = [text for broken, text in rules if broken]
    for where, group in [("head", head)] + [(group["groupName"], group) for group in workers]:
        violations += _group_violations(where, group)
    for group in workers:
        low, count, high = (group.get(key) for key in ("minReplicas", "replicas", "maxReplicas"))
        if low is None or high is None or not 0 <= low <= (low if count is None else count) <= high:
            violations.append(
                f"{group['groupName']}: minReplicas {low} <= replicas {count} <= maxReplicas {high} fails"
            )
    return violations


def _group_violations(where: str, group: Document) -> list[str]:
    params = group.get("rayStartParams", {})
    given_twice = "resources" in group and {"num-cpus", "num-gpus", "memory", "resources"} & set(params)
    rules = [
        (not group["template"]["spec"].get("containers"), f"{where}: no container"),
        ("labels" in params, f"{where}: labels belong beside rayStartParams, not in it"),
        (bool(given_twice), f"{where}: resources are given in rayStartParams and beside it"),
    ]
    return [text for broken, text in rules if broken]


def security_violations(document: Document) -> list[str]:
    """What breaks the restricted pod security standard, or this project's own rules on tokens, images and limits."""
    violations = [
        f"{where}: {text}" for where, _, pod in pod_templates(document) for text in _pod_violations(pod["spec"])
    ]
    if document["kind"] == "Secret":
        violations.append("a Secret does not belong into a manifest")
    for value in scalars(document):
        if any(re.search(r"[0-9]", word) for word in re.findall(r"[A-Za-z0-9_+=-]{32,}", str(value))):
            violations.append(f"{value!r} looks like a token")
    return violations


def _pod_violations(spec: Document) -> list[str]:
    context = spec.get("securityContext", {})
    rules = [(spec.get(key, False), f"{key} is on") for key in ("hostNetwork", "hostPID", "hostIPC")]
    rules += [
        (context.get("runAsNonRoot") is not True, "runAsNonRoot is not true"),
        (context.get("runAsUser", 0) == 0, "runAsUser is root or left to the image"),
        (context.get("seccompProfile", {}).get("type") != "RuntimeDefault", "seccompProfile is not RuntimeDefault"),
        (spec.get("automountServiceAccountToken") is not False, "the service account's token is mounted"),
    ]
    for volume in spec.get("volumes", []):
        for kind in set(volume) - {"name"} - RESTRICTED_VOLUMES:
            rules.append((True, f"volume {volume['name']} is a {kind}"))
    violations = [text for broken, text in rules if broken]
    for container in containers(spec):
        violations += [f"{container['name']}: {text}" for text in _container_violations(container)]
    return violations


def _container_violations(container: Document) -> list[str]:
    context, image = container.get("securityContext", {}), container["image"]
    resources = container.get("resources", {})
    first, slash, _ = image.partition("/")
    named_secrets = [
        variable["name"]
        for variable in container.get("env", [])
        if re.search(r"TOKEN|PASSWORD|SECRET|CREDENTIAL", variable["name"]) and "value" in variable
    ]
    rules = [
        (context.get("privileged", False), "privileged"),
        (context.get("runAsUser", 1) == 0 or context.get("runAsNonRoot") is False, "runs as root"),
        (context.get("allowPrivilegeEscalation") is not False, "allowPrivilegeEscalation is not false"),
        (context.get("capabilities") != {"drop": ["ALL"]}, "capabilities are not dropped"),
        (any("hostPort" in port for port in container.get("ports", [])), "hostPort is open"),
        (not resources.get("limits") or resources["limits"] != resources.get("requests"), "requests are not limits"),
        (not {"cpu", "memory"} <= set(resources.get("limits", {})), "cpu or memory has no limit"),
        (bool(named_secrets), f"{named_secrets} carry their value in the manifest"),
        (":" not in image.rpartition("/")[2] or image.endswith(":latest"), f"image {image} is not pinned"),
        (bool(slash) and bool(re.search(r"[.:]|^localhost$", first)), f"image {image} names a registry host"),
    ]
    return [text for broken, text in rules if broken]
