"""The page of experiments/credit_page.py: its data against the file that it shows, and its behaviour in a real browser.

Run it:  python -m pytest tests/test_credit_page.py
"""

import html.parser
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import credit_page

PIECE = re.compile(r"</?(?:think|answer)>| ?[0-9]+| ?[A-Za-z]+| ?[^\sA-Za-z0-9]|\s")
KINDS = ["filler", "operand", "operator", "result", "opening", "verdict", "answer", "tag", "end"]
METHODS = ["none", "ppo", "vineppo", "entropy_weighted"]


def response(rng, numbers, target, right):
    """The pieces of one response, the end token's last: attempts that fail, then one that hits or is given up."""
    text = ""
    for attempt in range(int(rng.integers(1, 4))):
        a, b, c = rng.permutation(numbers)
        text += (
            f" {rng.choice(['Maybe', 'How about', 'Let me try'])} {a} + {b} = {a + b}, {a + b} * {c} = {(a + b) * c}."
        )
        text += f" That is not {target}."
    if right:
        text = f"{text[: -len(f' That is not {target}.')]} That works!"
    return [*PIECE.findall(f"{text}</think>\n<answer>({a} + {b}) * {c}</answer>"), ""]


def kind_of(piece):
    """A kind for a piece, good enough for a test."""
    names = {r"": "end", r" ?\d+": "operand", r" ?[-+*/]": "operator", r"<.*": "tag"}
    return next((KINDS.index(name) for pattern, name in names.items() if re.fullmatch(pattern, piece)), 0)


