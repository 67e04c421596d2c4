"""Point-cloud files as other programs write them, of four points."""

import struct
from pathlib import Path

import numpy as np

XYZ = np.array([[0, 1, 2], [3.5, -4, 5], [1e-3, 7, -8], [9, 9, 9]], np.float32)
RGB = np.array([[255, 0, 1], [2, 3, 4], [5, 6, 7], [8, 9, 10]], np.uint8)
PACKED = RGB.astype(np.uint32) @ np.array([65536, 256, 1], np.uint32)


def lzf_compress(data: bytes) -> bytes:
    """A small compressor: the longest earlier match, found by `rfind`, or a literal."""
    out, literal, at = bytearray(), bytearray(), 0

    def flush():
        for start in range(0, len(literal), 32):
            run = literal[start : start + 32]
            out.append(len(run) - 1)
            out.extend(run)
        literal.clear()

    while at < len(data):
        length, found = 0, -1
        for size in (264, 100, 20, 9, 8, 4, 3):
            begin = max(0, at - 8192)
            found = data.rfind(data[at : at + size], begin, at + size - 1)
            if found >= 0 and at + size <= len(data):
                length = size
                break
        if not length:
            literal.append(data[at])
            at += 1
            continue
        flush()
        distance, code = at - found - 1, length - 2
        if code < 7:
            out.append(code << 5 | distance >> 8)
        else:
            out += bytes([7 << 5 | distance >> 8, code - 7])
        out.append(distance & 255)
        at += length
    flush()
    return bytes(out)


def pcd(kind: str, xyz=XYZ, *, n: int | None = None, extra: str = "") -> bytes:
    """A PCD file with x, y, z, rgb (a packed float), and a label."""
    n = len(xyz) if n is None else n
    header = (
        "# .PCD v0.7\nVERSION 0.7\nFIELDS x y z rgb _ label\nSIZE 4 4 4 4 1 2\n"
        f"TYPE F F F F U U\nCOUNT 1 1 1 1 3 1\nWIDTH {n}\nHEIGHT 1\n{extra}"
        f"POINTS {n}\nDATA {kind}\n"
    ).encode()
    code = [("xyz", "<f4", 3), ("rgb", "<u4"), ("pad", "u1", 3), ("label", "<u2")]
    table = np.zeros(len(xyz), code)
    table["xyz"], table["label"] = xyz, np.arange(len(xyz))
    table["rgb"] = np.resize(PACKED, len(xyz))
    if kind == "binary":
        return header + table.tobytes()
    if kind == "ascii":
        floats = table["rgb"].view(np.float32)
        rows = [
            f"{x!r} {y!r} {z!r} {rgb!r} 0 0 0 {label}"
            for (x, y, z), rgb, label in zip(
                xyz.tolist(), floats.tolist(), table["label"].tolist(), strict=True
            )
        ]
        return header + "\n".join(rows).encode() + b"\n"
    columns = [xyz[:, 0], xyz[:, 1], xyz[:, 2]]
    columns += [table[name] for name in ("rgb", "pad", "label")]
    raw = b"".join(np.ascontiguousarray(column).tobytes() for column in columns)
    packed = lzf_compress(raw)
    return header + struct.pack("<II", len(packed), len(raw)) + packed


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def ply_bytes(text: bool) -> bytes:
    header = (
        f"ply\nformat {'ascii' if text else 'binary_big_endian'} 1.0\n"
        "element vertex 4\nproperty double x\nproperty double y\nproperty double z\n"
        "property uchar red\nproperty uchar green\nproperty uchar blue\n"
        "property float nx\nproperty float ny\nproperty float nz\n"
        "property float scalar_intensity\nproperty int label\n"
        "element face 1\nproperty list uchar int vertex_indices\nend_header\n"
    ).encode()
    body = b""
    for i, (xyz, rgb) in enumerate(zip(XYZ.tolist(), RGB.tolist(), strict=True)):
        row = (*xyz, *rgb, 0.0, 0.0, 1.0, i / 4, i)
        if text:
            body += (" ".join(map(repr, row)) + "\n").encode()
        else:
            body += struct.pack(">3d3B4fi", *row)
    return header + body + (b"3 0 1 2\n" if text else struct.pack(">B3i", 3, 0, 1, 2))


def vtk(kind: str, body: bytes, points: str = "POINTS 4 float") -> bytes:
    head = f"# vtk DataFile Version 3.0\na scan\n{kind}\nDATASET POLYDATA\n{points}\n"
    return head.encode() + body
