"""Published text to prose: speeches, WikiText, MediaWiki. The inputs are small and our own."""

import hashlib
import time

import pytest

from residual_ebm.assets.catalog import ASSETS
from residual_ebm.assets.cleaning import (
    MIN_ARTICLE,
    MIN_LINE,
    clean_speech,
    detokenise_wikitext,
    strip_wiki_markup,
    wiki_documents,
    wikitext_documents,
)

# Speeches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("It is cold. [Laughter]\n\nWe go on.", "It is cold.\n\nWe go on."),
        ("Thank you. [Applause] Thank you.", "Thank you. Thank you."),
        ("Thank you. (Applause.) Thank you.", "Thank you. Thank you."),
        ("Thank you. (Laughter and applause.)", "Thank you."),
        ("My last--maybe--[laughter]--but here.", "My last--maybe--but here."),
        ("They deserve -- [applause] -- and so do we.", "They deserve -- and so do we."),
        ("Folks—[applause]—listen.", "Folks—listen."),
        ("But we—[applause]. But we can.", "But we. But we can."),
        ("We won, [applause], twice.", "We won, twice."),
        ("One. [Laughter] [Applause] Two.", "One. Two."),
        ("[As delivered in person before a joint session]\n\nMr. Speaker:", "Mr. Speaker:"),
        ("Sit down.\n\n[Audience members sang a song.]\n\nGood.", "Sit down.\n\nGood."),
        ("this important [see APP Note] matter", "this important matter"),
        ("the spirit has [p.3183] been kept", "the spirit has been kept"),
        ("the minority [majority; White House correction] leader", "the minority leader"),
        ("the panic [pandemic]* also came", "the panic also came"),
        ("it drives up profits [prices].* So", "it drives up profits. So"),
    ],
)
def test_asides_go_with_the_space_they_leave(text: str, clean: str) -> None:
    assert clean_speech(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "as [to] the efficacy of it",
        'to protect each of them [the States] against invasion."',
        "build 60,000 [50,000] aircraft",
        "[I repeat, this budget will be a balanced one.]",
        "the receipts (with the interest) and expenses",
        "the applause (to which we were used) ended",
        "a * * * b",
    ],
)
def test_words_in_brackets_that_were_said_or_supplied_stay(text: str) -> None:
    assert clean_speech(text) == text


def test_dates_in_brackets_are_written_out_where_the_sentence_needs_them() -> None:
    assert (
        clean_speech("By an act of [1815-03-03], so much") == "By an act of March 3, 1815, so much"
    )
    assert clean_speech("message of [1829-12], I had") == "message of December, 1829, I had"
    assert clean_speech("the 7th of August last [1794-08-07] was") == "the 7th of August last was"


def test_only_the_speaker_is_heard() -> None:
    text = (
        "The President. Good evening.\n\nAudience members. Boo!\n\nRep. Smith. Shame!\n\n"
        "The President. My plan—[laughter]. Audience member. [Inaudible]\n\n"
        "The President of France came."
    )
    assert clean_speech(text) == "Good evening.\n\nMy plan.\n\nThe President of France came."


def test_what_the_web_page_and_the_printer_added_goes() -> None:
    text = (
        "Jump toPart II |Part III\n\nIt is in the report.1 It was *very* good.* Yes.\n\n"
        "______ ____\n\nHARRY S. TRUMAN\nThe White House,\nJanuary 3, 1950."
    )
    assert clean_speech(text) == "It is in the report. It was very good. Yes."
    assert clean_speech("God bless you.\n\nThank you.") == "God bless you.\n\nThank you."


def test_wrapped_lines_are_joined_and_other_lines_kept() -> None:
    assert (
        clean_speech("where Mr. Truman\nstood, and\xa0I\t say")
        == "where Mr. Truman stood, and I say"
    )
    long = "word " * 14 + "word"
    assert clean_speech(f"{long}\nCongress {long}") == f"{long} Congress {long}"
    assert clean_speech("A TABLE\n1928 11.9\r\n1929 12.0 ") == "A TABLE\n1928 11.9\n1929 12.0"
    assert clean_speech("\ufeffone\n \n\n\n two ") == "one\n\ntwo"


