"""Traces and explanations pickle and load; compare puts traces beside each other."""

import copy
import html
import json
import pickle
import re
import sys
from dataclasses import replace

import cases
import mlx.core as mx
import numpy as np
import pytest

import mlx_lattice as ml
from mlx_lattice import cli, nn, ops
from mlx_lattice.inspect import trace

pytestmark = pytest.mark.usefixtures("unforced")


def tensor(channels=4, n=200):
    coords = cases.in_grid((8, 8, 8), n, 0)
    feats = cases.features(len(coords), channels, 0).astype(np.float32)
    return ml.SparseTensor(mx.array(coords), mx.array(feats))


def net():
    """Layers with a norm fused, groups, a packed weight, attention."""
    layers = nn.Sequential(
        nn.SubmConv3d(4, 8, 3),
        nn.BatchNorm(8),
        nn.ReLU(),
        nn.SubmConv3d(8, 8, 3, groups=2),
        nn.ReLU(),
        nn.SparseTransformerBlock(8, 2, window=3),
        nn.SubmConv3d(8, 64, 1),
    )
    return layers.eval()


def traced(model=None, x=None, **options):
    model, x = model or net(), x or tensor()
    with ml.trace(model, **options) as t:
        mx.eval(model(x).feats)
    return t


def loaded(t, tmp_path):
    t.save(tmp_path / "t.json")
    return ml.Trace.load(tmp_path / "t.json")


def pickled(t, tmp_path):
    return pickle.loads(pickle.dumps(t))


def copied(t, tmp_path):
    return copy.deepcopy(t)


@pytest.mark.parametrize("again", (loaded, pickled, copied))
def test_a_trace_is_the_same_after(again, tmp_path):
    model, x = net(), tensor()
    packed = ml.SparseTensor(x.coords, mx.ones((len(x), 64)))
    with ml.trace(model, time=True) as t:
        loss = mx.grad(lambda f: model(x.replace(f)).feats.square().sum())
        mx.eval(loss(x.feats))
        mx.eval(nn.SubmConv3d(64, 8, 3).to_quantized(64, 4)(packed).feats)
        with ml.routes.only("gather_gemm_scatter"):
            ops.subm_conv3d(x, mx.ones((27, 4, 4)))
    found = again(t, tmp_path)
    assert found.to_json() == t.to_json()
    assert found.table() == t.table() and repr(found) == repr(t)
    assert trace.page(found) == trace.page(t)
    for old, new in zip(t, found, strict=True):
        assert str(new.explanation) == str(old.explanation)
        assert new.cost == old.cost and repr(new) == repr(old)
    assert [r.norm for r in found.norms] == [r.norm for r in t.norms]


def test_a_tuned_choice_is_the_same_after(tmp_path):
    with ml.cache(tmp_path / "cache"), ml.tune():
        t = traced()
    assert t.records[0].choice.measured
    assert loaded(t, tmp_path).to_json() == t.to_json()


@pytest.mark.parametrize("pass_", ("forward", "input_grad", "weight_grad"))
@pytest.mark.parametrize("device", ("cpu", "m4-max", "h200"))
def test_explanations_pickle_with_their_choice(device, pass_):
    layer = nn.SubmConv3d(64, 32, 3, groups=4)
    x = tensor(64)
    explained = ml.explain(x, layer, device=device, pass_=pass_)
    again = pickle.loads(pickle.dumps(explained))
    assert repr(again) == str(again) == str(explained)
    assert again.problem == explained.problem and again.cost == explained.cost
    for name in ("parameters", "rejected", "below", "view", "device", "precision"):
        assert getattr(again.choice, name) == getattr(explained.choice, name)
    assert again.choice.route.name == explained.choice.route.name
    with pytest.raises(RuntimeError, match=r"ml.select\(plan.problem\)"):
        again.choice.plan(None, mx.ones((1, 64)), mx.ones((27, 16, 32)))


def test_explanations_of_attention_pickle_without_the_layer():
    found = ml.explain_attention(
        tensor(8), nn.SparseTransformerBlock(8, 2, window=3), device="h200"
    )
    again = pickle.loads(pickle.dumps(found))
    assert again == found and str(again) == str(found)
    assert found.attended[0].scope is None and len(pickle.dumps(found)) < 4000


def test_a_trace_has_the_net_and_the_date_in_its_title():
    t = traced()
    assert re.fullmatch(r"Sequential on .+, \d{4}-\d\d-\d\d \d\d:\d\d", t.title)
    assert f"<title>{t.title}</title>" in trace.page(t)
    assert repr(t).startswith("<Trace of Sequential, 2") and "\n" not in repr(t)
    t.net = "int8 & more"
    assert "<h1>int8 &amp; more on " in trace.page(t)
    with ml.trace() as t:
        pass
    assert t.title.startswith("a block on ")


