"""Names that other libraries have for parts of tensors and for arguments.

A name that means the same gives the thing meant; any other raises a sentence with the
name here. Those of modules and functions are in ``other_modules``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import NoReturn, ParamSpec

import mlx.core as mx

P = ParamSpec("P")

# Attributes of spconv's, MinkowskiEngine's and torchsparse's tensors.
TENSOR = {
    "coordinates": "x.coords",
    "tensor_stride": "x.stride",
    "coordinate_manager": "x.manager",
    "coordinate_map_key": "x.key",
    "coordinate_key": "x.key",
    "decomposed_features": "[y.feats for y in ops.unbatch(x)]",
    "decomposed_coordinates": "[y.coords for y in ops.unbatch(x)]",
    "spatial_range": "x.spatial_shape, without the batch",
    "indice_dict": "x.manager, which finds relations by their coordinates",
    "find_indice_pair": "x.manager, which finds relations by their coordinates",
    "kmaps": "x.manager, which finds relations by their coordinates",
    "cmaps": "x.manager, which keeps coordinate sets",
    "select_by_index": "ops.prune(x, mask)",
    "minus": "-x",
    "slice": "ops.devoxelize(x, inverse)",
    "features_at_coordinates": "ops.interpolate(x, points)",
    "sparse": "x itself: a SparseTensor has coords and feats",
    "detach": "x.replace(mx.stop_gradient(x.feats))",
    "clone": "copy.copy(x)",
    "numpy": "np.array(x.feats), and np.array(x.coords)",
    "requires_grad_": "mx.grad, of a function of the features",
    "requires_grad": "mx.grad, of a function of the features",
    "coordinates_at": "ops.unbatch(x)[element].coords",
    "features_at": "ops.unbatch(x)[element].feats",
    "unbind": "ops.unbatch(x)",
    "layout": "ops.unbatch(x), one tensor an element",
    "unique_index": "ops.lookup(x, rows), the row of each",
    "inverse_mapping": "ops.lookup(x, rows), the row of each",
    "get_spatial_cache": "x.manager, which keeps what is made of coordinates",
    "register_spatial_cache": "x.manager, which keeps what is made of coordinates",
    "D": "x.dims",
    "s": "x.stride",
    **dict.fromkeys(("half", "float", "bfloat16"), "x.astype(mx.float16), or another"),
    **dict.fromkeys(
        ("to", "cuda", "cpu", "device"),
        "x itself, as MLX's arrays have no device; x.astype(dtype) casts it",
    ),
}

ARGUMENTS = {
    "algo": "routes choose the kernel here; leave it out",
    "fp32_accum": "sums are float32 on every route; leave it out",
    "large_kernel_fast_algo": "routes choose the kernel here; leave it out",
    "record_voxel_count": "rows have no capacity here; leave it out",
    "output_padding": "rows come from the input or from coordinates=; leave it out",
    "transposed": "that is nn.ConvTranspose3d, or nn.GenerativeConvTranspose3d",
    "generative": "that is nn.GenerativeConvTranspose3d",
    "subm": "that is nn.SubmConv3d",
    "dimension": "the name says it: nn.Conv3d has 3 axes",
    "kernel_generator": "give kernel_size, stride and dilation themselves",
    "expand_coordinates": 'that is support="reach"',
    "inplace": "no layer changes its input in place; leave it out",
    "padding_mode": "cells that are not there count as zero; leave it out",
    "num_channels": "here that is dims",
    "normalized_shape": "here that is dims, the channels",
    "elementwise_affine": "here that is affine",
    "in_features": "here that is input_dims",
    "out_features": "here that is output_dims",
    "scale_factor": "here that is scale",
    "device": "MLX's arrays have no device; leave it out",
}


class OtherNames:
    """What other libraries call the parts of a SparseTensor."""

    def _set(self, value: object) -> None:
        raise AttributeError(
            "features and coordinates cannot be set: x = x.replace(feats) has other "
            "features on the same rows"
        )

    features = property(lambda self: self.feats, _set, doc="spconv's name of feats.")
    indices = property(lambda self: self.coords, _set, doc="spconv's name of coords.")
    F = property(lambda self: self.feats, _set, doc="MinkowskiEngine's name of feats.")
    C = property(
        lambda self: self.coords, _set, doc="MinkowskiEngine's name of coords."
    )
    del _set

    def replace_feature(self, feature: mx.array):
        """Return ``replace(feature)``: spconv's name of it."""
        return self.replace(feature)

    def dense(self, channels_first: bool = True) -> mx.array:
        """Return what spconv's ``dense`` does: (B, C, spatial...), channels first.

        ``to_dense`` has the channels last, as MLX's convolutions do.
        """
        dense = self.to_dense()
        return mx.moveaxis(dense, -1, 1) if channels_first else dense

    def __getitem__(self, key: object):
        raise TypeError(
            "a SparseTensor takes no index: ops.unbatch(x) are its batch elements, "
            "ops.prune(x, mask) some rows, x.replace(x.feats[:, :c]) some channels"
        )

    def _not_an_array(self, *_: object) -> NoReturn:
        raise TypeError(
            "a SparseTensor is not an array. Pass x.feats to losses, layers and "
            "functions of MLX, and put results back on the rows with x.replace(feats)"
        )

    # MLX calls the first where it expects an array.
    __mlx_array__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = _not_an_array
    __lt__ = __le__ = __gt__ = __ge__ = __abs__ = __mod__ = __floordiv__ = _not_an_array

    def __getattr__(self, name: str):
        kind = type(self).__name__
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # raises what the property did
        if hasattr(mx.array, name) and name not in TENSOR and name[0] != "_":
            raise AttributeError(
                f"a SparseTensor has no {name!r}: it is not an array. Pass x.feats to "
                "losses, layers and functions of MLX, and put results back on the rows "
                "with x.replace(feats)"
            )
        if name in TENSOR:
            raise AttributeError(f"{kind} has no {name!r}: here that is {TENSOR[name]}")
        raise AttributeError(f"{kind!r} object has no attribute {name!r}")