# WikiText ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "prose"),
    [
        ("a guest @-@ star , with 1 @,@ 250 @.@ 5 tons .", "a guest-star, with 1,250.5 tons."),
        ("He ( the son ) said : no ; why ? Now !", "He (the son) said: no; why? Now!"),
        ('as " Craig " in " Ann \'s Story " .', 'as "Craig" in "Ann\'s Story".'),
        ("I don 't think we 're K 'inich", "I don't think we're K'inich"),
        ("the characters ' turns and players ' hands", "the characters' turns and players' hands"),
        ("he said ' Oh no ' and left", "he said 'Oh no' and left"),
        ("\" ' Loverboy ' is a song , \" he wrote", "\"'Loverboy' is a song,\" he wrote"),
        ("the ' 90s and rock ' n roll", "the '90s and rock 'n roll"),
        ("Guns N ' Roses", "Guns N' Roses"),
        ("$ 25 @,@ 000 or £ 60 , 26 % of it", "$25,000 or £60, 26% of it"),
        ("May 15 – 18 , 1911 – the day", "May 15–18, 1911 – the day"),
        ("influenced — not much — by it", "influenced—not much—by it"),
        ("70 mph ( 110 km / h ) at 7 : 30", "70 mph (110 km/h) at 7:30"),
        ("at 46 ° C , 30 ° north", "at 46 °C, 30° north"),
        ("R & B , Simon & Schuster", "R&B, Simon & Schuster"),
        ("\" [ h ] e and [ I ] saw ... it \"", "\"[h]e and [I] saw ... it\""),
        ("issues # 72 , ~ 54 , − 2", "issues #72, ~54, −2"),
        ("“ Now ? ” it ’ s ‘ so ’", "“Now?” it’s ‘so’"),
        ('a 12 " single . The song " Up " was', 'a 12" single. The song "Up" was'),
        ("5 ' 11 \" ( 1 @.@ 80 m ) \" tall \"", "5'11\" (1.80 m) \"tall\""),
        ('" Apollo 13 " and in 1998 " Song " came', '"Apollo 13" and in 1998 "Song" came'),
        ("", ""),
    ],
)  # fmt: skip
def test_detokenised(tokens: str, prose: str) -> None:
    assert detokenise_wikitext(tokens) == prose


def test_quotation_marks_open_anew_in_each_line() -> None:
    assert detokenise_wikitext('one " open\n" two " three') == 'one "open\n"two" three'


def test_articles_begin_at_titles_and_not_at_the_key_of_a_table() -> None:
    text = (
        " \n = First @-@ born ( film ) = \n \n It is , so . \n"
        " Key : W \n = Wins ; L = \n Losses \n \n"
        " = = A heading = = \n \n \n = = = Deeper = = = \n \n More . \n"
        " \n = Second = \n \n Text . \n"
    )
    assert list(wikitext_documents(text)) == [
        (
            "First-born (film)",
            "It is, so.\n\nKey: W\n\n= Wins; L =\n\nLosses\n\nA heading\n\nDeeper\n\nMore.",
        ),
        ("Second", "Text."),
    ]
    assert list(wikitext_documents("")) == []


# MediaWiki ---------------------------------------------------------------------------------------

REST = "and this is the rest of a line that is long enough to be kept as prose by the cleaner."


def stripped(markup: str) -> str:
    """What is left before a sentence that makes the line long enough to be kept."""
    [line] = strip_wiki_markup(f"{markup} {REST}").split("\n\n")
    return line.removesuffix(REST).strip()


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("A <!-- never\n== shown == --> b", "A b"),
        ("A {{one|{{two|x}}|[[y]]}} b", "A b"),
        ("A<ref name=x>[[Book]] p. 3</ref> b<ref name=x />", "A b"),
        ("A 10<sup>7</sup> m<SUP>−2</SUP> (x)<sup>n</sup>", "A 10^7 m^−2 (x)^n"),
        ("A 5<sup>th</sup> and note<sup>1</sup>", "A 5th and note1"),
        ("A [[References|[1]]] [[Image:x.png|thumb|[sic] b]] c", "A [1] c"),
        ("A <B>bold</B> <br> x<sub>2</sub> <span style='a'>b</span>", "A bold x2 b"),
        ("A [[link]] and [[page (x)|label]]s", "A link and labels"),
        ("A [[Mercury (planet)|]] b", "A Mercury b"),
        ("A [[Image:x.png|thumb|A [[link]] in a [http://x.org caption]]] b", "A b"),
        ("A [[Category:Things]] [[fr:Chose]] [[zh-min-nan:Chose]] b", "A b"),
        ("A [[:Category:Things]] [[Wiktionary:b|b]]", "A Category:Things b"),
        ("A [[2001: A Film]]", "A 2001: A Film"),
        ("A [http://x.org/a?b=c the label] [http://x.org] b http://y.org/z", "A the label b"),
        ("'''Bold''' and ''[[it]]alic'' and '''''both'''''", "Bold and italic and both"),
        ("Caf&eacute;&nbsp;a &ndash; b &lt; c", "Café a – b < c"),
        ("Name ({{IPA|x}}) is ( {{y}}, z ) , so", "Name is (z), so"),
        ("__NOTOC__A {{unclosed b", "A unclosed b"),
        ("*: A list: b", "A list: b"),
        ("Countries: North", "Countries: North"),
    ],
)
def test_wiki_markup(markup: str, text: str) -> None:
    assert stripped(markup) == text


