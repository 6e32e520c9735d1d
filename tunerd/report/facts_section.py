"""What a result depends on: the model, versions, the machine, settings as they were recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunerd.report.figures import median_of, weighted_secs
from tunerd.report.precision_text import is_of_storage, precision_sentences, storage_sentences
from tunerd.report.run_view import RunView
from tunerd.report.view import Fold, Pairs, Section
from tunerd.system.text import UNKNOWN, moment_text, percent_text, secs_text
from tunerd.vocabulary.outcome import Outcome


def model_section(view: RunView) -> Section:
    rows: list[tuple[str, str]] = []
    if view.outcome is not None:
        model = view.outcome.model
        default, best = weighted_secs(view.outcome.tasks)
        kernels = f"{secs_text(default)} with the defaults, {secs_text(best)} as shipped"
        rows += [
            *((f"Input {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.inputs),
            *((f"Output {t.name}", f"{list(t.shape)} {t.dtype}") for t in model.outputs),
            ("Hit rate", f"{percent_text(view.outcome.hit_rate)} of the tasks use a tuned record"),
            ("Sum of kernels", kernels),
            *(("Whole model", said) for said in _beside_kernels(view.outcome, best)),
            ("Artifact", view.outcome.artifact),
            *(("Changed on import", note) for note in model.notes if not is_of_storage(note)),
        ]
    rows += [("Precision", said) for said in precision_sentences(view.settings)]
    if view.outcome is not None:
        rows += [("Precision", said) for said in storage_sentences(view.outcome.model)]
    rows.append(("Digest", view.facts.model_digest))
    return Section("Model", [Pairs(rows, "pairs facts")])


def _beside_kernels(outcome: Outcome, kernels_secs: float | None) -> tuple[str, ...]:
    """Say why the whole model does not take what its kernels take together; nothing if unknown."""
    tuned = next((latency for latency in outcome.latencies if latency.name == "tuned"), None)
    median = None if tuned is None else median_of(tuned)
    if median is None or kernels_secs is None:
        return ()
    more = median.value - kernels_secs
    why = (
        "more than its kernels: there its inputs and outputs are copied, too, and one kernel waits "
        "for the other"
        if more > 0
        else "less than its kernels: each finds in the cache what the one before has left"
    )
    return (f"{secs_text(median.value)}, {secs_text(abs(more))} {why}",)


def facts_section(view: RunView) -> Section:
    """Return what the result depends on; settings and host as they were recorded fold away."""
    recorded = [
        *_flat(view.settings, "settings"),
        *_flat(view.host, "host"),
        ("target", view.facts.target.json),
    ]
    fold = Fold("Settings, host and target as recorded", [Pairs(recorded, "pairs facts")])
    return Section("Versions and machine", (Pairs(version_pairs(view), "pairs facts"), fold))


def version_pairs(view: RunView) -> list[tuple[str, str]]:
    """Return versions and machine in the order in which they matter; what is unknown is left out.

    Values come from the store, which may hold anything under any name.
    """
    host = view.host
    packages = versions_of(host.get("packages"))
    tvm = f"apache-tvm {view.facts.tvm_version}"
    if "apache-tvm-ffi" in packages:
        tvm += f", apache-tvm-ffi {packages['apache-tvm-ffi']}"
    others = [
        f"{name} {version}"
        for name, version in packages.items()
        if name not in ("tunerd", "apache-tvm", "apache-tvm-ffi")
    ]
    commit = host.get("commit")
    drivers = sorted({p.driver for p in view.proofs if p.driver})
    rows: list[tuple[str, Any]] = [
        ("tunerd", view.facts.tunerd_version + (f", commit {str(commit)[:12]}" if commit else "")),
        ("Compiler", tvm),
        ("Packages", ", ".join(others)),
        ("Python", host.get("python")),
        ("Device", view.facts.device),
        ("Driver", ", ".join(drivers) or host.get("driver")),
        ("Newest CUDA of the driver", host.get("cuda_version")),
        ("Host", ", ".join(str(host[k]) for k in ("hostname", "platform") if host.get(k))),
        ("CPU", host.get("cpu_model")),
        ("Begun", moment_text(view.began_at)),
    ]
    return [(name, str(value)) for name, value in rows if value]


def versions_of(packages: object) -> dict[str, str]:
    """Return versions by package name, from a mapping or from pairs as JSON has them."""
    if isinstance(packages, Mapping):
        return {str(name): str(version) for name, version in packages.items()}
    if isinstance(packages, list | tuple):
        named = [p for p in packages if isinstance(p, list | tuple) and len(p) == 2]
        return {str(name): str(version) for name, version in named}
    return {}


def _flat(value: Any, name: str) -> list[tuple[str, str]]:
    """Return dotted names and values of nested dicts; a list of plain values is one value."""
    if isinstance(value, Mapping):
        return [p for k, v in value.items() for p in _flat(v, f"{name}.{k}")]
    if isinstance(value, list | tuple):
        if name.endswith(".packages"):
            return [(f"{name}.{k}", v) for k, v in versions_of(value).items()]
        if any(isinstance(item, Mapping | list | tuple) for item in value):
            return [p for i, item in enumerate(value) for p in _flat(item, f"{name}.{i}")]
        return [(name, ", ".join(map(str, value)))]
    return [(name, UNKNOWN if value is None else str(value))]
