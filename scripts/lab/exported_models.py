#!/usr/bin/env python3
"""Export architectures with random weights, and take each through tunerd as far as verifying it.

    python scripts/lab/exported_models.py export MODELS    # where torch, timm, transformers are
    scripts/lab/exported_models.py check MODELS --out FOLDER [--only PATTERN] [--limit SECONDS]

A model is read, lowered and compiled with default schedules for one core (plain loops: images are
small), and verified on random inputs. It ends as one of

    right, cannot tell, wrong    what verification said
    refused                      tunerd said in a sentence why not
    exception                    something else than a tunerd error
    crash                        a signal ended the process
    hang                         it took longer than --limit seconds

with the seconds until it was lowered, and the most memory of its process, beside the file's size.
Both go on where they were. Writes exported-models.json after each model, and exported-models.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

# By package, and for images by their size.
TORCHVISION = {
    64: """resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 googlenet
        squeezenet1_1 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x1_0
        mnasnet1_0 efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny""",
    96: "inception_v3 segmentation.fcn_resnet50 segmentation.lraspp_mobilenet_v3_large",
    224: "alexnet vgg11_bn vit_b_32 swin_t swin_v2_t maxvit_t",
}
TIMM = {
    64: """repvgg_a0 ghostnet_100 tinynet_a mobileone_s0 hrnet_w18_small convmixer_768_32
        dm_nfnet_f0 resnetv2_50 skresnet18 res2net50_26w_4s cspdarknet53 dpn68 rexnet_100 lcnet_100
        edgenext_small""",
    224: """deit_tiny_patch16_224 mixer_s32_224 gmlp_ti16_224 poolformer_s12 pit_ti_224 levit_128
        coat_lite_tiny cait_xxs24_224 xcit_nano_12_p16_224 crossvit_tiny_240 tiny_vit_5m_224
        fastvit_t8""",
    256: "mobilevit_s",
}
TRANSFORMERS = """bert distilbert roberta albert electra mobilebert deberta-v2 gpt2 opt gpt_neox
    llama mistral qwen2 t5 clip_text_model whisper wav2vec2 vit dinov2 segformer"""
_FIRST = 2  # layers of a language model: the others are the same
_TOKENS = 32

OUTCOMES = ("right", "cannot tell", "refused", "wrong", "exception", "crash", "hang")
_MAX_DETAIL = 240  # characters


# --- exporting ---------------------------------------------------------------------------------


def names() -> list[str]:
    """Name every architecture: its package, its name there, the size of an image."""
    found = []
    for package, by_size in (("torchvision", TORCHVISION), ("timm", TIMM)):
        for size, text in by_size.items():
            found += [f"{package}-{name}-{size}" for name in text.split()]
    return found + [f"transformers-{name}-{_TOKENS}" for name in TRANSFORMERS.split()]


def export(folder: Path) -> None:
    """Export what is not there yet, each in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names():
        path = folder / f"{name}.onnx"
        if path.exists() or path.with_suffix(".txt").exists():
            continue
        ended = subprocess.run(
            [sys.executable, __file__, "--child", "export", name, str(path)],
            capture_output=True,
            text=True,
        )
        said = "" if path.exists() else (ended.stderr.strip().splitlines() or ["no file"])[-1]
        if said:
            path.with_suffix(".txt").write_text(said)
        print(name, said or f"{path.stat().st_size >> 20} MiB", flush=True)


def export_one(name: str, path: Path) -> None:
    import torch

    torch.manual_seed(0)
    package, rest = name.split("-", 1)
    of, size = rest.rsplit("-", 1)
    model, inputs = _made(package, of, int(size))
    part = path.with_suffix(".part")
    torch.onnx.export(
        model.eval(), inputs, part, opset_version=17, dynamo=False, do_constant_folding=True
    )
    part.rename(path)


def _made(package: str, name: str, size: int) -> tuple[Any, tuple[Any, ...]]:
    import torch

    image = torch.randn(1, 3, size, size)
    if package == "torchvision":
        import torchvision

        group, _, own = name.rpartition(".")
        models = getattr(torchvision.models, group) if group else torchvision.models
        options: dict[str, Any] = {"weights": None}
        if group:
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options |= {"aux_logits": False, "init_weights": True}
        return _with_one_output(getattr(models, own)(**options)), (image,)
    if package == "timm":
        import timm

        if size == 224 and "240" in name:
            image = torch.randn(1, 3, 240, 240)
        return timm.create_model(name, pretrained=False), (image,)
    import transformers

    config = transformers.AutoConfig.for_model(name)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "n_layers"):
        if hasattr(config, key):
            setattr(config, key, _FIRST)
    if hasattr(config, "num_key_value_heads") and hasattr(config, "num_attention_heads"):
        config.num_key_value_heads = config.num_attention_heads // 2
    config._attn_implementation = "eager"
    config.use_cache = False
    model = transformers.AutoModel.from_config(config)
    if name == "whisper":
        return _with_one_output(model.encoder), (torch.randn(1, 80, 3000),)
    if name == "t5":
        model = model.encoder
    if name == "wav2vec2":
        return _with_one_output(model), (torch.randn(1, 16000),)
    if name in ("vit", "dinov2", "segformer"):
        return _with_one_output(model), (torch.randn(1, 3, 224, 224),)
    return _with_one_output(model), (torch.randint(0, 1000, (1, size)),)


