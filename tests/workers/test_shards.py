"""A run in parts: each unit is one part's, and the parts make the whole."""

import msgspec
import pytest
from click.testing import CliRunner
from tests.workers.stub_work import unit

from attncheck.cli.merge import merge as verb
from attncheck.core.errors import UsageError
from attncheck.records.record import Record
from attncheck.records.run_reports import Answer
from attncheck.workers.journal import Journal, merge_journals, merged_journal_bytes, missing_shards
from attncheck.workers.journal_format import JournalError, read_journal
from attncheck.workers.units import Shard, UnitResult

UNITS = [unit(f"u{n}") for n in range(200)]
FIRST = unit("k", kind="describe")
HEADER = {"command": "gate k", "tier": "smoke"}


@pytest.mark.parametrize(
    "text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "1/1001", "-1/2", "１/2"]
)
def test_what_is_no_part_is_refused(text):
    with pytest.raises(UsageError, match="must be I/N"):
        Shard.parse(text)


def test_its_text_is_read_back():
    assert str(Shard.parse("2/4")) == "2/4"
    assert Shard.parse("") == Shard(1, 1)
    assert str(Shard(1, 1)) == ""


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_unit_is_one_parts_and_no_part_is_empty(count):
    shards = [Shard(n, count) for n in range(1, count + 1)]
    owners = [[shard for shard in shards if shard.has(one)] for one in UNITS]
    assert all(len(found) == 1 for found in owners)
    assert {found[0] for found in owners} == set(shards)


def test_what_says_what_to_do_is_done_in_every_part():
    assert all(Shard(n, 3).has(FIRST) for n in (1, 2, 3))
    assert all(Shard(n, 3).has(unit("d", kind="draw")) for n in (1, 2, 3))


def test_alone_or_not_it_is_the_same_parts():
    for one in UNITS[:20]:
        again = msgspec.structs.replace(one, alone=True)
        assert Shard(1, 2).has(one) == Shard(1, 2).has(again)


def test_what_makes_a_failure_smaller_is_done_where_it_failed():
    for one in UNITS:
        smaller = msgspec.structs.replace(one, kind="shrink")
        before = msgspec.structs.replace(one, commit="0" * 40)
        assert {Shard(2, 7).has(each) for each in (one, smaller, before)} != {True, False}


def part(folder, text, *, seconds=1.0, facts=None, said=None, finished=True, **header):
    """The journal of a part."""
    shard, path = Shard.parse(text), folder / f"{text.replace('/', '-')}.jsonl"
    described = UnitResult(
        unit=FIRST.id,
        units=tuple(UNITS),
        facts=facts or {"name": "k"},
        answers=(said,) if said else (),
        seconds=seconds,
    )
    with Journal.open(path, HEADER | {"shard": text} | header, resume=False) as journal:
        journal.queued([FIRST])
        journal.done(described)
        mine = [one for one in UNITS if shard.has(one)]
        for one in mine if finished else mine[:-1]:
            journal.done(UnitResult(unit=one.id, seconds=seconds))
    return path


def test_the_parts_make_the_whole_whatever_the_clocks_say(tmp_path):
    paths = [part(tmp_path, "1/2", seconds=1.0), part(tmp_path, "2/2", seconds=2.0)]
    content = merge_journals({str(path): read_journal(path) for path in paths})
    assert content.results.keys() == {FIRST.id, *(one.id for one in UNITS)}
    assert not content.unfinished
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes(merged_journal_bytes(content))
    back = read_journal(whole)
    assert back.results == content.results
    assert back.units == content.units
    with Journal.open(whole, HEADER | {"shard": ""}, resume=True) as journal:  # can be resumed
        assert len(journal.results) == 201


def test_a_part_that_is_missing_or_unfinished_is_said(tmp_path):
    one, three = part(tmp_path, "1/3"), part(tmp_path, "3/3", finished=False)
    contents = {str(path): read_journal(path) for path in (one, three)}
    assert missing_shards(list(contents.values())) == (Shard(2, 3),)
    assert len(contents[str(three)].unfinished) == 1
    two = [unit for unit in UNITS if Shard(2, 3).has(unit)]
    assert len(merge_journals(contents).unfinished) == len(two) + 1


def test_different_results_of_one_unit_are_an_error(tmp_path):
    paths = [part(tmp_path, "1/2"), part(tmp_path, "2/2", facts={"name": "other"})]
    with pytest.raises(JournalError, match="have different results of unit"):
        merge_journals({str(path): read_journal(path) for path in paths})


