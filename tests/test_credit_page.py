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


class Reader(html.parser.HTMLParser):
    """The elements of a page with their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Remember an element."""
        self.tags.append((tag, attributes))


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
    names = [quantity["name"] for quantity in data["quantities"]]
    assert names[:3] == ["A*", "credit, none (GRPO)", "credit, ppo"]
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
    assert [data["kinds"], data["settings"]["samples"], data["total"]] == [KINDS, 400, 12]


def test_scales_are_those_of_the_responses_shown(truth):
    """Guards against a scale of other tokens, and a scale of 0, by which everything would be divided."""
    _, data, shown = page_of(truth, 4)
    rows = np.concatenate(shown)
    for quantity, values in zip(data["quantities"], values_of(truth).values()):
        assert quantity["scale"] == pytest.approx(np.percentile(np.abs(values[rows]), 98), rel=1e-6)
    sparse = np.zeros_like(truth["credits"])
    sparse[1, :2] = 0.25, -0.5  # two tokens only: the 98th percentile is 0
    scales = [quantity["scale"] for quantity in page_of(truth | {"credits": sparse}, 12)[1]["quantities"]]
    assert scales[1:3] == [1, 0.5]


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
    attributes = [pair for _, attributes in Reader(text).tags for pair in attributes]
    assert [value for name, value in attributes if name in ("src", "href", "action", "srcset")] == ["data:,"]


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
    assert Reader(text).tags == Reader(plain).tags
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


def draw_open(truth, monkeypatch):
    """The axes of the picture, which is neither written nor closed, and the two responses in it."""
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)
    monkeypatch.setattr(plt, "close", lambda _: None)
    shown = credit_page.choose_responses(truth, 12)
    credit_page.draw(truth, shown, None)
    return plt.gcf().axes, credit_page.examples(truth, shown)


def test_picture_shows_tokens_shades_and_V(truth, monkeypatch):
    """Guards against shades, underlines or steps that are off by a token, or of another response or measure."""
    axes, pair = draw_open(truth, monkeypatch)
    assert [response.right for response in pair] == [True, False]
    rows = np.concatenate([response.rows for response in pair])
    for i, (number, here, right) in enumerate(pair):
        head = f"[3, 4, {number}] -> 9: {'right, reward 1.10' if right else 'wrong, reward 0.10'}"
        assert head in [text.get_text() for text in axes[3 * i].texts]
        for text, column in zip(axes[3 * i :], ("a_star", "advantage")):
            share = np.clip(truth[column][here] / np.percentile(np.abs(truth[column][rows]), 98), -1, 1)
            pieces = [t.get_text() for t in text.texts if t.get_text() != head]
            assert pieces == [piece.replace("\n", "↵") or "■" for piece in truth["piece"][here]]
            full = np.where(share[:, None] > 0, to_rgb(credit_page.PLUS), to_rgb(credit_page.MINUS))  # (L, 3)
            shades = np.array([patch.get_facecolor()[:3] for patch in text.patches])  # (L, 3)
            assert shades == pytest.approx(1 + np.abs(share[:, None]) * (full - 1), abs=0.01)
            starts = [patch.get_x() for patch, x in zip(text.patches, share) if x < -credit_page.FAINT]
            assert [line.get_xdata()[0] for line in text.lines] == pytest.approx(np.array(starts) + 0.06)
            for patch, written in zip(text.patches, text.texts[-len(here):]):
                x, y = written.get_position()
                assert [patch.get_x(), patch.get_y() + patch.get_height() / 2] == pytest.approx([x + 0.06, y])
                assert 0 <= x < x + len(written.get_text()) <= text.get_xlim()[1]
                assert text.get_ylim()[1] < y < text.get_ylim()[0]  # the first line at the top
        V, error = truth["value"][here], truth["value_error"][here]
        steps, band = axes[3 * i + 2].lines[0], axes[3 * i + 2].collections[0].get_paths()[0].vertices
        assert steps.get_ydata() == pytest.approx([*V, float(right)])
        assert steps.get_xdata().tolist() == list(range(len(here) + 1))
        for t in range(1, len(here)):
            edges = band[np.isclose(band[:, 0], t - 0.5) | np.isclose(band[:, 0], t + 0.5), 1]
            low, high = max(V[t] - 1.96 * error[t], 0), min(V[t] + 1.96 * error[t], 1)
            assert np.abs(edges - low).min() < 1e-6 and np.abs(edges - high).min() < 1e-6
        named = {float(text.get_text().split()[-1].replace("−", "-")) for text in axes[3 * i + 2].texts}
        assert named == {round(x, 2) for x in truth["a_star"][here][credit_page.landmarks(truth["a_star"][here])]}
    bars = [axes[i].get_xlim()[1] for i in (7, 6)]
    assert bars == pytest.approx([np.percentile(np.abs(truth[name][rows]), 98) for name in ("a_star", "advantage")])


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
def test_picture_takes_hostile_tokens_and_a_single_response(tmp_path, hostile):
    """Guards against tokens that matplotlib reads as formulas, and a file with right responses only."""
    for truth in (hostile, make_truth(1)):
        credit_page.draw(truth, credit_page.choose_responses(truth, 4), tmp_path / "credit.png")
        picture = plt.imread(tmp_path / "credit.png")[..., :3]
        assert picture.shape[1] == 1440
        assert (np.abs(picture - to_rgb(credit_page.PLUS)).max(-1) < 0.01).sum() > 500


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
    (["absent.npz"], "does not exist"), (["text.npz"], "not a readable"), (["array.npy"], "not a readable"),
    (["truth.npz", "--responses", "0"], "--responses must be at least 1"),
    (["truth.npz", "--out", "text.npz"], "text.npz")])
