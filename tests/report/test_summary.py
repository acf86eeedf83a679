"""The job summary: appended Markdown that a name cannot break out of."""

from hqsweep.report.gate import Verdict, Verdicts
from hqsweep.report.summary import append, gate_markdown


def test_heading_table_and_problem():
    verdicts = Verdicts(verdicts=(Verdict(arm="a|<b>", outcome="regression", gap=0.5, seeds=3, note="bad"),))
    page = gate_markdown(verdicts)
    assert page.startswith("### hqsweep gate: ❌ regression\n\n| arm | verdict | gap (nats) |")
    assert "| a\\|&lt;b&gt; | regression | +0.500000 | - | - | 3 | bad |" in page
    assert "✅ pass" in gate_markdown(Verdicts(verdicts=(Verdict(arm="a", outcome="pass"),)))
    assert "❌ no baseline\n\nno file x.json\n" in gate_markdown(Verdicts(problem="no file x.json"))


def test_steps_of_a_job_share_the_file(tmp_path):
    for text in ("one\n", "two\n"):
        append(tmp_path / "new" / "summary.md", text)
    assert (tmp_path / "new" / "summary.md").read_text() == "one\ntwo\n"
