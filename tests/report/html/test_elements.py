import json
from html.parser import HTMLParser

from unet3d.report.html.elements import Html, embed_json, make_table, tag

ATTACK = "</td></script><script>alert(1)</script>"


class Reader(HTMLParser):
    """Collect elements and text."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def test_text_stays_text_in_elements_and_attributes():
    read = Reader(tag("p", ATTACK, title=f'" onclick="{ATTACK}'))
    assert read.elements == [("p", {"title": f'" onclick="{ATTACK}'})]
    assert "".join(read.texts) == ATTACK


def test_markup_is_markup_until_it_is_joined_with_text():
    bold = tag("b", "x")
    assert tag("p", bold) == "<p><b>x</b></p>"
    assert "&lt;b&gt;" in tag("p", f"{bold} and text")  # a plain string again


def test_data_cannot_end_its_element():
    read = Reader(embed_json({"name": ATTACK}, "data"))
    assert [name for name, _ in read.elements] == ["script"]
    assert json.loads("".join(read.texts)) == {"name": ATTACK}


def test_numbers_of_a_table_are_on_the_right():
    read = Reader(make_table([("case", "Dice"), (ATTACK, Html("<i>1</i>"))]))
    cells = [(name, a.get("class")) for name, a in read.elements if name in ("td", "th")]
    assert cells == [("th", None), ("th", "num"), ("td", None), ("td", "num")]
    assert ATTACK in read.texts


def test_characters_that_reorder_or_control_text_are_shown_as_escapes():
    name = "a\u202ecod.exe\x1b[2J\ud800\nb"
    escaped = "a\\u202ecod.exe\\x1b[2J\\ud800"
    assert tag("td", name, title=name).count(f"{escaped}\nb") == 2
    read = Reader(embed_json([{"name": name}, (name, 1)], "data"))
    assert json.loads("".join(read.texts)) == [{"name": escaped + "\\nb"}, [escaped + "\\nb", 1]]