def test_bad_arguments_are_one_clear_error(arguments, message, tmp_path, monkeypatch):
    """Guards against a traceback for a missing file, a foreign one, or an output folder that is a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "truth.npz", **make_truth(1))
    with pytest.raises(SystemExit, match=f"^error: [^\n]*{message}[^\n]*$"):
        run(monkeypatch, *arguments)


# ------------------------------------------------------------------------------------------------ in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
const errors = [];
for (const name of ["error", "securitypolicyviolation"]) addEventListener(name, event => errors.push(String(event)));
addEventListener("load", async () => {
  const all = selector => [...document.querySelectorAll(selector)], texts = selector => all(selector).map(textOf);
  const textOf = element => element.textContent, at = (r, t) => all(`[data-at="${r} ${t}"]`)[0];
  const readout = () => Object.fromEntries(all("dl div").map(pair => [...pair.children].map(textOf)));
  const view = () => [document.activeElement.dataset.at, location.hash, readout()];
  const fire = (element, event) => element.dispatchEvent(event), options = {bubbles: true, cancelable: true};
  const press = key => fire(document.activeElement, new KeyboardEvent("keydown", {key, ...options}));
  const mouse = (element, name, place) => fire(element, new MouseEvent(name, {...options, ...place}));
  const follow = hash => new Promise(done => { addEventListener("hashchange", () => done(0)); location.hash = hash; });
  const result = await (async () => { SCRIPT })();
  document.body.textContent = JSON.stringify({errors, result});
});
</script>"""


