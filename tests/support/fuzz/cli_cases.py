"""Random command lines and YAML files, most of them nearly right: what is drawn for cli/test_main.py.

A Case holds plain text only, so its repr is the reproducer of a failure.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hqsweep.config.job import config_class
from hqsweep.config.jobs import JOBS
from hqsweep.config.section import leaves
from hqsweep.formats import NAMES, options
from hqsweep.sweep.grid.compose import known_confs, known_recipes

CONFS = [
    *known_confs(),
    "own",
    "own.yaml",
    "conf/own.yaml",
    "nowhere",
    "nowhere.yaml",
    "a,b",
    "",
    ".",
    "conf",
    "recipe",
]
RECIPES = [*known_recipes(), "own", "conf/recipe/own.yaml", "conf/own.yaml", "nowhere", "bytes.bin", ".", ""]
GROUPS = ["recipe", "model", "data", "train", "stats", "track", "engine"]
KEYS = [
    *(key for job in map(config_class, JOBS) for key in leaves(job)), *GROUPS, "recipe.linear.input",
    "recipe.linear.weight.columnwise", "recipe.linear.grad_output.columnwise_source", "recipe.dpa.qkv",
    "recipe.grouped_linear.input", "recipe._target_", "recipe.overrides.0.linear", "recipe.schedule.0.at",
    "train.lr.deeper", "seed.x", "null_arm", "hydra.job.name", "hydra/launcher", "a", "a.b.c", ".", "train.",
    "train..lr", "recipe@x", "conf", "0", "recipe/linear", "train/lr", "$", "-", "_target_",
]  # fmt: skip
SCALARS = [
    "", " ", "abc", "-1", "0", "1", "2", "3", "7", "64", "0.5", "-0.0", "1e400", "1e-400", "nan", "inf", "-inf",
    "null", "true", "no", "0x10", "1_000", "1e3", "99999999999999999999", "9223372036854775807", "2026-01-01", "é",
    "\u2028", "\n", "\t", "'", '"', "\\", "#", "%s", "{}", "[]", "[", "]", "{", "}", "(", ")", "[1,2]", "[[1,2],[3]]",
    "{a:1}", "{a:{b:c}}", "[a,{b:c}]", "a=b", "=", ":", "a:b", "@", "|", "||", "+", "~", "!", "!!python/name:os", "&a",
    "*a", ",", "1,2", "a,b", ",1", "1,", "range(3)", "range(0)", "range(1,4,0)", "range(a)", "choice()", "choice(1,2)",
    "choice(a,", "glob(*)", "glob(mx*)", "interval(0,1)", "shuffle(1,2)", "sort(2,1)", "tag(x,1)", "int(3.5)",
    "float(x)", "str(1)", "json_str(", "extend_list(1)", "${model.dim}", "${nope}", "${", "${oc.env:NOPE_NOPE}",
    "${oc.env:HOME}", "${now:%Y}", "${a:b}", "???", "/", "/dev/null", "/proc/self/mem", "../up", "nowhere/x.yaml",
    "own.yaml", "conf", "bytes.bin", "x" * 300, "auto", "cpu", "cuda", "bf16", "fp32", "none", "wandb", "markov",
    "text", "tokens", "stdlib", "layer", "exact", "native", "strict", "convergence", "parity", "rowwise_dequantized",
    "last(0.15)", "first(2)", "layers.*", "my.module.factory", "os.system", "json.dumps", "builtins.int", "builtins",
    "--help", "--json", "-h",
]  # fmt: skip
YAML_LINES = [
    "defaults: [convergence, _self_]", "defaults: [convergence, _self_, {override recipe: own}]", "defaults: [own]",
    "defaults: [nowhere]", "defaults: {}", "defaults: 3", "defaults: [_self_, {recipe: mxfp8}]", "job: convergence",
    "defaults: [convergence, {override recipe: }]", "defaults: [{recipe: [bf16, mxfp8]}]",
    "defaults: [parity, _self_]", "defaults: [mxfp8, _self_]", "name: own", "linear: mxfp8",
    "linear: {input: nvfp4, weight: mxfp8}", "gemm: strict", "overrides: [{layers: last(0.15), linear: bf16}]",
    "overrides: {a: b}", "overrides: [3]", "schedule: [{at: 0.5}]", "schedule: [{at: 0.8, linear: bf16}]",
    "schedule: 7", "recipe: {linear: mxfp8}", "recipe: mxfp8", "recipe: [1]",
    "hydra: {sweeper: {params: {recipe: 'bf16,mxfp8', seed: range(2)}}}", "hydra: {sweeper: {params: 3}}", "hydra: 3",
    "hydra: {sweeper: 1}", "hydra: {sweeper: {params: {recipe: [a, b]}}}", "hydra: {run: {dir: /nowhere}}", "- a",
    "---", "train: {steps: 5}", "train: 5", "train: {1: 2}", "1: 2", "null: x", "? [a]\n: b", "data: {source: markov}",
    "a: &x [*x]", "seed: !!timestamp 1", "seed: !!binary x", "# @package train", "# @package _global_", "<<: 3", "...",
    "\x07", "parity: {}",
]  # fmt: skip
COMMANDS = ["run", "run", "run", "run", "compare", "gate", "ls", "show", "recipe ls", "recipe show", "recipe diff"]
COMMANDS += ["recipe export", "recipe", "baseline update", "probe", "status", "cancel", "sync", "doctor", "version"]
COMMANDS += ["runs", "", "--help", "run --help"]
RUNS = [
    "convergence",
    "bf16",
    "mxfp8-s0",
    "torn",
    "empty",
    "alien",
    "runs",
    "runs/convergence",
    "nowhere",
    "/",
    ".",
    "",
]
FILES = ["good.safetensors", "good.safetensors", "bytes.safetensors", "runs", "bytes.bin", "nowhere", "/", ""]


@dataclass(frozen=True, kw_only=True)
class Case:
    words: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    """(path, text) below the working directory."""


def draw(seed: int, flags: dict[str, Sequence[str]]) -> Case:
    """The case of a seed; `flags` are the options of each command."""
    rng = random.Random(seed)
    command = rng.choice(COMMANDS)
    words = [*command.split(), *_arguments(rng, command)]
    for flag in rng.choices(flags.get(command, ("--help",)), k=rng.choice((0, 0, 1, 2))):
        words += [flag] if rng.random() < 0.5 else [flag, _value(rng)]
    if rng.random() < 0.1:
        words[rng.randrange(len(words) + 1) :] = [_mutated(rng, word) for word in words[-1:]]
    names = ("conf/own.yaml", "conf/recipe/own.yaml", "own.yaml")
    return Case(words=tuple(words), files=tuple((name, _yaml(rng)) for name in names))


def _arguments(rng: random.Random, command: str) -> list[str]:
    if command == "run":
        conf = f"conf={rng.choice(CONFS[:8] if rng.random() < 0.8 else CONFS)}"
        overrides = [f"{_key(rng)}={_value(rng)}" for _ in range(rng.choice((0, 1, 1, 2, 3)))]
        return [conf, *overrides, *(["--dry-run"] if rng.random() < 0.5 else [])]
    pool = RECIPES if command.startswith("recipe") else FILES if command == "probe" else RUNS
    return [rng.choice(pool) if rng.random() < 0.9 else _value(rng) for _ in range(rng.choice((0, 1, 1, 2)))]


def _key(rng: random.Random) -> str:
    key = rng.choice(KEYS)
    if rng.random() < 0.1:
        key = _mutated(rng, key)
    return rng.choice(("", "", "", "", "+", "++", "~")) + key


def _value(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(SCALARS)
    if kind < 0.85:
        return _quantizer(rng)
    return _mutated(rng, rng.choice((*SCALARS, *RECIPES)))


def _quantizer(rng: random.Random) -> str:
    formats = []
    for name in rng.choices(sorted(NAMES), k=rng.choice((1, 2))):
        chosen = rng.sample(options(name), k=min(len(options(name)), rng.choice((0, 1, 2))))
        formats.append(
            "+".join((name, *chosen, *rng.choices(("eps1", "history0", "history4", "eps-1"), k=rng.random() < 0.1)))
        )
    text = "|".join(formats) + rng.choice(("", "", "@original", "@rowwise_dequantized", "@"))
    return text if rng.random() < 0.8 else _mutated(rng, text)


def _yaml(rng: random.Random) -> str:
    text = "\n".join(rng.choices(YAML_LINES, k=rng.choice((0, 1, 2, 3, 4)))) + "\n"
    return text if rng.random() < 0.7 else _mutated(rng, text)


def _mutated(rng: random.Random, text: str) -> str:
    """One character less, more or other."""
    at, kind = rng.randrange(len(text) + 1), rng.randrange(3)
    new = rng.choice("aZ0 .,:=+|@~'\"[]{}()$#&*!?%\\/\n\té\u0000"[: -1 if kind else None])
    return text[:at] + (new if kind else "") + text[at + (kind != 1) :]
