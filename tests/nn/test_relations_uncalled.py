"""Nets as users write them, called scan after scan: their relations are built ahead."""

from weakref import ref

import mlx.core as mx
import mlx.nn
import pytest
from cuda_recorder import recording
from mlx.utils import tree_flatten
from scans_anew import (  # noqa: F401 (a fixture)
    OwnUNet,
    asked,
    counted_starts,
    last,
    scan,
)

import mlx_lattice as ml
from mlx_lattice import devices, ops, relations_ahead


class TestUncalled:
    """Nets as users write them, called scan after scan and never prepared."""

    def test_the_second_scan_starts_its_views_together(self, starts):
        with recording():
            made = OwnUNet().eval()
            made.set_dtype(mx.float16)
            counts = []
            for seed in (1, 2, 3):
                starts.clear()
                made(scan(seed, 300, mx.float16))
                counts.append(len(starts))
        assert counts[0] > counts[1] == counts[2] <= 3

    @pytest.mark.parametrize("rows", ((250, 0, 1, 250), (0, 250, 0, 1)), ids=str)
    def test_results_are_those_of_layers_that_ask(self, rows):
        made, other = OwnUNet(), OwnUNet()
        other.update(made.parameters())

        def loss(net, x):
            return net(x).feats.square().sum()

        for seed, n in enumerate(rows):
            parts = []
            for net in (made, other):
                x = scan(seed, 300)
                x = ml.SparseTensor(x.coords[:n], x.feats[:n])
                parts.append(mlx.nn.value_and_grad(net, loss)(net, x))
            other._asked = other.stem._asked = relations_ahead.Asked()
            for one, two in zip(*map(tree_flatten, parts), strict=True):
                assert mx.array_equal(one[1], two[1]), one[0]

    def test_another_view_of_the_same_relations_is_learnt(self):
        """As many are read by another route: what is known must not stay."""
        with recording():
            made, other = ml.nn.SubmConv3d(4, 16, 3), ml.nn.SubmConv3d(4, 16, 3)
            made.set_dtype(mx.float16), other.set_dtype(mx.float16)
            with ml.routes.only("relation_traversal"):
                for seed in (1, 2, 3):
                    mx.eval(made(scan(seed, 3000, mx.float16)).feats)
            forced = [*asked(made)._known.values()]
            for seed in (4, 5, 6):
                for net in (made, other):
                    mx.eval(net(scan(seed, 3000, mx.float16)).feats)
        known, wanted = ([*asked(net)._known.values()] for net in (made, other))
        assert known == wanted != forced and len(known) == len(forced) == 1

    def test_what_gradients_read_is_made_too(self):
        def views(step, x):
            mx.eval(step(x))
            (named,) = last(made).values()
            transposed = {r.is_transposed for stage in named.stages for r in stage}
            return transposed, len(x.manager.record.cells)

        with recording():
            made = OwnUNet().train()
            step = mlx.nn.value_and_grad(made, lambda x: made(x).feats.sum())
            found = [views(step, scan(seed, 300)) for seed in (1, 2)]
            x = scan(2, 300)

            def begun(array):
                relations_ahead.begin(made.stem, x)
                return array.sum()

            mx.grad(begun)(mx.ones((1,)))
        assert found[0] == found[1] and found[0][0] == {False, True}
        built = {k for r in x.manager.relations for k in r.built}
        assert any(swapped for _, swapped in built) and found[0][1] == 2

    def test_a_scan_that_is_only_looked_at_has_no_views_of_gradients(self):
        with recording():
            made = OwnUNet().train()
            step = mlx.nn.value_and_grad(made, lambda x: made(x).feats.sum())
            for seed in range(1, 7):  # in turns, as a net that is not put into eval
                x = scan(seed, 300)
                mx.eval(step(x) if seed % 2 else made(x).feats)
                kept = [r for r in x.manager.relations if r.kind == "submanifold"]
                views = {k for r in kept for k in r.built}
                assert any(swapped for _, swapped in views) == (seed % 2 == 1)

    def test_a_layer_holds_no_scan(self):
        made, x = OwnUNet(), scan(1)
        mx.eval(made(x).feats)
        kept = [
            ref(x.manager),
            *map(ref, x.manager.sets),
            *map(ref, x.manager.relations),
        ]
        del x
        assert not any(each() for each in kept)
        mx.eval(made(scan(2)).feats)

    def test_a_layer_that_is_first_on_several_ways(self):
        """What another way was asked is made, and what this one asks is right."""
        stem = ml.nn.SubmConv3d(4, 4, 3)
        down, deep = ml.nn.Conv3d(4, 4, 2, stride=2), ml.nn.SubmConv3d(4, 4, 3)
        ways = {
            "deep": lambda x: deep(down(down(stem(x)))),
            "flat": lambda x: deep(stem(x)),
            "reach": lambda x: ml.nn.Conv3d.__call__(reach, stem(x)),
            "pruned": lambda x: deep(ops.prune(stem(x), x.feats[:, 0] > 0)),
            "up": lambda x: ml.nn.GenerativeConvTranspose3d.__call__(up, stem(x)),
        }
        reach = ml.nn.Conv3d(4, 4, 3, stride=2, padding=1, support="reach")
        up = ml.nn.GenerativeConvTranspose3d(4, 4, 2, stride=2)
        for seed, name in enumerate(2 * [*ways] + [*ways][::-1]):
            x, y = scan(seed), scan(seed)
            found = ways[name](x)
            stem._asked, known = relations_ahead.Asked(), stem._asked
            wanted = ways[name](y)
            stem._asked = known
            assert mx.array_equal(found.coords, wanted.coords), name
            assert mx.array_equal(found.feats, wanted.feats), name

    def test_another_backend_is_apart(self):
        made = OwnUNet()
        mx.eval(made(scan(1)).feats)
        other = "a100" if devices.current().name == "h200" else "h200"
        with recording(other):
            made(scan(2))
        y = made(scan(3)).feats
        assert len(last(made)) == 2
        wanted = OwnUNet()
        wanted.update(made.parameters())
        assert mx.array_equal(y, wanted(scan(3)).feats)
