"""The number that a written answer names, whatever is around it: `number`, by which tasks/math_task.py grades."""
import re
from fractions import Fraction
from unicodedata import normalize

from tasks.text import with_slashes, without_latex

MAX_LENGTH = 100  # characters of an answer
LETTER = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024fµμΩ"  # Latin, and units: others may be numbers
CURRENCY = "$£¥¢\u20a0-\u20cf"
EMOJI = "✓✔✅☑⭐\ufe0f\U0001f300-\U0001f64f\U0001f680-\U0001f6ff\U0001f900-\U0001faff"
# Words and marks that change nothing; the second line: 7-year-old, km/h, kg/m.
AROUND = rf"""(?:[{LETTER}{CURRENCY}{EMOJI}\s.,:;!?'"“”‘’«»()\[\]{{}}*_`#=%°…•~∼≈≃≅→⇒∴]
    |(?<=[0-9{LETTER}{CURRENCY}])[-/](?=[{LETTER}]{{2}}|[hs]\b)|(?<=[{LETTER}])/(?=[mlL]\b))*"""
UNIT = rf"""(?:[kcdmn]?m|[km]?g|[cdm]?[lL]|[mn]?s|min|sec|hr?s?|d|wks?|yrs?|ft|in|yds?|mi|lbs?|oz|[ap]\.?m|[AP]\.?M
    |mp[hg]|km?ph|kmh|rpm|[KkMGT]B|[kMG]?Hz|kWh|[kMG]?[WJNV]|dB|hp|[cptACF]|[pq]ts?|tb?sp|pcs?|sq|ppl|GBP|CHF|Rs|kr
    |[A-Z]{{2,3}}s)(?![{LETTER}])"""  # may follow without a space, but 5k and 7x are not 5 and 7
WHOLE = "(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}|[0-9]+)"  # 7, 1,234, 12,34,567
DECIMAL = rf"(?:{WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"  # 7.5, .5
NUMBER = re.compile(rf"""{AROUND}(?<![0-9{LETTER}.,)])([-+]?)[{CURRENCY}]?(?P<digits>
    (?:({WHOLE})[ \u00a0](?=[0-9]+/[0-9]+(?![.,]?[0-9])))?({DECIMAL})(?:/([-+]?{DECIMAL}))?     # 1 1/2; 7, 3/4, 7/-2
    )(?:(?={UNIT})|(?![{LETTER}])){AROUND}""", re.VERBOSE)
# What makes it another number, a bound, or no answer: anywhere, right before the digits, or right after them.
PART = "third|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|[a-z]+teen|[a-z]+tie)th"
ANYWHERE = re.compile(rf"""(?ix)\b(?:zero|one|(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve)(?:e?s)?
    |[a-z]+teen|(?:twen|thir|for|fif|six|seven|eigh|nine)t(?:y|ies)|dozens?|(?:hundred|thousand|[a-z]*illion)(?:th)?s?
    |half|halves|quarters?\s+(?:of|to|past)|(?:{PART})(?:s|\s+of)                                      # a part
    |twice|double|triple|negative|minus|plus|(?:divided|multiplied)\s+by                               # an operator
    |or|at\s+(?:least|most)|not|nor|never|neither|cannot
    |(?:(?:is|was)\s|[?!.,;:]+)\s*(?:wrong|incorrect|false|excluded|ruled\s+out))\b|n['’]t\b|!=|~~|[👎🚫]|[🔟💯]
    |[{CURRENCY}]\s?[0-9.,]+\s?m\b|[^\W_](?:\*\*?(?=[^\W_])|[ ]+\*\s)|\.[0-9]+\s?(?:\.\.|…)""")  # $3m, x*7, 0.3...
BEFORE = re.compile(rf"""(?ix)(?:\bthan\b[^.,:;=]*|[{LETTER}]\}}?(?:\(|_\{{?)                           # f(7), x_7
    |\b(?:over|under|above|below|beyond|exceed(?:s|ing)?|up\s+to|almost|nearly                         # a bound
    |no|except(?:\s+for)?|excluding|without|(?:all|nothing|anything)\s+but                             # denied
    |times|root|sqrt|log|ln|exp|sin|cos|tan|mod|(?:out|instead|short|shy|none|root|square|cube|log(?:arithm)?|factorial
        |reciprocal|inverse|opposite|multiple|factor|fraction|part|percent)\s+of(?:\s+[a-z]+){{0,2}}))
    [\s({{{CURRENCY}~≈+-]*\Z""")