def make_truth(B=12, seed=0, methods=METHODS):
    """What ground_truth.py might write: V wanders at operands and operators and ends at the outcome."""
    rng, parts, prompts = np.random.default_rng(seed), [], []
    for i in range(B):
        numbers, right = [int(n) for n in rng.integers(1, 20, 3)], i % 3 == 0
        target = int(rng.integers(10, 99))
        pieces = response(rng, numbers, target, right)
        L, kind = len(pieces), np.array([kind_of(piece) for piece in pieces])
        decides = np.isin(kind, (1, 2))
        value = np.clip(0.3 + np.cumsum(np.where(decides, rng.normal(0, 0.08, L), 0)), 0.005, 0.98)
        last = L - 1 - pieces[::-1].index("</think>")  # from there on the outcome is known
        value[last - 14 : last] = 0.9 * right + 0.05
        value = np.concatenate([[0.3], value[:last], np.full(L - last, right)])
        error = np.sqrt(value * (1 - value) / 400)
        p = np.where(decides, rng.uniform(0.05, 0.9, L), rng.uniform(0.9, 1, L))
        prompts.append(f"{numbers} -> {target}")
        parts.append(
            {
                "response": np.full(L, i),
                "group": np.full(L, i // 4),
                "position": np.arange(L),
                "token": rng.integers(0, 900, L),
                "logprob": np.log(p),
                "entropy": -p * np.log(p) * 2,
                "logit_grad": (1 - p) * 1.2,
                "advantage": np.full(L, 1.5 if right else -0.6),
                "reward": np.full(L, 1.1 if right else 0.1),
                "success": np.full(L, float(right)),
                "role": decides * 1,
                "in_answer": np.zeros(L),
                "value": value[:-1],
                "value_error": error[:-1],
                "a_star": np.diff(value),
                "a_star_error": np.sqrt(error[:-1] ** 2 + error[1:] ** 2),
                "kind": kind,
                "reachable": np.where(decides, rng.integers(0, 2, L), -1),
                "piece": np.array(pieces),
            }
        )
    truth = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    truth |= {name: x.astype(np.float32) for name, x in truth.items() if x.dtype == np.float64}
    N = len(truth["position"])
    credits = rng.normal(0, 0.3, (len(methods), N)).astype(np.float32)
    credits[0] = truth["advantage"]
    settings = json.dumps({"model": "countdown-tiny", "samples": 400})
    names = {"kinds": KINDS, "methods": methods, "prompts": prompts, "settings": settings, "complete": True}
    return truth | {"credits": credits} | {name: np.array(x) for name, x in names.items()}


@pytest.fixture(scope="module")
def truth():
    """Twelve responses, a third of them right."""
    return make_truth()


class Reader(html.parser.HTMLParser):
    """Lists the elements of a page and all attributes, and keeps the text of the scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.inside = [], [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        """Remembers an element."""
        self.tags.append(tag)
        self.attributes += attributes
        self.inside = tag == "script"
        self.scripts += [""] * self.inside

    def handle_endtag(self, tag):
        """A script's text is over."""
        self.inside = False

    def handle_data(self, text):
        """A part of a script's text."""
        if self.inside:
            self.scripts[-1] += text


def embedded(text):
    """The data of a page."""
    return json.loads(Reader(text).scripts[0])


def numbers_of(truth):
    """Every quantity (N,) of the menu by its id, worked out here from the file's columns."""
    measures = {"a_star": truth["a_star"]} | dict(zip(truth["methods"].tolist(), truth["credits"]))
    measures["contribution"] = truth["advantage"] * truth["logprob"]
    measures["logit_gradient"] = truth["advantage"] * truth["logit_grad"]
    return measures | {"entropy": truth["entropy"]}


def rows_of(truth, number):
    """The rows of a response of the file."""
    return np.flatnonzero(np.cumsum(truth["position"] == 0) == number + 1)


# ---------------------------------------------------------------------------------------------- data and choice


def test_every_number_of_the_page_is_that_of_the_file(truth):
    """Guards against columns, tokens or responses that change places on their way into the page."""
    data = embedded(credit_page.page(truth, credit_page.choose_responses(truth, 5)))
    expected = numbers_of(truth)
    assert [q["id"] for q in data["quantities"]] == list(expected) and len(data["responses"]) == 5
    for r in data["responses"]:
        rows = rows_of(truth, r["number"])
        assert r["prompt"] == truth["prompts"][r["number"]] and r["right"] == (truth["success"][rows[0]] == 1)
        assert r["piece"] == truth["piece"][rows].tolist()
        assert r["kind"] == truth["kind"][rows].tolist() and r["reachable"] == truth["reachable"][rows].tolist()
        assert [r["reward"], r["advantage"]] == [truth[name][rows[0]] for name in ("reward", "advantage")]
        assert r["p"] == pytest.approx(np.exp(truth["logprob"][rows]), rel=1e-3)
        assert r["V"][:-1] == pytest.approx(truth["value"][rows], rel=1e-3)
        assert r["V"][1:] == pytest.approx(truth["value"][rows] + truth["a_star"][rows], abs=1e-3)
        assert r["V_error"] == pytest.approx([*truth["value_error"][rows], 0], rel=1e-3)
        assert r["a_star_error"] == pytest.approx(truth["a_star_error"][rows], rel=1e-3)
        for values, column in zip(r["values"], expected.values(), strict=True):
            assert values == pytest.approx(column[rows], rel=1e-3)
    assert (
        data["kinds"] == KINDS and data["settings"] == {"model": "countdown-tiny", "samples": 400} and data["of"] == 12
    )


def test_scales_are_those_of_the_responses_shown(truth):
    """Guards against a scale of other tokens, or one of 0 by which everything would be divided."""
    zero = truth | {"credits": np.zeros_like(truth["credits"])}
    zero["credits"][1, :2] = 0.25, -0.5  # of two tokens only: their 98th percentile is 0
    shown = credit_page.choose_responses(zero, 12)
    shown_rows = np.concatenate([rows_of(truth, number) for number, _ in shown[:4]])
    some = {q["id"]: q["scale"] for q in embedded(credit_page.page(truth, shown[:4]))["quantities"]}
    for name, values in numbers_of(truth).items():
        assert some[name] == pytest.approx(np.percentile(np.abs(values[shown_rows]), 98), rel=1e-6), name
    scales = [q["scale"] for q in embedded(credit_page.page(zero, shown))["quantities"]]
    assert scales[1] == 1 and scales[2] == 0.5


def few(largest, success):
    """Responses of two tokens, the first with the larger |A*|, as far as the choice among them needs them."""
    truth = {"position": np.tile([0, 1], len(largest)), "success": np.repeat(success, 2).astype(float)}
    return truth | {"a_star": np.array([[x, -x / 2] for x in largest], float).ravel()}


@pytest.mark.parametrize(
    "largest, success, count, expected",
    [
        ([0.1, -0.9, 0.5, 0.7, -0.2], [1, 0, 1, 0, 0], 4, [2, 1, 0, 3]),
        ([0.1, -0.9, 0.5, 0.7, -0.2], [1, 0, 1, 0, 0], 3, [2, 1, 0]),
        ([0.1, -0.9, 0.5, 0.7, -0.2], [1, 0, 1, 0, 0], 16, [2, 1, 0, 3, 4]),
        ([0.5, 0.5, -0.5], [1, 1, 1], 2, [0, 1]),  # the first of equal ones; there is no wrong one
    ],
)
def test_responses_are_chosen_as_the_page_says(largest, success, count, expected):
    """Guards against a selection other than the stated one: by the largest |A*| of a token, right and wrong in turn."""
    chosen = credit_page.choose_responses(few(largest, success), count)
    assert [number for number, _ in chosen] == expected
    assert all(rows.tolist() == [2 * number, 2 * number + 1] for number, rows in chosen)


def test_the_page_needs_no_network(truth):
    """Guards against a font, a script or a picture from elsewhere: missing offline, and it tells on the readers."""
    text = credit_page.page(truth, credit_page.choose_responses(truth, 3))
    assert set(re.findall(r"\w+://[^\"' ]*", text)) == {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert not re.search(r"url\(|@import|\bimport\b|\bfetch\b|XMLHttp|WebSocket|EventSource|sendBeacon", text)
    links = [value for name, value in Reader(text).attributes if name in ("src", "href", "action", "srcset", "data")]
    assert links == ["data:,"]
    assert ("lang", "en") in Reader(text).attributes and "title" in Reader(text).tags


HOSTILE = [
    "</script><b>bold",
    "&amp;",
    "<!--<script>",
    "\u2028'\"`${1}\\n",
    "DATA PLUS",
    "<img src=x onerror=alert(1)>",
    " ",
    "$\\frac$",
    "W" * 40,
]


@pytest.fixture(scope="module")
def hostile():
    """Responses whose first tokens, prompts, kinds and settings are what a careless page would run or swallow."""
    truth = make_truth(4)
    piece = truth["piece"].astype("<U40")
    for number in range(4):
        piece[rows_of(truth, number)[: len(HOSTILE)]] = HOSTILE
    names = {"prompts": np.array([f"</h2>{HOSTILE[0]}{i}" for i in range(4)]), "kinds": np.array(HOSTILE * 2)}
    return truth | {"piece": piece, "settings": np.array(json.dumps({"model": HOSTILE[0]}))} | names


def test_tokens_can_not_break_out_of_the_data(truth, hostile):
    """Guards against a response that ends the script element: its tags become part of the page, its data are lost."""
    plain, text = (credit_page.page(t, credit_page.choose_responses(t, 4)) for t in (truth, hostile))
    assert Reader(text).tags == Reader(plain).tags and Reader(text).tags.count("script") == 2
    assert Reader(text).scripts[1] == Reader(plain).scripts[1] and Reader(plain).scripts[1].strip().endswith("start();")
    for r in embedded(text)["responses"]:
        assert r["piece"][: len(HOSTILE)] == HOSTILE and r["prompt"] == hostile["prompts"][r["number"]]


# ------------------------------------------------------------------------------------------------ command line


def run(monkeypatch, *arguments):
    """main() with these arguments."""
    monkeypatch.setattr(sys, "argv", ["credit_page.py", *map(str, arguments)])
    credit_page.main()


def pixels(file, colour):
    """How many pixels of a picture have a colour, to rounding."""
    picture = credit_page.plt.imread(file)[..., :3]
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return int((np.abs(picture - wanted).max(-1) < 0.01).sum())


def test_page_and_picture_are_written_always_the_same(tmp_path, monkeypatch, capsys):
    """Guards against a blank picture, a page too large to load, and output that changes from run to run."""
    np.savez_compressed(tmp_path / "truth.npz", **make_truth(20, methods=METHODS + [f"another{i}" for i in range(16)]))
    run(monkeypatch, tmp_path / "truth.npz")
    run(monkeypatch, tmp_path / "truth.npz", "--out", tmp_path / "a" / "b")
    for name in ("credit.html", "credit.png"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "a" / "b" / name).read_bytes()
    text = (tmp_path / "credit.html").read_text(encoding="utf-8")
    assert len(text.encode()) < 1e6 and len(embedded(text)["responses"]) == 16
    assert credit_page.plt.imread(tmp_path / "credit.png").shape[1] == 1440
    assert min(pixels(tmp_path / "credit.png", c) for c in (credit_page.PLUS, credit_page.MINUS)) > 500
    assert "credit.html" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Glyph")  # a character that the font lacks
def test_picture_takes_what_the_page_takes(tmp_path, hostile):
    """Guards against tokens that matplotlib reads as formulas, and a file with right responses only."""
    for i, truth in enumerate(
        (hostile, make_truth(1), make_truth(3) | {"success": np.ones(len(make_truth(3)["token"]))})
    ):
        file = tmp_path / f"{i}.png"
        credit_page.draw(truth, credit_page.choose_responses(truth, 4), file)
        assert pixels(file, credit_page.PLUS) > 500


def broken(truth, name):
    """What stands in a file that is of no use, by the name of its fault."""
    N = len(truth["position"])
    faults = {
        "missing column": {k: x for k, x in truth.items() if k != "a_star_error"},
        "NaN": truth | {"value": np.full(N, np.nan)},
        "shape": truth | {"credits": truth["credits"][:, 1:]},
        "length": truth | {"piece": truth["piece"][1:]},
        "prompts": truth | {"prompts": truth["prompts"][1:]},
        "settings": truth | {"settings": np.array("no JSON")},
        "model": truth | {"settings": np.array("{}")},
        "kinds": truth | {"kinds": np.array(["filler"])},
        "empty": {k: x[:, :0] if k == "credits" else x[:0] if x.shape else x for k, x in truth.items()},
        "unfinished": truth | {"complete": np.array(False)},
        "pickle": truth | {"piece": truth["piece"].astype(object)},
    }
    return faults[name]


@pytest.mark.parametrize(
    "fault, says",
    [
        ("missing column", "a_star_error"),
        ("NaN", "value"),
        ("shape", "credits"),
        ("length", "piece"),
        ("prompts", "prompts"),
        ("settings", "settings"),
        ("model", "settings"),
        ("kinds", "kinds"),
        ("empty", "empty"),
        ("unfinished", "still lacks rollouts"),
        ("pickle", "can't be read"),
    ],
)
def test_bad_files_are_one_clear_error(truth, fault, says, tmp_path, monkeypatch):
    """Guards against a traceback, or a page with holes, for a file that is not what ground_truth.py writes."""
    np.savez(tmp_path / "truth.npz", **broken(truth, fault))
    with pytest.raises(SystemExit, match=f"^error: .*{says}") as stopped:
        run(monkeypatch, tmp_path / "truth.npz")
    assert "\n" not in stopped.value.code and not (tmp_path / "credit.html").exists()


def test_bad_arguments_are_one_clear_error(tmp_path, monkeypatch):
    """Guards against a traceback for a file that is not there, not an .npz, or a number that makes no sense."""
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "truth.npz", **make_truth(2))
    faults = {"absent.npz": "does not exist", "text.npz": "can't be read", "array.npy": "can't be read"}
    for name, says in (faults | {"truth.npz": "--responses must be at least 1"}).items():
        with pytest.raises(SystemExit, match=f"^error: .*{says}") as stopped:
            run(monkeypatch, tmp_path / name, "--responses", 0 if name == "truth.npz" else 1)
        assert "\n" not in stopped.value.code
    with pytest.raises(SystemExit, match="^error: "):  # a file stands where the folder should be
        run(monkeypatch, tmp_path / "truth.npz", "--out", tmp_path / "text.npz")


# ---------------------------------------------------------------------------------------------------- a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIRE = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""  # becomes the browser, which reads its commands from descriptor 3 and answers on 4
FLAGS = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe --window-size=1200,900"
PATIENCE = 15  # seconds for any answer


class Browser:
    """A headless Chromium, driven by the DevTools protocol: JSON messages over two pipes, each ended by a zero byte."""

    def __init__(self, folder):
        (child_in, self.out), (self.into, child_out) = os.pipe(), os.pipe()
        flags = [*FLAGS.split(), f"--user-data-dir={folder}", "about:blank"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", WIRE, str(child_in), str(child_out), CHROMIUM, *flags],
            pass_fds=(child_in, child_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_in)
        os.close(child_out)
        self.count, self.buffer, self.events, self.session = 0, b"", [], None

    def close(self):
        """Ends the browser and all its processes, whatever state it is in."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(PATIENCE)
        os.close(self.out)
        os.close(self.into)

    def receive(self, deadline):
        """The next message."""
        while b"\0" not in self.buffer:
            if not select.select([self.into], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser did not answer in time")
            part = os.read(self.into, 1 << 20)
            if not part:
                raise ConnectionError("the browser has ended")
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def send(self, method, **parameters):
        """Gives a command and returns its result; events that come meanwhile are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while (answer := self.receive(deadline)).get("id") != self.count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def wait(self, method):
        """Waits until an event has happened since the last `wait`."""
        deadline = time.monotonic() + PATIENCE
        while method not in [event["method"] for event in self.events]:
            self.events.append(self.receive(deadline))
        self.events = [event for event in self.events if event["method"] != method]

    def attach(self):
        """Opens a tab and listens to it."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, address):
        """Loads a page anew, with light colours and on a screen, and forgets what happened before."""
        self.send("Emulation.setEmulatedMedia", media="", features=[])
        for target in ("about:blank", address):
            self.events.clear()
            self.send("Page.navigate", url=target)
            self.wait("Page.loadEventFired")

    def run(self, script):
        """The value of an expression, or of a function's body, in the page."""
        script = f"(() => {{ {script} }})()" if "return" in script else script
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def follow(self, fragment):
        """Goes to another fragment of the page, as by a link, and waits until the page has taken notice."""
        self.run(f"new Promise(done => {{ onhashchange = () => done(0); location.hash = '{fragment}'; }})")

    def press(self, key, text=""):
        """A key goes down and up."""
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "Tab": 9}
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                text=text if kind == "keyDown" else "",
                windowsVirtualKeyCode=codes.get(key, 0),
            )

    def mouse(self, script, click=False):
        """The pointer goes to the middle of the element that an expression names, and clicks there if asked to."""
        where = f"const e = {script}; e.scrollIntoView({{block: 'center'}}); const box = e.getClientRects()[0];"
        x, y = self.run(f"{where} return [box.left + box.width / 2, box.top + box.height / 2];")
        for kind in ["mouseMoved"] + ["mousePressed", "mouseReleased"] * click:
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left" if click else "none", clickCount=1)

    def errors(self):
        """What the page complained of, and what it asked of the network, since it was opened."""
        self.run("0")  # so that what was said before has been heard
        complaints = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        away = [url for url in asked if not url.startswith(("file:", "data:", "about:"))]
        return [e["params"] for e in self.events if e["method"] in complaints] + away

    def readout(self):
        """The numbers of the panel, by name, of its first line and of the others."""
        pairs = "[...document.querySelectorAll('#%s div')].map(d => [...d.children].map(c => c.textContent))"
        return dict(self.run(pairs % "token")), dict(self.run(pairs % "credits"))

    def focused(self):
        """Response (number on the page) and token that have the focus, None if it is elsewhere."""
        place = self.run("document.activeElement.dataset.at ?? ''").split()
        return tuple(map(int, place)) or None


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests; without one they are skipped."""
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome found: the page is not tried in a browser")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    try:
        browser.attach()
        yield browser
    finally:
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory, truth):
    """The page of six responses."""
    file = tmp_path_factory.mktemp("page") / "credit.html"
    file.write_text(credit_page.page(truth, credit_page.choose_responses(truth, 6)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def shown(truth):
    """The rows of the responses on the page, in its order."""
    return [rows for _, rows in credit_page.choose_responses(truth, 6)]


def value(text):
    """The first number of a text."""
    return float(re.match(r"[+−]?[\d.e-]+", text)[0].replace("−", "-"))


def check_readout(browser, truth, row):
    """The panel tells the numbers of a row of the file."""
    first, credits = browser.readout()
    assert first["token"].replace("\xa0", " ") == (truth["piece"][row].replace("\n", "↵") or "■")
    assert first["kind"] == KINDS[truth["kind"][row]]
    assert first.get("target") == {0: "out of reach", 1: "within reach", -1: None}[int(truth["reachable"][row])]
    assert value(first["A*"]) == pytest.approx(truth["a_star"][row], abs=6e-4)
    assert float(first["A*"].split("± ")[1]) == pytest.approx(truth["a_star_error"][row], abs=6e-4)
    before, after = map(float, first["V"].split(" → "))
    assert [before, after - before] == pytest.approx([truth["value"][row], truth["a_star"][row]], abs=1.2e-3)
    assert value(first["p"]) == pytest.approx(np.exp(truth["logprob"][row]), abs=6e-4)
    assert value(first["entropy"]) == pytest.approx(truth["entropy"][row], abs=6e-4)
    expected = {name: x[row] for name, x in numbers_of(truth).items() if name not in ("a_star", "entropy")}
    assert [value(text) for text in credits.values()] == pytest.approx(list(expected.values()), abs=6e-3)
    assert [name.replace(" (GRPO)", "").replace(" ", "_") for name in credits] == list(expected)


def rgb(colour):
    """Red, green and blue (3,) in [0, 1] of a computed colour, `rgb(...)` or `color(srgb ...)`."""
    assert colour.startswith(("rgb(", "color(srgb ")), colour  # opaque, that is
    numbers = np.array(re.findall(r"[\d.]+(?:e-\d+)?", colour)[:3], float)
    return numbers / 255 if colour.startswith("rgb") else numbers


def luminance(colour):
    """Relative luminance, as WCAG defines it."""
    c = rgb(colour)
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ (0.2126, 0.7152, 0.0722)


def contrast(one, other):
    """Contrast of two colours, as WCAG defines it."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


