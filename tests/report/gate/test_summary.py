"""The job summary: appended Markdown that a name cannot break out of."""

from hqsweep.report.gate.gate_verdicts import Verdict, Verdicts
from hqsweep.report.gate.summary import append, gate_markdown

SWEEP = {"replicates": "seeds", "margin": 0.25}


def test_heading_table_and_problem():
    bad = Verdict(arm="a|<b>", outcome="regression", verdict="worse", gap=0.5, margin=0.25, n=3, note="bad")
    page = gate_markdown(Verdicts(arms=(bad,), **SWEEP))
    assert page.startswith("### hqsweep gate: ❌ regression, margin 0.25 %\n\n| arm | gate | verdict | change % |")
    assert "| a\\|&lt;b&gt; | regression | worse | +0.500 | - | - | 3 | bad |" in page
    good = Verdict(arm="a", outcome="pass", verdict="equivalent", margin=0.25)
    assert "✅ pass" in gate_markdown(Verdicts(arms=(good,), **SWEEP)) and "| equivalent |" in gate_markdown(
        Verdicts(arms=(good,), **SWEEP)
    )
    open_arm = Verdict(arm="a", outcome="undecided", verdict="undecided", margin=0.25)
    assert "⚠️ undecided" in gate_markdown(Verdicts(arms=(open_arm,), **SWEEP))
    assert "❌ no baseline, margin 0.25 %\n\nno file x.json\n" in gate_markdown(
        Verdicts(problem="no file x.json", **SWEEP)
    )


def test_steps_of_a_job_share_the_file(tmp_path):
    for text in ("one\n", "two\n"):
        append(tmp_path / "new" / "summary.md", text)
    assert (tmp_path / "new" / "summary.md").read_text() == "one\ntwo\n"
