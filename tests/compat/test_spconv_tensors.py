"""spconv's tensors, keys of relations, containers, and errors."""

from collections import OrderedDict

import numpy as np
import pytest
from torch_scenes import close, picked, scene, spread, torch

import mlx_lattice as ml
from mlx_lattice.compat import spconv as package
from mlx_lattice.compat.spconv import pytorch as spconv
from mlx_lattice.compat.spconv.pytorch import ops
from mlx_lattice.compat.spconv.pytorch.hash import HashTable
from mlx_lattice.compat.spconv.pytorch.modules import is_sparse_conv, is_spconv_module

EXTENTS = 7, 8, 6
nn = torch.nn


def drawn(channels=5, extents=EXTENTS, batch=2):
    features, indices = scene(extents, channels, batch)
    return spconv.SparseConvTensor(features, indices, extents, batch)


# Tensors


@pytest.mark.parametrize(
    "shape",
    ([7, 8, 6], (7, 8, 6), np.array([7, 8, 6]), [torch.tensor(n) for n in EXTENTS]),
    ids=("list", "tuple", "numpy", "tensors"),
)
def test_a_spatial_shape_becomes_ints(shape):
    x = drawn()
    made = spconv.SparseConvTensor(x.features, x.indices, shape, 2)
    assert made.spatial_shape == [7, 8, 6]
    assert all(type(n) is int for n in made.spatial_shape)


def test_arguments_by_place_and_attributes_that_nets_copy():
    x, grid, numbers, stored = drawn(), torch.zeros(3), torch.ones(1), {"a": None}
    made = spconv.SparseConvTensor(
        x.features, x.indices, [7, 8, 6], 2, grid, numbers, stored
    )
    assert made.grid is grid and made.voxel_num is numbers
    assert made.indice_dict is stored
    names = "benchmark", "benchmark_record", "thrust_allocator", "_timer"
    for name in (*names, "force_algo", "int8_scale"):
        setattr(made, name, getattr(x, name))
    assert made.spatial_size == 336 and "SparseConvTensor" in repr(made)
    assert made.sparity == len(x.indices) / 672


def test_features_are_replaced_and_not_assigned():
    x = drawn()
    assert "replace_feature" in dir(x)
    y = x.replace_feature(x.features * 2)
    assert y.indice_dict is x.indice_dict and y.indices is x.indices
    with pytest.raises(ValueError, match="replace_feature"):
        x.features = y.features
    close(y.minus().features, -y.features)
    close((x + y).features, 3 * x.features)
    close((x + torch.ones(5)).features, x.features + 1)
    x += y
    close(x.features, 1.5 * y.features)


def test_the_private_features_may_have_any_shape():
    x = drawn()
    x._features = torch.zeros(len(x.indices), 2, 3)
    assert x.features.shape == (len(x.indices), 2, 3)
    assert x.replace_feature(x.features).features.ndim == 3


@pytest.mark.parametrize("channels_first", (True, False))
def test_dense(channels_first):
    x = drawn()
    grid = spread(x.features, x.indices, EXTENTS)
    y = x.dense(channels_first)
    close(y, grid if channels_first else grid.movedim(1, -1))
    assert y.is_contiguous()
    back = spconv.SparseConvTensor.from_dense(x.dense(False))
    close(back.dense(), grid)


def test_rows_that_repeat_are_not_added():
    indices = torch.tensor([[0, 1], [0, 1], [0, 2]]).int()
    x = spconv.SparseConvTensor(torch.tensor([[1.0], [2], [4]]), indices, [4], 1)
    assert x.dense().flatten().tolist()[1:3] in ([1, 4], [2, 4])