STYLES = """return [...document.querySelectorAll('.tokens span')].map(span => {
  const style = getComputedStyle(span);
  return [style.color, style.backgroundColor, style.textDecorationLine];
});"""


def check_shades(styles, shares, signed):
    """Orange above 0, purple and underlined below, white at 0, in proportion; green where there is no sign."""
    for (_, background, line), x in zip(styles, shares, strict=True):
        full = credit_page.PLUS if x > 0 else credit_page.MINUS
        full = np.array([int(full[i : i + 2], 16) / 255 for i in (1, 3, 5)]) if signed else GREEN
        assert rgb(background) == pytest.approx(1 + min(1, abs(x)) * (full - 1), abs=0.01)
        if abs(x + credit_page.FAINT) > 1e-3:
            assert (line == "underline") == (signed and x < -credit_page.FAINT)


GREEN = np.array([0x3D, 0xBB, 0x96]) / 255


def test_colours_follow_the_quantity(browser, address, truth, shown):
    """Guards against colours, a legend or an address of another quantity, and a sign that only colour tells."""
    browser.open(address)
    rows, meanings = np.concatenate(shown), set()
    for q, (name, values) in enumerate(numbers_of(truth).items()):
        menu = f"const menu = document.querySelector('select'); menu.selectedIndex = {q};"
        browser.run(f"{menu} menu.dispatchEvent(new Event('change')); return 0")
        scale, signed = float(np.percentile(np.abs(values[rows]), 98)), name != "entropy"
        check_shades(browser.run(STYLES), values[rows] / scale, signed)
        legend = browser.run("[...document.querySelectorAll('#legend span')].map(e => e.textContent)")[1:]
        ends = [-scale, 0, scale] if signed else [0, scale / 2, scale]
        assert [value(text.lstrip("≤≥ ")) for text in legend] == pytest.approx(ends, abs=0.006 * scale)
        assert browser.run("document.querySelector('#signs').checkVisibility()") == signed
        assert browser.run("location.hash").startswith(f"#by={name}&")
        meanings.add(browser.run("document.querySelector('#meaning').textContent"))
    assert len(meanings) == len(numbers_of(truth)) and browser.errors() == []


