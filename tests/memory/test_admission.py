"""A limit that cannot be kept raises before anything runs, and says what would do."""

import copy
import gc
import random
from dataclasses import replace

import cases
import mlx.core as mx
import mlx.nn
import pytest
from foreign_decoder import COUNTS, LATENT, OUT, WIDTHS, latents

import mlx_lattice as ml
from mlx_lattice import devices, models, nn, ops
from mlx_lattice.backends import cpu_extension
from mlx_lattice.memory import admission, flight, limit
from mlx_lattice.memory.order import order
from mlx_lattice.memory.schedule import Player
from mlx_lattice.memory.sizes import parse_bytes
from mlx_lattice.routes import launch

pytestmark = [
    pytest.mark.usefixtures("freed"),
    pytest.mark.skipif(
        devices.metal_on_host(), reason="an emulated GPU's memory is the CPU's"
    ),
    pytest.mark.skipif(
        not cpu_extension.usable(), reason="graphs are read by the compiled extension"
    ),
]


SHARES = limit.WHOLE, limit.LOOSE, limit.SMALL, limit.TIGHT


def scene(rows=20_000, channels=3):
    coords = mx.array(cases.geometry("surface", 3, rows))
    x = ml.SparseTensor(coords, mx.random.normal((len(coords), channels)))
    mx.eval(x.feats)
    return x


def small_net():
    net = models.SpUNet(3, 5, 16, (16, 32, 32, 16), (1, 1, 1, 1)).eval()
    mx.eval(net.parameters())
    return net


def refused(net, x, size, **options):
    """The error of a pass under a limit, and how many contractions it launched."""
    ran, raises = [], pytest.raises(ml.MemoryLimitError, match="limit that would do is")
    with ml.memory_limit(size), launch.observe(ran.append), raises as error:
        net(x, **options)
    return error.value, [each for each in ran if each.result is not None]


