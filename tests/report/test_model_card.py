"""The model card of a bundle."""

import re

from unet3d.report.model_card import make_model_card

PIPELINE = {
    "outputs": ["background", "<img src=x>"],
    "channels": ["[MRI](http://x)"],
    "classes": ["background", "<img src=x>"],
    "spacing_mm": None,
    "patch_size": [8, 8, 8],
    "regions": None,
    "keep_largest_component": ["<img src=x>"],
}


def test_names_are_not_markup():
    scores = {"dice": {"mean": 0.5, "low": 0.4, "high": 0.6}}
    report = {"evaluation": {"per_class": {"a | ![b](http://x)": scores}, "mean": scores}}
    metadata = {"config": {"model": {"_target_": "a.Net"}, "precision": "<b>", "seed": "`c`"}}
    card = make_model_card(PIPELINE, [metadata], [report])
    for markup in ("<img", "<b>", "[MRI]", "![b]", "`c`"):
        assert not re.search(r"(?<!\\)" + re.escape(markup), card), markup
    assert r"# Segmentation of \<img src=x\>" in card
    assert r"| a \| \!\[b\](http://x) | 0.5000 |" in card
