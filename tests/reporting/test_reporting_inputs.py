"""The ``inputs`` column (error from rounding the inputs) and softmax records on every page."""

import re

import pytest
from tests.reporting.pages import as_table, csv_rows

from attncheck.core.errors import UsageError
from attncheck.records.json_reports import load_report
from attncheck.records.record import Report
from attncheck.reporting.rendering import render


def test_input_rounding_error_has_its_own_column(make):
    out = make.out(rmse=1.5e-3, input_rmse=0.0625, max_error=9e-3)
    report = make.report(make.record(out=out))
    assert re.search(r"×ideal +inputs +max error ", render(report, "table"))
    assert re.search(
        r"flash2_forward +pass .* 1\.50e-03 .*× +6\.25e-02 +9\.00e-03 ",
        as_table(report),
    )
    assert "| ×ideal | inputs | max error |" in render(report, "md")
    assert re.search(r"× \| 6\.25e-02 \| 9\.00e-03 \|", render(report, "md"))
    (row,) = csv_rows(render(report, "csv"))
    assert row["out_input_rmse"] == "0.0625"
    assert load_report(render(report, "json"), Report).records[0].out.input_rmse == 0.0625


def test_narrow_table_drops_inputs_before_rmse(make):
    pages = {width: as_table(make.sample(), width=width) for width in range(40, 121, 5)}
    for width, page in pages.items():
        heading = next(line for line in page.splitlines() if line.startswith("  kernel "))
        assert "RMSE" in heading
        assert "×ideal" in heading
        assert ("inputs" in heading) != ("inputs" in page.partition("Left out at")[2]), width
    assert "inputs" in next(x for x in pages[115].splitlines() if x.startswith("  kernel "))


def softmax_report(make):
    return make.report(
        make.record("flash"),
        make.softmax("rows"),
        make.softmax("blocks", lse=None),
        make.refused(
            "online",
            "unsupported",
            "no fp32",
            variant="softmax",
            heads="",
            problem=make.softmax().case["problem"],
        ),
    )


def test_softmax_has_its_own_section(make):
    page = render(softmax_report(make), "table")
    assert "bf16 · B1 Q128 K96 D64 · normal · seed 0\n" in page
    assert "bf16 · B2 H3 R128 C96 · normal · seed 0\n" in page
    assert page.index("D64") < page.index("C96")
    assert "D0" not in page


def test_softmax_block_has_no_heads(make):
    lines = render(softmax_report(make), "table").splitlines()
    assert "softmax" in lines  # no · after it
    assert [re.match(r"  (\w+) ", line)[1] for line in lines[lines.index("softmax") + 1 :][:2]] == [
        "rows",
        "blocks",
    ]
    assert "online does not support softmax: no fp32" in lines
    markdown = render(softmax_report(make), "md")
    assert "## bf16 · B2 H3 R128 C96 · normal · seed 0\n" in markdown
    assert re.search(
        r"^\| softmax \|  \| `rows` \| pass \| 0\.25 \| 0\.042 \| 1\.53e-03 ",
        markdown,
        re.MULTILINE,
    )


def test_csv_names_the_operation(make):
    rows = csv_rows(render(softmax_report(make), "csv"))
    assert [row["operation"] for row in rows] == ["attention", *["softmax"] * 3]
    softmax = rows[1]
    assert (softmax["variant"], softmax["head_arrangement"], softmax["tiling"]) == (
        "softmax",
        "",
        "",
    )
    sizes = [softmax[n] for n in ("batch", "heads", "query", "kv", "head_dim", "value_dim")]
    assert sizes == ["2", "3", "128", "96", "0", "0"]


@pytest.mark.parametrize("operation", [5, None, ["softmax"]])
def test_operation_that_is_not_a_string_is_rejected(operation, make):
    report = make.report(make.record(problem={"operation": operation}))
    with pytest.raises(UsageError, match="holds no problem"):
        render(report, "table")
