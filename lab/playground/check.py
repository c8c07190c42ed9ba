"""What the playground does in a browser: its speed, what 60 steps gain, and its live truth against the recorded one.

It opens the page in headless Chromium, and takes about twenty minutes of one core.

Run it:  python -m lab.playground.check        writes lab/playground/checks.md and playground.png
"""
import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np

import countdown_task
from lab.playground.__main__ import HERE, TRUTH
from lab.playground.browser import CHROMIUM, Browser
from lab.playground.pack import pack_puzzles
from lab.truth.file import read_truth
from plumbing.progress import Progress, one_sentence
from plumbing.report import Table

STEPS, SEEDS, TOKENS, CONTINUATIONS = 60, 3, 30, 200
ADVANTAGES = ("grpo", "rloo")
# In the worker: what the page's buttons do, without the page.
WORKER = """
async function inWorker(script) {
  const source = $("engine").textContent + `
    ;onmessage = async ({data: [data, given]}) => {
      const playground = new Playground(data, () => {});
      postMessage(await (async () => { SCRIPT })());
    };`.replace("SCRIPT", script);
  const worker = new Worker(URL.createObjectURL(new Blob([source], {type: "text/javascript"})));
  return new Promise((go, no) => {
    worker.onmessage = ({data}) => { worker.terminate(); go(data); };
    worker.onerror = event => no(new Error(event.message));
    worker.postMessage([JSON.parse($("data").textContent), GIVEN]);
  });
}
"""
SPEED = """
  const method = {advantage: "grpo", rule: "none", amount: 0}, found = [];
  for (let i = 0; i < 5; i++) {
    const started = performance.now(), rows = data.training.slice(4 * i, 4 * i + 4).flatMap(
      puzzle => playground.sampleGroup(puzzle, generator(i)));
    const sampled = performance.now();
    playground.takeStep(rows, playground.creditOf(rows, method));
    found.push([1000 * rows.reduce((sum, row) => sum + row.tokens.length, 0) / (sampled - started),
                (performance.now() - started) / 1000]);
  }
  return found;"""
GAIN = """
  const method = {advantage: given.advantage, rule: "none", amount: 0};
  playground.reset({seed: given.seed});
  const before = playground.success(given.puzzles);
  data.heldout = [];  // no test on the way
  while (playground.steps < given.steps) playground.trainStep(method);
  return [before, playground.success(given.puzzles)];"""
LIVE = """
  return given.tokens.map(([r, t], i) => {
    const row = playground.recorded[r];
    Object.assign(playground, {rows: [row], puzzle: data.truth.puzzles[row.puzzle]});
    const live = playground.liveTruth(0, t, generator(i));
    while (live.n < given.continuations) live.add();
    return live.estimate();
  });"""


def choose_tokens(truth: dict, count: int) -> list[tuple[tuple[int, int], int]]:
    """((response, position), row) of tokens drawn by a hash, half of them with |A*| above 0.1, all with rollouts."""
    def order(row: int) -> str:
        return hashlib.sha256(str(row).encode()).hexdigest()
    large = np.abs(truth["a_star"]) > 0.1
    drawn = [row for group in (large, ~large & (truth["packets"] > 0))
             for row in sorted(np.flatnonzero(group).tolist(), key=order)[: count // 2]]
    return [((int(truth["response"][row]), int(truth["position"][row])), row) for row in drawn]


def in_worker(browser: Browser, script: str, given: dict) -> list:
    """What a script returns that runs beside a playground of its own, in a worker of the page."""
    head = WORKER.replace("GIVEN", json.dumps(given))
    return browser.run(f"(() => {{ {head}; return inWorker({json.dumps(script)}); }})()")


def picture(browser: Browser) -> None:
    """What the page shows of the token that decided most."""
    browser.until('responses.rows.length && $("scores").children.length')
    browser.until('$("status").textContent.startsWith("solves")')
    browser.run('$("skip").click(), set({band: "gradient"}), choose(...responses.decisive())')
    browser.until('$("others").textContent.includes("%")')
    browser.run("scrollTo(0, 0)")
    browser.screenshot(HERE / "playground.png")


def rows_of_speed(browser: Browser) -> list[list[str]]:
    """How fast the page samples, and takes a step."""
    speeds = np.median(in_worker(browser, SPEED, {}), axis=0)
    return [["tokens sampled a second", f"{speeds[0]:,.0f}"], ["seconds a step of 4 x 8 responses", f"{speeds[1]:.2f}"]]


def row_of_gains(browser: Browser, advantage: str, progress: Progress) -> list[str]:
    """What STEPS steps gain on puzzles that were not trained on."""
    gains, puzzles = [], pack_puzzles(countdown_task.load("heldout", 512))
    for seed in range(SEEDS):
        given = {"advantage": advantage, "seed": seed, "steps": STEPS, "puzzles": puzzles}
        before, after = in_worker(browser, GAIN, given)
        gains.append(100 * (after - before))
        progress.show(ADVANTAGES.index(advantage) * SEEDS + seed + 1)
    return [f"points gained in {STEPS} steps of {advantage.upper()}, from {100 * before:.1f}% of {len(puzzles)} "
            f"held-out puzzles, seeds 0 to {SEEDS - 1}",
            f"{', '.join(f'{gain:.1f}' for gain in gains)}; mean {np.mean(gains):.1f}"]


def row_of_live_truth(browser: Browser, truth: dict) -> list[str]:
    """How many live estimates lie where the recorded ones say."""
    places, rows = zip(*choose_tokens(truth, TOKENS))
    live = in_worker(browser, LIVE, {"tokens": places, "continuations": CONTINUATIONS})
    errors = np.hypot([estimate["error"] for estimate in live], truth["a_star_error"][list(rows)])
    apart = np.abs([estimate["value"] for estimate in live] - truth["a_star"][list(rows)])
    return [f"tokens whose live A*, {CONTINUATIONS} continuations a side, is inside the combined 95% interval",
            f"{(apart < 1.96 * errors).sum()} of {len(rows)}"]


@one_sentence()
def main() -> None:
    """Measure, and write the table."""
    if not CHROMIUM:
        raise ValueError("no chromium, chromium-browser or google-chrome found: install one of them")
    truth, progress = read_truth(TRUTH / "ground_truth.npz"), Progress("trainings", len(ADVANTAGES) * SEEDS)
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder), height=860) as browser:
        browser.open((HERE / "playground.html").as_uri())
        picture(browser)
        rows = [*rows_of_speed(browser), row_of_live_truth(browser, truth),
                *(row_of_gains(browser, advantage, progress) for advantage in ADVANTAGES)]
    table = Table("The page in headless Chromium", "Speed: medians of five steps, on one of two idle cores.",
                  ["measured", "figure"], rows)
    (HERE / "checks.md").write_text(str(table), encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
