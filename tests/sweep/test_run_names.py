"""Names of runs, which end in a hash of their config, are those of earlier versions: finished runs are found again."""

import json
from pathlib import Path

import pytest

from hqsweep.sweep.engine.launch import plan

pytestmark = pytest.mark.slow
NAMES = json.loads((Path(__file__).parents[1] / "golden" / "run_names.json").read_text())


@pytest.mark.parametrize("conf", NAMES)
def test_runs_of_packaged_sweeps_keep_their_names(conf: str, tmp_path: Path) -> None:
    sweep, *words = conf.split()
    for name in NAMES[conf]:
        (tmp_path / sweep / name).mkdir(parents=True)
    assert [row["run"] for row in plan([f"conf={sweep}", *words, f"runs_dir={tmp_path}"]).rows()] == NAMES[conf]