WRONG = {
    "page.html": "<!doctype html>",
    "empty.json": "",
    "other.json": '{"format": "another"}',
    "list.json": "[1]",
    "bytes.json": "\xff",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_a_trace_is_refused(name, tmp_path):
    (tmp_path / name).write_text(WRONG[name], encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{name} has no trace; pass the .json that"):
        ml.Trace.load(tmp_path / name)


def test_a_trace_of_another_version_is_refused(tmp_path):
    facts = json.loads(traced().to_json()) | {"mlx_lattice": "9.1"}
    del facts["records"][0]["plan"]["tile"], facts["records"][0]["cost"]["edges"]
    (tmp_path / "t.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="t.json was written by mlx_lattice 9.1, and"):
        ml.Trace.load(tmp_path / "t.json")
    with pytest.raises(FileNotFoundError):
        ml.Trace.load(tmp_path / "missing.json")


# compare


def timed(rows, t):
    """The trace with these milliseconds."""
    pairs = zip(t.records, rows, strict=True)
    t.records = [replace(record, milliseconds=ms) for record, ms in pairs]
    return t


TIMES = {"A": (2.0, 6.0, 1.0), "B": (1.0, 6.0, 2.0), "C": (4.0, 0.0, 1.0)}


def layers():
    return nn.Sequential(*(nn.SubmConv3d(4, 4, 3) for _ in range(3)))


def test_rows_have_routes_times_and_speedups(tmp_path):
    model = layers()
    a = timed(TIMES["A"], traced(model))
    with ml.routes.only("gather_gemm_scatter"):
        b = timed(TIMES["B"], traced(model))
    b.save(tmp_path / "b.json")
    found = ml.compare(a, str(tmp_path / "b.json"), timed(TIMES["C"], traced(model)))
    assert found.measured and len(found) == 3 and found.totals == (9.0, 9.0, 5.0)
    assert [row.layer for row in found] == [f"layers.{n}" for n in range(3)]
    assert {row.routes[1] for row in found} == {"gather_gemm_scatter"}
    assert [row.speedups for row in found] == [(2.0, 0.5), (1.0, None), (0.5, 1.0)]
    text = str(found).splitlines()
    wanted = (
        "layer pass route A time A route B time B route C time C speedup B speedup C"
    )
    assert " ".join(text[0].split()) == wanted
    assert text[2].split()[-2:] == ["2x", "0.5x"] and text[3].endswith("1x          -")
    assert text[-1] == "C is 1.8x faster than A: 5 ms instead of 9 ms"


def test_layers_that_a_trace_lacks_count_in_no_total():
    model, x = layers(), tensor()
    a = timed(TIMES["A"], traced(model, x))
    with ml.trace(model) as t:
        model(model(x))
    b = timed((*TIMES["B"], 30.0, 40.0, 50.0), t)
    found = ml.compare(a, b)
    assert found.totals == (9.0, 9.0) and len(found) == 6
    assert [r.times for r in found][3:] == [(None, 30.0), (None, 40.0), (None, 50.0)]
    assert "these totals are over 3 of 6 rows" in str(found)
    assert found.rows[3].records[0] is None and found.rows[3].routes[0] is None
    assert ml.compare(b, a).rows[3].speedups == (None,)


def test_without_times_rooflines_are_compared():
    a, b = traced(time=True), traced()
    found = ml.compare(a, b)
    assert not found.measured and "roofline B" in found.table()
    assert "with ml.trace(net, time=True)" in found.table().splitlines()[-1]
    assert found.rows[0].times[1] == b.records[0].cost.roofline_ms


def test_the_page_of_a_comparison_is_self_contained(tmp_path):
    a, b = traced(time=True), traced(time=True)
    b.net = "<b>"
    found = ml.compare(a, b)
    found.save(tmp_path / "ab.html")
    text = (tmp_path / "ab.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|@import|url\(|<b>\W*</b>", text)
    assert "&lt;b&gt;" in text and text.count("<tr data-pass=") == len(found)
    for row in found:
        assert row.layer in text.replace("<wbr>", "") and row.routes[0] in text
    with pytest.raises(ValueError, match="must end in .html; got 'ab.json'"):
        found.save(tmp_path / "ab.json")


def test_notebooks_show_the_pages(monkeypatch):
    t = traced()
    for shown, name in ((t, "Sequential on "), (ml.compare(t, t), "2 traces of ")):
        frame = shown._repr_html_()
        (text,) = re.findall('^<iframe srcdoc="([^"]*)" [^<>]*></iframe>$', frame)
        assert f"<h1>{name}" in html.unescape(text)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "jinja2", None)
            assert shown._repr_html_() is None


def test_the_command_compares_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        traced(time=True).save(f"{name}.json")
    assert cli.main(["compare", "a.json", "b.json", "--out", "new/ab.html"]) == 0
    text = capsys.readouterr().out
    assert text == str(ml.compare("a.json", "b.json")) + "\n"
    assert "2 traces of Sequential" in (tmp_path / "new" / "ab.html").read_text()
    assert cli.main(["compare", "a.json", "b.json", "a.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == ml.compare("a.json", "b.json", "a.json").as_dict()
    wrong = {
        "a.json": (2, "arguments are required: TRACE"),
        "a.json b.json --out a.txt": (2, "must end in .html; got 'a.txt'"),
        "a.json c.json": (1, "there is no file c.json"),
        "a.json new/ab.html": (1, "ab.html has no trace; pass the .json"),
    }
    for words, (code, says) in wrong.items():
        assert cli.main(["compare", *words.split()]) == code
        assert says in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(tmp_path):
    t = traced()
    for traces in ((), (t,), 27 * (t,)):
        with pytest.raises(ValueError, match=f"2 to 26 traces; got {len(traces)}"):
            ml.compare(*traces)
    with pytest.raises(TypeError, match="takes traces, or paths .* got list"):
        ml.compare([t, t], t)
    with ml.trace(other := nn.SubmConv3d(4, 4, 1)) as b:
        other(tensor())
    match = "no layer in common: A starts with layers.0, B starts with SubmConv3d"
    with pytest.raises(ValueError, match=match):
        ml.compare(t, b)
