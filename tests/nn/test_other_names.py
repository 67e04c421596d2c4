"""What a user of another library writes: it means the same, or a sentence says what."""

import copy
import re
from collections import OrderedDict

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import mlx_lattice as ml
from mlx_lattice import nn, ops
from mlx_lattice.io import import_checkpoint
from mlx_lattice.other_modules import FUNCTIONS, MODULES

COORDS = mx.array([[0, 0, 0, 0], [0, 1, 1, 1], [1, 2, 0, 3]])


def tensor(**options) -> ml.SparseTensor:
    feats = mx.arange(12, dtype=mx.float32).reshape(3, 4)
    return ml.SparseTensor(COORDS, feats, **options)


def test_spconv_s_names_of_a_tensor_s_parts():
    x = tensor(spatial_shape=[3, 2, 4])
    assert x.features is x.feats is x.F and x.indices is x.coords is x.C
    doubled = x.replace_feature(x.feats * 2)
    assert doubled.key == x.key and mx.array_equal(doubled.feats, x.feats * 2)
    assert x.dense().shape == (2, 4, 3, 2, 4)
    assert mx.array_equal(x.dense()[1, :, 2, 0, 3], x.feats[2])
    assert mx.array_equal(x.dense(channels_first=False), x.to_dense())


@pytest.mark.parametrize("name", ("features", "indices", "F", "C"))
def test_features_are_not_set_in_place(name):
    x = tensor()
    with pytest.raises(AttributeError, match=r"x = x\.replace\(feats\)"):
        setattr(x, name, x.feats * 2)


@pytest.mark.parametrize(
    ("name", "right"),
    (
        ("coordinates", "x.coords"),
        ("tensor_stride", "x.stride"),
        ("coordinate_map_key", "x.key"),
        ("find_indice_pair", "x.manager"),
        ("decomposed_features", "ops.unbatch"),
        ("detach", "mx.stop_gradient"),
        ("to", "no device"),
        ("half", "x.astype"),
        ("unbind", "ops.unbatch"),
        ("inverse_mapping", "ops.lookup"),
    ),
)
def test_other_words_of_a_tensor_are_named(name, right):
    with pytest.raises(AttributeError, match=f"has no '{name}': here that is") as e:
        getattr(tensor(), name)
    assert right in str(e.value)
    assert not hasattr(tensor(), "no_such_thing")


@pytest.mark.parametrize("key", (0, slice(2), (slice(None), 0)))
def test_tensors_take_no_index(key):
    with pytest.raises(TypeError, match=r"takes no index: ops\.unbatch"):
        tensor()[key]
    with pytest.raises(TypeError, match="takes no index"):
        list(tensor())


@pytest.mark.parametrize("name", ("stride", "spatial_shape", "batch_size", "dims"))
def test_what_rows_say_is_not_set(name):
    with pytest.raises(AttributeError, match=f"{name} of a tensor cannot be set"):
        setattr(tensor(), name, 2)


@pytest.mark.parametrize("dtype", ("float16", np.float16, None))
def test_dtypes_are_mlx_s(dtype):
    with pytest.raises(TypeError, match=r"one of MLX's, such as mx\.float16; got"):
        tensor().astype(dtype)


@pytest.mark.parametrize("shape", ((3,), (2, 4), (3, 5), (4, 1), (1, 3, 4)))
def test_values_that_do_not_fit_features(shape):
    x, wide = tensor(), tensor().replace(mx.ones((3, 8)))
    for values in (mx.ones(shape), np.ones(shape)):
        with pytest.raises(ValueError, match=r"values of shape \(4,\), \(3, 1\) or"):
            x * values
    with pytest.raises(ValueError, match=r"got \(3, 8\)\. ops\.cat joins"):
        x + wide
    for fitting in ((), (1,), (4,), (1, 4), (3, 1), (3, 4)):
        assert mx.array_equal((x * mx.ones(fitting)).feats, x.feats)
    one = x.replace(x.feats[:, :1])
    assert mx.array_equal((one * x).feats, x.feats[:, :1] * x.feats)


@pytest.mark.parametrize("dims", (1, 2, 3, 4))
def test_modules_of_the_same_meaning(dims):
    assert getattr(nn, f"SubMConv{dims}d") is getattr(nn, f"SubmConv{dims}d")
    assert nn.SparseSequential is nn.Sequential


