"""Host memory in the text of a block: forward stores what it keeps there, backward fetches it.

Input: the values that a block keeps, those that lie on the host, and the Python names of all.
Output: the words of forward's result and of what backward unpacks, and the lines behind that;
`store` and `fetch` are those of `runtime.host`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FUNCTIONS = ("fetch", "store")
"""What a program may import from `runtime.host`."""


def stored_words(kept: Sequence[str], hosted: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """What forward returns for backward: the host's values as one, then the device's."""
    near = [words[name] for name in kept if name not in hosted]
    return [f"store({', '.join(words[name] for name in hosted)})", *near] if hosted else near


def taken_words(kept: Sequence[str], hosted: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """The names under which backward takes the same."""
    near = [words[name] for name in kept if name not in hosted]
    return ["on_host", *near] if hosted else near


def fetched_lines(hosted: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """Brings the host's values back, at the start of backward."""
    if not hosted:
        return []
    names = ", ".join(words[name] for name in hosted)
    return [f"    ({names},) = fetch(on_host)", "    del on_host"]