def _with_one_output(model: Any) -> Any:
    """Return a module with the first tensor of a model's output as its only one."""
    import torch

    class First(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            out = self.model(x)
            out = next(iter(out.values())) if isinstance(out, dict) else out
            return out[0] if isinstance(out, tuple | list) else out

    return First()


# --- checking ----------------------------------------------------------------------------------


def check(folder: Path, out: Path, only: str, limit_secs: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "exported-models.json"
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for path in sorted(folder.glob("*.onnx")):
        if path.stem in done or not re.search(only, path.stem):
            continue
        done[path.stem] = _checked(path, limit_secs)
        print(path.stem, *done[path.stem].values(), flush=True)
        kept.write_text(json.dumps(done, indent=0, sort_keys=True) + "\n")
    (out / "exported-models.txt").write_text(table(done))


def _checked(path: Path, limit_secs: float) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as told:
        try:
            code = subprocess.run(
                [sys.executable, __file__, "--child", "check", str(path)],
                stdout=told,
                stderr=subprocess.DEVNULL,
                timeout=limit_secs,
            ).returncode
        except subprocess.TimeoutExpired:
            return {"outcome": "hang", "detail": f"longer than {limit_secs:g} s"}
        told.seek(0)
        lines = told.read().splitlines()
    if code or not lines:
        return {"outcome": "crash", "detail": f"exit code {code}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def check_one(path: Path) -> dict[str, Any]:
    """Take one model through tunerd, in a process that ends afterwards."""
    from tunerd.artifacts.compile import compile_artifact
    from tunerd.artifacts.loading import load
    from tunerd.errors import TunerdError
    from tunerd.frontend.kernels import kernels_of
    from tunerd.frontend.model import read_model
    from tunerd.runs.finals.verify import verify
    from tunerd.system.targets import cpu_target_json

    target = cpu_target_json(1)
    started = time.monotonic()
    found: dict[str, Any] = {"file_mib": round(path.stat().st_size / 2**20, 1)}
    try:
        kernels = kernels_of(read_model(path), target)
        found["lowered_secs"] = round(time.monotonic() - started, 1)
        found["lowered_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        found["tasks"] = len(kernels.tasks)
        with tempfile.TemporaryDirectory(prefix="exported-models-") as scratch:
            artifact = Path(scratch) / "artifact"
            compile_artifact(
                kernels.lowered,
                kernels.tasks,
                {},
                target,
                artifact,
                model=kernels.model,
                pct=100,
            )
            verified = verify(load(artifact), kernels.model)
    except TunerdError as error:
        return found | {"outcome": "refused", "detail": " ".join(str(error).split())[:_MAX_DETAIL]}
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return found | {"outcome": "exception", "detail": said[-_MAX_DETAIL:]}
    outcome = verified.verdict.value.replace("-", " ").replace("_", " ")
    return found | {"outcome": outcome, "detail": verified.message[:_MAX_DETAIL]}


def table(done: dict[str, Any]) -> str:
    counts = Counter(found["outcome"] for found in done.values())
    lines = ["| outcome | models |", "|---|--:|"]
    lines += [f"| {outcome} | {counts[outcome]} |" for outcome in OUTCOMES]
    lines += ["", "| model | MiB | lowered, s | memory, MiB | outcome |", "|---|--:|--:|--:|---|"]
    for name, found in sorted(done.items()):
        values = (found.get(key, "") for key in ("file_mib", "lowered_secs", "lowered_mib"))
        said = (
            found["outcome"]
            if found["outcome"] == "right"
            else ": ".join((found["outcome"], found["detail"]))
        )
        lines.append(f"| {name} | {' | '.join(map(str, values))} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        if sys.argv[2] == "export":
            export_one(sys.argv[3], Path(sys.argv[4]))
        else:
            print(json.dumps(check_one(Path(sys.argv[3]))), flush=True)
        os._exit(0)  # TVM takes its time to throw everything away
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export")
    exporting.add_argument("models", type=Path)
    checking = commands.add_parser("check")
    checking.add_argument("models", type=Path)
    checking.add_argument("--out", type=Path, required=True)
    checking.add_argument("--only", default="", help="models whose name holds this pattern")
    checking.add_argument("--limit", type=float, default=600.0, help="seconds of a model")
    given = parser.parse_args()
    if given.command == "export":
        export(given.models)
    else:
        check(given.models, given.out, given.only, given.limit)


if __name__ == "__main__":
    main()
