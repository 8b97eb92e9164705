"""Text as it was published to prose: speeches, tokenised WikiText, MediaWiki dumps.

Pure functions, linear in the length of the text. What goes is what nobody said or wrote as prose;
where a rule could also hit real text it was held against the published files first.
"""

import functools
import html
import io
import re
from collections.abc import Iterable, Iterator

# Speeches ----------------------------------------------------------------------------------------

# Every bracket of the 249 State of the Union texts was looked at. What speaks of the room or of the
# printed page goes. A word supplied in a quotation or a slip ("as [to] the efficacy") is real text
# and stays as printed. Corrections by the White House go: the word that was said stands before.
_ABOUT_THE_ROOM = r"""
    applause|applauded|laughter|inaudible|audience|ovation|silence|joint\ session|House\ Chamber
    |the\ President|First\ Lady|Medal|medal|Purple\ Heart|on\ film\ and\ tape|Released|APP\ Note
    |White\ House\ correction"""
_ASIDE = rf"""(?:
    \[ [^\[\]\n]* \b(?i:{_ABOUT_THE_ROOM})\b [^\[\]\n]* \]
    | \[ [^\[\]\n]* \] (?:\* | (?=\.\*))        # [Ukrainian]*: the star leads to a note
    | \[ p\.\s?\d+ \]                           # a page of the printed edition
    | \[ \d\. \]                                # numbers of the editor's
    | \( (?i:(?:loud|prolonged|applause|laughter|cheers|inaudible|and|[ ])+) [.!]? \)
)"""
_DASHED_ASIDE = re.compile(rf"([ ]?(?:--|—))\s?{_ASIDE}[ ]?(?:--|—)", re.VERBOSE)
_MARK_BEFORE_ANOTHER = re.compile(rf"(?:[ ]?(?:--|—)|,)[ ]?{_ASIDE}(?=[.,;!?])", re.VERBOSE)
_ASIDES = re.compile(rf"([ ]*){_ASIDE}(?:[ ]*{_ASIDE})*([ ]*)(?=(.?))", re.VERBOSE)

# "By an act of [1815-03-03]" is a transcriber's way to write a date the sentence needs, except
# behind "last" and the name of a month, where it repeats one ("the 7th of August last [...]").
_REPEATED_DATE = re.compile(r"(?<=last|pril) \[\d{4}-\d\d-\d\d\]")
_DATE = re.compile(r"\[(\d{4})-\s?(\d\d)(?:-(\d\d))?\]")
_MONTHS = "January February March April May June July August September October November December"

_FOOTNOTE_MARK = re.compile(r"(?<=[a-z]{3}\.)\d(?=\s|$)|(?<=[.,;])\*(?=\s|$)")
_EMPHASIS = re.compile(r"\*(\w[^*\n]*\w)\*")
_OTHER_SPEAKER = re.compile(
    r"(?:^|(?<=\. ))(?:Audience [Mm]embers?|Rep\. [A-Z]\w+)\.(?: .*)?$", re.M
)
_SPEAKER = re.compile(r"^The President\. ", re.M)
_WEB_PAGE = re.compile(r"^Jump to ?Part .*$|^[_ ]*___[_ ]*$", re.M)
_SIGNATURE = re.compile(
    r"(?i:the white house,?)|[A-Z]+(?: [A-Z]\.)? [A-Z]+\.?|"
    rf"(?:{_MONTHS.replace(' ', '|')}) \d+, \d{{4}}\.?"
)
_ODD_SPACES = re.compile(r"[^\S\n]+")
_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff]")
_WRAPPED = re.compile(r" ?\n ?(?=[a-z])|(?<=[^\n]{60}[a-z,]) ?\n ?(?=[^\n]{60})")


def clean_speech(text: str) -> str:
    """The words of the speaker: no stage directions, other voices, editor's notes or signature."""
    text = _INVISIBLE.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _ODD_SPACES.sub(" ", text)
    text = _WEB_PAGE.sub("", text)
    text = _MARK_BEFORE_ANOTHER.sub("", _DASHED_ASIDE.sub(r"\1", text))
    text = _ASIDES.sub(_join_around, text)
    text = _DATE.sub(_written_date, _REPEATED_DATE.sub("", text))
    text = _EMPHASIS.sub(r"\1", _FOOTNOTE_MARK.sub("", text))
    text = _SPEAKER.sub("", _OTHER_SPEAKER.sub("", text))
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = _WRAPPED.sub(" ", paragraph.strip())
        if paragraph:
            paragraphs.append("\n".join(line.strip() for line in paragraph.split("\n")))
    return _without_signature("\n\n".join(paragraphs))


