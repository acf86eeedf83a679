"""Logs of a small study: bf16, mxfp8 and nvfp4 over four seeds, two steps each."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ARMS = {"bf16": 0.0, "mxfp8": 0.0004, "nvfp4": 0.03}


def study(seeds: int = 4, steps: tuple[int, ...] = (100, 200)) -> pd.DataFrame:
    """Rows arm, seed, step, val_loss."""
    rng = np.random.default_rng(48)
    level, rows = 2.3 + rng.normal(0, 0.01, seeds), []
    for arm, gap in ARMS.items():
        for seed in range(seeds):
            for step in steps:
                noise = rng.normal(0, 0.0008)
                rows.append((arm, seed, step, level[seed] + gap + noise + 1 - step / steps[-1]))
    return pd.DataFrame(rows, columns=["arm", "seed", "step", "val_loss"])


def finals(rows: pd.DataFrame) -> dict[str, list[float]]:
    """Arm -> the last value of every seed."""
    last = rows[rows["step"] == rows["step"].max()]
    return {arm: last[last["arm"] == arm].sort_values("seed")["val_loss"].tolist() for arm in ARMS}


@pytest.fixture
def rows() -> pd.DataFrame:
    return study()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path
