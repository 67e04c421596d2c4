"""The experiments: what only a chip can say of itself, each asked in a few lines.

What is about Metal's kernels is asked where they run; on metal/host results are checked
and times mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from . import chip_experiments, kernel_experiments
from .lab import Experiment, Lab, NoTime
from .machine import sentence

ON_METAL = "It is about Metal's kernels, which do not run here."

Run = Callable[[Lab, Experiment], None]
# Number, whether it is about Metal alone, title, question, how it is measured.
EXPERIMENTS: tuple[tuple[int, bool, Run, str, str, str], ...] = (
    (
        1,
        False,
        chip_experiments.against_others,
        "others' shells",
        "How long do the layers take whose times were published?",
        "submanifold 3x3x3 over shells, float16, the route that is chosen",
    ),
    (
        3,
        True,
        kernel_experiments.buffers,
        "buffers",
        "Do two buffers in threadgroup memory pay, or the room that one leaves?",
        "the tiles of sorted_implicit_gemm in variants, 64 and 128 channels",
    ),
    (
        12,
        True,
        kernel_experiments.shapes,
        "shapes of tiles",
        "Which simdgroups are fastest: many of few sums, or few of many?",
        "sorted_implicit_gemm in other shapes; --keep keeps the fastest",
    ),
    (
        4,
        False,
        chip_experiments.bfloat,
        "bfloat16",
        "Does bfloat16 cost more than float16?",
        "the same layer in both, and with matrices in float",
    ),
    (
        5,
        True,
        kernel_experiments.skipping,
        "skipping",
        "What does the branch cost that passes over blocks of rows?",
        "masks as they are, all set, and no branch at all",
    ),
    (
        6,
        True,
        kernel_experiments.device_weights,
        "weights from the device",
        "Need weights pass through threadgroup memory?",
        "sorted_implicit_gemm and device_weights_gemm; --keep keeps their times",
    ),
    (
        7,
        True,
        kernel_experiments.accelerators,
        "neural accelerators",
        "How much faster are TensorOps, are they right, and how high simdgroups best?",
        "tensor_ops, as planned and by heights, of which --keep keeps the fastest; and "
        "sorted_implicit_gemm",
    ),
    (
        8,
        True,
        kernel_experiments.threadgroups,
        "threadgroups a core",
        "Into how many splits should few tiles be cut?",
        "1, 2, 4 and 8 splits over 1 000, 4 000 and 16 000 rows",
    ),
    (
        9,
        False,
        chip_experiments.relations,
        "relations",
        "What does a relation over a million rows take, and what divisions in it?",
        "new coordinates to the table; a copy with three kinds of division",
    ),
    (
        10,
        False,
        chip_experiments.sorting,
        "sorting",
        "Would keys of four bytes sort faster than those of eight?",
        "mx.argsort of a million keys",
    ),
    (
        11,
        False,
        chip_experiments.weight_gradient,
        "a weight gradient",
        "How long does a weight gradient take? Nobody has published one on a Mac.",
        "shell 128, 128 channels, float16, the route that is chosen",
    ),
    # The last one: it asks for what a pipeline does not allow.
    (
        2,
        True,
        kernel_experiments.threads_of_pipelines,
        "registers",
        "How many threads does each pipeline allow, which says how many registers?",
        "a threadgroup that is too large, to which MLX answers with the most",
    ),
)


def experiments(lab: Lab, told: Callable[[int, str], None]) -> Iterator[Experiment]:
    """Run the experiments one after another, each with its share of the time left.

    Args:
        lab: where; its budget is that of all.
        told: called with the place and the title of each before it runs.
    """
    whole = lab.budget
    rest = [e for e in EXPERIMENTS if lab.on_metal or not e[1]]
    for at, (number, on_metal, run, title, question, how) in enumerate(EXPERIMENTS):
        told(at, title)
        experiment = Experiment(number, title, question, how)
        running = [e[0] for e in rest]
        after = len(running) - running.index(number) if number in running else 1
        lab.budget = whole.part(2 * whole.left / (after + 1))
        lab.wrong = []
        if on_metal and not lab.on_metal:
            experiment.result = ON_METAL
        else:
            _run(run, lab, experiment)
        yield experiment
        mx.clear_cache()


def _run(run: Run, lab: Lab, experiment: Experiment) -> None:
    try:
        run(lab, experiment)
    except NoTime:
        experiment.result = "No time was left for all of it."
    except Exception as raised:  # whatever a compiler or driver raises
        lab.wrong.append(sentence(raised))
    if lab.wrong:
        experiment.wrong = "; ".join(lab.wrong)