def test_layers_on_rows_that_repeat():
    x = drawn()
    count, most = len(x.indices), 20
    again = torch.cat([x.indices, x.indices[:most]])
    more = torch.randn(most, 5, requires_grad=True)
    both = spconv.SparseConvTensor(torch.cat([x.features, more]), again, EXTENTS, 2)
    layer = spconv.SubMConv3d(5, 4, 3)
    y = layer(both)
    # The first of equal rows is a neighbour, and each row its own centre.
    close(y.features[:count], layer(x).features)
    centre = layer.weight[:, 1, 1, 1].T
    expected = layer(x).features[:most] + (more - x.features[:most]) @ centre
    close(y.features[count:], expected)
    y.features.sum().backward()
    assert more.grad.abs().sum() > 0
    # A layer that makes rows adds them; its inverse gives all the same value.
    added = x.features.detach().clone()
    added[:most] += more.detach()
    down = spconv.SparseConv3d(5, 6, 2, 2, indice_key="d")
    coarse, other = down(both), down(x.replace_feature(added))
    assert torch.equal(coarse.indices, other.indices)
    close(coarse.features, other.features)
    up = spconv.SparseInverseConv3d(6, 3, 2, "d")
    z, expected = up(coarse), up(other).features
    close(z.features, torch.cat([expected, expected[:most]]))
    assert z.indices is again
    pooled = spconv.SparseMaxPool3d(2, indice_key="p")(both)
    close(pooled.features, spconv.SparseMaxPool3d(2)(x).features)
    back = spconv.SparseInverseConv3d(5, 3, 2, "p")(pooled).features
    close(back[count:], back[:most])
    same = spconv.SparseMaxPool3d(3, 1, 1, subm=True)(both)
    assert len(same.features) == count + most
    one = spconv.SubMConv3d(5, 2, 1)
    close(one(both).features[count:], more @ one.weight.view(5, 2) + one.bias)
    assert spconv.SparseGlobalMaxPool()(both).shape == (2, 5)


WRONG = (
    (lambda f, i: (f[:, 0], i, EXTENTS, 2), r"features must be \(N, C\)"),
    (lambda f, i: (f, i[:, 0], EXTENTS, 2), r"indices must be \(N, 1 \+ D\)"),
    (lambda f, i: (f, i, EXTENTS[:2], 2), "spatial_shape must have 3 extents"),
    (lambda f, i: (f, i.long(), EXTENTS, 2), r"int32; got torch.int64.*\.int\(\)"),
    (lambda f, i: (f, i, EXTENTS, 0), "batch_size must be positive"),
)


@pytest.mark.parametrize("arguments, message", WRONG)
def test_wrong_arguments(arguments, message):
    x = drawn()
    with pytest.raises(AssertionError, match=message):
        spconv.SparseConvTensor(*arguments(x.features, x.indices))


def test_rows_outside_of_the_grid_or_the_batch():
    x = drawn()
    layer = spconv.SubMConv3d(5, 4, 3)
    small = spconv.SparseConvTensor(x.features, x.indices, [7, 4, 6], 2)
    with pytest.raises(ValueError, match=r"axis 1 must lie in \[0, 4\).*got 0 to 7"):
        layer(small)
    few = spconv.SparseConvTensor(x.features, x.indices, [7, 8, 6], 1)
    with pytest.raises(ValueError, match="below batch_size 1"):
        layer(few)


# Keys


def stored(layer, x):
    """The relation that a layer's result has under its key."""
    return layer(x).indice_dict[layer.indice_key]


def test_layers_of_one_key_use_one_relation():
    x = drawn()
    a = spconv.SubMConv3d(5, 5, 3, indice_key="k")
    b = spconv.SubMConv3d(5, 5, 3, indice_key="k")
    y = a(x)
    z = b(y)
    assert x.indice_dict == {} and list(y.indice_dict) == ["k"]
    assert z.indice_dict["k"] is y.indice_dict["k"]
    data = z.find_indice_pair("k")
    assert data.is_subm and data.ksize == [3, 3, 3] and data.indices is x.indices
    assert isinstance(data.relation, ml.Relation)
    assert x.find_indice_pair(None) is None and x.find_indice_pair("b") is None


def test_layers_without_a_key_share_the_relation_of_their_rows():
    x = drawn()
    with ml.trace() as trace:
        y = spconv.SubMConv3d(5, 5, 3)(x)
        spconv.SubMConv3d(5, 5, 3)(y)
        other = spconv.SparseConvTensor(x.features, x.indices, EXTENTS, 2)
        spconv.SubMConv3d(5, 5, 3)(other)
    assert len(trace) == 3 and y.indice_dict == {}
    a, b = (spconv.core.lattice_of(t) for t in (y, other))
    assert a.manager is b.manager and len(a.manager.relations) == 1