def takes(**harmless: Callable[[object, object], str | None]):
    """Let a constructor take other libraries' arguments, by name.

    Args:
        **harmless: name of an argument that has no effect here, and what checks it
            for a layer: it returns a sentence, or None where nothing is wrong.

    Raises:
        TypeError: a name in ``ARGUMENTS``; the text says what to do.
        ValueError: a harmless argument has a value that would have an effect.
    """

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        own = frozenset(inspect.signature(init).parameters)

        @wraps(init)
        def checked(self, *args, **kwargs):
            for word in [word for word in kwargs if word not in own]:
                name = type(self).__name__
                if word in harmless:
                    value = kwargs.pop(word)
                    if why := harmless[word](self, value):
                        raise ValueError(f"{name}({word}={value!r}): {why}")
                elif word in ARGUMENTS:
                    raise TypeError(f"{name} takes no {word!r}: {ARGUMENTS[word]}")
            if _in_place(init, args, kwargs):
                name, why = type(self).__name__, ARGUMENTS["inplace"]
                raise TypeError(f"{name} takes no 'inplace', {args[-1]}: {why}")
            init(self, *args, **kwargs)

        checked.takes_other_names = True
        return checked

    return decorate


def take_other_names(modules: Iterable[object], package: str) -> None:
    """Let the package's own modules name PyTorch's arguments, as ``takes`` does."""
    for module in modules:
        if not isinstance(module, type) or not module.__module__.startswith(package):
            continue
        init = module.__init__
        if not getattr(init, "takes_other_names", False):
            module.__init__ = takes()(init)


