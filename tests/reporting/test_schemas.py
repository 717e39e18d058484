"""JSON Schemas of reports: every report that is written conforms to its schema."""

import json
import re
from copy import deepcopy

import pytest
from tests.reporting import gate_reports
from tests.reporting.samples import SAMPLES

from attncheck.core.errors import UnknownName
from attncheck.records.json_reports import REPORTS, report_json, report_schema

KINDS = {"null": type(None), "object": dict, "array": list, "string": str, "boolean": bool}
KINDS |= {"number": int | float, "integer": int}


def violations(value, part, defs, at="$"):
    """Violations of ``part`` in a value; supports the subset of JSON Schema that msgspec writes."""
    if "$ref" in part:
        yield from violations(value, defs[part["$ref"].rpartition("/")[2]], defs, at)
    if "anyOf" in part and all([*violations(value, one, defs, at)] for one in part["anyOf"]):
        yield f"{at} is none of anyOf"
    if "enum" in part and value not in part["enum"]:
        yield f"{at} is none of the enum"
    kind = part.get("type")
    if kind and (not isinstance(value, KINDS[kind]) or (value is True and kind != "boolean")):
        yield f"{at} is no {kind}"
    for name, each in children(value):
        other = subschema(part, name, value)
        if other is None:
            yield f"{at}.{name} is not known"
        else:
            yield from violations(each, other, defs, f"{at}.{name}")
    if isinstance(value, dict):
        yield from (f"{at} lacks {name}" for name in part.get("required", ()) if name not in value)


def children(value):
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def subschema(part, name, value):
    """The schema for ``name`` in an object or list; None where ``name`` is not allowed."""
    if isinstance(value, dict):
        other = part.get("properties", {}).get(name, part.get("additionalProperties", True))
    else:
        first = part.get("prefixItems", [])
        other = first[name] if name < len(first) else part.get("items", True)
    return None if other is False else {} if other is True else other


def report_data(kind, make):
    if kind == "gate":
        return json.loads(report_json(gate_reports.sample()))
    return json.loads(report_json(SAMPLES.get(kind) or make.sample()))


@pytest.mark.parametrize("kind", REPORTS)
def test_report_of_each_kind_conforms_to_its_schema(kind, make):
    schema = report_schema(kind)
    report = report_data(kind, make)
    assert [*violations(report, schema, schema["$defs"])] == []
    # The check can fail: on an unknown field, a missing one, and one of another type.
    for name, other in (("command", 1), ("command", None), ("more", 1)):
        wrong = deepcopy(report)
        wrong[name] = other
        if other is None:
            del wrong[name]
        assert [*violations(wrong, schema, schema["$defs"])]


def test_field_descriptions_come_from_source_comments():
    of_answer = report_schema("gate")["$defs"]["Answer"]["properties"]
    assert of_answer["stage"]["description"] == "Which part of the gate asked."
    assert of_answer["smallest_of"]["description"].startswith("Id of the Case that failed")
    assert "description" not in of_answer["record"]  # its type says it
    of_blocks = report_schema("blocks")["$defs"]["BlockReport"]["properties"]
    described = {name: of_blocks[name].get("description") for name in ("batch", "kv", "command")}
    assert described == {
        "batch": "ranges of b, h, q_idx and kv_idx.",
        "kv": "ranges of b, h, q_idx and kv_idx.",
        "command": None,
    }


def test_schema_allows_nan_and_infinity_but_no_other_text(make):
    schema = report_schema("rmse")
    text = report_json(make.sample())
    assert re.search(r'"(nan|inf|-inf)"', text)
    wrong = re.sub(r'"(nan|inf|-inf)"', '"much"', text)
    assert [*violations(json.loads(wrong), schema, schema["$defs"])]


def test_unknown_kind_suggests_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'gate'"):
        report_schema("gaet")
