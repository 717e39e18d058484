"""A plausible hand-made report of every kind except measurements and gates."""

from msgspec.structs import replace

from attncheck.core.judgement import Judgement, Place
from attncheck.records.bench_report import BenchCell, BenchReport, BenchRow, TimeChange, Times, Work
from attncheck.records.fault_scores import (
    ControlScore,
    Detection,
    FaultReport,
    FaultScore,
    FaultSensitivity,
    MutantReport,
    MutantScore,
    OwnTestsReport,
    OwnTestsScore,
    PeerVerdict,
    SensitivityReport,
    SmallestFault,
    Total,
    WrongAnswer,
)
from attncheck.records.model_report import Drift, ModelCall, ModelFault, ModelRecord, ModelReport
from attncheck.records.record import Environment, Explanation, Record
from attncheck.records.run_reports import (
    BaselineComparison,
    Change,
    PropertyOutcome,
    PropertyReport,
    Tally,
)
from attncheck.records.survey_reports import (
    Agreement,
    BlockRecord,
    BlockReport,
    Certificate,
    CertificateReport,
    Distance,
    DtypeFingerprint,
    FingerprintReport,
    ModAnswer,
    ModRecord,
    ModReport,
    OracleRecord,
    OracleReport,
    ProvenError,
    Reading,
    Rows,
)

HERE = Environment(
    device="cpu", machine="x86_64", python="3.11.9", torch="2.13", numpy="2", attncheck="1"
)
AT = Place(batch=0, head=1, query=2, dim=3)
PROBLEM = {
    "mask": {"name": "full"},
    "score": {"name": "none"},
    "scale": 0.5,
    "distribution": "normal",
    "batch": 1,
    "heads": 2,
    "kv_heads": 1,
    "query": 24,
    "kv": 16,
    "head_dim": 8,
    "value_dim": 4,
    "dtype": "bf16",
    "seed": 3,
}


# Times


def timed(kernel="mine", *, forward=(4e-6, 5e-6, 6e-6), both=None, status="pass", **changes):
    judged = {"pass": Judgement(status="pass", out_over_bound=0.5)}
    judged["fail"] = Judgement(status="fail", rule="bound", reason="too far")
    record = Record(
        case_id="id",
        case={"problem": PROBLEM},
        kernel=kernel,
        variant="causal",
        heads="GQA",
        status=status,
        reason="" if status in judged else "says no",
        judgement=judged.get(status),
        environment="",
    )
    times = {"forward": forward, "both": both}
    timings = {name: Times(seconds=s, clock="events") for name, s in times.items() if s}
    return BenchRow(record=record, verified="sequence 0 of 4", **timings, **changes)


def cell(*rows, decoding=False, **changes):
    fields = {"table": "main", "case_id": "id", "case": {"problem": PROBLEM}, "variant": "causal"}
    work = {"pairs": 400, "forward_flops": 8e9, "backward_flops": 2e10, "decoding": decoding}
    work |= {"forward_bytes": 10**7, "cache_bytes": 10**6}
    fields |= {"heads": "GQA", "work": Work(**work), "rows": rows}
    return BenchCell(**fields | changes)


def bench(*cells, **changes):
    names = dict.fromkeys(row.record.kernel for each in cells for row in each.rows)
    fields = {
        "command": "attncheck bench",
        "environment": HERE,
        "kernels": dict.fromkeys(names, ""),
    }
    fields |= {"baseline": "sdpa-flash", "rounds": 3, "matmul": {"bf16": 8e14}, "copy": 4e12}
    return BenchReport(**fields | {"cells": cells} | changes)


BENCH = bench(
    cell(
        timed("sdpa-flash", forward=(8e-6, 8e-6, 8e-6), both=(3e-5, 3e-5, 3e-5)),
        timed(both=(2e-5, 2e-5, 2e-5)),
        timed("fast", forward=(1e-6, 1e-6, 1e-6), status="fail"),
        timed("picky", forward=None, status="unsupported"),
        timed("halfway", lacks="it gives no gradients"),
        clocks=(1400, 1980),
    ),
    cell(timed("mine"), timed("sdpa-flash"), decoding=True, table="decode"),
    absent={"away": "needs a GPU"},
    against="main",
    chance=0.01,
    margin=0.02,
    changes=(
        TimeChange(
            kernel="mine",
            cell=0,
            timed="both",
            ratio=1.3,
            interval=(1.2, 1.4),
            finding="slower",
        ),
        TimeChange(
            kernel="mine", cell=1, timed="forward", ratio=1.0, interval=None, finding="unclear"
        ),
    ),
    incomplete="stopped by --max-time 1s after 2 of 3 cells",
)


