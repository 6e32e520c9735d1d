"""recipes/kubernetes/rayjob.yaml: a RayJob that KubeRay would take, and its command line.

The CRD itself is not kept here. RAY_JOB below states, for the fields that the recipe uses, what the
"KubeRay CRD API reference" of v1.6.2 says of them (docs.ray.io, cluster/kubernetes/references/api);
any other field of RayJob is refused. Pod templates are checked against Kubernetes' own schemas.
"""

from __future__ import annotations

import copy
import shlex
import tomllib
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from packaging.requirements import Requirement

from tests.lib import ROOT
from tunerd.cli.app import app

RECIPE = ROOT / "recipes" / "kubernetes" / "rayjob.yaml"
KUBERNETES = "1.33"


def strict(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD_TEMPLATE = {"type": "object", "required": ["spec"]}
HEAD = strict({"rayStartParams": TEXTS, "template": POD_TEMPLATE}, "template")
WORKERS = strict(
    {
        "groupName": TEXT,
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "rayStartParams": TEXTS,
        "template": POD_TEMPLATE,
    },
    "groupName",
    "template",
)
CLUSTER = strict(
    {
        "rayVersion": TEXT,
        "authOptions": strict({"mode": {"enum": ["disabled", "token"]}, "secretName": TEXT}),
        "headGroupSpec": HEAD,
        "workerGroupSpecs": {"type": "array", "items": WORKERS},
    },
    "headGroupSpec",
)
RAY_JOB = strict(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": strict({"name": TEXT}, "name"),
        "spec": strict(
            {
                "entrypoint": TEXT,
                "backoffLimit": COUNT,
                "submissionMode": {
                    "enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
                },
                "shutdownAfterJobFinishes": FLAG,
                "ttlSecondsAfterFinished": COUNT,
                "runtimeEnvYAML": TEXT,
                "rayClusterSpec": CLUSTER,
            }
        ),
    },
    "apiVersion",
    "kind",
    "metadata",
    "spec",
)


@pytest.fixture
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(RECIPE.read_text(encoding="utf-8")))


@pytest.fixture
def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return next(d for d in documents if d["kind"] == "RayJob")


def templates(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [g["template"] for g in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    return [c for t in templates(job) for c in t["spec"]["containers"]]


def command(job: dict[str, Any]) -> str:
    """Return what the shell of the entry point runs."""
    shell, flag, line = shlex.split(job["spec"]["entrypoint"])
    assert (shell, flag) == ("sh", "-c")
    return line


def tune_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Parse the recipe's command as the program would."""
    name, *argv = shlex.split(command(job).partition("||")[0])
    assert name == "tunerd"
    tune = typer.main.get_command(app).commands[argv[0]]  # type: ignore[attr-defined]
    with tune.make_context(argv[0], argv[1:]) as context:
        return dict(context.params)


def as_kubernetes(template: dict[str, Any]) -> dict[str, Any]:
    named = {"metadata": {"name": "a-name"}, "template": template}
    return {"apiVersion": "v1", "kind": "PodTemplate"} | named


def test_the_job_has_the_documented_fields_and_no_other(job: dict[str, Any]) -> None:
    jsonschema.validate(job, RAY_JOB)


@pytest.mark.parametrize("field", ["backofLimit", "entryPoint"])
def test_a_field_that_ray_jobs_do_not_have_is_refused(field: str, job: dict[str, Any]) -> None:
    job["spec"][field] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, RAY_JOB)


def test_the_pods_are_what_kubernetes_takes(
    job: dict[str, Any], documents: list[dict[str, Any]]
) -> None:
    for template in templates(job):
        kubernetes_validate.validate(as_kubernetes(template), KUBERNETES, strict=True)
    for other in documents:
        if other["kind"] != "RayJob":
            kubernetes_validate.validate(other, KUBERNETES, strict=True)


def test_a_pod_with_a_field_that_kubernetes_does_not_know_is_refused(job: dict[str, Any]) -> None:
    template = copy.deepcopy(templates(job)[0])
    template["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(as_kubernetes(template), KUBERNETES, strict=True)


def test_the_command_is_one_that_the_program_takes(job: dict[str, Any]) -> None:
    given = tune_arguments(job)
    assert given["address"] is None  # a job finds its own cluster
    mounts = [m["mountPath"] for m in containers(job)[0]["volumeMounts"]]
    for path in (given["model"], given["out"]):
        assert path.is_absolute()
        assert any(path.is_relative_to(m) for m in mounts)


def test_codes_of_runs_with_an_artifact_are_the_ones_that_succeed(job: dict[str, Any]) -> None:
    assert command(job).partition("||")[2].split() == ["test", "$?", "-le", "2"]


def test_whole_gpus_are_asked_for_and_the_host_is_left_alone(job: dict[str, Any]) -> None:
    head, *workers = containers(job)
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    assert {w["resources"]["limits"]["nvidia.com/gpu"] for w in workers} == {"1"}
    for template in templates(job):
        assert not {"hostIPC", "hostPID", "hostNetwork"} & set(template["spec"])
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True


def test_every_pod_has_the_volume_and_memory_for_the_object_store(job: dict[str, Any]) -> None:
    for template in templates(job):
        volumes = {v["name"]: v for v in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            mounted = {m["mountPath"]: volumes[m["name"]] for m in container["volumeMounts"]}
            assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
            assert "persistentVolumeClaim" in mounted["/data"]


def test_the_token_comes_from_a_secret(job: dict[str, Any]) -> None:
    assert set(job["spec"]["rayClusterSpec"]["authOptions"]) == {"mode", "secretName"}
    variables = {e["name"] for c in containers(job) for e in c.get("env", ())}
    assert not any("AUTH" in name for name in variables)


def test_the_recipe_is_for_the_ray_that_tunerd_needs(job: dict[str, Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "ray")
    assert needed.specifier.contains(job["spec"]["rayClusterSpec"]["rayVersion"])


def test_the_job_s_environment_gives_a_stopped_run_time(job: dict[str, Any]) -> None:
    environment = yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
    assert int(environment["RAY_JOB_STOP_WAIT_TIME_S"]) >= 30
