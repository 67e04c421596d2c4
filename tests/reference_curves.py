"""Places on space-filling curves, a cell at a time."""


def morton_key(cell, bits: int) -> int:
    """Bits interleaved, highest first, the first axis leading."""
    key = 0
    for bit in reversed(range(bits)):
        for value in cell:
            key = key << 1 | value >> bit & 1
    return key


def hilbert_key(cell, bits: int) -> int:
    """Skilling's transform, written out for one cell."""
    axes, d = list(cell), len(cell)
    bit = 1 << bits - 1
    while bit > 1:
        low = bit - 1
        for a in range(d):
            if axes[a] & bit:
                axes[0] ^= low
            else:
                swap = (axes[0] ^ axes[a]) & low
                axes[0] ^= swap
                axes[a] ^= swap
        bit >>= 1
    for a in range(1, d):
        axes[a] ^= axes[a - 1]
    flip, bit = 0, 1 << bits - 1
    while bit > 1:
        if axes[-1] & bit:
            flip ^= bit - 1
        bit >>= 1
    return morton_key([axis ^ flip for axis in axes], bits)


def place(name: str, cell, bits: int) -> int:
    """The place of a cell on a curve by its name; "-trans" swaps two axes."""
    if name.endswith("-trans"):
        cell = [cell[1], cell[0], *cell[2:]]
    key = hilbert_key if name.startswith("hilbert") else morton_key
    return key([int(v) for v in cell], max(1, bits))


def order(name: str, rows, bits: int) -> list[int]:
    """Rows by batch, then along a curve of so many bits from 0."""
    keys = [(int(row[0]), place(name, row[1:], bits)) for row in rows]
    return sorted(range(len(rows)), key=keys.__getitem__)


def filled(order, batch, patch: int) -> list[list[int]]:
    """Patches of rows along a curve, an element's last filled from the one before."""
    found = []
    for element in sorted(set(batch)):
        rows = [row for row in order if batch[row] == element]
        cut = [rows[i : i + patch] for i in range(0, len(rows), patch)]
        if len(cut) > 1:
            cut[-1] = cut[-1] + cut[-2][len(cut[-1]) :]
        found += cut
    return found
