"""Packing in convert that needs the whole net: by scans, or for int8 features.

Without scans every row of features has its own scale; with them the net is run on
them, and ``ml.calibrate`` chooses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn
from mlx.utils import tree_flatten

from .distribution import __version__
from .io import read_points
from .io.errors import CheckpointError
from .io.layouts import OURS
from .io.safetensors import write_safetensors
from .models import Segmentor
from .models.attributes import of_scan
from .models.recipe import Voxels
from .nn.calibrate import calibrate
from .nn.calibration import keep_float


def check(given: argparse.Namespace, model: mlx.nn.Module | None) -> None:
    """Raise where the options do not fit one another."""
    if not given.bits:
        raise ValueError("--activations and --calibrate need --bits, of the weights")
    if given.calibrate and not isinstance(model, Segmentor):
        raise ValueError(
            "--calibrate is for nets that score the points of a scan; others are "
            "calibrated by ml.calibrate, on inputs of their own"
        )
    if given.calibrate and model.about.voxels is None:
        raise ValueError("--calibrate needs --about, which says how voxels are made")


def write(
    given: argparse.Namespace,
    model: mlx.nn.Module,
    weights: Sequence[tuple[str, mx.array]],
    target: Path,
    folder: bool,
) -> None:
    """Pack a model with these weights, and write it.

    Raises:
        CheckpointError: a parameter is missing.
        ValueError: a scan lacks what the net reads.
    """
    names = {name for name, _ in weights}
    missing = [n for n, _ in tree_flatten(model.parameters()) if n not in names]
    if missing:
        raise CheckpointError(
            f"a net that is calibrated must be whole; {missing[0]} is missing"
        )
    model.load_weights(list(weights))
    model.eval()
    bits, group_size = given.bits, given.group_size
    if given.activations and bits == 8:
        group_size = None
    predicate = keep_float()
    if given.calibrate:
        batches = [_voxels(model, scan) for scan in given.calibrate]
        model, report = calibrate(
            model,
            batches,
            bits,
            group_size,
            activations=given.activations,
            class_predicate=predicate,
            call=lambda net, voxels: net.score_voxels(voxels),
        )
        print(report)
    else:
        options = {"quantize_input": True, "class_predicate": predicate}
        mlx.nn.quantize(model, group_size, bits, **options)
        print(f"int{bits}, features of {given.activations} bits by row; {predicate}")
    if folder:
        model.save_pretrained(target)
        return
    metadata = {"format": "mlx", "library": OURS, "version": __version__}
    write_safetensors(target, dict(tree_flatten(model.parameters())), metadata)


def _voxels(model: Segmentor, scan: str) -> Voxels:
    """Return a scan as the net's voxels."""
    cloud = read_points(scan)
    with of_scan(scan):
        return model.recipe()(cloud.points, cloud.attributes)