def died(reason, status="crash"):
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
    return Answer(unit=FIRST.id, stage="contract", record=record)


def test_what_a_process_said_as_it_died_may_differ(tmp_path):
    words = ("died: pid 17 at 0x7f01", "died: pid 99 at 0x7f92")
    facts = [{"name": "k", "absent": word} for word in words]
    paths = [
        part(tmp_path, text, said=died(word), facts=fact)
        for text, word, fact in zip(("1/2", "2/2"), words, facts, strict=True)
    ]
    assert not merge_journals({str(path): read_journal(path) for path in paths}).unfinished
    for other in ({"said": died(words[1], "oom")}, {"said": None}):
        paths[1] = part(tmp_path, "2/2", facts=facts[1], **other)
        with pytest.raises(JournalError, match="have different results of unit"):
            merge_journals({str(path): read_journal(path) for path in paths})


def test_a_smaller_failure_that_nobody_looked_for_leaves_nothing_unsaid(tmp_path):
    paths = [part(tmp_path, text) for text in ("1/2", "2/2")]
    smaller = msgspec.structs.replace(UNITS[0], kind="shrink")
    for path, text in zip(paths, ("1/2", "2/2"), strict=True):
        with Journal.open(path, HEADER | {"shard": text}, resume=True) as journal:
            journal.queued([smaller])
    words = [*map(str, paths), "--out", str(tmp_path / "results.jsonl")]
    done = CliRunner().invoke(verb, words, standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0)
    assert read_journal(tmp_path / "results.jsonl").unfinished == (smaller,)


@pytest.mark.parametrize("content", ["hello\n", '{"a": 1}\n', ""], ids=["text", "JSON", "empty"])
def test_a_file_that_is_no_journal_is_a_usage_error(tmp_path, content):
    """The command line ends with 2 for one."""
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    for words in ([part(tmp_path, "1/2"), other], [tmp_path / "nowhere"]):
        asked = [*map(str, words), "--out", str(tmp_path / "results.jsonl")]
        done = CliRunner().invoke(verb, asked, standalone_mode=False)
        assert isinstance(done.exception, UsageError)
        assert not (tmp_path / "results.jsonl").exists()


def test_a_merged_journal_is_that_of_the_same_command_without_a_shard(tmp_path):
    def head(text, typed):
        how = {"device": "cpu", "tier": "smoke", "seed": 5, "started": "now"}
        return {"kernels": ["k"], **how, "shard": text, "typed": typed}

    paths = []
    for text, typed in (("1/2", "gate --shard=1/2 k"), ("2/2", "gate --shard 2/2 k")):
        paths.append(tmp_path / f"{text[0]}.jsonl")
        with Journal.open(paths[-1], head(text, typed), resume=False) as journal:
            journal.queued([FIRST])
    whole = tmp_path / "whole.jsonl"
    for order in (paths, paths[::-1]):
        whole.write_bytes(
            merged_journal_bytes(merge_journals({str(path): read_journal(path) for path in order}))
        )
        assert read_journal(whole).head == head("", "gate k")
        with Journal.open(whole, head("", "gate k"), resume=True) as journal:
            assert journal.content.unfinished == (FIRST,)


def test_parts_of_different_runs_are_refused(tmp_path):
    paths = [part(tmp_path, "1/2"), part(tmp_path, "2/2", tier="pr")]
    with pytest.raises(UsageError, match="are no parts of one run: tier is 'smoke' and 'pr'"):
        merge_journals({str(path): read_journal(path) for path in paths})
    with pytest.raises(UsageError, match="in 2 and 3 parts"):
        missing_shards([read_journal(part(tmp_path, text)) for text in ("1/2", "1/3")])


def test_the_verb_writes_one_journal_and_says_what_is_missing(tmp_path):
    one, two = (str(part(tmp_path, text)) for text in ("1/2", "2/2"))
    target = tmp_path / "all" / "results.jsonl"
    done = CliRunner().invoke(verb, [one, two, "--out", str(target)], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0)
    assert len(read_journal(target).results) == 201
    done = CliRunner().invoke(verb, [one, "--out", str(target)], standalone_mode=False)
    assert done.return_value == 3
    done = CliRunner().invoke(verb, [one, one, "--out", str(target)], standalone_mode=False)
    assert "is named twice" in str(done.exception)
