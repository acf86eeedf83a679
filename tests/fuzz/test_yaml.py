"""Random YAML: it is read as PyYAML reads it, or refused in one sentence, in a moment and never otherwise."""

import random
import time
from pathlib import Path

import yaml

from hqsweep.config.safe import LOADER, parse_yaml
from hqsweep.errors import UserError
from hqsweep.sweep.grid.compose import expand

SEEDS = [
    "defaults: [convergence, {override recipe: mxfp8}, _self_]\nseed: 3\ntrain: {steps: 7, lr: 1e-3}\n",
    "name: mine\nlinear: &l {input: nvfp4|mxfp8, weight: mxfp8, grad_output: mxfp8}\ngrouped_linear: *l\n",
    "a: ${b.c}\nb: {c: [1, 2.5, null, yes], <<: {d: 'x'}}\nhydra: {sweeper: {params: {seed: 'range(3)'}}}\n",
    "overrides: [{layers: last(0.15), linear: bf16}]\nschedule:\n  - {at: 0.82, fprop: bf16}\n",
]
PIECES = [
    "&a ", "*a", "*l", "${oc.env:HOME}", "${", "}", "[", "]", "{", "}", ": ", ":", "-", "- ", "\n", "\n  ", "'", '"',
    "#", "!!python/name:os.system ", "!!timestamp 1", "!!binary x", "<<: ", "? ", "|\n", ">\n", "---\n", "\x00", "\x1b",
    "é", "\ud800", "\t", "@", "%", "~", ".inf", "1" * 5000, "0x", "1_0", "seed: 1\n", "defaults: ", "hydra: ", "_self_",
]  # fmt: skip


def damaged(chance: random.Random) -> bytes:
    text = chance.choice(SEEDS)
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(text))
        text = text[:at] + chance.choice(PIECES) + text[at + chance.choice((0, 0, 1, 5)) :]
    return text.encode(errors="surrogatepass")


def test_it_is_read_as_by_pyyaml_or_refused():
    chance, outcomes = random.Random(18), {"read": 0, "refused": 0}
    for _ in range(2000):
        data = damaged(chance)
        try:
            document = parse_yaml(data)
        except UserError as error:
            outcomes["refused"] += 1
            assert "\n" not in str(error) and str(error)
        else:
            outcomes["read"] += 1
            assert repr(document) == repr(yaml.load(data, Loader=LOADER)), data
    assert min(outcomes.values()) > 200


def test_composition_of_it_ends_in_a_grid_or_a_sentence(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("conf").mkdir()
    chance, began = random.Random(19), time.monotonic()
    for number in range(60):
        Path("conf/a.yaml").write_bytes(damaged(chance))
        try:
            expand("a")
        except UserError as error:
            assert "\n" not in str(error), (number, error)
    assert time.monotonic() - began < 120
