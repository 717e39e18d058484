"""Bad input to any verb: a one-line error, exit code 2, and no file is written."""

import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FAULTY_KERNELS = Path(__file__).parents[1] / "faults" / "faulty_kernels.py"
FILES = {
    "taken": "{}",  # a file in place of a folder
    "mine.py": """
from torch.nn.functional import scaled_dot_product_attention
print("imported")
def kernel(q, k, v, is_causal=False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
def two(q, k): ...
""",
    "mods.py": """
import torch

table = torch.linspace(-1, 1, 8)

def even(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 2 == 0

def plus(score, b, h, q_idx, kv_idx):
    return score + table[kv_idx]

def raises(b, h, q_idx, kv_idx):
    raise ValueError("planted\\nmore")

def exits(b, h, q_idx, kv_idx):
    raise SystemExit(0)

five = 5
""",
    "bad.py": """
import torch
table = torch.arange(4)

def decides(b, h, q_idx, kv_idx):
    if q_idx > 3:
        return kv_idx > 2
    return kv_idx < 2

def whole(b, h, q_idx, kv_idx):
    return q_idx - kv_idx

def two(b, h, q_idx, kv_idx):
    return torch.stack([q_idx, kv_idx]) > 0

def outside(b, h, q_idx, kv_idx):
    return table[q_idx] > 0

def unknown(score, b, h, q_idx, kv_idx):
    return torch.erf(score)

def truth(score, b, h, q_idx, kv_idx):
    return score > 0
""",
    "none.py": "x = 1",
    "raising.py": "x = 1\n\nraise ValueError('planted')",
    "broken.py": "import nowhere_to_be_found\n",
    "empty.py": "from math import sqrt\n\n\ndef _own(): ...\n",
    "a_list.py": "FAULTS = [len]\n",
    "a_number.py": "FAULTS = {'x': 1}\n",
}
CHECK = "check mine.py::kernel"
RMSE = "rmse --kernel ideal --variant causal --shape 1x2x16x8"
RMSE_MODS = "rmse --kernel ideal --kernel sdpa-math --shape 1x2x8x8"
ORACLES = "oracles --shape 1x2/1x5x4 --distribution large_logits -q"
CERTIFY = "oracles --certify --shape 1x2/1x5x4 --distribution normal -q"
MODS = "mods --shape 1x2x5/6 --device cpu -q"
BENCH = "bench --shape 2x2x48x8 --variant causal --dtype fp32 -q --rounds 3 --device cpu"
FAULTS = "faults --device cpu -q"
FINGERPRINT = "fingerprint --device cpu -q"
DTYPES = "from bf16, e4m3, e5m2, fp16, fp32, tf32."
KERNEL_FILE = f"{FAULTS} --kernel-file"
FORMAT = "format 'xml' is not known: choose from csv, html, json, md, table"

