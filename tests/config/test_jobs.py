"""Columns of the tables: one list of them, whoever measures, writes and reads."""

import torch

from hqsweep.config.jobs import ERRORS, TABLES
from hqsweep.formats import parse
from hqsweep.ops.quantize.quantize import quantize
from hqsweep.ops.stats import gather, output_error


def test_what_is_measured_has_the_columns_of_the_table():
    x, format = torch.randn(32, 64), parse("mxfp8")
    outputs = quantize(x, format, statistics=True)
    measured = outputs.rowwise_statistics.row()
    assert tuple(measured) == ERRORS == tuple(gather(x, format, outputs.rowwise).row())
    assert set(output_error(x, x)) < set(ERRORS) < set(TABLES["stats"])


def test_a_table_that_checks_says_what_was_checked_and_how_it_went():
    checked = [columns for columns in TABLES.values() if "status" in columns]
    assert len(checked) == 2 and all({"check", "case", "subject", "note"} < set(columns) for columns in checked)
