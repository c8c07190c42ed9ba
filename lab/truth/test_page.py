"""The page and the picture of lab/truth/page.py: against the arrays they show, and the page in Chromium.

Run it:  python -m pytest lab/truth/test_page.py
"""
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from lab.truth import page as credit_page
from lab.truth.file import COLUMNS, read_truth

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
         "--disable-background-networking --disable-component-update --virtual-time-budget=5000 "
         "--dump-dom --window-size=390,800").split()
PUBLISHED = Path(__file__).parent / "data" / "ground_truth.npz"
METHODS = ["none", "ppo", "entropy_weighted"]
REWARDS = [[1.1, 0.1, 1.1], [0.1, 0.0, 0.0], [0.1, 0.1, 0.1]]  # of three puzzles; the second one's are for format
HOSTILE = ["</script><b>bold", "&amp;", "<!--<script>", "\u2028'\"`${1}", "DATA PLUS", "<img src=x onerror=a()>",
           "W" * 60]


def make_truth(pieces=(" Try", " 3", " +", " 4", "</think>", "\n", "<answer>", "7", "")):
    """What ground_truth.py writes, with random numbers: nine responses of the given tokens to three puzzles."""
    rng, reward = np.random.default_rng(0), np.array(REWARDS)
    L, N = len(pieces), len(pieces) * reward.size
    A = (reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)
    V = rng.uniform(0, 1, (reward.size, L + 1))
    V[:, -1] = reward.ravel() > 1
    p, credits = rng.uniform(0.05, 0.99, N), rng.normal(0, 0.3, (len(METHODS), N))
    credits[0] = A.repeat(L)
    settings = {"model": "tiny", "data": "", "questions": 3, "max_new_tokens": 9, "seed": 0}
    return {"position": np.tile(np.arange(L), reward.size), "group": np.repeat([0, 1, 2], 3 * L), "logprob": np.log(p),
            "entropy": rng.uniform(0, 2, N), "logit_grad": rng.uniform(0, 1.4, N), "advantage": A.repeat(L),
            "reward": reward.repeat(L), "success": (reward > 1).repeat(L), "value": V[:, :-1].ravel(),
            "packets": np.ceil(200 * (1 - p) / 8).astype(int), "a_star": np.diff(V).ravel(),
            "value_error": rng.uniform(0, 0.1, N), "a_star_error": rng.uniform(0, 0.1, N),
            "kind": rng.integers(4, size=N), "reachable": rng.integers(-1, 2, N), "piece": np.tile(pieces, reward.size),
            "credits": credits, "methods": np.array(METHODS), "complete": np.array(True),
            "kinds": np.array(["operand", "operator", "verdict", "tag"]), "settings": np.array(json.dumps(settings)),
            "prompts": np.repeat(["[3, 4] -> 7", "[1, 2] -> 9", "[5, 5] -> 1"], 3)}


def page_of(truth):
    """The page, and the data in it."""
    text = credit_page.page(truth, credit_page.choose_puzzles(truth, credit_page.rank_responses(truth)), fitted=True)
    return text, json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def elements(text):
    """The elements of a page with their attributes."""
    found, reader = [], HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.append((tag, attributes))
    reader.feed(text)
    return found