def test_a_key_of_one_branch_is_not_seen_by_another():
    x = drawn()
    down = spconv.SparseConv3d(5, 5, 2, 2, indice_key="d")
    coarse = down(x)
    assert "d" in coarse.indice_dict and "d" not in x.indice_dict
    down(x)  # the same key from the same input again
    after = spconv.SubMConv3d(5, 5, 3, indice_key="s")(coarse)
    assert list(after.indice_dict) == ["d", "s"]
    again = spconv.SparseConv3d(5, 5, 2, 2, indice_key="d")
    with pytest.raises(AssertionError, match="'d' is stored in this tensor already"):
        again(coarse)
    with pytest.raises(AssertionError, match="'d' is stored in this tensor already"):
        spconv.SparseMaxPool3d(2, indice_key="d")(coarse)
    with pytest.raises(AssertionError, match="'d' is stored"):
        spconv.SubMConv3d(5, 5, 3, indice_key="d")(coarse)


def test_an_inverse_convolution_without_its_pair():
    x = drawn()
    up = spconv.SparseInverseConv3d(5, 4, 2, indice_key="down")
    with pytest.raises(AssertionError, match="no layer stored indice_key 'down'"):
        up(x)
    y = spconv.SubMConv3d(5, 5, 3, indice_key="down")(x)
    with pytest.raises(AssertionError, match="'down' is of a submanifold layer"):
        spconv.SparseInverseConv3d(5, 4, 3, indice_key="down")(y)


def test_an_inverse_convolution_that_does_not_fit():
    x = drawn()
    coarse = spconv.SparseConv3d(5, 5, 2, 2, indice_key="d")(x)
    with pytest.raises(ValueError, match="one kernel size; stored is .2, 2, 2."):
        spconv.SparseInverseConv3d(5, 4, 3, indice_key="d")(coarse)
    # A convolution between the two that makes other rows (spconv's issue 467).
    other = spconv.SparseConv3d(5, 5, 3)(coarse)
    with pytest.raises(ValueError, match="one spatial shape"):
        spconv.SparseInverseConv3d(5, 4, 2, indice_key="d")(other)
    wider = spconv.SparseConv3d(5, 5, 3, padding=1)(coarse)
    with pytest.raises(ValueError, match="one number of rows"):
        spconv.SparseInverseConv3d(5, 4, 2, indice_key="d")(wider)


def test_an_inverse_convolution_of_pooling():
    x = drawn()
    y = spconv.SparseMaxPool3d(2, 2, indice_key="p")(x)
    z = spconv.SparseInverseConv3d(5, 4, 2, indice_key="p")(y)
    assert z.indices is x.indices and z.features.shape == (len(x.indices), 4)


def test_a_submanifold_key_is_trusted_after_a_check():
    x = drawn()
    y = spconv.SubMConv3d(5, 5, 3, indice_key="k")(x)
    for other, message in (
        (spconv.SubMConv3d(5, 5, 5, indice_key="k"), "one kernel size"),
        (spconv.SubMConv3d(5, 5, 3, dilation=2, indice_key="k"), "one dilation"),
    ):
        with pytest.raises(ValueError, match=message):
            other(y)
    same = spconv.SubMConv3d(5, 5, 3, indice_key="k")
    fewer = y.select_by_index(torch.arange(10))
    assert fewer.indice_dict == {}
    fewer.indice_dict = y.indice_dict
    with pytest.raises(ValueError, match="one number of rows"):
        same(fewer)
    # Rows in another order: the stored relation is used, as spconv does.
    order = torch.randperm(len(x.indices))
    turned = spconv.SparseConvTensor(y.features, x.indices[order], EXTENTS, 2)
    turned.indice_dict = y.indice_dict
    assert same(turned).indices is x.indices
    close(same(turned).features, same(y).features)
    turned.indice_dict = {}
    grid = spread(y.features, turned.indices, EXTENTS)
    dense = nn.functional.conv3d(grid, same.weight.movedim(-1, 1), same.bias, padding=1)
    close(same(turned).features, picked(dense, turned.indices))


