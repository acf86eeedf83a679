"""Throughput by arm."""

from hqsweep.report.compare.compare import compare
from hqsweep.report.figures.speed import speed_of


def test_marks_stand_where_the_speeds_are_and_an_arm_without_one_has_no_line(make_sweep, fake):
    comparison = compare(make_sweep(fake.three_arms()), "bf16")
    comparison.frames.runs.loc[comparison.frames.runs["arm"] == "mxfp8", "tokens_per_s"] = float("nan")
    speed = speed_of(comparison)
    assert [(line.arm, line.value) for line in speed.lines] == [("bf16", "9,500"), ("nvfp4", "8,500")]
    bf16, nvfp4 = speed.lines
    assert bf16.mean == round(100 / 1.05, 2) and nvfp4.mean == round(100 * 8500 / 9975, 2)
    assert nvfp4.dots[0] == (nvfp4.mean, "seed 0: 8,500 tokens/s") and len(nvfp4.dots) == 3
    assert speed.ticks[0] == (0, "0") and speed.says == "Tokens a second. bf16 9,500; nvfp4 8,500."
    comparison.frames.runs["tokens_per_s"] = float("nan")
    assert speed_of(comparison) is None