def test_every_number_of_the_page_is_that_of_the_file():
    """Guards against columns, tokens or responses that change places on their way into the page."""
    truth = make_truth()
    A, L = truth["advantage"], 9
    expected = {"A*": truth["a_star"], "GRPO": A} | dict(zip(METHODS[1:], truth["credits"][1:]))
    expected |= {"A·abs(log p)": A * np.abs(truth["logprob"]), "A·‖onehot - p‖": A * truth["logit_grad"]}
    _, data = page_of(truth)
    assert [quantity["name"] for quantity in data["quantities"]] == list(expected)
    assert {puzzle["name"]: [r["right"] for r in puzzle["responses"]] for puzzle in data["puzzles"]} == {
        "[3, 4] → 7": [True, False], "[1, 2] → 9": [False], "[5, 5] → 1": [False]}
    for puzzle in data["puzzles"]:
        for r in puzzle["responses"]:
            rows = slice(L * r["number"], L * r["number"] + L)
            assert puzzle["name"] == truth["prompts"][r["number"]].replace("->", "→")
            assert [r["reward"] / 100, r["group"]] == [truth["reward"][rows][0], 3]
            assert r["mean"] / 100 == pytest.approx(np.mean(REWARDS[r["number"] // 3]), abs=0.005)
            assert all(r[name] == truth[name][rows].tolist() for name in ("piece", "kind", "reachable"))
            V = np.append(truth["value"][rows], truth["success"][rows][0])
            columns = {"p": np.exp(truth["logprob"][rows]), "V": V, "entropy": truth["entropy"][rows],
                       "a_star_error": truth["a_star_error"][rows]}
            for name, column in columns.items():
                assert np.array(r[name]) / 100 == pytest.approx(column, abs=0.00501), name
            for values, column in zip(r["values"], expected.values(), strict=True):
                assert np.array(values) / 100 == pytest.approx(column[rows], abs=0.00501)


@pytest.mark.parametrize("count, expected", [(1, [[3]]), (2, [[3], [2, 1]]), (3, [[3], [2, 1], [5]])])
def test_each_puzzle_shows_a_right_and_a_wrong_response(monkeypatch, count, expected):
    """Guards against another selection than by the largest |A*|, and against a puzzle that fills half the page."""
    monkeypatch.setattr(credit_page, "PUZZLES", count)
    largest, success = np.array([0.1, -0.6, 0.5, 0.7, -0.2, 0.3]), np.array([1, 0, 1, 0, 0, 1])
    truth = {"position": np.tile([0, 1], 6), "group": np.repeat([0, 0, 0, 1, 1, 2], 2), "success": success.repeat(2),
             "a_star": np.stack((largest / 2, largest), axis=1).ravel()}
    puzzles = credit_page.choose_puzzles(truth, credit_page.rank_responses(truth))
    assert [[response.number for response in pair] for pair in puzzles] == expected


def test_the_footer_says_how_the_numbers_were_measured():
    """Guards against settings that are missing, and ones that are shown though they are empty."""
    truth = make_truth()
    facts = page_of(truth)[1]["facts"]
    assert facts["Measured on"].startswith("9 responses to 3 generated held-out puzzles, 81 tokens; at most 9 tokens")
    assert facts["Rollouts"].startswith(f"{8 * truth['packets'].sum():,}, about 200 · (1 − p) ")
    assert facts["Flags, all at their defaults"] == (
        "ppo gae_lambda 0.95, whiten False, gamma 1.0; entropy_weighted entropy_temp 1.0; the others have none")
    assert "fitted" in facts["Critic of ppo and value_change"]


def test_tokens_can_not_break_out_of_the_data():
    """Guards against a response that closes the script element, and against anything fetched from elsewhere."""
    (plain, _), (text, data) = page_of(make_truth(HOSTILE[:1] * len(HOSTILE))), page_of(make_truth(HOSTILE))
    assert elements(text) == elements(plain) and text.split("</script>")[1:] == plain.split("</script>")[1:]
    assert data["puzzles"][0]["responses"][0]["piece"] == HOSTILE
    links = [pair for _, attributes in elements(text) for pair in attributes if pair[0] in ("src", "href", "action")]
    assert not links and not re.search(r"url\(|@import|\bfetch\b|XMLHttp|WebSocket", text)


def test_the_published_page_is_small():
    """Guards against a page that a phone takes long to load."""
    text, data = page_of(read_truth(PUBLISHED))
    assert len(text.encode()) < 600_000
    assert len(data["puzzles"]) == 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_on_every_shade(scheme):
    """Guards against letters that drown in a strong colour: WCAG AA asks for a contrast of 4.5."""
    def luminance(c):
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)

    found = re.findall(r"--(\w+): (#\w{6});", page_of(make_truth())[0])
    half = found[:7] if scheme == "light" else found[7:]
    colours = {name: np.array(to_rgb(code)) for name, code in half}
    for name in ("plus", "minus"):
        for share in np.linspace(0, 1, 21):
            shade = colours["paper"] + share * (colours[name] - colours["paper"])
            dark, light = sorted((luminance(shade), luminance(colours["ink"])))
            assert (light + 0.05) / (dark + 0.05) > 4.5, (name, share)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome found")
@pytest.mark.parametrize("pieces", [(" Try", " 3", " +", "\n", "7", ""), tuple(HOSTILE)])
def test_a_tap_shows_the_numbers_of_its_token(tmp_path, pieces):
    """Guards against numbers or colours of another token, response or method, and against text that runs as HTML."""
    truth, L = make_truth(pieces), len(pieces)
    truth["a_star"][3 * L] = 0.99  # so response 3 is shown, which is wrong, with better format than the others
    text, data = page_of(truth)
    shown = [r["number"] for puzzle in data["puzzles"] for r in puzzle["responses"]]
    row = 3 * L + 2
    tap = f"""<script>document.title = $("method").value + document.querySelector("main").textContent;
      document.querySelectorAll(".token")[{L * shown.index(3) + 1}].firstChild.click(); $("next").click();
      $("method").selectedIndex = 1; $("method").dispatchEvent(new Event("change"));
      document.title += [...document.querySelectorAll("html, #bar, #panel, .tokens")].every(
        element => element.scrollWidth <= element.clientWidth);</script></body>"""
    (tmp_path / "page.html").write_text(text.replace("</body>", tap), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", (tmp_path / "page.html").as_uri()]
    dom = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120).stdout
    title, place = (html.unescape(re.search(start + "(.*?)</", dom, re.S)[1])
                    for start in ("<title>", '"place">.*?<span>'))
    assert title.startswith("GRPO") and title.endswith("true")  # the method at first; nothing is wider than the phone
    assert "Wrong, yet the mean credit of GRPO is +1.41: the format earned more than in" in title
    assert "Equal rewards for all responses to this puzzle: GRPO gives no credit." in title
    kind = truth["kinds"][truth["kind"][row]]
    assert place == f"[1, 2] → 9, wrong response, token 3 of {L}: “{pieces[2].strip()}”, {kind}"
    numbers = dict(re.findall(r"<dt[^>]*>([^<]*)</dt><dd[^>]*>([^<]*)</dd>", dom))
    assert numbers["V"].split(" → ")[1] == f"{truth['value'][row + 1]:.2f}"
    for name, values in {"A*": truth["a_star"], "GRPO": truth["advantage"], "ppo": truth["credits"][1]}.items():
        number = numbers[name].split(" ± ")[0]
        assert re.fullmatch(r"[+−]\d+\.\d\d", number)
        assert float(number.replace("−", "-")) == pytest.approx(values[row], abs=0.00501), name
    credit = np.concatenate([truth["credits"][1][L * n : L * n + L] for n in shown])  # of ppo
    bands = re.findall(r'<i class="(plus|minus)[^>]*--size: (\d+)%', dom)
    assert [sign for sign, _ in bands] == np.where(np.rint(100 * credit) < 0, "minus", "plus").tolist()
    sizes = np.minimum(100, 100 * np.abs(credit) / credit_page.scale_of(credit))
    assert [int(size) for _, size in bands] == pytest.approx(sizes, abs=2.5)
    assert "<b>bold" not in dom and "<img" not in dom


@pytest.mark.parametrize("fault, message", [
    ({"a_star_error": None}, "has no a_star_error"), ({"complete": np.array(False)}, "lacks some rollouts"),
    ({"methods": np.array(["none", "ppo", "old"])}, "mitigations.py lacks: old"),
    ({"piece": np.array([{}] * 9)}, "truth.npz can't be read"), (None, "can't be read")])
def test_bad_files_are_one_clear_error(fault, message, tmp_path, monkeypatch):
    """Guards against a traceback for a file that ground_truth.py did not write or finish."""
    if fault is not None:
        truth = dict.fromkeys(COLUMNS, np.zeros(81)) | make_truth() | fault
        np.savez(tmp_path / "truth.npz", **{name: x for name, x in truth.items() if x is not None})
    monkeypatch.setattr(sys, "argv", ["credit_page.py", str(tmp_path / "truth.npz")])
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        credit_page.main()
    assert not (tmp_path / "credit.html").exists()


@pytest.mark.parametrize("pieces", [make_truth.__defaults__[0], (" +", " 4", "")], ids=len)
def test_picture_shows_tokens_shades_and_V(pieces, monkeypatch):
    """Guards against shades or steps that are off by a token, or of another response or measure; short ones crashed."""
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(plt, "close", lambda _: None)
    truth, L = make_truth(pieces), len(pieces)
    ranked = credit_page.rank_responses(truth)
    pair = credit_page.examples(truth, ranked)
    credit_page.draw(truth, ranked, None)
    axes, rows = plt.gcf().axes, np.concatenate([response.rows for response in pair])
    assert [response.right for response in pair] == [True, False]
    for i, response in enumerate(pair):
        *texts, bottom = axes[3 * i : 3 * i + 3]
        for text, name in zip(texts, ("a_star", "advantage")):
            share = truth[name][response.rows] / credit_page.scale_of(truth[name][rows])
            assert [t.get_text() for t in text.texts[-L:]] == [p.replace("\n", "↵") or "■" for p in truth["piece"][:L]]
            assert [patch.get_facecolor() for patch in text.patches] == [credit_page.SHADES(0.5 + x / 2) for x in share]
        assert bottom.lines[0].get_ydata() == pytest.approx([*truth["value"][response.rows], float(response.right)])
        named = {float(text.get_text().split()[-1].replace("−", "-")) for text in bottom.texts}
        a_star = truth["a_star"][response.rows]
        assert named == {round(x, 2) for x in a_star[credit_page.landmarks(a_star)]}


def test_landmarks_are_large_and_far_apart():
    """Guards against texts that cover each other, and names of tokens that changed nothing."""
    a_star = np.zeros(70)
    a_star[[5, 15, 16, 30, 45, 46, 60, 69]] = 0.5, -0.45, 0.4, 0.1, -0.9, 0.8, 0.3, 0.2
    assert credit_page.landmarks(a_star) == [45, 5, 16, 60]
    assert credit_page.landmarks(np.array([0.09, 0.5, -0.11, 0.2])) == [1, 3, 2]