def test_lines_that_are_no_prose_are_dropped() -> None:
    markup = "\n".join(
        [
            f":''This article is about something. For another thing {REST}''",
            f"First {REST}",
            f"If <math>x_1</math>, and <math>x_2</math> are independent, {REST}",
            f"A book, ISBN 0-123-45678-9. {REST}",
            "A short line.",
            "{| class=x",
            f"| cell {REST}",
            "{|",
            f"| inner {REST}",
            "|}",
            f"| cell {REST}",
            "|}",
            f"== A heading that is long: {REST} ==",
            f"Second {REST}",
            "== See also ==",
            f"* A book {REST}",
            "== Life ==",
            f"Third {REST}",
        ]
    )
    kept = [f"{word} {REST}" for word in ("First", "Second", "Third")]
    assert strip_wiki_markup(markup) == "\n\n".join(kept)
    assert strip_wiki_markup("x" * MIN_LINE) == "x" * MIN_LINE
    assert strip_wiki_markup("x" * (MIN_LINE - 1)) == ""


def page(title: str, text: str) -> str:
    return (
        f"  <page>\n    <title>{title}</title>\n    <revision>\n"
        f'      <text xml:space="preserve">{text}</text>\n    </revision>\n  </page>\n'
    )


def test_articles_of_a_dump() -> None:
    prose = "A sentence of prose &amp;amp; of &quot;[[words]]&quot;. " * (MIN_ARTICLE // 40 + 2)
    dump = (
        "<mediawiki>\n"
        + page("Old name", "#redirect [[New name]]" + prose)
        + page("Talk:New name", prose)
        + page("User talk:Someone", prose)
        + page("2001: A Film &amp; more", f"{prose}\n\n{prose}")
        + page("Stub", "Too little &lt;ref&gt;x&lt;/ref&gt; prose.")
        + page("Cut off", prose).partition("</text>")[0]
    )
    text = 'A sentence of prose & of "words". ' * (MIN_ARTICLE // 40 + 2)
    expected = [("2001: A Film & more", f"{text.strip()}\n\n{text.strip()}")]
    assert list(wiki_documents(dump)) == expected
    assert list(wiki_documents(iter(dump.splitlines(keepends=True)))) == expected


@pytest.mark.parametrize(
    "mark",
    [
        "{{",
        "}}",
        "[[",
        "<ref>",
        "<!--",
        "\n{|",
        "<a ",
        "''",
        "(",
        "[http://x ",
        "=",
        "\n",
        " (",
        "a",
    ],
)
@pytest.mark.parametrize("start", ["", "[http://"])
def test_unbalanced_marks_cost_linear_time(start: str, mark: str) -> None:
    before = time.process_time()
    strip_wiki_markup(start + mark * 100_000)
    assert time.process_time() - before < 5  # quadratic would be minutes


# Versions ----------------------------------------------------------------------------------------


def test_another_way_to_clean_is_another_version_of_the_asset() -> None:
    """Texts in users' caches are made anew when the version of their asset goes up, and only then.
    If this fails, raise the version in the catalog and put both here."""
    speech = "The state [applause] of it -- [laughter] -- is as [to] me, by [1815-03-03].\n\nI AM"
    tokens = ' = A = \n\n The " Up " 12 @,@ 5 \' s ( x ) , 5 \' 11 " and R & B – no 7 : 30 . \n'
    markup = (
        '<title>T</title>\n<text xml:space="preserve">'
        f"A [[b (c)|d]] {{{{e}}}} 10<sup>3</sup> ''f''<ref>g</ref> {REST * 20}</text>"
    )
    made = {
        "sotu": clean_speech(speech),
        "wikitext-2": str(list(wikitext_documents(tokens))),
        "enwik8": str(list(wiki_documents(markup))),
    }
    assert {
        name: (ASSETS[name].version, hashlib.sha256(text.encode()).hexdigest()[:8])
        for name, text in made.items()
    } == {"sotu": (1, "a1968d12"), "wikitext-2": (2, "7ddc7aca"), "enwik8": (2, "eebc7163")}