@pytest.mark.parametrize(
    ("name", "right"),
    (
        ("SparseConv3d", 'nn.Conv3d(..., padding=p, support="reach")'),
        ("SparseConv2d", "nn.Conv2d("),
        ("SparseInverseConv3d", "nn.ConvTranspose3d("),
        ("SparseConvTranspose3d", "nn.GenerativeConvTranspose3d("),
        ("SparseMaxPool3d", "nn.MaxPool3d("),
        ("SparseAvgPool2d", "nn.AvgPool2d("),
        ("SparseGlobalMaxPool", "nn.GlobalMaxPool"),
        ("SparseGlobalAvgPool", "nn.GlobalAvgPool"),
        ("ToDense", "x.to_dense()"),
        ("JoinTable", "ops.cat"),
        ("AddTable", "x + y"),
        ("BatchNorm1d", "nn.BatchNorm"),
        ("MinkowskiConvolution", "nn.SubmConv3d"),
        ("MinkowskiGlobalSumPooling", "nn.GlobalSumPool"),
        ("MinkowskiLeakyReLU", "nn.LeakyReLU"),
        ("MinkowskiToDenseTensor", "x.to_dense()"),
        ("MinkowskiBroadcastMultiplication", "ops.gate"),
        ("MinkowskiSyncBatchNorm", "nn.SyncBatchNorm"),
        ("MinkowskiHardtanh", "mlx.nn.HardShrink or HardTanh"),
        ("AddTableMisaligned", "ops.union"),
        ("ToBEVHeightCompression", "nn.ToBEV"),
        ("SparseLayerNorm32", "nn.LayerNorm"),
        ("SparseMultiHeadAttention", "nn.SparseAttention"),
        ("ModuleList", "self.layers = [...]"),
        ("ModuleDict", "self.layers = {...}"),
        ("CrossEntropyLoss", "mlx.nn.losses"),
    ),
)
def test_other_modules_are_named(name, right):
    with pytest.raises(AttributeError) as e:
        getattr(nn, name)
    assert right in str(e.value)
    word = right.partition("(")[0].removeprefix("nn.")
    assert not right.startswith("nn.") or word in nn.__all__


def test_what_is_named_is_there():
    """Of each name that a sentence gives, every form that it may take."""
    found, places = 0, {"nn": nn, "ops": ops, "mlx.nn": mlx.nn, "ml": ml}
    for pattern, text in (*MODULES.items(), *FUNCTIONS.items()):
        kinds = re.search(r"<kind>([^)]*)", pattern)
        for kind in kinds[1].split("|") if kinds else ("",):
            said = text.format(kind=kind, d=3)
            for place, name in re.findall(r"\b(mlx\.nn|nn|ops|ml)\.(\w+)", said):
                assert hasattr(places[place], name), said
                found += 1
    assert found > len(MODULES)


@pytest.mark.parametrize("place", (ml, ops))
@pytest.mark.parametrize(
    ("name", "right"),
    (
        ("sparse_collate", "ops.batch"),
        ("batched_coordinates", "ops.batch"),
        ("sparse_quantize", "ml.SparseTensor.from_points"),
        ("SparseConvTensor", "ml.SparseTensor("),
        ("voxel_to_point", "ops.interpolate"),
        ("sparse_unbind", "ops.unbatch"),
    ),
)
def test_other_functions_are_named(place, name, right):
    with pytest.raises(AttributeError, match=f"has no '{name}': here that is") as e:
        getattr(place, name)
    assert right in str(e.value)


def test_functions_are_those_of_ops():
    with pytest.raises(AttributeError, match=r"here that is ops\.cat"):
        ml.cat  # noqa: B018
    for place in (ml, ops):
        with pytest.raises(AttributeError, match="has no attribute 'annotations'"):
            place.annotations  # noqa: B018
    assert not hasattr(ml, "mx")


def test_names_of_nobody_are_refused_as_ever():
    with pytest.raises(AttributeError, match="'mlx_lattice.nn' has no attribute 'Fn'"):
        nn.Fn  # noqa: B018