def test_assigned_indices_are_the_rows():
    x = drawn()
    layer = spconv.SubMConv3d(5, 4, 3)
    layer(x)
    order = torch.randperm(len(x.indices))
    turned = x.shadow_copy()
    turned.indices, turned._features = x.indices[order], x.features[order]
    close(layer(turned).features, layer(x).features[order])
    # A change in place of the same tensor is seen as well.
    moved = x.shadow_copy()
    moved.indices = x.indices.clone()
    layer(moved)
    moved.indices[:, 1] = 6 - moved.indices[:, 1]
    grid = spread(x.features, moved.indices, EXTENTS)
    dense = nn.functional.conv3d(
        grid, layer.weight.movedim(-1, 1), layer.bias, padding=1
    )
    close(layer(moved).features, picked(dense, moved.indices))


def test_rows_that_were_handed_out_are_copies():
    x = drawn()
    layer = spconv.SparseConv3d(5, 5, 2, 2)
    y = layer(x)
    rows = y.indices.clone()
    y.indices.zero_()
    assert torch.equal(layer(x).indices, rows)


def test_sorting_rows_by_batch_and_back_before_the_inverse():
    x = drawn()
    down = spconv.SparseConv3d(5, 5, 2, 2, indice_key="d")
    up = spconv.SparseInverseConv3d(5, 4, 2, indice_key="d")
    y = down(x)
    order = torch.argsort(y.indices[:, 0], stable=True)
    back = torch.argsort(order)
    turned = spconv.SparseConvTensor(
        y.features[order], y.indices[order], y.spatial_shape, 2
    )
    restored = spconv.SparseConvTensor(
        turned.features[back], turned.indices[back], y.spatial_shape, 2
    )
    restored.indice_dict = y.indice_dict
    close(up(restored).features, up(y).features)