def browse(text, folder, script, width=1200):
    """What a script returns that runs in a page, in a window so many pixels wide; the page must raise no error."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome found: the page is not tried in a browser")
    (folder / "page.html").write_text(text.replace("<title>", PROBE.replace("SCRIPT", script) + "<title>", 1))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", f"--window-size={width},800"]
    command = [CHROMIUM, *flags, "--dump-dom", (folder / "page.html").as_uri()]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=120).stdout
    answer = json.loads(html.unescape(re.search(r"<body[^>]*>(.*)</body>", printed, re.S)[1]))
    assert answer["errors"] == []
    return answer["result"]


def value(text):
    """The first number of a text."""
    return float(re.search(r"[+−]?[\d.e-]+", text)[0].replace("−", "-"))


def check_readout(readout, truth, row):
    """The panel shows the numbers of a row of the file."""
    assert readout["token"].replace("\xa0", " ") == (truth["piece"][row].replace("\n", "↵") or "■")
    assert readout["kind"] == KINDS[truth["kind"][row]]
    assert readout.get("target") == ["out of reach", "within reach", None][truth["reachable"][row]]
    before, after = map(float, readout["V"].split(" → "))
    assert [before, after - before] == pytest.approx([truth["value"][row], truth["a_star"][row]], abs=1.2e-3)
    assert value(readout["A*"].split("± ")[1]) == pytest.approx(truth["a_star_error"][row], abs=6e-4)
    for name, expected in ({"A*": truth["a_star"], "p": np.exp(truth["logprob"]), "none (GRPO)": truth["advantage"]}
                           | {name.replace("_gr", " gr"): x for name, x in values_of(truth).items()}).items():
        assert name in ("a_star", "none") or value(readout[name]) == pytest.approx(expected[row], abs=6e-3), name


def test_colours_and_legend_follow_the_quantity(truth, tmp_path):
    """Guards against colours, a legend or an address of another quantity, and a sign that only colour shows."""
    text, data, shown = page_of(truth, 4)
    views = browse(text, tmp_path, r"""return all("option").map((_, i) => {
      $("quantity").selectedIndex = i;
      fire($("quantity"), new Event("change"));
      const tokens = all(".tokens span").map(span => getComputedStyle(span));
      return [location.hash, texts("#legend span").slice(1), $("signs").hidden, $("meaning").textContent,
        tokens.map(style => style.backgroundColor.match(/[\d.]+/g)), tokens.map(style => style.textDecorationLine)];
    });""")
    for (hash, legend, unsigned, meaning, shades, lines), (id, x), quantity in zip(
            views, values_of(truth).items(), data["quantities"], strict=True):
        scale, share = quantity["scale"], x[np.concatenate(shown)] / quantity["scale"]
        assert hash.startswith(f"#by={id}&") and quantity["meaning"] in meaning
        assert unsigned == (id == "entropy")
        ticks = [0, scale / 2, scale] if unsigned else [-scale, 0, scale]
        assert [value(text) for text in legend] == pytest.approx(ticks, abs=0.006 * scale)
        full = np.where(share[:, None] > 0, to_rgb(credit_page.PLUS), to_rgb(credit_page.MINUS))
        full = np.broadcast_to(to_rgb("#3dbb96"), full.shape) if unsigned else full
        found = np.array(shades, float)[:, :3]
        found = found / (255 if found.max() > 1 else 1)
        assert found == pytest.approx(1 + np.minimum(np.abs(share), 1)[:, None] * (full - 1), abs=0.01)
        clear = np.abs(share + credit_page.FAINT) > 1e-3  # the page rounds
        below = (share < -credit_page.FAINT) & (not unsigned)
        assert ((np.array(lines) == "underline") == below)[clear].all()


def test_keys_pointer_and_address_move_the_readout(truth, tmp_path):
    """Guards against numbers of a neighbouring token, a pointer that takes the focus, and links to another view."""
    text, data, shown = page_of(truth, 4)
    last, peaks = len(shown[0]) - 1, [np.abs(truth["a_star"][rows]).argmax() for rows in shown]
    moves = [("ArrowRight", 1, 5), ("ArrowLeft", 1, 4), ("ArrowDown", 2, 4), ("ArrowUp", 1, 4), ("Home", 1, 0),
             ("ArrowLeft", 1, 0), ("ArrowUp", 0, 0), ("ArrowUp", 0, 0), ("End", 0, last), ("ArrowRight", 0, last)]
    start, views, brackets, stops, hover, left, curves, link, stale = browse(text, tmp_path, f"""
      const start = [readout(), all('.tokens [tabindex="0"]').map(span => span.dataset.at)];
      at(1, 4).focus();
      const views = {json.dumps([key for key, *_ in moves])}.map(key => [press(key), ...view()]);
      const brackets = ["]", "]", "[", "[", "["].map(key => (press(key), $("quantity").selectedIndex));
      const stops = all('.tokens [aria-selected="true"]').map(span => span.dataset.at);
      mouse(at(2, 7), "mousemove");
      const hover = view(), svg = all("svg")[3], box = svg.getBoundingClientRect();
      mouse($("responses"), "mouseleave");
      const left = view(), heights = all("svg:first-of-type .grid").slice(0, 3).map(line => line.getBBox().y);
      const curves = [...Array({len(shown[3])}).keys()].map(t => {{
        at(3, t).focus();
        const [x, y] = ["cx", "cy"].map(name => Number(svg.querySelector("circle").getAttribute(name)));
        const drawn = svg.querySelector(".step").isPointInStroke(new DOMPoint(x, y));
        at(0, 0).focus();
        mouse(svg, "mousemove", {{clientX: box.left + x / 340 * box.width}});
        return [(y - heights[0]) / (heights[2] - heights[0]), drawn, readout()];
      }});
      await follow("#by=ppo&response={data['responses'][2]['number']}&token=6");
      const link = view();
      await follow("#by=entropy&response=none&token=2");
      return [start, views, brackets, stops, hover, left, curves, link, view()];
    """)
    check_readout(start[0], truth, shown[0][peaks[0]])
    assert start[1] == [f"{r} {t}" for r, t in enumerate(peaks)]
    for i, ((key, r, t), (unhandled, focus, hash, readout)) in enumerate(zip(moves, views, strict=True)):
        assert focus == f"{r} {t}", key
        assert unhandled == (i == 7)  # where there is no response above; elsewhere the page must not scroll as well
        if not unhandled:
            assert hash == f"#by=a_star&response={data['responses'][r]['number']}&token={t}"
        check_readout(readout, truth, shown[r][t])
    assert brackets == [1, 2, 1, 0, 7]
    assert stops == [f"0 {last}", "1 0", "2 4", f"3 {peaks[3]}"]
    assert [hover[0], left[0]] == [f"0 {last}"] * 2
    check_readout(hover[2], truth, shown[2][7])
    check_readout(left[2], truth, shown[0][last])
    for row, (height, drawn, readout) in zip(shown[3], curves, strict=True):
        assert drawn and height == pytest.approx(truth["value"][row] + truth["a_star"][row], abs=1e-3)
        check_readout(readout, truth, row)
    assert [link[0], "credit, ppo" in link[2]] == ["2 6", True]
    assert [stale[0], stale[1][:11]] == ["2 6", "#by=entropy"]


def test_hostile_tokens_are_only_text_and_fit_a_phone(tmp_path, hostile):
    """Guards against a page that runs, hides or cuts off what a model wrote."""
    pieces, elements, torn, heading, widths = browse(page_of(hostile, 4)[0], tmp_path, r"""
      const words = all(".tokens span").filter(span => /^\W?\w{1,9}$/.test(span.textContent));
      const torn = words.filter(span => span.getClientRects().length > 1);
      return [texts(".tokens span"), all("b, img").length, torn.length, texts("h2")[0],
        all("html, .readout").map(element => [element.scrollWidth, element.clientWidth])];
    """, width=390)
    assert [piece.replace("\xa0", " ") for piece in pieces[: len(HOSTILE)]] == HOSTILE
    assert [elements, torn] == [0, 0]
    assert heading.startswith("</h2></script><b>bold")
    assert all(content <= visible <= 500 for content, visible in widths)
