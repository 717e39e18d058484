"""Patches of kernel sources: located by their text, refused unless it occurs exactly once."""

from __future__ import annotations

import pytest

from attncheck.faults.patching import NotPlanted, apply_patches

SOURCES = {
    "a": "def f(x):\n    # why\n    y = x + 1  # more\n\n    return y\n",
    "b": "def g(x):\n    if x:\n        return 1\n    return 2\n",
}


def test_patch_matches_ignoring_indentation_comments_and_empty_lines():
    texts = apply_patches(
        SOURCES,
        [
            """
        -y = x + 1
        +y = x + 2
        +if y:
        +    y += 1
         return y
    """
        ],
    )
    assert texts["a"] == (
        "def f(x):\n    # why\n    y = x + 2\n    if y:\n        y += 1\n\n    return y\n"
    )
    assert texts["b"] == SOURCES["b"]


def test_patches_apply_in_order_and_may_append_functions():
    first = "+def h():\n+    return 0"
    texts = apply_patches(
        SOURCES, [first, " if x:\n-    return 1\n+    return h()", "-return h()\n+return -h()"]
    )
    assert texts["b"].endswith("        return -h()\n    return 2\n\ndef h():\n    return 0\n")
    assert apply_patches(SOURCES, []) == SOURCES


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("-y = x - 1\n+pass", "0 times"),
        ("-return 3\n+pass", "0 times"),
        (" return 1\n-def f(x):\n+pass", "0 times"),
        ("+pass", "only appends"),
    ],
)
def test_patch_whose_text_does_not_occur_once_is_refused(patch, message):
    with pytest.raises(NotPlanted, match=message):
        apply_patches(SOURCES, [patch])
    with pytest.raises(NotPlanted, match="2 times"):
        apply_patches(SOURCES | {"c": SOURCES["a"]}, ["-y = x + 1\n+pass"])