def test_what_is_said_would_do():
    net, x = small_net(), scene()
    y = net(x).feats
    mx.eval(y)
    held = mx.get_active_memory()
    error, _ = refused(net, x, held // 3)  # less than is left without tables
    assert held // 3 < error.least < held + 1500 * len(x)
    said = str(error).rsplit("would do is ", 1)[1]
    assert error.least <= parse_bytes(said) <= 1.02 * error.least
    with ml.memory_limit(said):
        mx.reset_peak_memory()
        z = net(x).feats
        mx.eval(z)
    mx.synchronize()
    assert mx.array_equal(y, z) and mx.get_peak_memory() <= parse_bytes(said)


class Own(mlx.nn.Module):
    """A net that is none of the package's: nothing asks before it is called."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.SubmConv3d(3, 32, 3), nn.BatchNorm(32), nn.ReLU())
        self.blocks = [models.blocks.BasicBlock(32, 32) for _ in range(2)]
        self.down, self.up = nn.Conv3d(32, 64, 2, 2), nn.ConvTranspose3d(64, 32)
        self.wide = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 32))

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.wide(ops.cat([self.up(self.down(x), x), x]))


@pytest.mark.parametrize("room", (1.0, 1.1))
def test_a_net_of_ones_own_keeps_a_limit_that_it_was_checked_for(room):
    net, x = Own().eval(), scene()
    y = net(x).feats
    mx.eval(y)

    def again():
        gc.collect()
        made = ml.SparseTensor(x.coords + 0, x.feats)
        mx.eval(made.coords)
        return made

    given = again()
    with (
        pytest.raises(ml.MemoryLimitError) as error,
        ml.memory_limit(mx.get_active_memory() + 1000),
    ):
        ml.check_memory(net, given)
    size, given = int(room * error.value.least), again()
    with ml.memory_limit(size), ml.check_memory(net, given):
        mx.reset_peak_memory()
        z = net(given).feats
        mx.eval(z)
    mx.synchronize()
    assert mx.array_equal(y, z) and mx.get_peak_memory() <= size
    with ml.check_memory(net, given):  # no limit holds
        assert limit.active() is None


def test_little_room_beside_much_that_is_held_is_enough():
    net, x, much = small_net(), scene(300), mx.zeros((50_000_000,), mx.uint8)
    mx.eval(much)
    with ml.memory_limit(mx.get_active_memory() + 3_000_000):
        mx.eval(net(x).feats)


def test_nothing_runs_of_a_pass_that_is_refused():
    net, x = small_net(), scene(2_000)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    refused(net, x, 1000)
    mx.synchronize()
    views = sum(r.n_out * r.volume for r in x.manager.relations)
    assert mx.get_peak_memory() < before + 4 * 16 * views
    # Features of one layer alone would take more than what is held now.
    assert mx.get_active_memory() < before + 4 * 4 * views


def test_a_decoder_that_predicts_its_rows_is_checked_level_by_level():
    net = models.SparseVAEDecoder(OUT, WIDTHS, LATENT, COUNTS)
    x = latents("batches", 40)
    size = mx.get_active_memory() + 10_000
    with pytest.raises(ml.MemoryLimitError), ml.memory_limit(size):
        net(x)


def test_a_net_that_chooses_its_rows_is_played_through_once(monkeypatch):
    asked, net = [], models.SparseVAEDecoder(OUT, WIDTHS, LATENT, COUNTS)
    real = admission.recorded
    monkeypatch.setattr(
        admission, "recorded", lambda *given: asked.append(given) or real(*given)
    )
    x, counts = latents("batches", 40), []
    with ml.memory_limit("1GB"):
        for _ in range(2):
            mx.eval(net(ml.SparseTensor(x.coords + 0, x.feats)).feats)
            counts.append(len(asked))
    assert counts[0] == counts[1] > 1


def test_a_net_can_be_prepared_under_a_limit():
    """What is planned alone takes nothing, however little the limit leaves."""
    net, x = small_net(), scene(2000)
    wanted = net(x).feats
    mx.eval(wanted)
    with ml.memory_limit("1GB"):
        assert len(ml.prepare(net, x).relations) > 1
        assert mx.array_equal(net(x).feats, wanted)


def test_any_function_is_checked_when_asked():
    x, conv = scene(5_000, 8), nn.SubmConv3d(8, 8, 3)
    with ml.memory_limit("2GB"):
        ml.check_memory(lambda x: conv(conv(x)), x)
    with ml.memory_limit(1000), pytest.raises(ml.MemoryLimitError):
        ml.check_memory(conv, x)


def test_the_same_pass_is_checked_once(monkeypatch):
    asked, net, x = [], small_net(), scene(500)
    real = admission.recorded
    monkeypatch.setattr(
        admission, "recorded", lambda *given: asked.append(given) or real(*given)
    )
    with ml.memory_limit("2GB"):
        for _ in range(3):
            mx.eval(net(x).feats)
    assert len(asked) == 1
    with ml.memory_limit("1GB"):
        net(x)
    assert len(asked) == 2
    assert copy.deepcopy(net)(x).shape == (len(x), 5)  # with what it keeps of a pass


def test_less_memory_takes_no_larger_shares(monkeypatch):
    found, net, x = [], small_net(), scene()
    real = admission.admission_of
    monkeypatch.setattr(
        admission,
        "admission_of",
        lambda *given: found.append(real(*given)) or found[-1],
    )
    y = net(x).feats
    mx.eval(y)
    again = ml.SparseTensor(x.coords + 0, x.feats)
    error, _ = refused(net, again, mx.get_active_memory() + 500_000)
    for size in (1.01 * error.least, 3 * error.least, 10**9):
        again = ml.SparseTensor(x.coords + 0, x.feats)
        with ml.memory_limit(size):
            assert mx.array_equal(net(again).feats, y)
    wholes = [each.shares.whole for each in found]
    assert wholes == sorted(wholes)
    # An NVIDIA GPU is waited for instead: what it has queued is most of what is held.
    assert wholes[0] < 1 or mx.cuda.is_available()
    assert found[-1].shares == limit.WHOLE
    assert min(found[-1].marks) > 0.9 * 10**9


@pytest.mark.parametrize(
    ("drains", "chosen"),
    (((1, 0, 0, 0), "WHOLE"), ((40, 20, 0, 0), "LOOSE"), ((99, 99, 0, 0), "SMALL")),
)
def test_blocks_are_cut_where_waiting_takes_longer(drains, chosen, monkeypatch):
    launches = dict(zip(SHARES, (480, 600, 1160, 2000), strict=True))
    drains = dict(zip(SHARES, drains, strict=True))

    def played(record, held):
        return admission.Played(1, (held.bytes,), launches[record], drains[record])

    monkeypatch.setattr(admission, "_recorded", lambda held, shares, *_: shares)
    monkeypatch.setattr(admission.Played, "of", played)
    with ml.memory_limit("1GB") as held:
        found = admission.admission_of(held, None, (), {})
    assert found.shares is getattr(limit, chosen)


class Device(Player):
    """One that finishes what is launched when it likes."""

    draw = random.Random(0)

    def _wait_as_needed(self):
        super()._wait_as_needed()
        while len(self._queue) > 1 and self.draw.random() < self.pace:
            self._finish_one()


@pytest.mark.parametrize("backend", ("metal", "cuda"))
@pytest.mark.parametrize("room", (1.0, 1.2, 2.0))
def test_a_limit_is_kept_whatever_the_speed_of_the_device(backend, room, monkeypatch):
    """Played through at random speeds, with the waits that were found."""
    net, x = small_net(), scene()
    ahead = flight.Flight(backend, 100, 1000)  # stages end first: no task is counted
    monkeypatch.setattr(flight, "current", lambda: ahead)
    gc.collect()  # what is freed meanwhile is no room
    least = refused(net, x, 1000)[0].least
    with ml.memory_limit(room * least) as held:
        held.begin()
        found = admission.admission_of(held, net, (x,), {})
        record = admission._recorded(held, found.shares, net, (x,), {})
    nodes, done = record.graph.nodes, []
    for pace in (0.0, 0.02, 0.1, 0.5, 0.9):
        player = Device(nodes, ahead, hurry=True)
        player.pace, most = pace, 0
        for stage in record.stages:
            player.begin(stage)
            for at in order(nodes, stage.roots, player.layout.__contains__):
                most = max(most, player.compute(at))
            mark = found.marks[min(stage.boundaries, len(found.marks) - 1)]
            player.end(replace(stage, waits_above=mark))
        done.append(most)
    assert max(done) <= held.bytes
    assert min(done) > held.held + 0.2 * (least - held.held)