def _in_place(init: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether arguments fit but for a last True or False, as PyTorch's inplace."""
    if not args or not isinstance(args[-1], bool):
        return False
    signature, fits = inspect.signature(init), []
    for given in (args, args[:-1]):
        try:
            signature.bind(None, *given, **kwargs)
            fits.append(True)
        except TypeError:
            fits.append(False)
    return fits == [False, True]


class Layers:
    """What PyTorch's Sequential gives by a number, or one after another."""

    def __len__(self) -> int:
        """Return how many layers there are, not the parts of a module."""
        return len(self.get("layers", ()))

    def __getitem__(self, key: object):
        """Return a layer by its number, layers by a slice, or a module's part."""
        if isinstance(key, int | slice):
            layers = self.layers
            return list(layers.values() if isinstance(layers, dict) else layers)[key]
        return super().__getitem__(key)

    def __setitem__(self, key: object, value: object) -> None:
        """Put a layer in the place of another, by its number, or set a part."""
        if not isinstance(key, int | slice):
            super().__setitem__(key, value)
            return
        layers = self.layers
        if isinstance(layers, dict) and isinstance(key, int):
            key = list(layers)[key]
        elif isinstance(layers, dict):
            raise TypeError("layers with names are set one by one")
        layers[key] = value

    def __getattr__(self, name: str):
        if name in ("append", "extend", "insert"):
            raise AttributeError(
                f"a Sequential has no {name!r}: its layers are in .layers. Write "
                f"net.layers.{name}(...)"
            )
        return super().__getattr__(name)

    def __iter__(self):
        raise TypeError(
            "a Sequential is a dict, as all of MLX's modules: its layers are in "
            ".layers. Write: for layer in net.layers"
        )


def unused(layer: object, value: object) -> None:
    """Accept any value: relations are found by their coordinates, without keys."""


def kept_rows(layer: object, stride: object) -> str | None:
    """Return why a submanifold convolution cannot have this stride, or None."""
    axes = stride if isinstance(stride, tuple | list) else (stride,)
    if all(s == 1 for s in axes):
        return None
    return (
        "a submanifold convolution keeps its rows, so its stride is 1; nn.Conv3d "
        "takes others"
    )


def centred(layer: object, padding: object) -> str | None:
    """Accept any padding: a submanifold kernel is centred, whatever spconv is told."""
    axes = padding if isinstance(padding, tuple | list) else (padding,)
    if all(p is None or (isinstance(p, int) and p >= 0) for p in axes):
        return None
    return "padding must be an int of 0 or more, or one an axis"


def no_key(layer: object, value: object) -> str | None:
    """Return why an inverse convolution cannot be found by a key, or None."""
    if value is None or layer.generative:
        return None
    return (
        "there are no keys here. Give the stride and padding of the convolution that "
        "it undoes: its rows are found by them"
    )


def tensor_arguments(init: Callable[P, None]) -> Callable[P, None]:
    """Name the right argument where a tensor is made as other libraries make theirs."""
    words = {"features": "feats", "indices": "coords", "coordinates": "coords"}

    @wraps(init)
    def checked(self, *args, **kwargs):
        if len(args) > 3:
            raise TypeError(
                "SparseTensor takes coords, feats and stride by position; spconv's "
                "SparseConvTensor(features, indices, spatial_shape, batch_size) is "
                "SparseTensor(coords, feats, spatial_shape=..., batch_size=...)"
            )
        third = args[2] if len(args) > 2 else None
        if isinstance(third, list) or getattr(third, "ndim", 0):
            raise TypeError(
                f"the third argument is the stride, an int or a tuple; got {third}. "
                f"The extents of a grid have a name: spatial_shape={third}"
            )
        for word in [word for word in kwargs if word in words]:
            raise TypeError(
                f"SparseTensor takes no {word!r}: here that is {words[word]}. "
                "SparseTensor(coords, feats)"
            )
        if len(args) > 1 and _floating(args[0]) and not _floating(args[1]):
            raise ValueError(
                "coords come first: SparseTensor(coords, feats); got "
                f"{args[0].dtype} and then {args[1].dtype}"
            )
        init(self, *args, **kwargs)

    return checked


def _floating(array: object) -> bool:
    return _is_floating(getattr(array, "dtype", None))


@cache
def _is_floating(dtype: object) -> bool:
    """Of MLX, or of another library."""
    return "float" in str(dtype)