def _join_around(aside: re.Match[str]) -> str:
    """One space where words meet, none before punctuation or at the end of a line."""
    before, after, following = aside.groups()
    return "" if following in ("", *",.;:!?)") else " " if before or after else ""


def _written_date(date: re.Match[str]) -> str:
    year, month, day = date.groups()
    name = _MONTHS.split()[int(month) - 1]
    return f"{name} {int(day)}, {year}" if day else f"{name}, {year}"


def _without_signature(text: str) -> str:
    body, _, last = text.rpartition("\n")
    while _SIGNATURE.fullmatch(last):
        text = body.rstrip()
        body, _, last = text.rpartition("\n")
    return text


# WikiText ----------------------------------------------------------------------------------------

_TITLE = re.compile(r"= ([^=\s].*?) =")
_HEADING = re.compile(r"(?:= ){2,}(.*?)(?: =){2,}")
_JOINED = {"@-@": "-", "@,@": ",", "@.@": ".", "/": "/", "⁄": "⁄", "—": "—", "‑": "‑"}
_CLOSING = set(",.;:!?)]}%”’′″〉°♭♯") | {"!?", "?!", "??"}
_OPENING = set("([{$£€¥₹₤₣“‘„¡¿〈") | {"US$", "A$", "C$"}
_BEFORE_A_NUMBER = set("#~−±")
_CONTRACTED = {"s", "t", "d", "m", "re", "ve", "ll"}


def wikitext_documents(text: str) -> Iterator[tuple[str, str]]:
    """Articles (title, text) of a WikiText raw file, which holds no `<unk>`; headings are lines.

    A title stands between blank lines; ` = Wins ; L = ` in a table's key does not.
    """
    title, paragraphs = "", list[str]()
    lines = ["", *(line.strip() for line in text.split("\n")), ""]
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        if (found := _TITLE.fullmatch(line)) and not before and not after:
            if paragraphs:
                yield title, "\n\n".join(paragraphs)
            title, paragraphs = detokenise_wikitext(found[1]), []
        elif line:
            heading = _HEADING.fullmatch(line)
            paragraphs.append(detokenise_wikitext(heading[1] if heading else line))
    if paragraphs:
        yield title, "\n\n".join(paragraphs)


def detokenise_wikitext(text: str) -> str:
    """Ordinary spacing; quotation marks open and close in turn within a line."""
    text = _INVISIBLE.sub("", text).replace("\x93", "“").replace("\x94", "”")
    return "\n".join(_detokenise_line(line) for line in text.split("\n"))


def _detokenise_line(line: str) -> str:
    tokens = line.split()
    pieces: list[str] = []
    glued = True  # to what stands before
    open_quotes: set[str] = set()
    measures = _measures(tokens)
    for place, token in enumerate(tokens):
        before = tokens[place - 1] if place else ""
        after = tokens[place + 1] if place + 1 < len(tokens) else ""
        if place in measures:
            left, right = True, token == "'"
        elif token == "'":
            left, right = _apostrophe_joins(before, after, tokens[place + 1 :], open_quotes)
        elif token == '"':
            left, right = token in open_quotes, token not in open_quotes
            open_quotes ^= {token}
        else:
            left, right = _token_joins(token, before, after)
        if not (left or glued):
            pieces.append(" ")
        pieces.append(_JOINED.get(token, token))
        glued = right
    return "".join(pieces)


def _measures(tokens: list[str]) -> set[int]:
    """Places of marks that are feet and inches: 5 ' 11 ", and a 12 " single where an odd number of
    quotation marks would leave one open."""
    after_number = {
        place
        for place, token in enumerate(tokens)
        if token in ("'", '"') and place and tokens[place - 1].isdigit()
    }
    feet = {
        place
        for place in after_number
        if tokens[place] == "'" and place + 2 in after_number and tokens[place + 2] == '"'
    }
    measures = feet | {place + 2 for place in feet}
    quotes = [place for place, token in enumerate(tokens) if token == '"' and place not in measures]
    if len(quotes) % 2:
        measures |= set(sorted(after_number.intersection(quotes))[:1])
    return measures


