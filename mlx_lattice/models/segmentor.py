"""Segmentor: a net that scores each point of a scan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .attributes import check_scores
from .pretrained import Pretrained
from .recipe import ATTRIBUTES, VoxelRecipe, Voxels


class Segmentor(Pretrained):
    """A net of scores for each voxel, called on points by the recipe in ``about``."""

    def score_points(
        self,
        points: Any,
        attributes: Mapping[str, Any] | None = None,
        *,
        fill: bool = False,
    ) -> mx.array:
        """Return (P, num_classes) scores, one row a point, in their order.

        Points of one voxel have the same scores.

        Args:
            points, attributes, fill: as for ``VoxelRecipe``: one scan.

        Raises:
            ValueError: ``about`` has no recipe, a value of a point is not finite,
                scores are NaN, or as for ``VoxelRecipe``.
        """
        recipe = self.recipe()
        voxels = recipe(points, attributes, fill=fill)
        if dropped := voxels.dropped:
            first = mx.argmax(voxels.rows < 0).item()
            names = [name for name in recipe.features if name in ATTRIBUTES]
            raise ValueError(
                f"{', '.join(['coordinates', *names])} must be finite, since each "
                f"point gets scores; point {first} and {dropped - 1} others are not: "
                "leave them out, as io.read_points does"
            )
        scores = self.score_voxels(voxels)
        check_scores(scores)
        return scores[voxels.rows]

    def score_voxels(self, voxels: Voxels) -> mx.array:
        """Return (N, num_classes) scores of the rows of ``voxels.x``."""
        return self(voxels.x.astype(self.dtype)).feats

    def recipe(self) -> VoxelRecipe:
        """Return the recipe of the net's voxels; raise where it has none."""
        if self.about.voxels is None:
            raise ValueError(
                f"this {type(self).__name__} does not say how its voxels are made: set "
                "net.about = models.About(models.VoxelRecipe(voxel_size, features))"
            )
        return self.about.voxels

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of features that the net takes: that of its first norm's scale."""
        for _, module in self.named_modules():
            if "running_mean" in module and "weight" in module:
                return module["weight"].dtype
        return mx.float32
