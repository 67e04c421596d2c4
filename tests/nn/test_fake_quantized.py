"""Training with FakeQuant gives the values that integers give."""

import mlx.core as mx
import mlx.nn
import mlx.optimizers as optim
import pytest
from integer_nets import PACK_ALL, Net, batch, distance, integers, of_layers

import mlx_lattice as ml
from mlx_lattice import nn
from mlx_lattice.nn.int8 import _round_features


def test_fake_quantised_layers_that_were_never_trained():
    net, x = of_layers(), batch()
    y = net(x)
    nn.fake_quantize(net)
    made, _ = ml.calibrate(net, [x], 8, activations=8)
    assert distance(made(x), y) < 0.03
    mlx.nn.quantize(net, bits=8, mode="affine", quantize_input=True)
    assert set(integers(net)) == {"layers.0", "layers.3"}
    assert distance(net(x), y) < 0.03


def test_gradients_pass_straight_through():
    x, scale = mx.array([[-3.0, -0.2, 0.26, 1.27, 1.276]]), mx.array([0.01])
    y = _round_features(x, scale)
    assert mx.allclose(y, mx.array([[-1.27, -0.2, 0.26, 1.27, 1.27]]))
    grad = mx.grad(lambda x: (_round_features(x, scale) * mx.arange(1, 6)).sum())(x)
    assert grad.tolist() == [[0, 2, 3, 4, 0]]
    _, (tangent,) = mx.jvp(lambda x: _round_features(x, scale), [x], [mx.ones_like(x)])
    assert tangent.tolist() == [[0, 1, 1, 1, 0]]
    layer = nn.FakeQuant(nn.Linear(5, 3, bias=False))
    grad = mx.grad(lambda w: (layer.update({"weight": w})(x)).sum())(layer.weight)
    held = layer._rounded(x)
    assert mx.allclose(grad, mx.broadcast_to(held, grad.shape))


@pytest.mark.parametrize("bits", (8, 4))
@pytest.mark.parametrize("momentum", (0.1, None))
def test_a_layer_gives_what_its_integers_give(bits, momentum):
    x = batch()
    for layer in (nn.SubmConv3d(20, 8, 3, groups=2), nn.Linear(20, 8)):
        fake = nn.FakeQuant(layer, bits, momentum=momentum)
        names = {"weight", "bias"} | ({"input_scale"} if momentum else set())
        assert set(fake.parameters()) == names
        assert set(fake.trainable_parameters()) == {"weight", "bias"}
        fake.train()
        fake(x)
        fake(batch(1))
        fake.eval()
        y = fake(x)
        twin = fake.to_quantized(quantize_input=True)
        assert ("input_scale" in twin) == (momentum is not None)
        assert twin.bits == bits and distance(twin(x), y) < 1e-6
        held = nn.Sequential(fake)
        mlx.nn.quantize(held, bits=bits, quantize_input=True)
        assert mx.array_equal(held(x).feats, twin(x).feats)
        with pytest.raises(ValueError, match=f"was trained for int{bits} weights"):
            fake.to_quantized(bits=12 - bits, quantize_input=True)
    assert fake.to_quantized(32, 8).mode == "affine"


@pytest.mark.parametrize("bits", (8, 4))
def test_a_net_that_was_trained_gives_the_same_values(bits):
    mx.random.seed(3)
    net, x = Net(), batch()
    nn.fake_quantize(net, bits, class_predicate=PACK_ALL)
    assert sum(isinstance(m, nn.FakeQuant) for m in net.modules()) == 9
    target = mx.random.normal((len(x), 24))
    optimizer = optim.Adam(1e-3)
    step = mlx.nn.value_and_grad(net, lambda x: mx.square(net(x).feats - target).mean())
    net.train()
    losses = []
    for _ in range(6):
        loss, grads = step(x)
        optimizer.update(net, grads)
        mx.eval(net.state, optimizer.state)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    net.eval()
    y = net(x)
    made, report = ml.calibrate(net, [x], bits, activations=8)
    assert len(integers(made)) == 9 and len(report.folded) == 5
    assert distance(made(x), y) < 1e-5
    # Only where all readers were trained for one scale.
    writes = {p for p, m in integers(made).items() if "output_scale" in m}
    assert "block.conv1.conv" in writes and "first.conv" not in writes
    assert all(isinstance(m, nn.FakeQuant) for m in (net.first.conv, net.line))


def test_fake_quant_takes_float_layers_alone():
    with pytest.raises(TypeError, match="float convolution or Linear; got ReLU"):
        nn.FakeQuant(nn.ReLU())
    with pytest.raises(TypeError, match="got QuantizedLinear"):
        nn.FakeQuant(nn.Linear(32, 4).to_quantized(32, 8))
    with pytest.raises(ValueError, match="bits must be 4 or 8"):
        nn.FakeQuant(nn.Linear(32, 4), 3)
