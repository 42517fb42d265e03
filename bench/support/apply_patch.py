"""A grammar of patches in the format of Codex's `apply_patch` tool, and an independent check of its texts."""

from __future__ import annotations

import re

GRAMMAR = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_file | delete_file | update_file
add_file: "*** Add File: " name LF added+
delete_file: "*** Delete File: " name LF
update_file: "*** Update File: " name LF moved? changes?
name: /(.+)/
added: "+" /(.*)/ LF
moved: "*** Move to: " name LF
changes: (place | line)+ end_of_file?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
end_of_file: "*** End of File" LF

%import common.LF
"""

_NAME = r"[^\n]+\n"
_CHANGES = r"(?:(?:@@\n|@@ [^\n]+\n|[-+ ][^\n]*\n)+(?:\*\*\* End of File\n)?)?"
_PATCH = re.compile(
    r"\*\*\* Begin Patch\n"
    rf"(?:\*\*\* Add File: {_NAME}(?:\+[^\n]*\n)+"
    rf"|\*\*\* Delete File: {_NAME}"
    rf"|\*\*\* Update File: {_NAME}(?:\*\*\* Move to: {_NAME})?{_CHANGES})+"
    r"\*\*\* End Patch\n?"
)


def is_patch(text: str) -> bool:
    """Return True if the text is a patch, by a regular expression that does not share code with the grammar."""
    return _PATCH.fullmatch(text) is not None
