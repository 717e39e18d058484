"""Shards of a run: each unit belongs to one shard, and merged journals make the whole run."""

import msgspec
import pytest
from click.testing import CliRunner
from tests.workers.stub_work import unit

from attncheck.cli.merge import merge as merge_command
from attncheck.core.errors import UsageError
from attncheck.records.record import Record
from attncheck.records.run_reports import Answer
from attncheck.workers.journal import Journal, merge_journals, merged_journal_bytes, missing_shards
from attncheck.workers.journal_format import JournalError, read_journal
from attncheck.workers.units import Shard, UnitResult

UNITS = [unit(f"u{n}") for n in range(200)]
DESCRIBE = unit("k", kind="describe")
HEADER = {"command": "gate k", "tier": "smoke"}


@pytest.mark.parametrize(
    "text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "1/1001", "-1/2", "１/2"]
)
def test_invalid_shard_text_is_a_usage_error(text):
    with pytest.raises(UsageError, match="must be I/N"):
        Shard.parse(text)


def test_shard_round_trips_through_text():
    assert str(Shard.parse("2/4")) == "2/4"
    assert Shard.parse("") == Shard(1, 1)
    assert str(Shard(1, 1)) == ""


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_unit_belongs_to_one_shard_and_no_shard_is_empty(count):
    shards = [Shard(n, count) for n in range(1, count + 1)]
    owners = [[shard for shard in shards if shard.has(one)] for one in UNITS]
    assert all(len(each) == 1 for each in owners)
    assert {each[0] for each in owners} == set(shards)


def test_describe_and_draw_units_belong_to_every_shard():
    assert all(Shard(n, 3).has(DESCRIBE) for n in (1, 2, 3))
    assert all(Shard(n, 3).has(unit("d", kind="draw")) for n in (1, 2, 3))


def test_alone_does_not_change_the_shard():
    for one in UNITS[:20]:
        again = msgspec.structs.replace(one, alone=True)
        assert Shard(1, 2).has(one) == Shard(1, 2).has(again)


def test_shrinking_and_repetition_at_another_commit_stay_in_the_shard_of_the_question():
    for one in UNITS:
        shrunk = msgspec.structs.replace(one, kind="shrink")
        repeated = msgspec.structs.replace(one, commit="0" * 40)
        assert {Shard(2, 7).has(each) for each in (one, shrunk, repeated)} != {True, False}


def write_shard(folder, text, *, seconds=1.0, facts=None, answer=None, finished=True, **header):
    """Write the journal of a shard, without its last unit if it is not finished."""
    shard, path = Shard.parse(text), folder / f"{text.replace('/', '-')}.jsonl"
    description = UnitResult(
        unit=DESCRIBE.id,
        units=tuple(UNITS),
        facts=facts or {"name": "k"},
        answers=(answer,) if answer else (),
        seconds=seconds,
    )
    with Journal.open(path, HEADER | {"shard": text} | header, resume=False) as journal:
        journal.write_queued([DESCRIBE])
        journal.write_result(description)
        mine = [one for one in UNITS if shard.has(one)]
        for one in mine if finished else mine[:-1]:
            journal.write_result(UnitResult(unit=one.id, seconds=seconds))
    return path


def test_merged_shards_make_the_whole_run_despite_different_times(tmp_path):
    paths = [write_shard(tmp_path, "1/2", seconds=1.0), write_shard(tmp_path, "2/2", seconds=2.0)]
    content = merge_journals({str(path): read_journal(path) for path in paths})
    assert content.results.keys() == {DESCRIBE.id, *(one.id for one in UNITS)}
    assert not content.unfinished
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(merged_journal_bytes(content))
    back = read_journal(whole)
    assert back.results == content.results
    assert back.units == content.units
    with Journal.open(whole, HEADER | {"shard": ""}, resume=True) as journal:
        assert len(journal.results) == 201


def test_missing_and_unfinished_shards_are_detected(tmp_path):
    one, three = write_shard(tmp_path, "1/3"), write_shard(tmp_path, "3/3", finished=False)
    contents = {str(path): read_journal(path) for path in (one, three)}
    assert missing_shards(list(contents.values())) == (Shard(2, 3),)
    assert len(contents[str(three)].unfinished) == 1
    two = [unit for unit in UNITS if Shard(2, 3).has(unit)]
    assert len(merge_journals(contents).unfinished) == len(two) + 1


def test_different_results_of_one_unit_are_an_error(tmp_path):
    paths = [write_shard(tmp_path, "1/2"), write_shard(tmp_path, "2/2", facts={"name": "other"})]
    with pytest.raises(JournalError, match="have different results of unit"):
        merge_journals({str(path): read_journal(path) for path in paths})


