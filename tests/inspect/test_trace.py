"""trace: every convolution with its layer, Choice and cost; table, JSON and page."""

import json
import re
import sys
from html.parser import HTMLParser

import cases
import mlx.core as mx
import mlx.nn as mnn
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import models, nn, ops, registry
from mlx_lattice.inspect import trace
from mlx_lattice.inspect.trace import check_page
from mlx_lattice.problem import FORWARD, INPUT_GRAD, WEIGHT_GRAD

pytestmark = pytest.mark.usefixtures("unforced")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.SubmConv3d(4, 8, 3)
        self.down = nn.Conv3d(8, 16, 2, stride=2)
        self.blocks = [nn.SubmConv3d(16, 16, 3), nn.SubmConv3d(16, 16, 3, groups=4)]
        self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)
        self.head = nn.SubmConv3d(8, 3, 1)

    def __call__(self, x):
        x = self.stem(x)
        y = self.down(x)
        for block in self.blocks:
            y = block(y)
        return self.head(self.up(y) + x)


PATHS = ["stem", "down", "blocks.0", "blocks.1", "up", "head"]


def tensor(channels=4, n=300, seed=0):
    coords = cases.in_grid((9, 9, 9), n, seed)
    feats = cases.features(len(coords), channels, seed).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats))


def step(net, x):
    loss = mnn.value_and_grad(net, lambda m: m(x).feats.square().mean())
    mx.eval(loss(net))


def traced(time=False, named=True):
    net, x = Net(), tensor()
    with ml.trace(net if named else None, time=time) as t:
        step(net, x)
    return t, net, x


def test_every_convolution_forward_and_backward():
    t, net, _ = traced()
    layers = [(r.layer, r.problem.pass_) for r in t]
    assert layers[:6] == [(path, FORWARD) for path in PATHS]
    for path in PATHS[::-1]:
        assert (path, INPUT_GRAD) in layers and (path, WEIGHT_GRAD) in layers
    assert len(t) == 18
    assert [r.index for r in t] == list(range(18))


@pytest.mark.usefixtures("portable_only")
def test_records_hold_what_was_executed():
    t, net, x = traced()
    first = t.records[0]
    assert first.choice == ml.explain(x, net.stem).choice
    assert first.choice == ml.select(first.problem)
    assert first.inputs == ((len(x), 4), (8, 27, 4)) and first.output == (len(x), 8)
    relation = x.manager.submanifold_kernel_relation(x.key, kernel_size=3)
    assert first.explanation.facts.edges == first.cost.edges == relation.n_edges
    assert first.milliseconds is None and first.note is None
    assert str(first.explanation).startswith("forward of stem: submanifold 3x3x3")
    grad = next(r for r in t if (r.layer, r.problem.pass_) == ("up", WEIGHT_GRAD))
    assert grad.output == (8, 8, 16)
    head = next(r for r in t if r.layer == "head")
    assert head.choice.route.name == "pointwise"


def test_names_without_a_model():
    t, *_ = traced(named=False)
    names = [r.layer for r in t if r.problem.pass_ == FORWARD]
    assert names == [
        "SubmConv3d 0",
        "Conv3d 0",
        "SubmConv3d 1",
        "SubmConv3d 2",
        "ConvTranspose3d 0",
        "SubmConv3d 3",
    ]
    with ml.trace() as t:
        ops.subm_conv3d(tensor(), mx.ones((27, 4, 4)))
    assert t.records[0].layer == "call"


def test_tracing_and_timing_change_no_result():
    net, x = Net(), tensor()
    plain = net(x).feats
    with ml.trace(net, time=True):
        seen = net(x).feats
    assert mx.array_equal(plain, seen)


def test_no_times_under_compile_and_the_trace_says_so():
    net, x = Net(), tensor()
    step = mx.compile(lambda f: net(x.replace(f)).feats)
    with ml.trace(net, time=True) as t:
        mx.eval(step(x.feats))
    assert [r.layer for r in t] == PATHS
    assert all(r.milliseconds is None and "mx.compile" in r.note for r in t)
    assert all(r.explanation.facts.edges for r in t)
    assert "no time: mx.compile" in t.table()
    assert "no time: mx.compile" in trace.page(t)
    with ml.trace(net) as t:
        mx.eval(step(x.feats))
    assert len(t) == 0, "a compiled graph runs without Python"


def test_blocks_nest_and_end():
    x, w = tensor(), mx.ones((27, 4, 4))
    with ml.trace() as outer:
        with ml.trace() as inner:
            ops.subm_conv3d(x, w)
        ops.subm_conv3d(x, w)
    ops.subm_conv3d(x, w)
    assert (len(outer), len(inner)) == (2, 1)


def test_empty_tensors_and_empty_traces():
    x = ml.SparseTensor(mx.zeros((0, 4), dtype=mx.int32), mx.zeros((0, 4)))
    with ml.trace(time=True) as t:
        ops.subm_conv3d(x, mx.ones((27, 4, 4)))
    assert t.records[0].problem.edges == 0
    for found in (t, ml.trace().__enter__()):
        assert found.table() and found.to_json() and trace.page(found)


# The table.


def test_the_table_names_what_a_person_asks_for():
    t, *_ = traced(time=True)
    text = t.table()
    assert str(t) == text
    for word in ("layer", "route", "roofline", "time", "blocks.1", "weight_grad"):
        assert word in text
    assert text.splitlines()[-1].startswith("18 contractions on ")
    untimed, *_ = traced()
    assert "time" not in untimed.table().splitlines()[0].split()


# JSON.