# Oracles


def oracle(name="safe", distribution="normal", variant="full", **changes):
    softmax = {"operation": "softmax"} if variant == "softmax" else {}
    fields = {
        "case_id": f"{variant} {distribution}",
        "case": {"problem": PROBLEM | softmax},
        "variant": variant,
        "distribution": distribution,
        "oracle": name,
        "out": Distance(units=1.2345, at=AT, compared=192),
        "lse": Distance(units=0.0, at=Place(batch=0, head=0, query=0), compared=48),
        "rows": Rows(total=48),
    }
    return OracleRecord(**(fields | changes))


def naive(distribution="large_logits", **rows):
    count = sum(rows.values())
    return oracle(
        "naive",
        distribution,
        out=Distance(units=7.0, at=AT, compared=192 - 4 * count, nonfinite=4 * count),
        lse=Distance(units=3.0, at=AT, compared=48 - count, nonfinite=count),
        rows=Rows(total=48, nonfinite=count, **rows),
    )


def oracles(*records, log10=-51.3, **apart):
    agreements = {
        r.case_id: Agreement(
            case_id=r.case_id,
            variant=r.variant,
            distribution=r.distribution,
            oracles=("naive", "online"),
            log10=log10,
            **apart,
        )
        for r in records
    }
    return OracleReport(
        command="attncheck oracles --digits 50",
        environment=HERE,
        mpmath="1.3.0",
        backend="python",
        digits=50,
        must_agree=40,
        reference="safe",
        may_overflow=("naive",),
        oracles={"naive": "n", "safe": "s"},
        records=records,
        agreements=tuple(agreements.values()),
    )


# Certificates


def proven(**changes):
    fields = {"share": 1.25e-10, "error": 2.5e-16, "allowance": 2e-6, "at": AT}
    return ProvenError(**(fields | {"a_priori": 0.0625, "elements": 192} | changes))


def certificate(name="truth", distribution="normal", **changes):
    a_priori = {} if name == "truth" else {"a_priori": None}
    fields = {
        "case_id": distribution,
        "case": {"problem": PROBLEM | {"dtype": "fp32"}},
        "variant": "full",
        "distribution": distribution,
        "oracle": name,
        "out": proven(**a_priori),
        "lse": proven(**a_priori),
        "rows": 48,
        "proven_rows": 48,
    }
    return Certificate(**(fields | changes))


def certificates(*records):
    return CertificateReport(
        command="attncheck oracles --certify",
        environment=HERE,
        flint="0.9.0",
        bits=128,
        limit=0.01,
        arithmetics={"fp32": "products of fp32"},
        oracles={"truth": "t", "naive": "n"},
        records=records,
    )


UNPROVEN = proven(share=None, error=None, allowance=None, at=None, elements=0, unproven=192)

# Mods

EQUAL = ModAnswer(status="equal")
ABSENT = ModAnswer(status="unsupported", detail="torch.compile is broken here")
LONG = " + ".join(["score"] * 40)


def mod(name="causal", kind="mask", expression="q_idx >= kv_idx", **answers):
    answers = {"mpmath": EQUAL, "flex": EQUAL} | answers
    return ModRecord(name=name, kind=kind, line=3, expression=expression, answers=answers)


def mods(*records, backends=("mpmath", "flex")):
    return ModReport(
        command="attncheck mods mine.py",
        environment=HERE,
        mpmath="1.3.0",
        file="mine.py",
        shape="B1 H2 Q8 K8 D4",
        backends=dict.fromkeys(backends, "what it is"),
        records=records,
    )


DIFFERENT = ModAnswer(status="different", detail="at b=0 h=1: True, but should be False")

# Planted faults

FIRST = WrongAnswer(
    stage="probes",
    question="ones",
    status="fail",
    rule="structure",
    reason="row 4 | is wrong",
    problem="bf16 full B1 H2 Q77 K93 D64",
    case={"question": "ones"},
)
OTHER = Explanation(model="other", sentence="a", share=0.9, explains_all=False)
CAUGHT = FaultScore(
    fault="missing-alpha",
    category="online softmax",
    host="ideal",
    outcome="caught",
    problems=23,
    seconds=6.64,
    caught=Detection(first=FIRST, shrunk=replace(FIRST, problem="bf16 full B1 H1 Q1 K65 D16")),
    peers=(
        PeerVerdict(rule="allclose(1e-2)", problems=9, caught=True),
        PeerVerdict(rule="2×", problems=22, alarms=3),
    ),
    diagnosis=(OTHER, replace(OTHER, model="alpha")),
    rank=2,
)
MISSED = FaultScore(
    fault="window-left",
    category="sliding window",
    summary="the window is one wider",
    host="ideal",
    outcome="missed",
    problems=250,
    seconds=31.0,
)
BROKEN = replace(MISSED, fault="gone", outcome="harness", reason="NameError: x")
SAME = replace(MISSED, fault="same", outcome="equivalent", reason="the bits are the same")
NOWHERE = replace(MISSED, fault="race", host="", outcome="unplanted", reason="no threads")
CLEAN = ControlScore(control="split", host="ideal", outcome="clean", problems=250, seconds=30.0)
FLAGGED = replace(CLEAN, control="lazy", outcome="flagged", flagged=(FIRST,))
TOTALS = (
    Total(host="ideal", caught=1, missed=1, unscored=2, seconds=6.64, problems=23.0),
    Total(host="ideal", category="online softmax", caught=1, peers={"2×": 1}),
)


