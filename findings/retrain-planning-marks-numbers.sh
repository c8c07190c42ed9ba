#!/usr/bin/env bash
# in short (trainers): HICRA's and SEPA's planning mask takes in two or three tokens before each phrase, and never sees
# "Wait, let me" or "that's not right".
# guessed: retrain's planning tokens, which HICRA amplifies and SEPA leaves out of its pool, are those of the strategic
# phrases: of the 18 that it has, or of one's own
# seen: a window of five tokens that has the phrase anywhere is marked from its first token on, so of text before the
# phrase two tokens are planning, too, three where it has two words: in "is 54. Wait let me" the 54 and its period. And
# fragments are joined by spaces. GPT-2's, Llama 3's and Qwen's tokenizers cut punctuation and 's off, so "that's not
# right" and "that doesn't work" of the 18 never match, nor does "wait let me" where a comma stands in it, nor any word
# of two tokens. With transform_mode = "gtpo_hicra" a result before "double check" is paid as planning
# with: retrain 0.3.0, tokenizers 0.23.3
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install -q retrain==0.3.0 tokenizers==0.23.3
venv/bin/python -W ignore - <<'EOF'
from retrain.advantages import DEFAULT_STRATEGIC_GRAMS, compute_composable_advantages
from retrain.config import TrainConfig
from retrain.planning import create_planning_detector
from tokenizers import pre_tokenizers

cut = pre_tokenizers.ByteLevel(add_prefix_space=False)  # as GPT-2's: a tokenizer may cut these further, but joins none
detector = create_planning_detector(TrainConfig())


def planning(text):
    """The tokens of a text, and which of them are planning."""
    tokens = [token for token, _ in cut.pre_tokenize_str(text)]
    return tokens, detector.detect(tokens)


found = {}  # phrase -> how many tokens before it, and of it, are marked
for phrase in DEFAULT_STRATEGIC_GRAMS:
    before, whole = "3 + 4 is 7 then", f"3 + 4 is 7 then {phrase} 8 + 9"
    n, (tokens, mask) = len(planning(before)[0]), planning(whole)
    found[phrase] = sum(mask[:n]), sum(mask[n:])
    print(f"{phrase}:", *(token.lstrip("Ġ") for token, marked in zip(tokens, mask) if marked))
unseen = ["that's not right", "that doesn't work"]
for phrase, marked in found.items():
    n = len(phrase.split())
    assert marked == ((0, 0) if phrase in unseen else (5 - n, n))
assert detector.detect(["let", "Ġme", "Ġver", "ify"]) == [0] * 4
for text, n in ("7 times 8 is 54. Wait let me see", 5), ("7 times 8 is 54. Wait, let me see", 0):
    tokens, mask = planning(text)
    credit = compute_composable_advantages([1.0, 0.0], [[-0.5] * len(tokens)] * 2, [mask] * 2,
                                           transform_mode="gtpo_hicra").token_advs[0]
    print(*(f"{token.lstrip('Ġ')} {c:.2f}" for token, c in zip(tokens, credit)))
    assert sum(mask) == sum(c > 0.55 for c in credit) == n and mask[tokens.index("Ġ54")] == (n > 0)
EOF