def test_mouse_and_arrow_keys_move_the_readout(browser, address, truth, shown):
    """Guards against numbers of a neighbouring token, a focus that leaves the text, and a wrong way at the borders."""
    browser.open(address)
    check_readout(browser, truth, shown[0][np.abs(truth["a_star"][shown[0]]).argmax()])  # before anything is done
    browser.mouse("document.querySelector('[data-at=\"1 4\"]')", click=True)
    browser.run("window.addEventListener('keydown', event => { window.held = event.defaultPrevented; })")
    moves = [(None, 1, 4), ("ArrowRight", 1, 5), ("ArrowLeft", 1, 4), ("ArrowDown", 2, 4), ("ArrowUp", 1, 4)]
    moves += [("Home", 1, 0), ("ArrowLeft", 1, 0), ("ArrowUp", 0, 0), ("ArrowUp", 0, 0), ("End", 0, len(shown[0]) - 1)]
    moves += [("ArrowRight", 0, len(shown[0]) - 1), ("ArrowDown", 1, min(map(len, (shown[0], shown[1]))) - 1)]
    for key, r, t in moves:
        if key:
            browser.press(key)
            assert browser.run("window.held") or (key, r) == ("ArrowUp", 0), key  # or the page would scroll as well
        assert browser.focused() == (r, t), key
        number = credit_page.choose_responses(truth, 6)[r][0]
        assert browser.run("location.hash") == f"#by=a_star&response={number}&token={t}"
        check_readout(browser, truth, shown[r][t])
        stops = browser.run("[...document.querySelectorAll('.tokens [tabindex=\"0\"]')].map(s => s.dataset.at)")
        assert [stop.split()[0] for stop in stops] == list("012345") and f"{r} {t}" in stops
        assert browser.run("[...document.querySelectorAll('[aria-selected=true]')].map(s => s.dataset.at)") == stops
    assert browser.errors() == []


