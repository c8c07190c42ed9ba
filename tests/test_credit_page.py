"""The page and picture of experiments/credit_page.py: against the arrays they show, and in Chromium if there is one.

Run it:  python -m pytest tests/test_credit_page.py
"""

import html
import html.parser
import json
import re
import shutil
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from experiments import credit_page

ATTEMPT = " Maybe 3 + 4 = 7, 7 * 5 = 35. That is not 9."
ANSWER = "</think>\n<answer>(3 + 4) * 5</answer>"
PIECE = re.compile(r"</?(?:think|answer)>| ?[0-9]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s")
KINDS = ["operand", "operator", "verdict", "tag"]
METHODS = ["none", "ppo", "vineppo", "entropy_weighted"]


def make_truth(B=12, methods=METHODS):
    """What ground_truth.py writes, with random numbers: B responses of 1 to 4 attempts, every third of them right."""
    rng, columns, prompts = np.random.default_rng(0), [], []
    for i in range(B):
        pieces = [*PIECE.findall(ATTEMPT * rng.integers(1, 5) + ANSWER), ""]
        L, right = len(pieces), float(i % 3 == 0)
        V = np.append(np.clip(0.4 + rng.normal(0, 0.07, L).cumsum(), 0.01, 0.99), right)
        prompts.append(f"[3, 4, {i}] -> 9")
        columns.append({
            "position": np.arange(L), "logprob": np.log(rng.uniform(0.05, 1, L)), "entropy": rng.uniform(0, 2, L),
            "logit_grad": rng.uniform(0, 1.4, L), "advantage": np.full(L, 1.5 if right else -0.6),
            "reward": np.full(L, 0.1 + right), "success": np.full(L, right), "value": V[:-1],
            "value_error": np.sqrt(V * (1 - V) / 400)[:-1], "a_star": np.diff(V),
            "a_star_error": rng.uniform(0, 0.1, L), "kind": rng.integers(len(KINDS), size=L),
            "reachable": rng.integers(-1, 2, L), "piece": np.array(pieces)})
    truth = {name: np.concatenate([response[name] for response in columns]) for name in columns[0]}
    credits = rng.normal(0, 0.3, (len(methods), len(truth["position"])))
    credits[0] = truth["advantage"]
    settings = json.dumps({"model": "countdown-tiny", "samples": 400})
    names = {"kinds": KINDS, "methods": methods, "prompts": prompts, "settings": settings, "complete": True}
    return truth | {"credits": credits} | {name: np.array(x) for name, x in names.items()}


@pytest.fixture(scope="module")
def truth():
    """Twelve responses, a third of them right."""
    return make_truth()


def rows_of(truth, number):
    """The rows of a response of the file."""
    return np.flatnonzero(np.cumsum(truth["position"] == 0) == number + 1)


def values_of(truth):
    """Every quantity (N,) of the menu by its id, computed here from the columns."""
    values = {"a_star": truth["a_star"]} | dict(zip(truth["methods"].tolist(), truth["credits"]))
    values["contribution"] = truth["advantage"] * truth["logprob"]
    values["logit_gradient"] = truth["advantage"] * truth["logit_grad"]
    return values | {"entropy": truth["entropy"]}


def shades_of(share):
    """The colours (L, 3) of tokens with these shares (L,) of the scale: white at 0, full at -1 and 1."""
    full = np.where(share[:, None] > 0, to_rgb(credit_page.PLUS), to_rgb(credit_page.MINUS))
    return 1 + np.minimum(np.abs(share), 1)[:, None] * (full - 1)


def elements(text):
    """The elements of a page with their attributes."""
    found, reader = [], html.parser.HTMLParser()
    reader.handle_starttag = lambda tag, attributes: found.append((tag, attributes))
    reader.feed(text)
    return found


def page_of(truth, count):
    """The page of `count` responses, the data in it, and their rows in its order."""
    text = credit_page.page(truth, credit_page.choose_responses(truth, count))
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    return text, data, [rows_of(truth, response["number"]) for response in data["responses"]]