def death(reason, status="crash"):
    record = Record(
        case_id="c",
        case={},
        kernel="k",
        variant="v",
        heads="",
        status=status,
        reason=reason,
        environment="",
    )
    return Answer(unit=DESCRIBE.id, stage="contract", record=record)


def test_reason_of_a_death_may_differ_between_shards(tmp_path):
    """It may hold process ids and addresses; another status is a different result."""
    reasons = ("died: pid 17 at 0x7f01", "died: pid 99 at 0x7f92")
    facts = [{"name": "k", "absent": reason} for reason in reasons]
    paths = [
        write_shard(tmp_path, text, answer=death(reason), facts=fact)
        for text, reason, fact in zip(("1/2", "2/2"), reasons, facts, strict=True)
    ]
    assert not merge_journals({str(path): read_journal(path) for path in paths}).unfinished
    for other in ({"answer": death(reasons[1], "oom")}, {"answer": None}):
        paths[1] = write_shard(tmp_path, "2/2", facts=facts[1], **other)
        with pytest.raises(JournalError, match="have different results of unit"):
            merge_journals({str(path): read_journal(path) for path in paths})


def test_merge_succeeds_with_unfinished_shrink_units(tmp_path):
    paths = [write_shard(tmp_path, text) for text in ("1/2", "2/2")]
    smaller = msgspec.structs.replace(UNITS[0], kind="shrink")
    for path, text in zip(paths, ("1/2", "2/2"), strict=True):
        with Journal.open(path, HEADER | {"shard": text}, resume=True) as journal:
            journal.write_queued([smaller])
    arguments = [*map(str, paths), "--out", str(tmp_path / "results.jsonl")]
    done = CliRunner().invoke(merge_command, arguments, standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0)
    assert read_journal(tmp_path / "results.jsonl").unfinished == (smaller,)


@pytest.mark.parametrize("content", ["hello\n", '{"a": 1}\n', ""], ids=["text", "JSON", "empty"])
def test_merging_a_file_that_is_no_journal_is_a_usage_error(tmp_path, content):
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    for paths in ([write_shard(tmp_path, "1/2"), other], [tmp_path / "nowhere"]):
        arguments = [*map(str, paths), "--out", str(tmp_path / "results.jsonl")]
        done = CliRunner().invoke(merge_command, arguments, standalone_mode=False)
        assert isinstance(done.exception, UsageError)
        assert not (tmp_path / "results.jsonl").exists()


def test_merged_journal_has_the_header_of_a_run_without_shards(tmp_path):
    def head(text, typed):
        choices = {"device": "cpu", "tier": "smoke", "seed": 5, "started": "now"}
        return {"kernels": ["k"], **choices, "shard": text, "typed": typed}

    paths = []
    for text, typed in (("1/2", "gate --shard=1/2 k"), ("2/2", "gate --shard 2/2 k")):
        paths.append(tmp_path / f"{text[0]}.jsonl")
        with Journal.open(paths[-1], head(text, typed), resume=False) as journal:
            journal.write_queued([DESCRIBE])
    whole = tmp_path / "whole.jsonl"
    for order in (paths, paths[::-1]):
        whole.write_bytes(
            merged_journal_bytes(merge_journals({str(path): read_journal(path) for path in order}))
        )
        assert read_journal(whole).head == head("", "gate k")
        with Journal.open(whole, head("", "gate k"), resume=True) as journal:
            assert journal.content.unfinished == (DESCRIBE,)


def test_shards_of_different_runs_are_a_usage_error(tmp_path):
    paths = [write_shard(tmp_path, "1/2"), write_shard(tmp_path, "2/2", tier="pr")]
    with pytest.raises(UsageError, match="are no parts of one run: tier is 'smoke' and 'pr'"):
        merge_journals({str(path): read_journal(path) for path in paths})
    with pytest.raises(UsageError, match="in 2 and 3 parts"):
        missing_shards([read_journal(write_shard(tmp_path, text)) for text in ("1/2", "1/3")])


def test_merge_command_writes_one_journal_and_fails_if_a_shard_is_missing(tmp_path):
    one, two = (str(write_shard(tmp_path, text)) for text in ("1/2", "2/2"))
    target = tmp_path / "all" / "results.jsonl"
    done = CliRunner().invoke(
        merge_command, [one, two, "--out", str(target)], standalone_mode=False
    )
    assert (done.exception, done.return_value) == (None, 0)
    assert len(read_journal(target).results) == 201
    done = CliRunner().invoke(merge_command, [one, "--out", str(target)], standalone_mode=False)
    assert done.return_value == 3
    done = CliRunner().invoke(
        merge_command, [one, one, "--out", str(target)], standalone_mode=False
    )
    assert "is named twice" in str(done.exception)
