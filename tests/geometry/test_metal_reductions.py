"""Metal reductions against float64 loops, on the CPU and with every check."""

from conftest import KINDS, pair
from metal_checks import bounded, checked, host
from reduction_checks import Checks, ReductionTests

from mlx_lattice.backends.metal_reductions import MetalReductions

host.require()


class TestMetal(ReductionTests):
    checks = Checks(MetalReductions(), checked)
    channels = (1, 3, 4, 9)

    def launched(self, count):
        assert checked.launches == count

    def test_work_is_cut_into_bounded_dispatches(self, monkeypatch):
        bounded(monkeypatch, "elements", 50)
        self.checks.max(pair(KINDS[0]), 3)
        assert checked.launches > 3
        for channels in self.channels:
            self.checks.tables("float32", (25, 8, 9), True, channels)
        assert checked.launches > 3
        self.checks.segments([0, 2, 1, 1] * 40, 3, 4)
        assert checked.launches > 2