def test_what_a_submanifold_convolution_takes():
    """spconv centres the kernel whatever the padding says."""
    x = tensor()
    mx.random.seed(1)
    plain = nn.SubmConv3d(4, 5, 3, bias=False)
    for padding in (0, 1, 2, (1, 1, 1), [1, 1, 1]):
        mx.random.seed(1)
        layer = nn.SubMConv3d(
            4, 5, 3, padding=padding, stride=1, indice_key="subm1", bias=False
        )
        assert mx.array_equal(layer(x).feats, plain(x).feats)
    with pytest.raises(ValueError, match=r"its stride is 1; nn.Conv3d takes others"):
        nn.SubmConv3d(4, 5, 3, stride=2)
    with pytest.raises(ValueError, match="padding must be an int of 0 or more"):
        nn.SubmConv3d(4, 5, 3, padding="same")


def test_keys():
    assert nn.Conv3d(4, 5, 3, 2, padding=1, indice_key="down").padding == (1, 1, 1)
    assert nn.MaxPool3d(3, 2, 1, indice_key="pool").stride == (2, 2, 2)
    assert nn.AvgPool3d(2, indice_key="pool").stride == (2, 2, 2)
    nn.GenerativeConvTranspose3d(4, 5, 2, 2, indice_key="up")
    with pytest.raises(ValueError, match="Give the stride and padding of the convolu"):
        nn.ConvTranspose3d(4, 5, 3, indice_key="down")


@pytest.mark.parametrize(
    ("make", "right"),
    (
        (lambda: nn.SubmConv3d(4, 5, 3, algo=1), "routes choose the kernel"),
        (lambda: nn.Conv3d(4, 5, 3, dimension=3), "nn.Conv3d has 3 axes"),
        (lambda: nn.Conv3d(4, 5, 3, transposed=True), "nn.ConvTranspose3d"),
        (lambda: nn.Conv3d(4, 5, 3, subm=True), "nn.SubmConv3d"),
        (lambda: nn.Conv3d(4, 5, 3, typo=True), "unexpected keyword argument 'typo'"),
        (lambda: nn.Conv3d(4), "missing"),
    ),
)
def test_arguments_with_an_effect_are_refused(make, right):
    with pytest.raises(TypeError, match=right):
        make()


@pytest.mark.parametrize(
    ("make", "right"),
    (
        (lambda: nn.ReLU(True), "ReLU takes no 'inplace', True: .*leave it out"),
        (lambda: nn.ReLU(inplace=True), "ReLU takes no 'inplace': no layer changes"),
        (lambda: nn.LeakyReLU(0.1, True), "LeakyReLU takes no 'inplace', True"),
        (lambda: nn.SiLU(inplace=False), "SiLU takes no 'inplace'"),
        (lambda: nn.Dropout(0.1, True), "Dropout takes no 'inplace', True"),
        (lambda: nn.GroupNorm(num_groups=2, num_channels=8), "here that is dims"),
        (lambda: nn.LayerNorm(8, elementwise_affine=False), "here that is affine"),
        (lambda: nn.LayerNorm(normalized_shape=8), "here that is dims"),
        (lambda: nn.Linear(in_features=4, out_features=5), "here that is input_dims"),
        (lambda: nn.Linear(4, out_features=5), "here that is output_dims"),
        (lambda: nn.Upsample3d(scale_factor=2), "here that is scale"),
        (lambda: nn.Conv3d(4, 5, 3, padding_mode="zeros"), "count as zero"),
        (lambda: nn.ReLU(1), "takes 1 positional argument but 2 were given"),
        (lambda: nn.Linear(4, 5, typo=1), "unexpected keyword argument 'typo'"),
    ),
)
def test_pytorch_s_arguments_are_named(make, right):
    with pytest.raises(TypeError, match=right):
        make()


def test_mlx_s_own_modules_stay_as_they_are():
    with pytest.raises(TypeError, match="unexpected keyword argument 'in_features'"):
        mlx.nn.Linear(in_features=4, out_features=5)
    assert "bias" not in nn.Linear(4, 5, False)


def test_layers_by_number():
    for net in (nn.Sequential(*named().values()), nn.Sequential(named())):
        layers = net.layers
        layers = list(layers.values()) if isinstance(layers, dict) else layers
        assert net[0] is layers[0] and net[-1] is layers[2]
        assert net[1:] == layers[1:] and net["layers"] is net.layers
        with pytest.raises(IndexError):
            net[3]
        with pytest.raises(TypeError, match=r"in \.layers. Write: for layer in net"):
            list(net)
        again = copy.deepcopy(net)
        again.update(net.parameters())
        assert list(again.keys()) == list(net.keys()) and dict(net)
        assert "layers" in net and len(tree_flatten(net.parameters())) == 6


