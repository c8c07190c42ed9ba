"""tokens.html: what it holds against the log it is made of, and what a browser shows of it. Chromium runs the page;
without Chromium those tests are skipped."""
import base64
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest

from analyze import with_measures
from plumbing import report, tokens_page
from plumbing.tokenizer import Tokenizer
from tests.fixtures import BUNDLED

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WRITTEN = ["<b>5 & 3</b></script>\n", "你好 é", "-->\t`${1}`" + "ab" * 60]  # two steps of them, a response each
TITLE = "<i>run</i> & RLOO"
MEASURES = ["gradient", "credit", "contribution", "entropy", "log p", "mine"]


def make_log(texts, steps):
    """A log of one response to one puzzle for each text in each step, with random numbers, and the tokens of each."""
    rng, tokenizer = np.random.default_rng(0), Tokenizer(BUNDLED)
    rows = [tokenizer.encode(text) + tokenizer.end_tokens[:1] for text in texts] * steps
    response = np.repeat(np.arange(len(rows)), list(map(len, rows)))  # (N,)
    N = len(response)
    log = {"step": 1 + response // len(texts), "group": response % len(texts), "response": response % len(texts),
           "position": np.concatenate([np.arange(len(row)) for row in rows]), "token": np.concatenate(rows),
           "logprob": -rng.exponential(1, N), "entropy": rng.exponential(1, N), "logit_grad": rng.uniform(0, 1.4, N),
           "credit": rng.normal(0, 1, N), "reward": np.ones(N), "advantage": np.ones(N),
           "mine": 1e6 * rng.normal(0, 1, N),  # beyond what a float16 can hold
           "puzzle_text": np.array([f"<u>{text}</u> & step" for text in texts] * steps)}
    log["entropy"][0] = 1e-5  # among the smallest that a float16 can hold
    return with_measures(log), tokenizer, rows


@pytest.fixture
def page(tmp_path):
    """A page of two steps, the log it shows, and the file."""
    log, tokenizer, rows = make_log(WRITTEN, 2)
    tokens_page.write_page(log, tokenizer, TITLE, tmp_path / "tokens.html")
    return log, [[tokenizer.bytes[token] for token in row] for row in rows], tmp_path / "tokens.html"


def read_page(file):
    """What the page knows, and its columns (N,): numbers of texts, then known["measures"]."""
    text = file.read_text(encoding="utf-8")
    known = json.loads(re.search('id="known">(.*?)</script>', text)[1])
    data, N = base64.b64decode(re.search('id="data">(.*?)</script>', text)[1]), sum(known["lengths"])
    assert len(data) == (4 + 2 * len(known["units"])) * N and len(known["units"]) == len(known["measures"])
    parts = np.frombuffer(data[4 * N :], "<f2").reshape(-1, N).astype(float)
    return known, [np.frombuffer(data[: 4 * N], "<u4"), *(unit * part for unit, part in zip(known["units"], parts))]


def test_the_page_holds_the_whole_run(page):
    """Guards against columns in another order, a response shifted by a token, and a puzzle of another group or step."""
    log, rows, file = page
    known, (number, *facts) = read_page(file)
    texts = [known["texts"][i].encode("latin-1") for i in number]
    assert texts == [part for row in rows for part in row] and known["lengths"] == list(map(len, rows))
    logged = {"log p": "logprob"}  # by another name
    for column, name in zip(facts, known["measures"], strict=True):
        np.testing.assert_allclose(column, log[logged.get(name, name)], rtol=1e-3, atol=1e-7)
    assert known["measures"] == ["gradient", "credit", "contribution", "entropy", "log p", "mine"]
    assert known["steps"] == [1, 1, 1, 2, 2, 2]
    puzzles = [name.partition("Puzzle: ")[2] for name in known["names"]]
    assert puzzles == [f"<u>{text}</u> & step" for text in WRITTEN] * 2


def test_replies_stand_where_they_came(tmp_path):
    """Guards against a reply of another response, and one with the numbers of a token."""
    log, tokenizer, rows = make_log(["ab", "cd"], 1)
    log |= {"turn": log["position"], "reply_response": np.array([1, 1]), "reply_position": np.array([1, 1]),
            "reply_token": np.array([300, 301])}
    tokens_page.write_page(log, tokenizer, "", tmp_path / "tokens.html")
    known, (number, credit, *_) = read_page(tmp_path / "tokens.html")
    expected = [*rows[0], rows[1][0], 300, 301, *rows[1][1:]]
    assert [known["texts"][i].encode("latin-1") for i in number] == [tokenizer.bytes[token] for token in expected]
    assert known["lengths"] == [len(rows[0]), len(rows[1]) + 2]
    assert np.flatnonzero(np.isnan(credit)).tolist() == [len(rows[0]) + 1, len(rows[0]) + 2]