def test_pairs_of_a_stored_relation():
    x = drawn()
    data = stored(spconv.SparseConv3d(5, 4, 2, 2, indice_key="d", bias=False), x)
    pairs, counts = data.indice_pairs, data.indice_pair_num
    assert pairs.shape[:2] == (2, 8) and counts.shape == (8,)
    for k in range(8):
        i, o = pairs[:, k, : counts[k]].long()
        assert (pairs[:, k, counts[k] :] == -1).all()
        inside = x.indices[i][:, 1:] - 2 * data.out_indices[o][:, 1:]
        assert (inside == torch.tensor([k // 4, k // 2 % 2, k % 2])).all()


# Modules


def test_sequential():
    layers = OrderedDict(a=spconv.SubMConv3d(5, 4, 3), b=nn.ReLU())
    net = spconv.SparseSequential(layers, c=spconv.SubMConv3d(4, 4, 1))
    net.add(nn.BatchNorm1d(4))
    net.add(spconv.ToDense(), "last")
    assert len(net) == 5 and net[-1] is net.last and isinstance(net[1], nn.ReLU)
    with pytest.raises(IndexError):
        net[5]
    with pytest.raises(ValueError, match="two modules named '0'"):
        spconv.SparseSequential(nn.ReLU(), **{"0": nn.ReLU()})
    assert list(net._modules) == ["a", "b", "c", "3", "last"]
    assert net(drawn()).shape == (2, 4, *EXTENTS)
    later = spconv.SparseSequential()
    later.add_module("x", nn.Linear(5, 3))
    assert later(drawn()).features.shape[1] == 3


def test_sequential_gives_sparse_modules_the_tensor():
    class Block(spconv.SparseModule):
        def forward(self, x):
            assert isinstance(x, spconv.SparseConvTensor)
            return x.replace_feature(x.features + 1)

    x = drawn()
    net = spconv.SparseSequential(Block(), nn.Identity(), spconv.Identity())
    close(net(x).features, x.features + 1)
    assert is_spconv_module(Block()) and not is_spconv_module(nn.ReLU())
    assert is_sparse_conv(spconv.SubMConv1d(1, 1, 3)) and not is_sparse_conv(Block())


def test_pytorchs_layers_on_sparse_tensors():
    x = drawn()
    for made, plain in (
        (spconv.SparseBatchNorm(5), nn.BatchNorm1d(5)),
        (spconv.SparseReLU(), nn.ReLU()),
        (spconv.SparseIdentity(), nn.Identity()),
    ):
        close(made(x).features, plain(x.features))
        close(made(x.features), plain(x.features))
        assert isinstance(made, type(plain))


def test_tables():
    x = drawn()
    both = spconv.ConcatTable().add(spconv.SubMConv3d(5, 4, 3)).add(nn.Identity())
    a, b = both(x)
    joined = spconv.JoinTable()([a, b])
    close(joined.features, torch.cat([a.features, x.features], 1))
    close(spconv.AddTable()([x, x]).features, 2 * x.features)
    with pytest.raises(AssertionError, match="AddTableMisaligned"):
        spconv.AddTable()([x, x.select_by_index(torch.arange(3))])
    assert spconv.RemoveGrid()(x).grid is None


def test_a_subclass_with_a_forward_of_its_own():
    class Plain(spconv.SparseConv3d):
        """Reads a kernel of one as out by in."""

        def forward(self, input):
            weight = self.weight.view(self.out_channels, self.in_channels)
            made = spconv.SparseConvTensor(
                input.features @ weight.T, input.indices, input.spatial_shape, 2
            )
            made.indice_dict, made.grid = input.indice_dict, input.grid
            return made

    x = drawn()
    layer = Plain(5, 4, kernel_size=1, bias=False)
    close(layer(x).features, x.features @ layer.weight.reshape(4, 5).T)
    assert isinstance(layer, spconv.conv.SparseConvolution)


def test_names_are_assigned():
    net = spconv.SparseSequential(nn.Sequential(spconv.SubMConv3d(1, 1, 3, name="n")))
    spconv.assign_name_for_sparse_modules(net)
    assert net[0][0]._sparse_unique_name == "0.0" and net[0][0].name == "n"


def test_choices_of_kernels_are_taken_and_ignored():
    x = drawn()
    a = spconv.SubMConv3d(
        5, 4, 3, algo=spconv.ConvAlgo.Native, fp32_accum=True, indice_key="k"
    )
    b = spconv.SubMConv3d(
        4, 4, 3, algo=package.ConvAlgo.MaskImplicitGemm, large_kernel_fast_algo=True,
        indice_key="k",
    )  # fmt: skip
    b(a(x))
    assert "algo" in repr(a) and "bias=False" in repr(
        spconv.SubMConv2d(1, 1, 3, bias=0)
    )
    package.constants.SPCONV_USE_DIRECT_TABLE = False
    assert spconv.constants.is_amp_enabled() is False


def test_what_is_not_provided_says_what_to_use():
    x = drawn()
    for make, message in (
        (lambda: spconv.SparseConvTranspose3d(1, 1, 3, dilation=2), "use dilation=1"),
        (lambda: spconv.SparseConv3d(1, 1, -1), "use SparseGlobalMaxPool or dense"),
        (
            lambda: spconv.SparseConvolution(3, 1, 1, 3, act_type="ReLU"),
            "put the activation behind",
        ),
        (
            lambda: spconv.SparseConvolution(3, 1, 1, 3, output_padding=1),
            "no output_padding",
        ),
        (lambda: HashTable("cpu", torch.int32, torch.int32), "use torch.unique"),
        (lambda: ops.get_indice_pairs(x.indices), "ops.get_indice_pairs is not prov"),
        (lambda: spconv.functional.indice_conv(), "functional.indice_conv is not"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            make()


def test_what_spconv_refuses():
    x = drawn()
    with pytest.raises(ValueError, match="kernel of odd size"):
        spconv.SubMConv3d(1, 1, 2)
    with pytest.raises(AssertionError, match="no groups"):
        spconv.SubMConv3d(2, 2, 3, groups=2)
    with pytest.raises(AssertionError, match="takes no padding"):
        spconv.SparseConv3d(1, 1, 1, padding=1)
    with pytest.raises(AssertionError, match="channel size mismatch.*4.*5"):
        spconv.SubMConv3d(4, 4, 3)(x)
    with pytest.raises(AssertionError, match="takes a SparseConvTensor; got Tensor"):
        spconv.SubMConv3d(5, 4, 3)(x.features)
    with pytest.raises(ValueError, match="no input reaches an output row"):
        spconv.SparseConv3d(5, 4, 1, 40)(x.select_by_index(x.indices[:, 1] > 0))
    with pytest.raises(TypeError, match="torch.float16.*torch.float32"):
        spconv.SubMConv3d(5, 4, 3)(x.replace_feature(x.features.half()))
    with pytest.raises(TypeError, match="float64"):
        spconv.SubMConv3d(5, 4, 3).double()(x.replace_feature(x.features.double()))


def test_mixed_devices():
    x = drawn()
    layer = spconv.SubMConv3d(5, 4, 3).to("meta")
    with pytest.raises(RuntimeError, match="one device; got cpu and meta"):
        layer(x)


def test_sizes_of_outputs():
    assert ops.get_conv_output_size([7, 8], [3, 2], [2, 2], [1, 0], [1, 1]) == [4, 4]
    sizes = ops.get_deconv_output_size([4, 4], [3, 2], [2, 2], [1, 0], [1, 1], [0, 1])
    assert sizes == [7, 9]


# spconv 1.x


def test_old_nets_use_the_names_at_the_top():
    features, indices = scene(EXTENTS)
    x = package.SparseConvTensor(features, indices, np.array(EXTENTS), 2)
    net = package.SparseSequential(
        package.SubMConv3d(5, 6, kernel_size=3, padding=1, bias=False, indice_key="s"),
        nn.ReLU(),
        package.SparseConv3d(6, 7, kernel_size=2, stride=2, indice_key="d"),
        package.SparseInverseConv3d(7, 4, kernel_size=2, indice_key="d"),
    )
    shapes = {k: tuple(v.shape) for k, v in net.state_dict().items()}
    assert shapes["0.weight"] == (3, 3, 3, 5, 6) and shapes["3.weight"] == (
        2,
        2,
        2,
        7,
        4,
    )
    new = spconv.SparseSequential(
        spconv.SubMConv3d(5, 6, 3, padding=1, bias=False, indice_key="s"),
        nn.ReLU(),
        spconv.SparseConv3d(6, 7, 2, 2, indice_key="d"),
        spconv.SparseInverseConv3d(7, 4, 2, indice_key="d"),
    )
    state = net.state_dict()
    new.load_state_dict(
        {k: v.movedim(-1, 0) if v.ndim == 5 else v for k, v in state.items()}
    )
    y = net(x)
    close(y.features, new(drawn()).features)
    y.features = torch.relu(y.features)
    y.features += 1
    assert (y.features >= 1).all()
    assert isinstance(net[0], package.modules.SparseModule)
    net(x)  # the dictionary is shared, and a key is used again
    assert set(x.indice_dict) == {"s", "d"}
    one = package.SubMConv3d(5, 3, 1, bias=False, use_hash=True)
    close(one(x).features, features @ one.weight.view(5, 3))


def test_an_old_layer_computes_with_the_offsets_of_its_key():
    features, indices = scene(EXTENTS)
    flat = package.SubMConv3d(5, 6, (1, 3, 3), indice_key="s", bias=False)
    wide = package.SubMConv3d(5, 6, 3, indice_key="s", bias=False)
    wide.weight.data.copy_(torch.randn_like(wide.weight))
    x = package.SparseConvTensor(features, indices, EXTENTS, 2)
    flat(x)  # stores its 9 offsets: the other layer reads the first 9 of its 27 slices
    y = wide(x).features
    y.square().sum().backward()
    flat.weight.data.copy_(wide.weight[:1])
    fresh = package.SparseConvTensor(features, indices, EXTENTS, 2)
    close(y, flat(fresh).features)
    assert wide.weight.grad[:1].any() and not wide.weight.grad[1:].any()