def named() -> OrderedDict:
    return OrderedDict(conv=nn.SubmConv3d(4, 5, 3), norm=nn.BatchNorm(5), act=nn.ReLU())


def test_an_ordered_dict_names_the_layers():
    net, x = nn.Sequential(named()).eval(), tensor()
    parts = list(net.layers.values())
    assert mx.array_equal(net(x).feats, nn.Sequential(*parts).eval()(x).feats)
    names = [name for name, _ in tree_flatten(net.parameters())]
    assert "layers.conv.weight" in names
    again = nn.Sequential(nn.Sequential(**named()), mlx.nn.Identity()).eval()
    state = {
        f"0.{n.removeprefix('layers.')}": p for n, p in tree_flatten(net.parameters())
    }
    assert import_checkpoint(state, again, "spconv").complete
    assert mx.array_equal(again(x).feats, net(x).feats)
    mlx.nn.quantize(wide := nn.Sequential(OrderedDict(a=nn.SubmConv3d(32, 32, 3))))
    assert type(wide.layers["a"]) is nn.QuantizedSubmConv3d
    assert nn.Sequential().layers == [] and len(nn.Sequential(parts[0]).layers) == 1
    with pytest.raises(TypeError, match="modules by name, not both; got 1 and act"):
        nn.Sequential(nn.ReLU(), act=nn.ReLU())
    with pytest.raises(TypeError, match="must have names"):
        nn.Sequential({1: nn.ReLU()})


def test_numbers_as_names_are_places(tmp_path):
    parts = {"0": nn.SubmConv3d(4, 5, 3), "1": nn.BatchNorm(5)}
    net, x = nn.Sequential(parts).eval(), tensor()
    file = str(tmp_path / "net.safetensors")
    net.save_weights(file)
    other = nn.Sequential(nn.SubmConv3d(4, 5, 3), nn.BatchNorm(5)).eval()
    for each in (nn.Sequential(parts), other):
        each.load_weights(file)
        assert mx.array_equal(each.eval()(x).feats, net(x).feats)
    first, second = parts.values()
    for names in (("0", "2"), ("1", "0"), ("1", "2")):
        with pytest.raises(ValueError, match=f"0 to 1 in order; got {names[0]}"):
            nn.Sequential(dict(zip(names, (first, second), strict=True)))
    for name in ("a.b", ""):
        with pytest.raises(ValueError, match=f"none is empty .* got '{name}'"):
            nn.Sequential({name: first})


@pytest.mark.parametrize(
    "shape", (np.array([3, 2, 4]), mx.array([3, 2, 4]), tuple(np.array([3, 2, 4])))
)
def test_extents_from_numpy(shape):
    x = tensor(spatial_shape=shape)
    assert x.spatial_shape == (3, 2, 4) and type(x.spatial_shape[0]) is int
    assert x.to_dense().shape == tensor().to_dense(shape).shape == (2, 3, 2, 4, 4)
    assert nn.SubmConv3d(4, 5, np.int64(3)).kernel_size == (3, 3, 3)
    with pytest.raises(ValueError, match="an int or 3 ints, one per spatial axis"):
        tensor(spatial_shape=np.array([3, 2]))
    with pytest.raises(ValueError, match="an int or 3 ints, one per spatial axis"):
        tensor(spatial_shape=np.array([3.0, 2.0, 4.0]))


@pytest.mark.parametrize("third", ([3, 2, 4], np.array([3, 2, 4]), mx.array([3, 2, 4])))
def test_a_third_list_is_no_stride(third):
    with pytest.raises(TypeError, match="have a name: spatial_shape="):
        ml.SparseTensor(COORDS, mx.ones((3, 4)), third)
    assert ml.SparseTensor(COORDS, mx.ones((3, 4)), (2, 2, 2)).stride == (2, 2, 2)
    assert tensor(stride=[2, 2, 2]).stride == (2, 2, 2)
    assert ml.SparseTensor(COORDS, mx.ones((3, 4)), np.int64(2)).stride == (2, 2, 2)