def test_tab_goes_through_control_and_responses(browser, address, truth, shown):
    """Guards against a control out of the keyboard's reach, and a tab stop on each of a thousand tokens."""
    browser.open(address)
    places = []
    for _ in range(4):
        browser.press("Tab")
        places.append(browser.focused() or browser.run("document.activeElement.id"))
    peaks = [int(np.abs(truth["a_star"][rows]).argmax()) for rows in shown]
    assert places == ["quantity", (0, peaks[0]), (1, peaks[1]), (2, peaks[2])]
    check_readout(browser, truth, shown[2][peaks[2]])


def test_pointing_shows_without_choosing(browser, address, truth, shown):
    """Guards against a pointer that takes the focus along, and numbers that stay when it has left."""
    browser.open(address)
    browser.mouse("document.querySelector('[data-at=\"0 2\"]')", click=True)
    browser.mouse("document.querySelector('[data-at=\"1 7\"]')")
    check_readout(browser, truth, shown[1][7])
    marked = "[...document.querySelectorAll('circle')].map(c => getComputedStyle(c).display !== 'none')"
    assert browser.focused() == (0, 2) and browser.run(marked) == [r == 1 for r in range(6)]
    browser.mouse("document.querySelector('h1')")
    check_readout(browser, truth, shown[0][2])
    browser.mouse("document.querySelectorAll('circle')[0]", click=True)  # the mark of token 2, in the curve
    assert browser.focused() == (0, 2)
    assert browser.errors() == []


