#!/usr/bin/env python3
"""Export architectures with random weights, and take each through tunerd as far as verifying it.

    python scripts/lab/models/exported_models.py export MODELS
    scripts/lab/models/exported_models.py check MODELS --out FOLDER [--only PATTERN] \
        [--limit SECONDS]

Images are small, language models have two layers, few tokens and no more width than an
architecture needs. What torch's older exporter does not know the newer one exports. A model is
compiled with default schedules for one core (plain loops) and verified on random inputs:
model_checks.py says how it may end. Both commands go on where they were. Writes
exported-models.json after each model, and exported-models.txt.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.models import model_checks

# By package, and for images by their size.
TORCHVISION = {
    64: """resnet18 resnet50 resnext50_32x4d wide_resnet50_2 densenet121 googlenet
        squeezenet1_1 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x1_0
        mnasnet1_0 efficientnet_b0 efficientnet_v2_s regnet_y_400mf convnext_tiny""",
    96: """inception_v3 segmentation.fcn_resnet50 segmentation.lraspp_mobilenet_v3_large
        segmentation.deeplabv3_mobilenet_v3_large""",
    224: "alexnet vgg11_bn vit_b_32 swin_t swin_v2_t maxvit_t",
}
TIMM = {
    64: """repvgg_a0 ghostnet_100 tinynet_a mobileone_s0 hrnet_w18_small convmixer_768_32
        dm_nfnet_f0 resnetv2_50 skresnet18 res2net50_26w_4s cspdarknet53 dpn68 rexnet_100 lcnet_100
        edgenext_small efficientnet_lite0 mixnet_s mobilenetv4_conv_small mobilenetv3_small_050
        fbnetc_100 hardcorenas_a ese_vovnet19b_dw dla46_c selecsls42b gernet_s regnetz_005
        resnest14d resnet26t darknet53 inception_next_atto nf_regnet_b0 repghostnet_050
        repvit_m0_9 starnet_s1 mambaout_femto convnextv2_atto hgnetv2_b0 ghostnetv2_100
        efficientvit_b0 mobilevitv2_050 fasternet_t0 cs3darknet_s legacy_xception ecaresnet26t""",
    224: """deit_tiny_patch16_224 mixer_s32_224 gmlp_ti16_224 poolformer_s12 pit_ti_224 levit_128
        coat_lite_tiny cait_xxs24_224 xcit_nano_12_p16_224 crossvit_tiny_240 tiny_vit_5m_224
        fastvit_t8 efficientvit_m0 efficientformer_l1 efficientformerv2_s0 pvt_v2_b0 visformer_tiny
        convit_tiny eva02_tiny_patch14_224 gcvit_xxtiny coatnet_pico_rw_224 resmlp_12_224 shvit_s1
        swiftformer_xs nest_tiny""",
    256: "mobilevit_s eca_botnext26ts_256 halonet26t",
}
TRANSFORMERS = """bert distilbert roberta albert electra mobilebert deberta-v2 gpt2 opt gpt_neox
    llama mistral qwen2 t5 clip_text_model whisper wav2vec2 vit dinov2 segformer xlm-roberta xlnet
    funnel roformer squeezebert nystromformer mpnet ernie gpt_neo gptj codegen bloom falcon phi
    phi3 gemma gemma2 qwen3 stablelm olmo starcoder2 granite mamba bart pegasus mbart modernbert
    fnet convbert beit deit hubert clip_vision_model siglip_vision_model yolos openai-gpt"""
_IMAGES = "vit dinov2 segformer beit deit clip_vision_model siglip_vision_model yolos"
_FIRST = 2  # layers of a language model: the others are the same
_TOKENS = 32
# Of language models that are larger: as wide, and as many tokens, as a file needs to have.
_WIDTH = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
_VOCABULARY = 4096

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
            [sys.executable, __file__, "--child", name, str(path)],
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
    given = {"opset_version": 17, "dynamo": False, "do_constant_folding": True}
    try:
        torch.onnx.export(model.eval(), inputs, part, **given)
    except Exception:  # what the older exporter does not know
        given = {"opset_version": 18, "dynamo": True, "external_data": False}
        torch.onnx.export(model.eval(), inputs, part, **given)
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

    model = transformers.AutoModel.from_config(_small(transformers.AutoConfig.for_model(name)))
    if name == "whisper":
        return _with_one_output(model.encoder), (torch.randn(1, 80, 3000),)
    if name == "t5":
        model = model.encoder
    if name in ("wav2vec2", "hubert"):
        return _with_one_output(model), (torch.randn(1, 16000),)
    if name in _IMAGES.split():
        side = _image_size(model.config)
        return _with_one_output(model), (torch.randn(1, 3, side, side),)
    return _with_one_output(model), (torch.randint(3, 1000, (1, size)),)


def _small(config: Any) -> Any:
    """Return a configuration with two layers, and no wider than an export needs."""
    for key in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "n_layers"):
        if hasattr(config, key):
            setattr(config, key, _FIRST)
    if getattr(config, "hidden_size", 0) > 2 * _WIDTH["hidden_size"]:
        for key, value in _WIDTH.items():
            if hasattr(config, key):
                setattr(config, key, value)
    if getattr(config, "vocab_size", 0) > _VOCABULARY:
        config.vocab_size = _VOCABULARY
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if (getattr(config, key, None) or 0) > 2:
                setattr(config, key, 2)
    if hasattr(config, "num_key_value_heads") and hasattr(config, "num_attention_heads"):
        config.num_key_value_heads = config.num_attention_heads // 2
    config._attn_implementation = "eager"
    config.use_cache = False
    return config


def _image_size(config: Any) -> int:
    size = getattr(config, "image_size", 224)
    return 224 if not isinstance(size, int) or size > 384 else size


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


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        export_one(sys.argv[2], Path(sys.argv[3]))
        os._exit(0)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export")
    exporting.add_argument("models", type=Path)
    model_checks.add_check(commands)
    given = parser.parse_args()
    if given.command == "export":
        export(given.models)
    else:
        models = {p.stem: model_checks.Given(p) for p in given.models.glob("*.onnx")}
        kept = given.out / "exported-models.json"
        done = model_checks.check(models, kept, only=given.only, limit_secs=given.limit)
        missing = [name for name in names() if not (given.models / f"{name}.onnx").exists()]
        text = model_checks.table(done, names())
        text += "".join(f"not exported: {name}\n" for name in missing)
        (given.out / "exported-models.txt").write_text(text)


if __name__ == "__main__":
    main()
