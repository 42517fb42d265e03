"""OtherLoad: the requests that other gateways have on some workers. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple


class OtherLoad(NamedTuple):
    interactive: int = 0
    flex: int = 0
    busy_s: float = -math.inf  # when one of the interactive requests was last seen

    def plus(self, other: OtherLoad) -> OtherLoad:
        return OtherLoad(self.interactive + other.interactive, self.flex + other.flex, max(self.busy_s, other.busy_s))


NO_OTHERS = OtherLoad()
