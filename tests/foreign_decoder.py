"""A small SparseVAEDecoder, and the names that TRELLIS.2 publishes for any."""

import cases
import mlx.core as mx

import mlx_lattice as ml

WIDTHS, COUNTS, LATENT, OUT = (16, 16, 8), (1, 2, 0), 4, 7


def latents(name="negative", n=25, dtype="float32", **options):
    coords = cases.geometry(name, 3, n)
    feats = mx.array(cases.features(len(coords), LATENT)).astype(getattr(mx, dtype))
    return ml.SparseTensor(mx.array(coords), feats, **options)


def published(widths, counts, latent, out, predicted=True):
    """Names and shapes of a checkpoint, as TRELLIS.2 publishes them."""
    shapes = {
        "from_latent.weight": (widths[0], latent),
        "from_latent.bias": (widths[0],),
        "output_layer.weight": (out, widths[-1]),
        "output_layer.bias": (out,),
    }
    for i, (c, count) in enumerate(zip(widths, counts, strict=True)):
        for j in range(count):
            shapes |= {
                f"blocks.{i}.{j}.norm.weight": (c,),
                f"blocks.{i}.{j}.norm.bias": (c,),
                f"blocks.{i}.{j}.conv.weight": (c, 3, 3, 3, c),
                f"blocks.{i}.{j}.conv.bias": (c,),
                f"blocks.{i}.{j}.mlp.0.weight": (4 * c, c),
                f"blocks.{i}.{j}.mlp.0.bias": (4 * c,),
                f"blocks.{i}.{j}.mlp.2.weight": (c, 4 * c),
                f"blocks.{i}.{j}.mlp.2.bias": (c,),
            }
        if i + 1 == len(widths):
            continue
        name, d = f"blocks.{i}.{count}", widths[i + 1]
        shapes |= {
            f"{name}.norm1.weight": (c,),
            f"{name}.norm1.bias": (c,),
            f"{name}.conv1.weight": (8 * d, 3, 3, 3, c),
            f"{name}.conv1.bias": (8 * d,),
            f"{name}.conv2.weight": (d, 3, 3, 3, d),
            f"{name}.conv2.bias": (d,),
        }
        if predicted:
            shapes |= {f"{name}.to_subdiv.weight": (8, c)}
            shapes |= {f"{name}.to_subdiv.bias": (8,)}
    return shapes
