"""``attncheck model``: does a whole transformer give the same results with this kernel?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from attncheck.cli import verb
from attncheck.cli.long_runs import progress
from attncheck.cli.options import open_kernels, start_worker, typed_command, was_typed
from attncheck.cli.standard_output import interrupts, show_report
from attncheck.core.errors import UsageError
from attncheck.records.failures import FAILURE_FOLDER
from attncheck.records.model_report import ModelRecord, ModelReport

if TYPE_CHECKING:
    from attncheck.subjects.capabilities.subject import Subject

_COUNT = click.IntRange(min=1)
_DEFAULT_RIGHT = 19


@verb.command
def model(
    *,
    specs: tuple[str, ...] = verb.argument("SPEC...", nargs=-1, required=True),
    kernels: tuple[str, ...] = verb.several(
        "--kernel",
        "NAME",
        "A kernel of `attncheck list`, FILE.py::NAME, or a folder of the kernels hub, FOLDER::NAME "
        "(repeatable; default: those of torch).",
    ),
    dtype: str = verb.option(
        "--dtype",
        "NAME",
        "Dtype of weights and activations: fp32, fp16 or bf16.",
        "bf16",
        type=click.Choice(["fp32", "fp16", "bf16"]),
    ),
    layers: int = verb.option(
        "--layers", "N", "Number of layers of a built-in model.", 4, type=_COUNT
    ),
    hidden: int = verb.option(
        "--hidden",
        "N",
        "Width of a built-in model; its heads have 16 columns, or 64 from 256 on.",
        64,
        type=_COUNT,
    ),
    length: int = verb.option(
        "--length", "N", "Number of tokens of each prompt.", 48, type=click.IntRange(min=4)
    ),
    batch: int = verb.option("--batch", "N", "Number of prompts.", 2, type=_COUNT),
    steps: int = verb.option(
        "--steps",
        "N",
        "Number of tokens decoded after the prompt, with a cache.",
        8,
        type=click.IntRange(min=0),
    ),
    right: int = verb.option(
        "--right",
        "N",
        "Number of right kernels to compare with: by chance a right kernel drifts further than "
        "all N once in N + 1 runs.",
        _DEFAULT_RIGHT,
        type=click.IntRange(2, 25),
    ),
    seed: int = verb.option(
        "--seed", "", "Seed of random weights and tokens.", 0, type=click.IntRange(min=0)
    ),
    device: str | None = verb.device("Where the model runs", verb.GPU),
    timeout: float | None = verb.timeout(),
    in_process: bool = verb.in_process(),
    fmt: str = verb.fmt(),
    directory: str = verb.out("model.json, model.md and model.html"),
    plots: tuple[str, ...] = verb.plots("Also draw each layer's drift"),
    quiet: bool = verb.quiet(),
) -> int:
    """Run transformers with their attention replaced by a kernel, and compare their outputs.

    SPEC is llama, gemma, gpt-oss, mistral or bert, a small model with random weights; or a folder
    with a Hugging Face config.json, and weights in safetensors or random ones. Nothing is
    downloaded.

    Every call of every layer is judged on the tensors that it received. The model's outputs for a
    prompt, for tokens decoded with a cache and for a training step are compared with those of the
    same model in fp64 with exact attention. How far right kernels differ from it is measured too,
    for comparison.

    The first call that fails is kept with its tensors: `attncheck repro ID` repeats it.

    Exit code 1 when a call failed or a kernel raised; 5 when no kernel supports the model.
    """
    workers = {each: start_worker(each, in_process=in_process) for each in kernels}
    with interrupts.importing():
        from attncheck.reporting import rendering
        from attncheck.reporting.image_files import check_plots, write_plots
        from attncheck.surveys.swapped_model import ModelSize, describe_model, transformers_version
    rendering.check_format(fmt)
    check_plots(plots)
    from attncheck.subjects.capabilities.named_kernels import subject_named
    from attncheck.surveys.model_survey import peer_names, survey_model
    from attncheck.verify.claims import hold_to_convention
    from attncheck.verify.environment import environment, prepare, usable_device

    device = usable_device(device)
    prepare(device)  # before transformers, which imports Triton
    version = transformers_version()
    rendering.check_writable(directory, "model")
    _refuse_sizes(specs)
    size = ModelSize(
        layers=layers,
        hidden=hidden,
        length=length,
        batch=batch,
        steps=steps,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    names = peer_names(device)
    foreign = workers or dict.fromkeys(names)
    peers: list[Subject] = [subject_named(name) for name in names if name not in foreign]
    total = len(specs) * (1 + right + len(foreign) + len(peers))
    records: list[ModelRecord] = []
    with (
        open_kernels(
            foreign, device=device, in_process=in_process, seconds=timeout or math.inf
        ) as hosts,
        progress("run", total, quiet=quiet) as advance,
    ):
        for kernel, host in hosts.items():
            hold_to_convention(host, kernel=kernel, device=device)
        folder = Path(directory) / FAILURE_FOLDER
        for spec in specs:
            records += survey_model(
                spec, size, hosts, peers, right=right, folder=folder, advance=advance
            )
    report = ModelReport(
        command=typed_command(files={"--kernel", "--plot"}),
        environment=environment(device),
        transformers=version,
        dtype=dtype,
        batch=batch,
        length=length,
        steps=steps,
        models={Path(spec).name: describe_model(spec, size) for spec in specs},
        right=right,
        records=tuple(records),
    )
    with interrupts.writing(directory):
        rendering.write_report(report, directory, "model", formats=("json", "md", "html"))
        if plots and any(record.drifts for record in records):
            write_plots(report, plots)
        elif plots:
            click.echo("attncheck: no kernel took a model: no plot is drawn.", err=True)
    return show_report(report, fmt)


def _refuse_sizes(specs: tuple[str, ...]) -> None:
    """Raise UsageError if a size is typed for a model that has its own."""
    from attncheck.surveys.swapped_model import SHAPES

    typed = [one for one in ("layers", "hidden") if was_typed(one)]
    own = [spec for spec in specs if spec not in SHAPES]
    if own and typed:
        raise UsageError(f"--{typed[0]} is of built-in models: {own[0]!r} has its own.")