def test_a_long_run_is_thinned_by_whole_steps(tmp_path, monkeypatch):
    """Guards against a page that no browser opens, and a step without some of its responses."""
    log, tokenizer, rows = make_log(WRITTEN, 7)
    del log["mine"]  # as in a run whose credit function logs nothing
    monkeypatch.setattr(tokens_page, "PAGE_TOKENS", len(log["token"]) // 2)
    tokens_page.write_page(log, tokenizer, "", tmp_path / "tokens.html")
    known, _ = read_page(tmp_path / "tokens.html")
    assert known["steps"] == [1, 1, 1, 4, 4, 4, 7, 7, 7] and known["lengths"] == list(map(len, rows[:9]))


def test_nothing_is_fetched_and_text_stays_text(page):
    """Guards against a network, and a token, puzzle or title that ends a script or becomes an element."""
    text, found, tags, reader = page[2].read_text(encoding="utf-8"), [], [], HTMLParser()
    reader.handle_starttag = lambda tag, attributes: (tags.append(tag), found.extend(name for name, _ in attributes))
    reader.feed(text)
    assert tags.count("script") == 3 == text.count("</script") and not {"b", "i", "u"} & {*tags}
    assert not {"src", "href", "action"} & {*found}
    assert not re.search(r"url\(|@import|\bfetch\b|XMLHttp|WebSocket|innerHTML|\beval\(|new Function|https?:", text)
    assert re.search('content="(default-src[^"]*)"', text)[1] == (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    assert text.count("&lt;i>run&lt;/i> &amp; RLOO") == 2


DRIVE = """<script>
const seen = [], change = (id, value) => { $(id).value = value; $(id).onchange(); };
for (const step of [...$("step").options].map(o => o.value)) {
  change("step", step);
  for (const response of [...$("response").options].map(o => o.value)) {
    change("response", response);
    for (const measure of [...$("measure").options].map(o => o.value)) {
      change("measure", measure);
      const boxes = [...document.querySelectorAll(".tokens span")];
      const apart = boxes.every((a, i) => boxes.slice(i + 1).every(b =>
        [...a.getClientRects()].every(p => [...b.getClientRects()].every(q =>
          p.right <= q.left + 1 || q.right <= p.left + 1 || p.bottom <= q.top + 6 || q.bottom <= p.top + 6))));
      boxes[0].onmouseover();
      seen.push({step, response, measure, apart, texts: boxes.map(b => b.textContent), facts: $("facts").textContent,
        shades: boxes.map(b => getComputedStyle(b).backgroundColor), about: document.querySelector("#panes p").textContent,
        styles: boxes.map(b => ["--hue", "--share"].map(name => b.style.getPropertyValue(name).trim())),
        inside: document.documentElement.scrollWidth <= innerWidth});
    }
  }
}
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
</script>"""

FIND = """<script>
const listed = id => [...$(id).options].map(o => o.value), seen = {};
const all = () => listed("step").flatMap(step => ($("step").value = step, $("step").onchange(), listed("response")));
for (const kind of listed("kind")) { $("kind").value = kind; $("kind").onchange(); seen[kind] = all().map(Number); }
$("kind").value = "all";
for (const word of ["NO!", "puzzle 1", "nowhere"]) {
  $("search").value = word; $("search").oninput(); seen[word] = all().map(Number); seen.count = $("count").textContent;
}
seen.empty = document.querySelectorAll(".tokens").length;
$("search").value = ""; $("search").oninput();
seen.offered = listed("beside"); $("beside").value = "5"; $("beside").onchange();
seen.panes = [...document.querySelectorAll(".tokens")].map(pane => pane.textContent);
document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: JSON.stringify(seen)}));
</script>"""


def shown(file, script, width=1100):
    """What a script saw that Chromium ran at the end of a page."""
    driven = file.with_name("driven.html")
    driven.write_text(file.read_text(encoding="utf-8").replace("</html>", script + "</html>"), encoding="utf-8")
    found = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},800",
                            f"--user-data-dir={file.with_name('profile')}", "--dump-dom", driven.as_uri()],
                           capture_output=True, text=True, timeout=120).stdout
    return json.loads(html.unescape(re.search('<pre id="seen">(.*?)</pre>', found, re.S)[1]))