def test_curve_is_V_with_its_interval(browser, address, truth, shown):
    """Guards against steps, marks or a band that are off by a token, upside down, or not where one points."""
    browser.open(address)
    frame = "const svg = document.querySelectorAll('svg')[3], box = svg.getBoundingClientRect();"
    for t in (0, int(np.abs(truth["a_star"][shown[3]]).argmax()), len(shown[3]) - 1):
        browser.run(f"document.querySelector('[data-at=\"3 {t}\"]').focus()")
        x, y = browser.run(
            f"{frame} const c = svg.querySelector('circle'); return [c.cx, c.cy].map(n => n.baseVal.value)"
        )
        zero, _, one = browser.run(f"{frame} return [...svg.querySelectorAll('.grid')].map(g => g.getBBox().y)")
        after = truth["value"][shown[3][t]] + truth["a_star"][shown[3][t]]
        assert (y - zero) / (one - zero) == pytest.approx(after, abs=1e-3)
        browser.run("document.querySelector('[data-at=\"0 0\"]').focus()")
        browser.run(f"{frame} svg.scrollIntoView({{block: 'center'}}); return 0")
        left, top, width = browser.run(f"{frame} return [box.left, box.top, box.width]")
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=left + x / 340 * width, y=top + 60)
        check_readout(browser, truth, shown[3][t])
    hit = "const hit = (part, x, y, how) => svg.querySelector(part)[how](new DOMPoint(x, y));"
    for t, row in enumerate(shown[3]):  # V before token t lies around x, in the middle of its step
        v, error = float(truth["value"][row]), float(truth["value_error"][row])
        x = 44 + 282 * (t + 0.5) / (len(shown[3]) + 1)
        heights = [128 - 120 * (v + e * error) for e in (0, -1.8, 1.8, -2.1, 2.1)]
        found = browser.run(
            f"{frame} {hit} return [hit('.step', {x}, {heights[0]}, 'isPointInStroke'),"
            f" ...{heights[1:]}.map(y => hit('.band', {x}, y, 'isPointInFill'))]"
        )
        if 2.2 * error < v < 1 - 2.2 * error:  # the band is cut off at 0 and 1
            assert found == [True, True, True, False, False], t
    band = "const b = document.querySelectorAll('.band')[%d].getBBox(); return [b.y, b.y + b.height]"
    assert all(8 <= top < low <= 128 for top, low in (browser.run(band % r) for r in range(6)))
    assert browser.errors() == []