def test_spconv_s_and_minkowskiengine_s_ways_to_make_a_tensor():
    feats = mx.ones((3, 4))
    with pytest.raises(TypeError, match="spatial_shape=..., batch_size=..."):
        ml.SparseTensor(feats, COORDS, [3, 2, 4], 2)
    with pytest.raises(ValueError, match="coords come first"):
        ml.SparseTensor(feats, COORDS)
    with pytest.raises(ValueError, match="coords come first"):
        ml.SparseTensor(np.ones((3, 4)), np.array(COORDS))
    for words in ({"features": feats, "indices": COORDS}, {"coordinates": COORDS}):
        with pytest.raises(TypeError, match="SparseTensor takes no '[a-z]+': here"):
            ml.SparseTensor(**words)


# ops.unique_sum


@pytest.mark.parametrize("dtype", ("float32", "float16", "bfloat16"))
def test_sums_of_rows_that_repeat(dtype):
    rng = np.random.default_rng(0)
    coords = rng.integers(-3, 3, size=(400, 4)).astype(np.int32)
    coords[:, 0] = rng.integers(0, 3, size=400)
    feats = mx.array(rng.normal(size=(400, 5))).astype(getattr(mx, dtype))
    wide = np.array(feats.astype(mx.float32)).astype(np.float64)
    rows, inverse = np.unique(coords, axis=0, return_inverse=True)
    expected = np.zeros((len(rows), 5))
    np.add.at(expected, inverse.reshape(-1), wide)
    y = ops.unique_sum(mx.array(coords), feats)
    assert y.feats.dtype == feats.dtype and len(y) < 400
    np.testing.assert_array_equal(np.array(y.coords), rows)
    error = np.array(y.feats.astype(mx.float32)) - expected
    bound = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    assert np.linalg.norm(error) <= bound * np.linalg.norm(expected)
    again = ops.unique_sum(ml.SparseTensor(mx.array(coords), feats))
    assert mx.array_equal(again.feats, y.feats)


def test_sums_keep_what_a_tensor_says_and_have_gradients():
    coords = mx.array([[0, 1], [0, 0], [0, 1]])
    x = ml.SparseTensor(coords, mx.ones((3, 2)), 4, spatial_shape=[2], batch_size=3)
    y = ops.unique_sum(x)
    assert y.coords.tolist() == [[0, 0], [0, 1]] and y.feats.tolist() == [
        [1] * 2,
        [2] * 2,
    ]
    assert (y.stride, y.spatial_shape, y.batch_size) == ((4,), (2,), 3)
    scale = mx.array([[1.0, 2.0], [3.0, 4.0]])
    grad = mx.grad(lambda f: (ops.unique_sum(coords, f).feats * scale).sum())
    assert grad(mx.ones((3, 2))).tolist() == [[3, 4], [1, 2], [3, 4]]
    empty = ops.unique_sum(mx.zeros((0, 3), dtype=mx.int32), mx.zeros((0, 4)))
    assert len(empty) == 0 and empty.channels == 4
    with pytest.raises(ValueError, match="feats must have shape"):
        ops.unique_sum(coords, mx.ones((2, 2)))
    with pytest.raises(TypeError, match="got both"):
        ops.unique_sum(x, x.feats)


def test_a_sequential_counts_and_takes_layers():
    first, x = nn.SubmConv3d(4, 5, 3), tensor()
    net = nn.Sequential(nn.SubmConv3d(4, 4, 3), nn.ReLU())
    assert len(net) == 2 and len(nn.Sequential()) == 0
    net[0] = first
    assert net[0] is first and len(net) == 2
    assert net(x).channels == 5
    assert set(net.parameters()) == {"layers"}
    net[-1] = nn.Identity()
    assert mx.array_equal(net(x).feats, first(x).feats)
    named = nn.Sequential(OrderedDict(conv=nn.SubmConv3d(4, 4, 3), relu=nn.ReLU()))
    named[0] = first
    assert len(named) == 2 and named.layers["conv"] is first
    with pytest.raises(TypeError, match="one by one"):
        named[0:1] = [first]
    with pytest.raises(IndexError):
        net[2] = first
    with pytest.raises(AttributeError, match=r"net\.layers\.append"):
        net.append(first)


@pytest.mark.parametrize("layer", (None, [nn.ReLU()], 3))
def test_a_sequential_s_layers_are_called(layer):
    with pytest.raises(TypeError, match="takes layers and functions"):
        nn.Sequential(layer, nn.ReLU())
    with pytest.raises(TypeError, match="takes layers and functions"):
        nn.Sequential(relu=nn.ReLU(), other=layer)