def _token_joins(token: str, before: str, after: str) -> tuple[bool, bool]:
    """Whether a token joins the one before it, and the one after."""
    if token in _JOINED:
        return True, True
    between_numbers = before[-1:].isdigit() and after[:1].isdigit()
    if token == "–":  # 1914–18; between words Wikipedia has it both ways, mostly spaced
        return between_numbers, between_numbers
    if token == ":" and between_numbers and len(after) == 2:  # 7:30
        return True, True
    if token == "°" and after.strip(".,") in ("C", "F"):  # 20 °C, but 30° north
        return False, True
    if token == "&":  # R&B, A&M
        initials = len(before) == len(after) == 1 and (before + after).isupper()
        return initials, initials
    if token in _BEFORE_A_NUMBER:
        return False, after[:1].isdigit() and not (token == "−" and before[-1:].isdigit())
    if token == "]" and len(before) == 1 and before not in "IaA":  # [h]e
        return True, after[:1].islower()
    if token == "’":
        return True, after in _CONTRACTED
    # Never an opening quotation mark, which is a token of its own: do|n't, Boulter|'s, K|'inich.
    return token in _CLOSING or (token[0] == "'" and token[1:2].isalpha()), token in _OPENING


def _apostrophe_joins(
    before: str, after: str, rest: list[str], open_quotes: set[str]
) -> tuple[bool, bool]:
    """A lone ' closes, opens, or stands for letters: the characters' turns, rock 'n roll, '92."""
    later = rest.count("'")
    possessive = before[-1:] in ("s", "z", "x") and (after[:1].islower() or later % 2 == 0)
    if "'" in open_quotes:
        # Inside a quotation it closes, unless a closing one is still to come for the last word.
        if possessive and after[:1].islower() and later % 2 == 1:
            return True, False
        open_quotes.remove("'")
        return True, False
    if possessive:
        return True, False
    if after == "n" or (after[:2].isdigit() and len(after.rstrip("s")) == 2):
        return False, True
    if later == 0:
        return True, False
    open_quotes.add("'")
    return False, True


# MediaWiki ---------------------------------------------------------------------------------------

MIN_LINE = 80  # characters: below are list items, captions and what is left of a table
MIN_ARTICLE = 1000  # characters of prose: below are stubs and pages of lists

_SPACES = {
    "User",
    "Wikipedia",
    "Image",
    "File",
    "MediaWiki",
    "Template",
    "Help",
    "Category",
    "Portal",
}
_NOT_ARTICLES = {"Media", "Special", "Talk", *_SPACES, *(f"{space} talk" for space in _SPACES)}
_PAGE_TITLE = re.compile(r"\s*<title>(.*)</title>")
_TEXT_OPENS = re.compile(r'\s*<text xml:space="preserve">')
_TEXT_CLOSES = "</text>"