def test_brackets_change_the_quantity(browser, address, truth):
    """Guards against keys that do nothing, or go past the ends of the menu."""
    browser.open(address)
    ids = list(numbers_of(truth))
    for key, expected in (("]", 1), ("]", 2), ("[", 1), ("[", 0), ("[", len(ids) - 1), ("]", 0), ("]", 1)):
        browser.press(key, key)
        assert browser.run("document.querySelector('select').selectedIndex") == expected
        assert browser.run("location.hash").startswith(f"#by={ids[expected]}&")
    browser.mouse("document.querySelector('[data-at=\"1 4\"]')", click=True)
    browser.press("]", "]")
    assert browser.focused() == (1, 4) and "credit, ppo" in browser.readout()[0]
    assert browser.errors() == []


def test_the_address_restores_the_view(browser, address, truth, shown):
    """Guards against a link that shows another view than the one it was copied from."""
    browser.open(address)
    browser.mouse("document.querySelector('[data-at=\"3 6\"]')", click=True)
    browser.press("]", "]")
    before, link = browser.run(STYLES), browser.run("location.href")
    browser.events.clear()
    browser.send("Page.reload")
    browser.wait("Page.loadEventFired")
    for _ in range(2):
        assert browser.focused() == (3, 6) and browser.run(STYLES) == before
        check_readout(browser, truth, shown[3][6])
        browser.open(link)
    number = credit_page.choose_responses(truth, 6)[0][0]
    for place in (f"response={number}&token=length", f"response={number}&token=999", "response=none&token=2"):
        browser.follow(f"#by=entropy&{place}")  # a link may be old, or mistyped
        assert browser.run("document.querySelector('select').value") == "entropy" and browser.focused() == (3, 6)
    assert browser.errors() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(browser, address, scheme):
    """Guards against letters that drown in a strong colour: WCAG AA asks for a contrast of 4.5 of every text."""
    browser.open(address)
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) > 0.9) if scheme == "light" else (luminance(paper) < 0.05 and paper != light)
    for quantity in ("a_star", "none", "entropy"):
        browser.follow(f"#by={quantity}")
        shades = {(ink, shade) for ink, shade, _ in browser.run(STYLES)}
        assert min(contrast(*shade) for shade in shades) >= 4.5
        assert max(contrast(paper, shade) for _, shade in shades) > 1.8  # and yet the full colour is seen
    for what in ("p", "dt", "dd", "h2", "svg text", ".legend span"):
        property = "fill" if what == "svg text" else "color"
        for ink in browser.run(f"[...document.querySelectorAll('{what}')].map(e => getComputedStyle(e).{property})"):
            assert contrast(ink, paper) >= 4.5, what


