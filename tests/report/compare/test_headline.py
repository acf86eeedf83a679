"""The first sentence of a report."""

from hqsweep.report.compare.compare import compare
from hqsweep.report.compare.headline import headline


def test_each_verdict_is_said_once_with_its_arms_by_gap(make_sweep, fake):
    null = [fake.Run(arm="null", seed=seed, init_noise=0.01, gap=0.0001, fmt="bf16") for seed in range(3)]
    broken = fake.Run(arm="broken", state="failed", reason="x", steps=80)
    comparison = compare(make_sweep([*fake.three_arms(), *null, broken]), "bf16")
    arms = comparison.arms.set_index("arm")
    gaps = {arm: f"{arm} ({arms.at[arm, 'gap_pct']:+.{n}f} %)" for arm, n in (("mxfp8", 3), ("nvfp4", 2))}
    assert headline(comparison) == (
        f"{gaps['mxfp8']} is equivalent to bf16 within 0.25 %; {gaps['nvfp4']} is worse than bf16; broken has no"
        " verdict (failed); the null arm is equivalent, as it must be; 1 run is left out."
    )


def test_many_arms_are_a_number_between_two_names(make_sweep, fake):
    many = [fake.Run(arm=f"arm{n}", seed=seed, gap=0.03 * n) for n in range(1, 7) for seed in range(3)]
    bf16 = [fake.Run(seed=seed) for seed in range(3)]
    said = headline(compare(make_sweep([*bf16, *many]), "bf16"))
    assert said.startswith("6 arms, from arm1 (+") and "to arm6 (+" in said and said.endswith("are worse than bf16.")


def test_a_worse_arm_inside_the_margin_and_a_null_arm_that_is_off_are_said(make_sweep, fake):
    study = fake.fork_study({"mxfp8": lambda trunk, point: 0.002 + 1e-6 * trunk, "null": lambda trunk, point: trunk})
    said = headline(compare(make_sweep(study), "bf16"))
    assert said == (
        "mxfp8 (+0.100 %) is worse, inside the margin of 0.25 %; the null arm is not shown equivalent, so that the"
        " machinery is in doubt."
    )
    alone = headline(compare(make_sweep([fake.Run()], name="alone"), "bf16"))
    assert alone == "No arm stands beside bf16."