# Elements that go with their content; of all other tags the content stays. A formula takes its
# whole paragraph along: "if, and are independent" is no prose.
_FORMULA = "\0"
_DROPPED_ELEMENTS = (
    "ref",
    "gallery",
    "timeline",
    "table",
    "pre",
    "code",
    "source",
    "hiero",
)
_EMPTY_ELEMENT = re.compile(r"<(?:ref|references|br|hr)\b[^<>]*/>|<references\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
# 10<sup>7</sup> is not 107; 5<sup>th</sup> is 5th.
_EXPONENT = re.compile(r"(?:(?<=[\d)])|(?<=\b\w))<sup>(?=[-−+]?(?:\d+|\w)</sup>)", re.I)
_BOOK_NUMBER = re.compile(r"\bISBN\b")
_EXTERNAL_LINK = re.compile(
    r"\[(?:(?:https?|ftp|irc|gopher)://|mailto:|news:)[^\s\[\]]*((?:\s[^\[\]]*)?)\]"
)
_LINK = re.compile(r"\[\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\]")  # single brackets may stand inside
_MAX_NESTED_LINKS = 5  # a picture, its caption, a link in it
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*|simple|tokipona")
_DROPPED_LINKS = {"image", "file", "category", "media"}
_APPARATUS = re.compile(
    r"(?:references?|notes?|footnotes|sources|external links?|see also|further reading|links"
    r"|bibliography|related (?:topics|articles)|literature|publications|discography|filmography)\b",
    re.I,
)
_LIST_MARKER = re.compile(r"^[*#:;]+\s*")
_HATNOTE = re.compile(r"^:+\s*''.*$", re.M)  # :''This article is about ...''
_BARE_URL = re.compile(r"\b(?:https?|ftp)://\S+")
_QUOTE_RUN = re.compile(r"'{2,}")
_MAGIC_WORD = re.compile(r"__[A-Z]+__")
_HOLE = re.compile(r"\s*\([\s,;:]*\)|\s*\[\s*\]")  # where a template or formula was all there was
_EDGE_OF_HOLE = re.compile(r"(?<=\()[\s,;]+|\s+(?=[,.;:)](?:\s|$))")


def wiki_documents(source: str | Iterable[str]) -> Iterator[tuple[str, str]]:
    """Articles (title, prose) of a MediaWiki dump, given as its text or line by line.

    Redirects, other name spaces and articles with little prose are left out, and so is a page that
    the end of the dump cuts off.
    """
    title = ""
    body: list[str] | None = None  # none: not inside a text
    for line in io.StringIO(source) if isinstance(source, str) else source:
        if body is None:
            if found := _PAGE_TITLE.match(line):
                title = html.unescape(found[1])
            elif found := _TEXT_OPENS.match(line):
                body, line = [], line[found.end() :]
        if body is not None:
            last, closes, _ = line.partition(_TEXT_CLOSES)
            body.append(last)
            if closes:
                text, body = html.unescape("".join(body)), None
                if title.partition(":")[0] in _NOT_ARTICLES or _is_redirect(text):
                    continue
                prose = strip_wiki_markup(text)
                if len(prose) >= MIN_ARTICLE:
                    yield title, prose


def strip_wiki_markup(text: str) -> str:
    """Paragraphs of prose, a blank line between them. XML entities are decoded already."""
    text = _without_nested(text, r"<!--", r"-->")
    text = _EMPTY_ELEMENT.sub(" ", text)
    text = _without_nested(text, r"<math\b[^<>]*>", r"</math\s*>", leaving=_FORMULA)
    text = _EXPONENT.sub("^", text)
    for element in _DROPPED_ELEMENTS:
        text = _without_nested(text, rf"<{element}\b[^<>]*>", rf"</{element}\s*>")
    text = _TAG.sub("", text)
    text = _without_nested(text, r"\{\{", r"\}\}")
    text = _without_nested(text, r"^[: \t]*\{\|", r"^[: \t]*\|\}")
    text = _HATNOTE.sub("", text)
    text = _BARE_URL.sub("", _EXTERNAL_LINK.sub(lambda link: link[1].strip(), text))
    for _ in range(_MAX_NESTED_LINKS):
        text, num_links = _LINK.subn(_link_text, text)
        if not num_links:
            break
    # What is left of these is unbalanced, a slip of a writer's: the words stay, the marks go.
    for mark in ("{{", "}}", "[[", "]]"):
        text = text.replace(mark, "")
    text = _MAGIC_WORD.sub("", _QUOTE_RUN.sub("", text))
    # Entities of the wiki text itself, behind those of the XML: &nbsp; and the like.
    return "\n\n".join(_prose_lines(html.unescape(text)))


def _is_redirect(text: str) -> bool:
    return text.lstrip()[:9].upper() == "#REDIRECT"


def _without_nested(text: str, opening: str, closing: str, leaving: str = "") -> str:
    """Without what stands between balanced marks, however deep; one scan, unbalanced marks stay."""
    starts: list[int] = []
    regions: list[tuple[int, int]] = []  # closed, none inside another
    for mark in _mark_pattern(opening, closing).finditer(text):
        if mark["opening"]:
            starts.append(mark.start())
        elif starts:
            start = starts.pop()
            while regions and regions[-1][0] > start:
                regions.pop()
            regions.append((start, mark.end()))
    pieces, end = list[str](), 0
    for start, stop in regions:
        pieces += text[end:start], leaving
        end = stop
    return "".join([*pieces, text[end:]])


@functools.cache
def _mark_pattern(opening: str, closing: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<opening>{opening})|{closing}", re.I | re.M)


def _link_text(link: re.Match[str]) -> str:
    target, pipe, label = link[1].rpartition("|")
    target, label = (target.partition("|")[0], label) if pipe else (label, label)
    space, colon, page = target.strip().partition(":")
    if colon and space:
        if space.strip().lower() in _DROPPED_LINKS or _LANGUAGE.fullmatch(space):
            return ""
        target = page
    if pipe and label.strip():
        return label
    if pipe:  # [[Mercury (planet)|]] shows Mercury
        return re.sub(r"\s*\([^()]*\)$", "", target)
    return (link[1] if colon and space else target).lstrip(":")


def _prose_lines(text: str) -> Iterator[str]:
    in_apparatus = False
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith("=") and line.endswith("="):
            in_apparatus = _APPARATUS.match(line.strip("= ")) is not None
        elif _FORMULA in line or _BOOK_NUMBER.search(line):
            continue
        elif not in_apparatus and len(line) >= MIN_LINE and line[0] not in "|!{}":
            line = " ".join(_INVISIBLE.sub("", _LIST_MARKER.sub("", line)).split())
            line = _EDGE_OF_HOLE.sub("", _HOLE.sub("", line))
            if len(line) >= MIN_LINE:
                yield line