def test_json_has_a_version_and_these_fields(tmp_path):
    t, *_ = traced(time=True)
    held = json.loads(t.to_json())
    assert (held["format"], held["version"]) == ("mlx_lattice.trace", 1)
    assert held["mlx_lattice"] == ml.distribution.__version__
    assert held["net"] == "Net" and held["date"] == t.date
    assert held["mlx"] == mx.__version__ and held["timed"] is True
    assert held["device"]["name"] == t.device.name
    for record in held["records"]:
        assert set(record) == {
            *("index", "layer", "pass", "route", "idea", "parameters", "view", "note"),
            *("precision", "forced", "measured", "rejected", "below", "problem"),
            "plan",
            *("inputs", "output", "cost", "milliseconds", "rounding_error"),
        }
        assert all(set(row) == {"route", "reason"} for row in record["rejected"])
    assert set(held["records"][0]["cost"]) == {
        *("device", "edges", "useful_flops", "done_over_useful", "bytes_moved"),
        *("explicit_bytes", "edges_per_row", "occupancy", "compute_ms", "memory_ms"),
        *("estimated", "roofline_ms", "bound"),
    }
    t.save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text()) == held


# The page.


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "input", "br", "link", "img"):
            self.open.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_and_has_everything(tmp_path):
    t, *_ = traced(time=True)
    t.save(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    page = Page(text.replace("<wbr>", ""))
    assert not page.open and not page.links
    assert not re.search(r"https?:|@import|url\(", text)
    assert page.tags.count("details") == len(t)
    words = " ".join(" ".join(page.text).split())
    for record in t:
        assert record.layer in words
        for route, reason in (*record.choice.rejected, *record.choice.below):
            assert route in words and reason in words
    for word in ("useful work", "must move", "occupancy", "edges a row"):
        assert word in words
    assert ("estimated" in words) == t.device.estimated
    assert "prefers-color-scheme: dark" in text


def test_names_are_escaped_in_the_page():
    with ml.trace() as t, ml.routes.launch.scope("<script>alert(1)</script>"):
        ops.subm_conv3d(tensor(), mx.ones((27, 4, 4)))
    text = trace.page(t)
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_forced_and_measured_routes_are_marked(tmp_path):
    x, w = tensor(), mx.ones((27, 4, 4))
    with ml.trace() as t, ml.routes.only("gather_gemm_scatter"):
        ops.subm_conv3d(x, w)
    assert "(forced)" in t.table() and "forced" in trace.page(t)
    with ml.trace() as t, ml.cache(tmp_path), ml.tune():
        ops.subm_conv3d(x, w)
    assert t.records[0].choice.measured
    assert ">measured</span>" in trace.page(t)


def test_without_jinja2_the_error_has_the_command(monkeypatch, tmp_path):
    t, *_ = traced()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ImportError, match=r"a page needs jinja2; run.*pip install .*\[viz\]"
    ):
        t.save(tmp_path / "run.html")
    t.save(tmp_path / "run.json")
    with pytest.raises(
        ImportError, match=r"a page needs jinja2; run.*pip install .*\[viz\]"
    ):
        check_page("run.html")  # a command's, before what it traces runs
    assert check_page("run.json").name == "run.json"


def test_norms_and_what_was_fused_into_them():
    block, x = models.BasicBlock(4, 4), tensor()
    with ml.trace(block) as t:
        mx.eval(mx.grad(lambda f: block(x.replace(f)).feats.sum())(x.feats))
    said = {(r.layer, r.norm.pass_): r.norm.parts for r in t.norms}
    assert said["conv1.norm", "forward"] == ("BatchNorm", "ReLU")
    assert said["conv2.norm", "forward"] == ("BatchNorm", "residual", "ReLU")
    if t.norms[0].norm.launches is not None:
        assert said["conv2.norm", "backward"] == said["conv2.norm", "forward"]
        launches = "3 launches"
        if registry.norms().is_one_launch(x.feats):
            launches = "one launch"
        assert f"BatchNorm + residual + ReLU, {launches}" in t.table()
        with ml.trace(block.eval()) as t:
            block(x)
        assert "BatchNorm + residual + ReLU, with the layer before" in t.table()
    data = json.loads(t.to_json())["norms"]
    assert data[1]["parts"] == ["BatchNorm", "residual", "ReLU"]
    assert data[1]["channels"] == 4 and data[1]["dtype"] == "float32"
    pytest.importorskip("jinja2")
    assert "BatchNorm + residual + ReLU" in trace.page(t)


@pytest.mark.parametrize("training", (False, True))
def test_attention_is_traced_with_its_padding(training, tmp_path):
    block, x = nn.SparseTransformerBlock(8, 2, window=3), tensor(8)
    with ml.trace(block) as t:
        step(block, x) if training else mx.eval(block(x).feats)
    cells = np.array(x.coords) // [1, 3, 3, 3]
    counts = np.unique(cells, axis=0, return_counts=True)[1]
    told = t.attention[0].attention
    assert told.pairs == (counts**2).sum() and told.groups == len(counts)
    assert told.rule == "window" and (told.heads, told.channels) == (2, 4)
    assert told.padding >= 1 and told.calls >= 1
    assert "times the useful pairs" in t.table()
    record = json.loads(t.to_json())["attention"][0]
    assert record["pairs"] == told.pairs and record["padding"] == told.padding
    assert record["layer"] == "attn" and record["dtype"] == "float32"
    t.save(tmp_path / "trace.html")
    assert "Attention, and its padding" in (tmp_path / "trace.html").read_text()