def faults(*scores, controls=(), **fields):
    about = {"command": "attncheck faults", "tier": "smoke", "device": "cpu"}
    return FaultReport(scores=scores, controls=controls, **(about | fields))


def own_tests(*statuses, **changes):
    scores = tuple(
        OwnTestsScore(
            fault=f"f{number}",
            category="gqa",
            host="ideal",
            status=status,
            reason="why" if status == "not scored" else "",
            tests=("test_a.py::test_b",) if status == "caught" else (),
        )
        for number, status in enumerate(statuses)
    )
    about = {"command": "attncheck faults", "pytest": "tests", "replace": "a:b"}
    return OwnTestsReport(scores=scores, **(about | changes))


def sensitivity(size=2.0**-9):
    rules = {
        "attncheck": SmallestFault(size=size, below=2.0**-10, question="compare", asked=12),
        "2×": SmallestFault(size=None, below=None),
    }
    seen = FaultSensitivity(
        fault="scale",
        summary="the scale is off",
        unit="ε",
        dtype="bf16",
        tier="smoke",
        device="cpu",
        questions=40,
        plain=31,
        rules=rules,
        seconds=3.0,
    )
    return SensitivityReport(command="attncheck faults --sensitivity", seen=(seen,))


# Properties


def outcome(kernel="ideal", kind="passed", reason="", **problems):
    return PropertyOutcome(
        file="test_causal.py",
        test="test_first_row",
        kernel=kernel,
        dtype="bf16",
        family="causal",
        outcome=kind,
        reason=reason,
        tally=Tally(problems=problems, seconds=0.5, compiling=0.1),
    )


def properties(*outcomes, seconds=2.0, processes=1, **changes):
    fields = {"command": "pytest properties", "environment": HERE, "tier": "smoke"}
    return PropertyReport(
        processes=processes,
        seconds=seconds,
        untaken={"sdpa-math": {"e4m3": "takes no fp8", "e5m2": "takes no fp8", "tf32": "no GPU"}},
        outcomes=outcomes,
        **(fields | changes),
    )


def change(standing, **changes):
    fields = {"kernel": "mine.py::fwd", "case_id": "abcdefghij", "reason": ""}
    return Change(standing=standing, **(fields | changes))


def comparison(*changes, **fields):
    about = {"command": "attncheck baseline diff gate.json", "baseline": "attncheck-baseline.json"}
    return BaselineComparison(changes=changes, **(about | fields))


MIXED = properties(
    outcome(**{"pass": 3, "warn": 1}),
    outcome("flex", "known", "0 · NaN", fail=1),
    outcome("mine", "failed", "relation repeat: out moved", fail=1, unsupported=2),
    outcome("mine", "skipped", "takes no mask"),
    processes=4,
)


def mutants():
    def score(mutant, outcome, **facts):
        where = {"kernel": "mine", "operator": mutant.split(":")[1], "line": 7, "tool": "check"}
        diff = "-    s = q @ k\n+    s = q @ v"
        return MutantScore(mutant=mutant, diff=diff, outcome=outcome, **where, **facts)

    rules = {"torch": True, "2×": False}
    wrong = {"named": "wrong", "family": "scale", "models": ("mask-ignored",), "certain": 1}
    return MutantReport(
        command="attncheck faults --mutants mine.py::attention",
        tool="check",
        started="2026-11-22T17:30:00Z",
        seconds=95.0,
        scores=(
            score("mine:drop-term:7:8", "caught", questions=3, seconds=1.5, peers=rules, **wrong),
            score("mine:drop-term:8:8", "caught", questions=1, seconds=1.0, named="proven"),
            score("mine:drop-term:8:9", "caught", questions=2, seconds=1.0, named="family"),
            score("mine:drop-term:7:9", "missed", questions=48, seconds=4.5, peers=rules),
            score("mine:transpose:7:8", "missed", questions=48, seconds=4.0, identical=True),
            score("mine:transpose:7:9", "equivalent", reason="it is square"),
            score("mine:off-by-one:7:4", "stillborn", reason="TypeError: no"),
            score("mine:off-by-one:7:6", "harness", reason="its process was lost 2 times"),
        ),
        curve=(1, 2, 3),
    )


