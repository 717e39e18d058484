"""JSON Schemas of reports: what is written is what they say."""

import json
import re
from copy import deepcopy
from pathlib import Path

import pytest

from attncheck.core.errors import UnknownName
from attncheck.core.source_files import import_file
from attncheck.records.json_reports import REPORTS, report_json, report_schema

SAMPLES = import_file(Path(__file__).parent / "samples.py", "samples").SAMPLES
KINDS = {"null": type(None), "object": dict, "array": list, "string": str, "boolean": bool}
KINDS |= {"number": int | float, "integer": int}


def mistakes(value, part, defs, at="$"):
    """What of a value its schema does not allow: the part of JSON Schema that msgspec writes."""
    if "$ref" in part:
        yield from mistakes(value, defs[part["$ref"].rpartition("/")[2]], defs, at)
    if "anyOf" in part and all([*mistakes(value, one, defs, at)] for one in part["anyOf"]):
        yield f"{at} is none of anyOf"
    if "enum" in part and value not in part["enum"]:
        yield f"{at} is none of the enum"
    kind = part.get("type")
    if kind and (not isinstance(value, KINDS[kind]) or (value is True and kind != "boolean")):
        yield f"{at} is no {kind}"
    for name, each in inner(value):
        other = part_of(part, name, value)
        if other is None:
            yield f"{at}.{name} is not known"
        else:
            yield from mistakes(each, other, defs, f"{at}.{name}")
    if isinstance(value, dict):
        yield from (f"{at} lacks {name}" for name in part.get("required", ()) if name not in value)


def inner(value):
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def part_of(part, name, value):
    """The schema of what an object or list holds under ``name``; None where it may not."""
    if isinstance(value, dict):
        other = part.get("properties", {}).get(name, part.get("additionalProperties", True))
    else:
        first = part.get("prefixItems", [])
        other = first[name] if name < len(first) else part.get("items", True)
    return None if other is False else {} if other is True else other


def written(kind, make):
    if kind == "gate":
        gates = import_file(Path(__file__).parent / "gate_reports.py", "gate reports")
        return json.loads(report_json(gates.sample()))
    return json.loads(report_json(SAMPLES.get(kind) or make.sample()))


@pytest.mark.parametrize("kind", REPORTS)
def test_a_report_of_each_kind_is_what_its_schema_says(kind, make):
    schema = report_schema(kind)
    report = written(kind, make)
    assert [*mistakes(report, schema, schema["$defs"])] == []
    # It can fail: a field that is not known, one that is missing, one of another type.
    for name, other in (("command", 1), ("command", None), ("more", 1)):
        wrong = deepcopy(report)
        wrong[name] = other
        if other is None:
            del wrong[name]
        assert [*mistakes(wrong, schema, schema["$defs"])]


def test_fields_are_described_by_what_stands_beside_them():
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


def test_numbers_without_a_word_in_json_are_allowed(make):
    schema = report_schema("rmse")
    text = report_json(make.sample())
    assert re.search(r'"(nan|inf|-inf)"', text)
    wrong = re.sub(r'"(nan|inf|-inf)"', '"much"', text)
    assert [*mistakes(json.loads(wrong), schema, schema["$defs"])]


def test_another_kind_is_refused():
    with pytest.raises(UnknownName, match="did you mean 'gate'"):
        report_schema("gaet")
