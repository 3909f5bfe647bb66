"""Reads and renders Kubernetes manifests without a cluster, and validates them under a CRD.

`render` gives the documents that `kubectl kustomize` would, for kustomizations that use resources, JSON patches and
images only. `crd_validator` turns a CRD into a strict validator. What a schema cannot say is in k8s_rules.py.
"""

import copy
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Document = dict[str, Any]

_QUANTITY_FACTOR = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def load(path: Path) -> list[Document]:
    """The YAML documents of one file, with aliases written out, so that a patch of one place changes no other."""
    documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    return json.loads(json.dumps(documents))


def render(directory: Path) -> list[Document]:
    """The documents of a kustomization, with its patches and images applied.

    Raises ValueError for any part of kustomize that is not read here, so that no test passes on a partial rendering.
    """
    (kustomization,) = load(directory / "kustomization.yaml")
    unknown = set(kustomization) - {"apiVersion", "kind", "resources", "patches", "images"}
    if unknown:
        raise ValueError(f"{directory}: kustomization uses {sorted(unknown)}, which this renderer does not know")
    documents: list[Document] = []
    for resource in kustomization["resources"]:
        path = (directory / resource).resolve()
        documents += render(path) if path.is_dir() else load(path)
    for patch in kustomization.get("patches", []):
        _patch_targets(documents, patch["target"], yaml.safe_load((directory / patch["path"]).read_text()))
    for image in kustomization.get("images", []):
        _rename_image(documents, image)
    return documents


def json_patched(document: Document, operations: list[Document]) -> Document:
    """A copy of `document` after add, replace and remove operations (RFC 6902). Raises KeyError for a missing place."""
    document = copy.deepcopy(document)
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = document
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        key: Any = last
        if isinstance(place, list):
            key = len(place) if last == "-" else int(last)
        verb = operation["op"]
        if verb != "add" and not (key < len(place) if isinstance(place, list) else key in place):
            raise KeyError(f"{verb} {operation['path']}: nothing is there")
        if verb == "add" and isinstance(place, list):
            place.insert(key, copy.deepcopy(operation["value"]))
        elif verb in ("add", "replace"):
            place[key] = copy.deepcopy(operation["value"])
        elif verb == "remove":
            del place[key]
        else:
            raise ValueError(f"JSON patch operation {verb!r} is not known here")
    return document


def _patch_targets(documents: list[Document], target: Document, operations: list[Document]) -> None:
    hits = 0
    for i, document in enumerate(documents):
        group, _, version = document["apiVersion"].rpartition("/")
        found = {"group": group, "version": version, "kind": document["kind"], "name": document["metadata"]["name"]}
        if all(found[key] == value for key, value in target.items()):
            documents[i] = json_patched(document, operations)
            hits += 1
    if hits == 0:
        raise ValueError(f"patch target {target} matches no document")


def _rename_image(documents: list[Document], image: Document) -> None:
    for _, _, pod in (found for document in documents for found in pod_templates(document)):
        for container in containers(pod["spec"]):
            name, _, tag = container["image"].rpartition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"


def one(documents: list[Document], kind: str) -> Document:
    """The only document of that kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def entrypoint(rayjob: Document) -> list[str]:
    """The job's command as the shell would split it."""
    return shlex.split(rayjob["spec"]["entrypoint"])


def ray_groups(rayjob: Document) -> list[tuple[str, Document]]:
    """(name, group) of the head and of every worker group."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [("head", cluster["headGroupSpec"])] + [(group["groupName"], group) for group in cluster["workerGroupSpecs"]]


def pod_templates(document: Document) -> Iterator[tuple[str, Document, Document]]:
    """(where, owner, pod template) of every pod that a document leads to: a pod itself, or a RayJob's."""
    if document["kind"] == "Pod":
        yield f"Pod {document['metadata']['name']}", document, document
    if document["kind"] == "RayJob":
        if "submitterPodTemplate" in document["spec"]:
            yield "submitter", document["spec"], document["spec"]["submitterPodTemplate"]
        for name, group in ray_groups(document):
            yield name, group, group["template"]


def containers(pod_spec: Document) -> list[Document]:
    return pod_spec.get("initContainers", []) + pod_spec["containers"]


def scalars(value: Any) -> Iterator[Any]:
    """Every leaf of a document, keys left out."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from scalars(item)
    else:
        yield value


def quantity(text: str | int) -> float:
    """The number that a Kubernetes quantity such as 500m, 2 or 4Gi stands for."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if match is None or match[2] not in _QUANTITY_FACTOR:
        raise ValueError(f"{text!r} is no quantity")
    return float(match[1]) * _QUANTITY_FACTOR[match[2]]


def crd_validator(path: Path, version: str = "v1") -> jsonschema.Draft7Validator:
    """A validator of one CRD version that also refuses fields which the schema does not name.

    The API server would drop such a field silently, so a misspelt one does nothing; here it is an error.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 1.4 MB: 1 s with libyaml, 10 s without
    crd = yaml.load(path.read_text(), Loader=loader)
    (found,) = [entry for entry in crd["spec"]["versions"] if entry["name"] == version]
    return jsonschema.Draft7Validator(strict(found["schema"]["openAPIV3Schema"]))


def strict(schema: Document) -> Document:
    """JSON Schema (draft 7) of an OpenAPI v3 structural schema, closed wherever it names its properties."""
    out = {key: value for key, value in schema.items() if not key.startswith("x-")}
    for key in ("default", "nullable", "format"):
        out.pop(key, None)
    if "properties" in schema:
        out["properties"] = {name: strict(inner) for name, inner in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            out.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties", "not"):
        if isinstance(schema.get(key), dict):
            out[key] = strict(schema[key])
    if schema.get("x-kubernetes-int-or-string"):
        out.pop("type", None)
        out["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if schema.get("nullable") and "type" in out:
        out["type"] = [out["type"], "null"]
    return out


def schema_violations(validator: jsonschema.Draft7Validator, document: Document) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]