# ------------------------------------------------------------------------------------------------- the data


def test_every_number_of_the_page_is_that_of_the_file(truth):
    """Guards against columns, tokens or responses that change places on their way into the page."""
    _, data, shown = page_of(truth, 5)
    expected = values_of(truth)
    assert [quantity["id"] for quantity in data["quantities"]] == list(expected)
    assert [quantity["signed"] for quantity in data["quantities"]] == [True] * 7 + [False]
    assert [quantity["name"] for quantity in data["quantities"]][:3] == ["A*", "credit, none (GRPO)", "credit, ppo"]
    assert len(shown) == 5
    for r, rows in zip(data["responses"], shown):
        assert r["prompt"] == truth["prompts"][r["number"]]
        assert r["right"] == (truth["success"][rows[0]] == 1)
        for name in ("piece", "kind", "reachable"):
            assert r[name] == truth[name][rows].tolist()
        assert [r["reward"], r["advantage"]] == [truth[name][rows[0]] for name in ("reward", "advantage")]
        assert r["p"] == pytest.approx(np.exp(truth["logprob"][rows]), rel=1e-3)
        assert r["V"][:-1] == pytest.approx(truth["value"][rows], rel=1e-3)
        assert r["V"][1:] == pytest.approx(truth["value"][rows] + truth["a_star"][rows], abs=1e-3)
        assert r["V_error"] == pytest.approx([*truth["value_error"][rows], 0], rel=1e-3)
        assert r["a_star_error"] == pytest.approx(truth["a_star_error"][rows], rel=1e-3)
        for values, column in zip(r["values"], expected.values(), strict=True):
            assert values == pytest.approx(column[rows], rel=1e-3)
    for quantity, values in zip(data["quantities"], expected.values()):
        size = np.abs(values[np.concatenate(shown)])  # of the responses shown
        assert quantity["scale"] == pytest.approx(np.percentile(size, 98), rel=1e-6)
    assert [data["kinds"], data["settings"]["samples"], data["total"]] == [KINDS, 400, 12]


def test_a_scale_is_never_0():
    """Guards against a division by 0 where few tokens or none have credit."""
    assert [credit_page.scale_of(np.array(x)) for x in ([0.25, -0.5] + [0] * 200, [0, 0])] == [0.5, 1]


def few(largest, success, length=2):
    """Responses whose first token has the largest |A*|: as much of a file as choosing among them needs."""
    position = np.tile(np.arange(length), len(largest))
    a_star = np.where(position, -0.5, 1.0) * np.repeat(largest, length)
    return {"position": position, "success": np.repeat(success, length).astype(float), "a_star": a_star}


@pytest.mark.parametrize("largest, success, count, expected", [
    ([0.1, -0.9, 0.5, 0.7, -0.2], [1, 0, 1, 0, 0], 4, [2, 1, 0, 3]),
    ([0.1, -0.9, 0.5, 0.7, -0.2], [1, 0, 1, 0, 0], 3, [2, 1, 0]),
    ([0.1, -0.9, 0.5, 0.7, -0.2], [1, 0, 1, 0, 0], 16, [2, 1, 0, 3, 4]),
    ([0.5, 0.5, -0.5, 0.6], [1, 1, 1, 0.5], 3, [0, 3, 1])])  # ties keep their order; half a success is wrong
def test_responses_are_chosen_as_the_page_says(largest, success, count, expected):
    """Guards against another selection than by the largest |A*| of a token, right and wrong ones alternating."""
    chosen = credit_page.choose_responses(few(largest, success), count)
    assert [response.number for response in chosen] == expected
    assert all(response.rows.tolist() == [2 * response.number, 2 * response.number + 1] for response in chosen)


