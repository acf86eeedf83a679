"""The box that says what was trained, and notes in Markdown."""

import pytest

from hqsweep.report.compare.compare import compare
from hqsweep.report.pages import html, setup
from hqsweep.report.pages.folder import report_markdown
from hqsweep.report.pages.panels import panels
from hqsweep.sweep.store import edits, sweep_file
from hqsweep.sweep.store.store import RunStore

pytestmark = pytest.mark.slow

NOTE = """# Why
Two **arms**, [a paper](https://arxiv.org/abs/1), [bad](javascript:alert(1)), ![pixel](https://x.example/p.png)

<script>alert(1)</script> <img src=x onerror=alert(1)>"""


def test_the_setup_says_what_was_trained_and_with_which_command(make_sweep, fake):
    runs = make_sweep(fake.fork_study({"mxfp8": 0.004}), "forks")
    folder = runs[0].sweep_path
    document = RunStore(folder.parent).facts("forks") | {"overrides": ["train.lr=0.001", "recipe=a b"]}
    sweep_file.write(folder, {key: value for key, value in document.items() if key != "checksum"})
    facts = dict(setup.setup(compare(runs)).rows)
    assert facts["model"] == "2 layers, width 64, 98,304 parameters"
    assert facts["training"] == "80 to 200 steps, batch 4, context 32 (128 tokens a step)"
    assert facts["forks"] == "4 trunks, forked at step 40 / 80, 20 steps at the constant rate, 20 steps to rate 0"
    assert facts["learning rate"] == "0.001 at its peak" and facts["machine"].startswith("cpu, torch 2.13.0+cpu")
    assert facts["command"] == "hqsweep run conf=synthetic sweep=forks train.lr=0.001 'recipe=a b'"
    assert facts["judged"] == "training loss over the decay against 'bf16', margin 0.25 % of the loss"


def test_facts_that_an_old_sweep_does_not_say_are_left_out(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    (runs[0].sweep_path / "sweep.json").unlink()
    comparison = compare(runs)
    for column in ("manifest.params", "manifest.commit", "config.train.batch", "config.train.lr"):
        del comparison.frames.runs[column]
    facts = dict(setup.setup(comparison).rows)
    assert {"forks", "learning rate", "command"} & set(facts) == set()
    assert facts["model"] == "2 layers, width 64" and facts["training"] == "200 steps, context 32"


def test_notes_are_prose_in_which_no_tag_no_script_and_no_picture_is_one(make_sweep, fake):
    runs = make_sweep(fake.three_arms())
    edits.note([edits.Target(folder=runs[0].sweep_path)], NOTE)
    comparison = compare(runs)
    page = html.render(comparison, panels(comparison))
    assert "<h3>Why</h3>" in page and "<strong>arms</strong>" in page
    assert '<a href="https://arxiv.org/abs/1">a paper</a>' in page
    assert "javascript:" not in page.replace("[bad](javascript:alert(1))", "") and "<img" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;script&gt;" in report_markdown(comparison) and "<script" not in report_markdown(comparison)