def test_print_leaves_the_controls_out(browser, address):
    """Guards against paper with menus on it, without colours, in white on black, or without what is shown."""
    browser.open(address + "#by=ppo")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.send("Emulation.setEmulatedMedia", media="print", features=features)
    seen = "[...document.querySelectorAll('%s')].some(e => e.checkVisibility())"
    assert not any(browser.run(seen % part) for part in ("select", ".controls", ".readout", ".mark"))
    assert all(browser.run(seen % part) for part in ("#meaning", "#legend", ".tokens span", "svg", "#choice"))
    assert browser.run("document.querySelector('#meaning').textContent").startswith("Coloured by credit, ppo")
    assert browser.run("document.querySelector('#choice').textContent").startswith("6 of 12 responses, chosen: ")
    style = "const s = getComputedStyle(document.querySelector('%s')); return [s.printColorAdjust, s.breakInside]"
    assert browser.run(style % ".tokens span")[0] == "exact" and browser.run(style % "article")[1] == "avoid"
    assert luminance(browser.run("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert browser.errors() == []


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_cut_off(browser, address, width):
    """Guards against text that runs out of a telephone's screen, and a bar or panel that hides what has the focus."""
    browser.open(address)
    browser.send("Emulation.setDeviceMetricsOverride", width=width, height=640, deviceScaleFactor=1, mobile=width < 400)
    try:
        for part in ("html", ".readout"):
            wide = browser.run(f"const e = document.querySelector('{part}'); return [e.scrollWidth, e.clientWidth]")
            assert wide[0] <= wide[1] <= width
        torn = "[...document.querySelectorAll('.tokens span')].filter(s => s.getClientRects().length > 1)"
        assert browser.run(torn + ".filter(s => !s.textContent.includes('\\n')).map(s => s.textContent)") == []
        browser.run("document.querySelector('[data-at=\"0 0\"]').focus()")
        for key in ["ArrowDown"] * 5 + ["End"] + ["ArrowUp"] * 5:
            browser.press(key)
            top, low, panel, bar = browser.run(
                "const of = element => element.getBoundingClientRect(), part = name => document.querySelector(name);"
                "const box = of(document.activeElement);"
                "return [box.top, box.bottom, of(part('.readout')).top, of(part('.bar')).bottom];"
            )
            assert bar <= top and low <= panel
    finally:
        browser.send("Emulation.clearDeviceMetricsOverride")


def test_hostile_tokens_are_only_letters(browser, tmp_path, hostile):
    """Guards against a page that runs, or hides, what a model wrote."""
    (tmp_path / "hostile.html").write_text(
        credit_page.page(hostile, credit_page.choose_responses(hostile, 4)), encoding="utf-8"
    )
    browser.open((tmp_path / "hostile.html").as_uri())
    pieces = browser.run(
        "[...document.querySelectorAll('.tokens')[1].querySelectorAll('span')].map(e => e.textContent)"
    )
    assert [piece.replace("\xa0", " ") for piece in pieces[: len(HOSTILE)]] == HOSTILE
    for t, piece in enumerate(HOSTILE):
        browser.mouse(f"document.querySelector('[data-at=\"1 {t}\"]')", click=True)
        assert browser.readout()[0]["token"].replace("\xa0", " ") == piece
    assert browser.run("document.querySelectorAll('b, img').length") == 0
    browser.send("Emulation.setDeviceMetricsOverride", width=320, height=640, deviceScaleFactor=1, mobile=True)
    wide = browser.run("document.documentElement.scrollWidth")
    browser.send("Emulation.clearDeviceMetricsOverride")
    assert wide == 320
    assert browser.run("document.querySelector('h2').textContent").startswith("</h2></script><b>bold")
    assert browser.errors() == []
