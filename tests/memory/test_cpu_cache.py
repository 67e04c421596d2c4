"""MLX keeps more of what is freed on the CPU, unless somebody has said how much."""

import mlx.core as mx
import pytest

from mlx_lattice.memory import cpu_cache

ON_GPU = mx.metal.is_available() or mx.cuda.is_available()


@pytest.fixture
def limit():
    """The limit that the library has set, put back afterwards."""
    before = mx.set_cache_limit(cpu_cache.DEFAULT)
    yield before
    mx.set_cache_limit(before)


@pytest.mark.skipif(ON_GPU, reason="its cache is bounded by the limit of memory")
def test_importing_raises_the_default(limit):
    cpu_cache.keep_more()
    assert mx.set_cache_limit(0) == limit == int(cpu_cache.memory() / 8)


@pytest.mark.parametrize("own", (0, 5_000_000, 3 << 40))
def test_a_limit_of_the_users_own_stays(limit, own):
    mx.set_cache_limit(own)
    cpu_cache.keep_more()
    assert mx.set_cache_limit(0) == own


@pytest.mark.skipif(ON_GPU, reason="its cache is bounded by the limit of memory")
@pytest.mark.parametrize("said", ("max", "1000000000", None))
def test_a_container_has_less_than_its_machine(limit, said, tmp_path, monkeypatch):
    file, whole = tmp_path / "memory.max", mx.get_memory_limit()
    if said:
        file.write_text(said + "\n")
    monkeypatch.setattr(cpu_cache, "CONTAINER", (file,))
    assert cpu_cache.memory() == (10**9 if said == "1000000000" else whole)
    cpu_cache.keep_more()
    assert mx.set_cache_limit(0) == int(cpu_cache.memory() / 8)