def whole_letters(parts, values):
    """Texts and values of tokens, given as bytes; those that share a letter are one, with the value larger in size."""
    begins = [i for i, part in enumerate(parts) if not part or part[0] < 0x80 or part[0] >= 0xC0]
    pieces = [slice(*ends) for ends in zip(begins, [*begins[1:], len(parts)])]
    return ([b"".join(parts[piece]).decode() for piece in pieces],
            np.array([max(values[piece], key=abs) for piece in pieces]))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium runs the page, and is not here")
@pytest.mark.parametrize("width", [360, 1100])
def test_a_browser_shows_every_response_by_every_measure(page, width):
    """Guards against a box with another token's number, a scale of another step, a letter in two boxes, text that
    becomes an element, boxes that overlap, and a line that leaves the window."""
    log, rows, file = page
    seen = shown(file, DRIVE, width)
    assert [(int(s["response"]), s["measure"]) for s in seen] == [(i, m) for i in range(6) for m in MEASURES]
    columns = log | {"log p": log["logprob"]}
    for s in seen:
        own = log["response_id"] == int(s["response"])
        texts, values = whole_letters(rows[int(s["response"])], columns[s["measure"]][own])
        scale = np.abs(columns[s["measure"]][log["step"] == int(s["step"])]).max()
        assert s["texts"] == [text.replace("\n", "↵").replace("\t", "⇥") or "■" for text in texts]
        shares = [float(share.rstrip("%")) for _, share in s["styles"]]
        assert shares == pytest.approx(100 * np.abs(values) / scale, rel=0.01, abs=0.01)
        assert [hue == report.MINUS for hue, _ in s["styles"]] == (values < 0).tolist()
        assert len({*s["shades"]}) > 1 and s["apart"] and s["inside"]
        facts = [fact.rsplit(" ", 1) for fact in s["facts"].partition("; ")[0].split(", ")]
        first = {name: columns[name][own][0] for name in ("credit", *MEASURES)}
        assert {name: float(x) for name, x in facts} == {name: pytest.approx(x, rel=0.01) for name, x in first.items()}
        assert f"Full colour: {s['measure']} of " in s["about"] and "</u> & step" in s["about"]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium runs the page, and is not here")
def test_a_browser_finds_responses_and_shows_two(tmp_path):
    """Guards against a filter by another response's reward, group or end, a search in one step alone, and a response
    beside one to another puzzle. Three steps of two responses to a puzzle, the same one in the first and the last."""
    log, tokenizer, rows = make_log(["Yes.", "No!"], 3)
    log["group"], log["puzzle_text"] = np.zeros_like(log["group"]), np.array(["puzzle 1", "puzzle 2", "puzzle 1"])
    log = with_measures(log)
    log["reward"] = np.array([1.1, 0, 0.1, 0.1, 1, 0.5])[log["response_id"]]
    log["token"][np.flatnonzero(log["position"] == 0)[4] - 1] = rows[0][0]  # the last of response 3
    log["response_success"] = np.array([1, 0, 0, 0, 1, 1])
    tokens_page.write_page(log, tokenizer, "", tmp_path / "tokens.html")
    seen = shown(tmp_path / "tokens.html", FIND)
    assert seen == {"all": [0, 1, 2, 3, 4, 5], "right": [0, 4, 5], "wrong": [1, 2, 3], "cut off": [3],
                    "silent group": [2, 3], "NO!": [1, 3, 5], "puzzle 1": [0, 1, 4, 5], "nowhere": [],
                    "count": "0 of 6 responses", "empty": 0, "offered": ["", "1", "4", "5"], "panes": seen["panes"]}
    assert [text.strip("■") for text in seen["panes"]] == ["Yes.", "No!"]
    del log["response_success"]  # as in a run of before
    assert tokens_page.kinds_of(log, np.flatnonzero(log["position"] == 0), tokenizer)[2] == ["silent group"]


def test_a_puzzle_is_known_by_its_number(tmp_path):
    """Guards against two puzzles whose texts are alike as far as they are kept, and one that has two orders of words."""
    log, tokenizer, _ = make_log(["Yes.", "No!"], 3)
    log["group"], log["puzzle_text"] = np.zeros_like(log["group"]), np.array(["x" * 500] * 3)
    log["puzzle_key"] = np.array([7, 2**63 + 1, 7], np.uint64)
    tokens_page.write_page(with_measures(log), tokenizer, "", tmp_path / "a.html")
    known = json.loads(re.search(r'id="known">(.*?)</script>', (tmp_path / "a.html").read_text(encoding="utf-8"))[1])
    assert known["puzzles"] == [0, 0, 1, 1, 0, 0]