DRIFTS = tuple(
    Drift(phase=phase, where=where, error=0.3, floor=0.01, most=0.02, as_far=0)
    for phase, where in (
        ("prefill", "layer 0"),
        ("prefill", "layer 1"),
        ("prefill", "logits"),
        ("prefill", "KL"),
        ("training", "gradients"),
    )
)

SAMPLES = {
    "bench": BENCH,
    "oracles": oracles(
        oracle("naive"),
        oracle(),
        naive(overflowed=37),
        oracle(distribution="large_logits"),
        oracle("naive", variant="softmax"),
        oracle(variant="softmax"),
    ),
    "certificates": certificates(
        certificate(),
        certificate("naive"),
        certificate(distribution="sink"),
        certificate("naive", "sink", out=UNPROVEN),
    ),
    "mods": mods(mod(), mod("odd", flex=DIFFERENT), mod("long", "score mod", LONG, flex=ABSENT)),
    "blocks": BlockReport(
        command="attncheck blocks causal",
        attncheck="1",
        mask={"name": "causal"},
        name="causal",
        batch=1,
        heads=1,
        query=8,
        kv=8,
        records=(
            BlockRecord(
                block_query=4,
                block_kv=4,
                total=4,
                empty=1,
                partial=2,
                full=1,
                sparsity=0.25,
                speedup=4 / 3,
                map=("10", "21"),
            ),
        ),
    ),
    "fingerprint": FingerprintReport(
        command="attncheck fingerprint mine",
        kernel="mine",
        device="cpu",
        environment=HERE,
        records=(
            DtypeFingerprint(
                dtype="bf16",
                calls=12,
                arithmetic="P in bf16",
                readings=(
                    Reading(field="P", standing="agrees", read="bf16", declared="bf16"),
                    Reading(field="tile", standing="not seen", reason="too few keys"),
                ),
            ),
            DtypeFingerprint(
                dtype="e4m3",
                calls=0,
                readings=(Reading(field="P", standing="not seen", reason="takes no fp8"),),
            ),
        ),
    ),
    "model": ModelReport(
        command="attncheck model mistral --kernel mine",
        environment=HERE,
        transformers="5",
        dtype="bf16",
        batch=1,
        length=24,
        steps=2,
        models={"mistral": "a sliding window"},
        right=3,
        records=(
            ModelRecord(
                model="mistral",
                kernel="mine",
                status="fail",
                reason="out[0, 1, 7, 3] = 2",
                drifts=DRIFTS,
                chance=0.25,
                diverges=1,
                gradient_norm=2.0,
                exact_norm=1.0,
                calls=(
                    ModelCall(layer=0, module="layers.0", calls=4, failed=0, over_bound=0.5),
                    ModelCall(layer=1, module="layers.1", calls=4, failed=1, over_bound=30.0),
                ),
                fault=ModelFault(
                    layer=1,
                    module="layers.1",
                    step=2,
                    backward=True,
                    batch=0,
                    head=1,
                    position=25,
                    reason="out[0, 1, 7, 3] = 2",
                    id="abcdefghij",
                    recording="mistral-mine.safetensors",
                    again=False,
                ),
            ),
            ModelRecord(model="mistral", kernel="sdpa-math", for_comparison=True, status="pass"),
            ModelRecord(model="mistral", kernel="o", status="unsupported", reason="it takes none"),
        ),
    ),
    "faults": faults(
        *(CAUGHT, MISSED, BROKEN, SAME, NOWHERE),
        controls=(CLEAN, FLAGGED),
        totals=TOTALS,
        unfinished=3,
        unfinished_because="interrupted",
    ),
    "own-tests": own_tests("caught", "missed", "not shown", "not reached", "not scored"),
    "mutants": mutants(),
    "sensitivity": sensitivity(),
    "properties": MIXED,
    "baseline": comparison(
        change("worse", before=1e-3, after=1.5e-3, reason="out's error is 1.5 × what it was"),
        change("better", before=2e-3, after=1e-3),
        change("gone", before=2e-3),
        change("new", after=0.0),
        change("within rounding", before=1e-3, after=1.01e-3, reason="out 1.01 ×"),
        *(change("identical", before=0.0, after=0.0) for _ in range(3)),
        problems={"abcdefghij": "bf16 causal B1 H2 Q128 K128 D64"},
    ),
}