BAD_INPUT = [
    ("check", "Missing argument 'SPEC'"),
    (
        "check mine.py::two",
        "takes (q, k): a kernel's first three arguments are query, key and value",
    ),
    (f"{CHECK} --convention ragged", "'ragged' is not known: choose from flash"),
    (f"{CHECK} --convention native", "is function, and must be a Subject."),
    (f"{CHECK} --question why", "question 'why' is not known: choose from calls"),
    (f"{CHECK} --question plian", "is not known: did you mean 'plain'? Choose"),
    ("check ideal --question crossed-99", "ideal has no question 'crossed-99': leave --question"),
    ("check ideal --question lengths-9 --question plain", "ideal has no question 'lengths-9': "),
    (f"{CHECK} --dtype bf61", "dtype 'bf61' is not known: did you mean 'bf16'?"),
    (f"{CHECK} --convention sdap", "did you mean 'sdpa'?"),
    ("check mine.py::kernl", "mine.py has no 'kernl': did you mean 'kernel'?"),
    ("check mien.py::kernel", "there is no file mien.py: did you mean 'mine.py'?"),
    ("check idael", "kernel 'idael' is not known: did you mean 'ideal'? Choose from"),
    (f"{CHECK} --dtpye bf16", "No such option '--dtpye'"),
    (f"{CHECK} --head-dim 0", "0"),
    (f"{CHECK} --format xml", FORMAT),
    (f"{CHECK} --format jsno", "did you mean 'json'? Choose from csv"),
    (f"{CHECK} --out mine.py", "mine.py"),
    ("check ideal --watch", "--watch watches a file: kernel 'ideal' must be FILE.py::NAME"),
    (f"{RMSE} --kernel flash9", "kernel 'flash9' is not known: choose from"),
    (f"{RMSE} --variant casual", "'casual' is not known: did you mean 'causal'? Choose"),
    (f"{RMSE} --dtype fp12", "dtype 'fp12' is not known: choose from"),
    (f"{RMSE} --dtype fp64", "dtype 'fp64' is not known: choose from bf16, e4m3"),
    (
        f"{RMSE} --variant softmax --dtype e5m2",
        "softmax has no dtype 'e5m2': choose from fp32, fp16, bf16.",
    ),
    (
        f"{RMSE} --variant softmax --distribution ones_v",
        "distribution 'ones_v' has no scores for softmax: choose from",
    ),
    (f"{RMSE} --distribution cauchy", "distribution 'cauchy' is not known: choose from"),
    (f"{RMSE} --shape 4x64", "shape '4x64' is not BATCHx"),
    (f"{RMSE} --shape 1x4/3x64x16", "kv_heads=3 does not divide heads=4"),
    (f"{RMSE} --shape 1x4x64x257", "head_dim=257 must be 1–256"),
    (f"{RMSE} --format xml", FORMAT),
    (f"{RMSE} --seed -1", "-1"),
    (f"{RMSE} --device cuda", "device 'cuda' is not here"),
    (f"{RMSE} --out taken/reports", "taken/reports"),
    (f"{RMSE} --nonsense", "--nonsense"),
    (f"{RMSE} surplus", "surplus"),
    (f"{RMSE} --max-time soon", "--max-time 'soon' must be a time above 0"),
    (
        f"{RMSE_MODS} --score mods.py::plus --shape 1x2x9x8",
        "score mod 'mods.py::plus' indexes axis 0 of its tensor of shape (8,) with 8 at",
    ),
    (f"{RMSE_MODS} --mask bad.py::decides", "cannot be traced: it decides on a tensor's value at"),
    (f"{RMSE_MODS} --mask bad.py::whole", "cannot be traced: it gives dtype int64"),
    (f"{RMSE_MODS} --mask mods.py::raises", "planted"),
    (f"{RMSE_MODS} --mask mods.py::plus", "cannot be traced: it must take (b, h, q_idx, kv_idx)"),
    (f"{RMSE_MODS} --mask mods.py::five", "is int: it must be a callable"),
    (f"{RMSE_MODS} --mask mods.py::nope", "mods.py has no 'nope'"),
    (f"{RMSE_MODS} --mask absent.py::even", "there is no file absent.py"),
    (f"{RMSE_MODS} --mask broken.py::even", "importing broken.py raised ModuleNotFoundError"),
    (f"{RMSE_MODS} --mask casual", "mask 'casual' is not known: did you mean 'causal'? Choose"),
    (f"{RMSE_MODS} --mask=", "mask '' is not known"),
    (f"{RMSE_MODS} --mask sliding_window", "mask 'sliding_window' needs numbers or parts"),
    (f"{RMSE_MODS} --score causal", "score mod 'causal' is not known"),
    (
        f"{RMSE_MODS} --mask mods.py::even --variant causal",
        "--mask or --score already says what to compute: leave out --variant.",
    ),
    *(
        (
            f"rmse --kernel ideal --inputs x.safetensors {name}={value}",
            f"--inputs already says what to compute: leave out {name}.",
        )
        for name, value in (("--mask", "causal"), ("--mask", ""), ("--score", ""), ("--seed", "0"))
    ),
    ("rmse --kernel ideal --inputs x.safetensors", "recording 'x.safetensors' is not there"),
    ("rmse --kernel sdpa-math --variant softmax", "kernel 'sdpa-math' is for other operations"),
    (
        f"{RMSE} --backward --dtype e4m3",
        "there are no gradients in e4m3: nothing says which descales",
    ),
    (f"{RMSE} --backward --variant softmax", "backward=True has no meaning for softmax."),
    (f"{RMSE} --backward --variant paged", "there are no gradients of keys in pages."),
    (
        f"{RMSE} --backward --plot a.svg",
        "--backward gives gradients, which a plot does not show: leave out",
    ),
    (f"{RMSE} --from rmse.json", "--from shows what was measured: leave out "),
    (f"{RMSE} --plot rmse.pdf", "plot 'rmse.pdf' does not end in .png or .svg"),
    (f"{RMSE} --plot taken/a.png", "plots cannot be written to 'taken': Not a directory"),
    (f"{RMSE} --explain ideal/causal/MHA --plot a.png", "leave out --plot"),
    ("rmse --from taken", "taken is no report of attncheck"),
    ("rmse --from gone.json", "gone.json cannot be read"),
    ("rmse --from taken --seed 0", "--from shows what was measured: leave out --seed"),
    ("rmse --from taken --format xml", FORMAT),
    (f"{RMSE} --explain ideal/casual", "did you mean 'ideal/causal'? Choose from ideal/causal/"),
    (
        f"{RMSE} --dtype fp16 --explain ideal --variant full",
        "one of ideal/causal/MHA/fp16, ideal/causal/",
    ),
    (f"{RMSE} --explain ideal/causal/MHA --format json", "prints one cell and writes no files"),
    (f"{RMSE} --explain ideal/causal/MHA --out there", "writes no files: leave out --out."),
    (f"{ORACLES} --variant casual", "'casual' is not known: did you mean 'causal'? Choose"),
    (f"{ORACLES} --dtype fp64", "dtype 'fp64'"),
    (f"{ORACLES} --distribution cauchy", "distribution 'cauchy' is not known: choose from"),
    (f"{ORACLES} --shape 4x64", "shape '4x64' is not BATCHx"),
    (f"{ORACLES} --shape 1x4x4096x64", "needs 8.7e+09 multiplications of many digits"),
    (f"{ORACLES} --format xml", FORMAT),
    (f"{ORACLES} --digits 16", "16 is not in the range 17<=x<=1000"),
    (f"{ORACLES} --digits 1001", "1001 is not in the range 17<=x<=1000"),
    (f"{ORACLES} --variant softmax --dtype e4m3", "softmax has no dtype 'e4m3'"),
    # Refused even beside a valid variant: this one would measure nothing.
    (f"{ORACLES} --variant full --variant softmax --dtype e4m3", "softmax has no dtype 'e4m3'"),
    (f"{ORACLES} --variant full --variant softmax --dtype nonsense", "dtype 'nonsense'"),
    (f"{ORACLES} --out taken/reports", "taken/reports"),
    (f"{CERTIFY} --digits 50", "--digits 50 has no meaning with --certify"),
    (f"{CERTIFY} --variant softmax --dtype e4m3", "softmax has no dtype 'e4m3'"),
    (f"{CERTIFY} --shape 1x64x4096x128", "products of balls; at most"),
    (f"{CERTIFY} --out taken/reports", "taken/reports"),
    (
        f"{MODS} bad.py::decides",
        "bad.py:5: decides: mask 'decides' cannot be traced: it decides on",
    ),
    (f"{MODS} bad.py::whole", "bad.py:10: whole: mask 'whole' cannot be traced: it gives dtype"),
    (f"{MODS} bad.py::two", "bad.py:13: two: mask 'two' cannot be traced: "),
    (
        f"{MODS} bad.py::outside",
        "bad.py:16: outside: mask 'outside' indexes axis 0 of its tensor of shape (4,)",
    ),
    (f"{MODS} bad.py::unknown", "bad.py:19: unknown: score mod 'unknown' cannot be traced: "),
    (
        f"{MODS} bad.py::truth",
        "bad.py:22: truth: score mod 'truth' cannot be traced: it gives dtype bool",
    ),
    (f"{MODS} mods.py::exits", "SystemExit"),
    (f"{MODS} gone.py", "there is no file gone.py"),
    (f"{MODS} raising.py", "importing raising.py raised ValueError: planted at raising.py:3."),
    (f"{MODS} none.py", "there are none: a mod is a public name"),
    (f"{MODS} none.py::x", "'x' is no mod: it does not take"),
    (f"{MODS} none.py::y", "none.py has no 'y'"),
    (f"{MODS} mods.py::", "mods of 'mods.py::': there is no name after '::'"),
    (f"{MODS} ''", "mods of '': there is no file: give FILE.py"),
    (f"{MODS} ::f", "mods of '::f': there is no file: give FILE.py"),
    (f"{MODS} .", "mods of '.': '.' is a folder"),
    (f"{MODS} mods.py --shape 1x2", "shape '1x2' is not BATCHxHEADSxLENGTH"),
    (f"{MODS} mods.py --shape 8x8x256", "4194304 places"),
    (f"{MODS} mods.py --kernel flash9", "kernel 'flash9' is not known"),
    (f"{MODS} mods.py --kernel gone.py::x", "there is no file gone.py"),
    (
        f"{MODS} mods.py --kernel torch-softmax",
        "kernel 'torch-softmax' is for other operations or dtypes than are asked for",
    ),
    (f"{MODS} mods.py --format xml", FORMAT),
    (f"{MODS} mods.py --device cuda", "device 'cuda' is not here"),
    ("mods", "FILE.py"),
    ("blocks casual", "mask 'casual' is not known: did you mean 'causal'? Choose from and, "),
    ("blocks prefix_lm", 'needs numbers or parts: write it as JSON, {"name": "prefix_lm", …}'),
    ("blocks and", "needs numbers or parts"),
    ("blocks sliding_window", "needs numbers or parts"),
    ("""blocks '{"name": "and"'""", "is no JSON: Expecting"),
    ("""blocks '{"name": "and"}'""", "and has 0 parts: it takes at least one part."),
    ("""blocks '{"name": "casual"}'""", "mask 'casual' is not known"),
    ("""blocks '{"window": 3}'""", "a mod is an object with a name"),
    ("""blocks '{"name": "padding", "lengths": [3]}' --batch 2""", "one for each of the batch=2"),
    ("blocks mods.py::gone", "mods.py has no 'gone'"),
    ("blocks bad.py::decides", "cannot be traced"),
    ("blocks mods.py::five", "it must be a callable"),
    ("blocks bad.py::outside", "allowed is −4 … 3"),
    ("blocks gone.py::mask", "there is no file gone.py"),
    ("blocks mods.py", "is not FILE.py::NAME"),
    ("blocks causal --query 0", "0"),
    ("blocks causal --block 128", "block '128' is not ROWSxKEYS, such as 128x64."),
    ("blocks causal --block 0x64", "is not ROWSxKEYS"),
    ("blocks causal --block 64x64x64", "is not ROWSxKEYS"),
    ("probe mine.py::two --device cpu", "takes (q, k): a kernel's first three"),
    ("probe mine.py::gone --device cpu", "kernel 'mine.py::gone': mine.py has no 'gone'."),
    ("probe nosuch --device cpu", "kernel 'nosuch' is not known: choose from"),
    ("probe mine.py::kernel --convention ours --device cpu", "convention 'ours' is not known"),
    ("probe sdpa-cudnn --device cpu", "cannot run on cpu: needs a CUDA GPU"),
    (
        f"{FINGERPRINT} ideal --dtype half",
        f"dtype 'half' is not known: did you mean 'fp16'? Choose {DTYPES}",
    ),
    (f"{FINGERPRINT} ideal --dtype fp64", f"dtype 'fp64' is not known: choose {DTYPES}"),
    (f"{FINGERPRINT} nobody", "nobody"),
    (f"{FINGERPRINT} sdpa-cudnn", "needs a CUDA GPU"),
    (f"{BENCH} --kernel triton-flash2", "is interpreted on a CPU, where its time means nothing"),
    (f"{BENCH} --table main", "--shape stands in place of --table"),
    (f"{BENCH} --variant softmax", "bench times attention"),
    (f"{BENCH} --against HEAD", "--against compares kernels of a repository"),
    (f"{BENCH} --plot x.pdf", "does not end in .png or .svg"),
    ("model bert mine --layers 2", "--layers is of built-in models: 'mine' has its own"),
    ("model lama", "did you mean 'llama'?"),
    (f"{FAULTS} --fault nope", "fault 'nope' is not known: choose from "),
    (f"{FAULTS} --host cuda", "host 'cuda' is not known: choose from all, ideal, triton"),
    (f"{FAULTS} --category nope", "category 'nope' is not known: choose from backward"),
    (f"{FAULTS} --tier nope", "tier 'nope' is not known"),
    (
        f"{FAULTS} --fault missing-alpha-on-acc --category gqa",
        "none of the faults is of category gqa",
    ),
    (f"{FAULTS} --max-time soon", "--max-time 'soon' must be a time above 0"),
    (f"{KERNEL_FILE} gone.py", "there is no file"),
    (f"{KERNEL_FILE} .", "is a folder"),
    (f"{KERNEL_FILE} raising.py", "ValueError: planted at raising.py"),
    (f"{KERNEL_FILE} empty.py", "has no kernel: give it public functions"),
    (f"{KERNEL_FILE} a_list.py", "FAULTS is list: it must be a dict"),
    (f"{KERNEL_FILE} a_number.py", "fault 'x' is int: it must be a function"),
    (
        f"{KERNEL_FILE} {FAULTY_KERNELS} --fault nope",
        "fault of faulty_kernels.py 'nope' is not known: choose from exit, next key, none",
    ),
    (f"{KERNEL_FILE} {FAULTY_KERNELS} --host ideal", "leave --host, --category and"),
    (f"{FAULTS} --pytest tests", "--pytest needs --replace package.module:name"),
    (f"{FAULTS} --replace a:b", "say what --pytest tests: give it too"),
    ("faults mine.py::f", "give it too"),
    ("faults --tool pr", "give it too"),
    ("faults --mutants", "mutants.toml names none"),
    ("faults --mutants gone.py::f", "there is no file"),
    ("faults --mutants mine.py::f --tool nobody", "tool 'nobody' is not known"),
    ("faults --mutants mine.py::f --device cuda", "on a cpu alone"),
]
NEEDS = {"--certify": "flint", "--plot taken": "matplotlib", "model ": "transformers"}


@pytest.fixture
def folder(tmp_path, monkeypatch, library_as_before):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder):
    """All files and folders, except Python's caches."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(("words", "message"), BAD_INPUT, ids=[words for words, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_writes_nothing(run_in_process, folder, words, message):
    for part, needed in NEEDS.items():
        if part in words and find_spec(needed) is None:
            pytest.skip(f"{needed} is an optional extra")
    if "--device cuda" in words and torch.cuda.is_available() and "here" in message:
        pytest.skip("there is a GPU, so --device cuda is valid")
    before = tree(folder)
    code, out, err = run_in_process(*shlex.split(words))
    (line,) = (each for each in err.splitlines() if each != "imported")
    assert (code, out) == (2, "")
    assert line.startswith("attncheck: ")
    assert message in line
    assert tree(folder) == before


def test_each_bad_mod_has_its_own_line(run_in_process, folder):
    code, out, err = run_in_process(*MODS.split(), "bad.py")
    assert (code, out) == (2, "")
    names = ["decides", "whole", "two", "outside", "unknown", "truth"]
    assert [line.split(": ")[2] for line in err.splitlines()] == names