# A scale in many languages. An abbreviation that is no UNIT, without a vowel, may be another one: it is refused, too.
SCALE = r"""(?:grand|lakhs?|lacs?|crores?|thou|tausend|mille|mila|ribu|juta|tys\w*|mi[oa]|(?:m|b|tr)ill?|basis\s+points?
    |(?:mil(?!liamp)|bil(?!liards?\b))(?:l?i[oa]|l?[oó]n|[jyh])\w*|pro\s*mille|per\s*mill?e?)"""
AFTER = re.compile(rf"""(?sx)[^{LETTER}]*(?i:(?:cub|[a-z]{{4,}})ed
    |factorial|pi|mod(?:ulo)?|choose|max(?:imum)?|minimum|and|exclusive|recurring|repeat(?:ing|ed)|periodic
    |(?:degrees?\s+)?below|to\s+the\s+(?:power|{PART})|(?:in\s+)?(?:debt|binary|octal|hex(?:adecimal)?)|in\s+base)\b
    |.*\b(?:and\s+an?|(?:than|times|over)\s+[b-zB-Z])\b                            # 7 feet and an inch, 7 more than x
    |[\s{{}}()*$_~{CURRENCY}-]*(?:[A-Z]{{3}}\s+)?(?:(?i:{SCALE})\b                       # 7 Mio, 7 EUR mln
    |(?!{UNIT}|[aI]\s)(?:[A-Za-z]|(?i:[b-df-hj-np-tv-xz]){{2,}})(?![{LETTER}'’]))""")  # 7 x, 5 k, but $7 a day
SEPARATOR = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|,\\!\s?|[\u00a0\u2009\u202f'’])(?=[0-9]{3}(?![0-9]))")  # 1{,}234
MARKS = re.compile(r"\\(?:approx|sim(?:eq)?|therefore|because|implies|Rightarrow|checkmark|degree|pounds)"
                   r"(?![A-Za-z])"  # such as ~
                   r"|\^\{?\\circ\b\}?")  # 90°
AREA = re.compile(r"(?<![A-Za-z])((?:[kcdm]?m|ft|in|yd|mi|s|[A-Za-z]{3,})\s?\}?)(?:[²³]|\^\{?-?[1-3]\}?|(?<=m)[23]\b)")


def number(text: str) -> Fraction | None:
    r"""The one number of a text, whatever words, marks and LaTeX are around it: `**$1,234.00**`, `\boxed{7}`, `x = 7`.

    None where there is no number or a second one, which may be a word (`seven or 8`); where words or signs make it
    another (`7 squared`, `a quarter of 7`, `7 Mio`, `7x`) or may (`7 zzz`, no known unit), a bound (`less than 7`) or
    none (`not 7`, `7 omitted`); and for operators (`3 + 4`), exponents, ordinals, letters that are not Latin, and more
    than 100 characters. `50%` is 50, as in GSM8K, `~7` and `7 m²` are 7, and `- 3` is -3.
    """
    text = plain(text) if len(text) <= MAX_LENGTH else ""
    found = NUMBER.fullmatch(text)
    if not found or ANYWHERE.search(text):
        return None
    if BEFORE.search(text[: found.start("digits")]) or AFTER.match(text[found.end("digits") :]):
        return None
    sign, _, *parts = found.groups()
    whole, above, below = (Fraction((part or default).replace(",", "")) for part, default in zip(parts, "011"))
    if below == 0 or whole and above >= below:  # 5 6/2 is no mixed number
        return None
    return (whole + above / below) * (-1 if sign == "-" else 1)


def plain(text: str) -> str:
    r"""A text without LaTeX, thousands separated by commas, fractions with a slash: `1\frac{1}{2}` becomes `1 1/2 `."""
    text = re.sub(r"(?<=[0-9])\s?(?=[¼-¾⅐-⅞]|\\[cdt]?frac|\{[^{}]*\\over(?![A-Za-z]))", " ", SEPARATOR.sub(",", text))
    text = re.sub("[¼-¾⅐-⅞]", lambda sign: normalize("NFKC", sign[0]) + " ", text).replace("\u2044", "/")
    text = MARKS.sub(" ", without_latex(with_slashes(text, "{}/{} "))).strip()
    text = re.sub(r"(?i)\b(?:minus|negative)\s", "- ", AREA.sub(r"\1", text))
    return re.sub(r"(^|[=:(\[{*_`$\"“/]) *([-+]) +", r"\1\2", text)  # - 3 is -3; x - 3 stays
