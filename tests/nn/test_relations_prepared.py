"""Nets that were prepared before are prepared for a scan by what they read then."""

import mlx.core as mx
import pytest
from cuda_recorder import no_small_tiles, recording
from scans_anew import OwnUNet, net, scan, views

import mlx_lattice as ml
from mlx_lattice import preparation
from mlx_lattice.geometry import sync
from mlx_lattice.routes import selection


def facts(x):
    """What plans depend on, of each relation, and the views."""
    counted = [(str(r), r.counted) for r in x.manager.relations]
    return sorted(counted, key=str), sorted(views(x))


def names_of_runs(launches, *runs):
    """The names of what each net launches over its rows."""
    found = []
    for run, rows in runs:
        launches.clear()
        run(rows)
        found.append([launch.name for launch in launches])
    return found


class TestPrepared:
    """A net that was prepared before is prepared for a scan by that, uncalled."""

    @pytest.fixture
    def called(self, monkeypatch):
        """How often a net was planned by a call."""
        real, calls = preparation._plan, []

        def plan(net, *given):
            calls.append(net)
            return real(net, *given)

        monkeypatch.setattr(preparation, "_plan", plan)
        return calls

    def test_it_is_what_a_call_would_make(self, called):
        def new(seed):
            return scan(seed, 3000, mx.float16)  # the stem's rows are sorted, too

        with recording() as launches:
            known, other = net(dtype=mx.float16), net(dtype=mx.float16)
            ml.prepare(known, new(1)), called.clear()
            known(new(1)), other(new(1))
            x, y, z = new(2), new(2), new(2)
            quick = ml.prepare(known, x)
            assert not called
            other(y)
            assert facts(x) == facts(y)
            slow = ml.prepare(net(dtype=mx.float16), z)
            assert len(called) == 1
            assert quick.kernels and set(quick.kernels) == set(slow.kernels)
            assert sorted(quick.levels) == sorted(slow.levels)
            before = facts(x)
            runs = names_of_runs(launches, (known, x), (other, y))
        assert facts(x) == before and runs[0] == runs[1] != []

    def test_a_view_that_no_plan_names_is_made_by_a_call(self, called):
        with recording():
            made = net()
            made(scan(1))
            ml.prepare(made, scan(2))
            assert called

    def test_a_kernel_that_is_new_is_compiled_by_a_call(self, called, monkeypatch):
        with recording():
            made = net(dtype=mx.float16)
            ml.prepare(made, scan(1, 3000, mx.float16)), called.clear()
            made(scan(1, 3000, mx.float16))
            ml.prepare(made, scan(2, 3000, mx.float16))
            assert not called
            no_small_tiles(monkeypatch)
            selection._settled.cache_clear()
            ml.prepare(made, scan(3, 3000, mx.float16))
            assert called
        selection._settled.cache_clear()

    def test_what_may_differ_is_asked_by_a_call(self, called):
        with recording():
            made = net(dtype=mx.float16)
            made(scan(1, 3000, mx.float16))
            with ml.routes.only("relation_traversal"):
                ml.prepare(made, scan(2, 3000, mx.float16))
            assert len(called) == 1
            ml.prepare(made, scan(2, 3000, mx.float16), training=True)
            ml.prepare(made.train(), scan(2, 3000, mx.float16))
        assert len(called) == 3


class TestOwnNets:
    """What a net read when it was prepared is built for the next scan, uncalled."""

    called = TestPrepared.called

    @pytest.mark.parametrize("halves", (0, 1, 2))
    def test_the_next_scan_is_prepared_without_a_call(self, called, halves):
        with recording() as launches:
            made, other = OwnUNet(halves=halves), OwnUNet(halves=halves)
            for each in (made, other):
                each.set_dtype(mx.float16), each.eval()
            x, y, z = (scan(seed, 3000, mx.float16) for seed in (1, 2, 2))
            ml.prepare(made, x)
            made(x), other(scan(1, 3000, mx.float16))  # kernels are known
            assert len(called) == 1
            quick = ml.prepare(made, y)
            assert len(called) == 1, "it was called"
            slow = ml.prepare(other, z)
            assert facts(y) == facts(z)
            assert set(quick.kernels) == set(slow.kernels) != set()
            assert sorted(quick.levels) == sorted(slow.levels)
            before = facts(y)
            runs = names_of_runs(launches, (made, y), (other, z))
        assert facts(y) == before and runs[0] == runs[1] != []

    def test_sizes_of_its_levels_are_read_at_once(self, monkeypatch):
        made = OwnUNet().eval()
        real, reads = sync.read, []
        for seed in (1, 2):
            x = scan(seed)
            ml.prepare(made, x) if seed == 1 else None
            mx.eval(made(x).feats)
        monkeypatch.setattr(sync, "read", lambda *a: reads.append(a) or real(*a))
        x = scan(3)
        ml.prepare(made, x)
        ahead = len(reads)
        wanted = OwnUNet()
        wanted.update(made.parameters())
        y = made(x).feats
        assert len(reads) == ahead, "the call read again"
        assert mx.array_equal(y, wanted.eval()(scan(3)).feats)

    def test_a_net_that_has_changed_is_called(self, called):
        with recording():
            made = OwnUNet()
            made.set_dtype(mx.float16), made.eval()
            new = iter(range(1, 9))
            ml.prepare(made, scan(next(new), 3000, mx.float16))
            made(scan(next(new), 3000, mx.float16))
            ml.prepare(made, scan(next(new), 3000, mx.float16))
            assert len(called) == 1
            made.deep = ml.nn.SubmConv3d(16, 16, 3, dilation=2)
            made.set_dtype(mx.float16)
            x = scan(next(new), 3000, mx.float16)
            ml.prepare(made, x)
            assert len(called) == 2
            assert any("dilation" in str(r.spec) for r in x.manager.relations)
            made.train()
            ml.prepare(made, scan(next(new), 3000, mx.float16), training=True)
            assert len(called) == 3

    def test_what_another_route_read_is_not_what_is_made(self, called):
        with recording():
            made, other = OwnUNet(), OwnUNet()
            for each in (made, other):
                each.set_dtype(mx.float16), each.eval()
            with ml.routes.only("relation_traversal"):
                ml.prepare(made, scan(1, 3000, mx.float16))
            made(scan(1, 3000, mx.float16)), called.clear()
            for seed, calls in ((2, 1), (3, 1), (4, 1)):
                x, y = (scan(seed, 3000, mx.float16) for _ in "xy")
                ml.prepare(made, x)
                assert sum(each is made for each in called) == calls
                ml.prepare(other, y)
                assert seed == 2 or facts(x) == facts(y)

    def test_rows_that_are_chosen_are_asked_for(self, called):
        class Pruned(OwnUNet):
            def __call__(self, x):
                x = self.stem(x)
                return self.head(ml.ops.prune(x, x.feats[:, 0] >= 0))

        with recording():
            made = Pruned().eval()
            for seed in (1, 2):
                ml.prepare(made, scan(seed))
        assert len(called) == 2
