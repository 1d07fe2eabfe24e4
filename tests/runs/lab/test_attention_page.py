"""The page of one query: that it is self-contained, and how a browser steps through it."""

import json
import re

import pytest
from browser import BROWSER, browse
from command_line import command
from html_page import Page
from lab_experiments import run_small_experiment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(run_dir, table, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    settings = [f"checkpoint={run_dir}", f"table={table}", "target=class", "row=7"]
    result = command("lab", "attention", f"folder={folder}", *settings)
    assert result.returncode == 0, result.stderr
    return folder / "attention.html"


STEPS = ["tokens", "qkv", "score", "divided", "based", "scaled", "visibility", "weight", "context", "prediction"]


def test_the_page_is_self_contained_and_says_what_it_shows(page, tmp_path):
    source = page.read_text()
    assert not re.search(r"https?:|url\(|@import|//[a-z]", source)
    assert "default-src 'none'" in source
    assert re.findall(r'data-step="(\w+)"', source) == STEPS
    plain = re.sub(r"<script.*?</script>", "", source, flags=re.S)
    (tmp_path / "plain.html").write_text(plain)
    parsed = Page(tmp_path / "plain.html")
    assert "does not measure causal importance" in parsed.text
    assert "aria-live" in source
    assert "prefers-reduced-motion: no-preference" in source
    assert "prefers-color-scheme: dark" in source
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', source, re.S)[1])
    shown = parsed.table("row", "q . k", "weight")
    assert list(shown) == [f"row {key['row']}: {key['label']}" for key in data["keys"]]
    for key, row in zip(data["keys"], shown.values(), strict=True):
        columns = {"q . k": "score", f"divided by {data['root']:.4g}": "divided", "with base": "based",
                   "with gate": "scaled", "weight": "weight"}  # fmt: skip
        assert list(row) == list(columns)
        for column, name in columns.items():
            assert float(row[column]) == pytest.approx(key[name], rel=1e-3)


def test_the_small_form_has_at_most_50_labeled_rows(run_dir, table, tmp_path):
    run_small_experiment("attention", tmp_path, f"checkpoint={run_dir}", f"table={table}", "target=class", "row=7")
    source = (tmp_path / "attention.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', source, re.S)[1])
    assert len(data["keys"]) + data["rest"]["count"] == 50


WALK = """<script>{
const seen = [], labels = () => Array.from(document.querySelectorAll("#rows tbody tr")).filter(row => !row.hidden)
  .map(row => [row.children[0].textContent, row.children[2].textContent]);
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
const look = () => seen.push([document.getElementById("position").textContent, location.hash, labels(),
  Array.from(document.querySelectorAll("[data-step]")).filter(step => !step.hidden).map(step => step.dataset.step)]);
look();
for (let i = 0; i < 5; i++) { press("ArrowRight"); look(); }
for (let i = 0; i < 6; i++) { document.getElementById("next").click(); look(); }
press("ArrowLeft"); look();
document.getElementById("all").children[0].click(); look();
press("ArrowLeft"); look();
const bar = document.createElement("span");
bar.className = "bar";
bar.append(document.createElement("i"));
document.body.append(bar);
document.title = JSON.stringify({ seen, back: document.getElementById("back").disabled,
  moves: getComputedStyle(bar.firstChild).transitionDuration, errors: window.errors,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth });
}</script></body>"""
CATCH = "<script>window.errors = []; window.onerror = message => { window.errors.push(message); };</script></head>"


@pytest.mark.skipif(BROWSER is None, reason="no headless browser")
@pytest.mark.parametrize("width, still", [(1200, True), (500, False)])
def test_a_browser_steps_through_it(width, still, page, tmp_path):
    source = page.read_text()
    (tmp_path / "walk.html").write_text(source.replace("</head>", CATCH).replace("</body>", WALK))
    motion = ["--force-prefers-reduced-motion"] if still else []
    document = browse(f"--window-size={width},900", *motion, "--virtual-time-budget=10000", "--dump-dom",
                      tmp_path / "walk.html")  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", document, re.S)[1]
    seen = json.loads(title.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert seen["errors"] == []
    assert seen["overflow"] <= 0
    assert seen["back"]
    assert (seen["moves"] == "0s") == still
    order = [*STEPS, "prediction", "prediction", "context", "tokens", "tokens"]
    assert [step for *_, (step,) in seen["seen"]] == order
    assert [hash for _, hash, *_ in seen["seen"]] == [f"#step={step}" for step in order]
    data = json.loads(re.search(r'id="data">(.*?)</script>', source, re.S)[1])
    numbers = {step: dict(rows) for (_, _, rows, _), step in zip(seen["seen"], STEPS, strict=False)}
    names = [f"row {key['row']}: {key['label']}" for key in data["keys"]]
    for step in ("score", "divided", "based", "scaled", "weight"):
        for name, key in zip(names, data["keys"], strict=True):
            assert float(numbers[step][name]) == pytest.approx(key[step], rel=1e-3)
    hidden = [f"row {row['row']}, a query row" for row in data["hidden"]]
    assert [numbers["weight"][name] for name in hidden] == ["0"] * 4
    assert not set(hidden) & set(numbers["score"])
    others = f"{data['rest']['count']} other labeled rows"
    assert float(numbers["weight"][others]) == pytest.approx(data["rest"]["weight"], rel=1e-3)