def test_the_page_needs_no_network(truth):
    """Guards against a font, script or image from elsewhere: it is missing offline, and tells others who reads."""
    text, *_ = page_of(truth, 3)
    assert set(re.findall(r"\w+://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name that nobody fetches
    assert not re.search(r"url\(|@import|\bimport\b|\bfetch\b|XMLHttp|WebSocket|EventSource|sendBeacon", text)
    links = [pair for _, attributes in elements(text) for pair in attributes if pair[0] in ("src", "href", "action")]
    assert links == [("href", "data:,")]


HOSTILE = ["</script><b>bold", "&amp;", "<!--<script>", "\u2028'\"`${1}\\n", "DATA PLUS", "<img src=x onerror=a()>",
           " ", "$\\frac$", "W" * 40]


@pytest.fixture(scope="module")
def hostile():
    """Responses whose tokens, prompts, kinds and settings a careless page would run or swallow."""
    truth = make_truth(4)
    piece = truth["piece"].astype("<U40")
    for number in range(4):
        piece[rows_of(truth, number)[: len(HOSTILE)]] = HOSTILE
    names = {"prompts": np.array([f"</h2>{HOSTILE[0]}{i}" for i in range(4)]), "kinds": np.array(HOSTILE)}
    return truth | {"piece": piece, "settings": np.array(json.dumps({"model": HOSTILE[0]}))} | names


def test_tokens_can_not_break_out_of_the_data(truth, hostile):
    """Guards against a response that closes the script element: its tags become part of the page, its data is lost."""
    (plain, *_), (text, data, _) = page_of(truth, 4), page_of(hostile, 4)
    assert elements(text) == elements(plain)
    assert text.split("</script>")[1:] == plain.split("</script>")[1:]
    assert [r["piece"][: len(HOSTILE)] for r in data["responses"]] == [HOSTILE] * 4


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_is_readable_on_every_shade(scheme):
    """Guards against letters that drown in a strong colour: WCAG AA asks for a contrast of 4.5, light and dark."""
    def contrast(one, other):
        c = np.array([one, other])
        dark, light = sorted(np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722))
        return (light + 0.05) / (dark + 0.05)

    found = re.findall(r"--(\w+): (#\w{6});", page_of(make_truth(2), 2)[0])
    colours = {name: np.array(to_rgb(code)) for name, code in (found[:8], found[8:])[scheme]}
    assert len(found) == 16 and colours["paper"].mean() == pytest.approx(1 - 0.91 * scheme, abs=0.01)
    assert contrast(colours["quiet"], colours["paper"]) > 4.5
    for name in ("plus", "minus", "plain"):
        assert contrast(colours[name], colours["paper"]) > 1.8  # the full colour stands out
        for share in np.linspace(0, 1, 21):
            assert contrast(colours["ink"], colours["paper"] + share * (colours[name] - colours["paper"])) > 4.5


# ------------------------------------------------------------------------------------------------ the picture


def test_picture_shows_tokens_shades_and_V(truth, monkeypatch):
    """Guards against shades, underlines or steps that are off by a token, or of another response or measure."""
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(plt, "close", lambda _: None)
    shown = credit_page.choose_responses(truth, 12)
    pair = credit_page.examples(truth, shown)
    credit_page.draw(truth, shown, None)
    axes, rows = plt.gcf().axes, np.concatenate([response.rows for response in pair])
    assert [response.right for response in pair] == [True, False]
    scales = {name: np.percentile(np.abs(truth[name][rows]), 98) for name in ("a_star", "advantage")}
    for i, (number, here, right) in enumerate(pair):
        *texts, bottom = axes[3 * i : 3 * i + 3]
        assert f"[3, 4, {number}] -> 9: {'right, reward 1.10' if right else 'wrong, reward 0.10'}" in [
            text.get_text() for text in texts[0].texts]
        for text, (name, scale) in zip(texts, scales.items()):
            share, written = np.clip(truth[name][here] / scale, -1, 1), text.texts[-len(here):]
            assert [t.get_text() for t in written] == [p.replace("\n", "↵") or "■" for p in truth["piece"][here]]
            shades = np.array([patch.get_facecolor()[:3] for patch in text.patches])  # (L, 3)
            assert shades == pytest.approx(shades_of(share), abs=0.01)
            starts = [patch.get_x() for patch, x in zip(text.patches, share) if x < -credit_page.FAINT]
            assert [line.get_xdata()[0] for line in text.lines] == pytest.approx(starts, abs=0.1)
            for patch, token in zip(text.patches, written):
                x, y = token.get_position()
                assert patch.get_x() == pytest.approx(x, abs=0.1) and patch.get_y() < y < patch.get_y() + 1
                assert x + len(token.get_text()) <= text.get_xlim()[1] and text.get_ylim()[1] < y < text.get_ylim()[0]
        V, error = truth["value"][here], truth["value_error"][here]  # (L,), (L,)
        assert bottom.lines[0].get_xdata().tolist() == list(range(len(here) + 1))
        assert bottom.lines[0].get_ydata() == pytest.approx([*V, float(right)])
        band = bottom.collections[0].get_paths()[0].vertices
        for t, ends in enumerate(np.clip(V[:, None] + np.outer(error, [-1.96, 1.96]), 0, 1)):
            edges = band[np.abs(band[:, 0] - t) < 0.6, 1]
            assert np.abs(edges - ends[:, None]).min(1).max() < 1e-6
        named = {float(text.get_text().split()[-1].replace("−", "-")) for text in bottom.texts}
        assert named == {round(x, 2) for x in truth["a_star"][here][credit_page.landmarks(truth["a_star"][here])]}
    assert [axis.get_xlim()[1] for axis in axes[:5:-1]] == pytest.approx(list(scales.values()))  # colour bars


def test_landmarks_are_large_and_far_apart():
    """Guards against texts that cover each other, and names of tokens that changed nothing."""
    a_star = np.zeros(70)
    a_star[[5, 15, 16, 30, 45, 46, 60, 69]] = 0.5, -0.45, 0.4, 0.1, -0.9, 0.8, 0.3, 0.2
    assert credit_page.landmarks(a_star) == [45, 5, 16, 60]
    a_star[[15, 16, 60, 69]] = 0
    assert credit_page.landmarks(a_star) == [45, 5, 30]
    assert credit_page.landmarks(np.array([0.09, 0.5, -0.11, 0.2])) == [1, 3, 2]


def test_picture_prefers_examples_with_credit_and_of_suitable_length():
    """Guards against an example that overflows the picture, and one on which GRPO's credit shows nothing."""
    parts = [few([0.9], [success], length) | {"advantage": np.full(length, advantage)} for success, length, advantage in
             ((1, 39, 1), (1, 80, 0), (1, 40, 1), (1, 50, 1), (0, 81, -1), (0, 80, -1), (0, 60, -1))]
    truth = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    shown = credit_page.choose_responses(truth, 7)
    assert [response.number for response in credit_page.examples(truth, shown)] == [2, 5]
    right = [response for response in shown if response.right]
    assert [response.number for response in credit_page.examples(truth, right)] == [2, 3]
    assert [response.number for response in credit_page.examples(truth, right[:1])] == [0]


@pytest.mark.filterwarnings("ignore:Glyph")  # a character that the font lacks
@pytest.mark.filterwarnings("ignore:Glyph")  # a character that the font lacks
def test_picture_takes_hostile_tokens_and_a_single_response(tmp_path, hostile):
    """Guards against tokens that matplotlib reads as formulas, and a file with right responses only."""
    for truth in (hostile, make_truth(1)):
        credit_page.draw(truth, credit_page.choose_responses(truth, 4), tmp_path / "credit.png")
        assert (tmp_path / "credit.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "credit.png").unlink()


# --------------------------------------------------------------------------------------------- command line


def run(monkeypatch, *arguments):
    """main() with these arguments."""
    monkeypatch.setattr(sys, "argv", ["credit_page.py", *map(str, arguments)])
    credit_page.main()


def test_page_and_picture_are_the_same_in_every_run(tmp_path, monkeypatch, capsys):
    """Guards against a page too large to load, and output that changes from run to run."""
    np.savez_compressed(tmp_path / "truth.npz", **make_truth(17, METHODS + [f"another{i}" for i in range(16)]))
    run(monkeypatch, tmp_path / "truth.npz")
    run(monkeypatch, tmp_path / "truth.npz", "--out", tmp_path / "a" / "b")
    assert f"wrote {tmp_path / 'credit.html'}" in capsys.readouterr().out
    for name in ("credit.html", "credit.png"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "a" / "b" / name).read_bytes()
    text = (tmp_path / "credit.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1e6
    assert text.count('"V_error":') == 16


@pytest.mark.parametrize("fault, message", [
    ({"a_star_error": None}, "lacks a_star_error"), ({"complete": np.array(False)}, "lacks some rollouts"),
    ({"value": np.full(9, np.nan)}, "values in value"), ({"credits": np.zeros((4, 8))}, "values in credits"),
    ({"piece": np.array(["a"] * 8)}, "values in piece"), ({"prompts": np.array([""] * 2)}, "values in prompts"),
    ({"settings": np.array("no JSON")}, "values in settings"), ({"settings": np.array("{}")}, "values in settings"),
    ({"kinds": np.array(["operand"])}, "values in kind"), ({"entropy": np.array(["a"] * 9)}, "values in entropy"),
    ({"position": np.zeros(0)}, "position"), ({"position": np.arange(9) + 1}, "position"),
    ({"piece": np.array([{}] * 9)}, "not a readable .npz file")])
def test_bad_files_are_one_clear_error(fault, message, tmp_path, monkeypatch):
    """Guards against a traceback, or a page with holes, for a file that ground_truth.py did not write or finish."""
    truth = {name: x[..., :9] if x.ndim and len(x.T) > 9 else x for name, x in make_truth(1).items()}  # of 9 tokens
    truth |= {"kind": np.arange(9) % 4} | fault
    np.savez(tmp_path / "truth.npz", **{name: x for name, x in truth.items() if x is not None})
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        run(monkeypatch, tmp_path / "truth.npz")
    assert not (tmp_path / "credit.html").exists()


@pytest.mark.parametrize("arguments, message", [
    ("absent.npz", "does not exist"), ("text.npz", "not a readable"), ("array.npy", "not a readable"),
    ("truth.npz --responses 0", "--responses must be at least 1"), ("truth.npz --out text.npz", "text.npz")])
def test_bad_arguments_are_one_clear_error(arguments, message, tmp_path, monkeypatch):
    """Guards against a traceback for a missing file, a foreign one, or an output folder that is a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "truth.npz", **make_truth(1))
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        run(monkeypatch, *arguments.split())


# ------------------------------------------------------------------------------------------------ in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
const errors = [];
for (const name of ["error", "securitypolicyviolation"]) addEventListener(name, event => errors.push(String(event)));
addEventListener("load", async () => {
  const all = selector => [...document.querySelectorAll(selector)], at = (r, t) => all(`[data-at="${r} ${t}"]`)[0];
  const readout = () => Object.fromEntries(all("dl div").map(pair => [...pair.children].map(e => e.textContent)));
  const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const result = await (async () => { SCRIPT })();
  document.body.textContent = JSON.stringify({errors, result});
});
</script>"""


def browse(text, folder, script):
    """What a script returns that runs in a page, in a window as narrow as a phone; the page must raise no error."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome found: the page is not tried in a browser")
    (folder / "page.html").write_text(text.replace("<title>", PROBE.replace("SCRIPT", script) + "<title>", 1))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--window-size=390,800"]
    command = [CHROMIUM, *flags, "--dump-dom", (folder / "page.html").as_uri()]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120).stdout
    answer = json.loads(html.unescape(re.search(r"<body[^>]*>(.*)</body>", printed, re.S)[1]))
    assert answer["errors"] == []
    return answer["result"]


def test_colours_follow_the_quantity(truth, tmp_path):
    """Guards against colours or an address of another quantity, and a sign that only colour shows."""
    text, data, shown = page_of(truth, 4)
    views = browse(text, tmp_path, r"""at(1, 4).focus(); return all("option").map(() => {
      const tokens = all(".tokens span").map(span => getComputedStyle(span));
      const view = [location.hash, $("meaning").textContent,
        tokens.map(style => style.backgroundColor.match(/[\d.]+/g)), tokens.map(style => style.textDecorationLine)];
      press("]");
      return view;
    });""")
    for (hash, meaning, colours, lines), (id, x), quantity in zip(
            views, values_of(truth).items(), data["quantities"], strict=True):
        assert hash == f"#by={id}&response={data['responses'][1]['number']}&token=4" and quantity["meaning"] in meaning
        found, share = np.array(colours, float)[:, :3], x[np.concatenate(shown)] / quantity["scale"]
        found = found / (255 if found.max() > 1 else 1)
        plain = 1 + np.minimum(share, 1)[:, None] * (np.array(to_rgb("#3dbb96")) - 1)
        assert found == pytest.approx(plain if id == "entropy" else shades_of(share), abs=0.01)
        clear = np.abs(share + credit_page.FAINT) > 1e-3  # the page rounds
        below = (share < -credit_page.FAINT) & (id != "entropy")
        assert ((np.array(lines) == "underline") == below)[clear].all()


def test_the_readout_shows_the_numbers_of_the_token(truth, tmp_path):
    """Guards against numbers of a neighbouring token, keys that miss, and links to another view."""
    text, data, shown = page_of(truth, 4)
    last = len(shown[0]) - 1
    moves = [("ArrowRight", 1, 5), ("ArrowLeft", 1, 4), ("ArrowDown", 2, 4), ("ArrowUp", 1, 4), ("Home", 1, 0),
             ("ArrowLeft", 1, 0), ("ArrowUp", 0, 0), ("End", 0, last), ("ArrowRight", 0, last)]
    *views, link = browse(text, tmp_path, f"""
      at(1, 4).focus();
      const view = () => [document.activeElement.dataset.at, readout()];
      const views = {json.dumps([key for key, *_ in moves])}.map(key => (press(key), view()));
      location.hash = "#by=ppo&response={data['responses'][2]['number']}&token=6";
      await new Promise(done => addEventListener("hashchange", done));
      return [...views, view()];
    """)
    assert link[0] == "2 6" and "credit, ppo" in link[1]
    for (focus, readout), (key, r, t) in zip(views, moves, strict=True):
        row = shown[r][t]
        assert focus == f"{r} {t}", key
        assert readout["token"].replace("\xa0", " ") == (truth["piece"][row].replace("\n", "↵") or "■")
        assert readout["kind"] == KINDS[truth["kind"][row]]
        assert readout.get("target") == ["out of reach", "within reach", None][truth["reachable"][row]]
        V = [truth["value"][row], truth["value"][row] + truth["a_star"][row]]
        assert list(map(float, readout["V"].split(" → "))) == pytest.approx(V, abs=6e-4)
        assert float(readout["A*"].split("± ")[1]) == pytest.approx(truth["a_star_error"][row], abs=6e-4)
        for name, values in (values_of(truth) | {"p": np.exp(truth["logprob"])}).items():
            label = {"a_star": "A*", "none": "none (GRPO)"}.get(name, name.replace("_gr", " gr"))
            number = re.match(r"[+−]?[\d.e-]+", readout[label])[0].replace("−", "-")
            assert float(number) == pytest.approx(values[row], abs=6e-3), name


def test_hostile_tokens_are_only_text_and_fit_a_phone(tmp_path, hostile):
    """Guards against a page that runs, hides or cuts off what a model wrote."""
    pieces, found, torn, widths = browse(page_of(hostile, 4)[0], tmp_path, r"""
      const spans = all(".tokens span"), words = spans.filter(span => /^\W?\w{1,9}$/.test(span.textContent));
      const torn = words.filter(span => span.getClientRects().length > 1);
      return [spans.map(span => span.textContent), all("b, img").length, torn.length,
        all("html, .readout").map(element => [element.scrollWidth, element.clientWidth])];
    """)
    assert [piece.replace("\xa0", " ") for piece in pieces[: len(HOSTILE)]] == HOSTILE
    assert [found, torn] == [0, 0]
    assert all(content <= visible <= 500 for content, visible in widths)
