"""StageTaps: how the hidden states that a draft model needs come to the first stage of a pipeline, which drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from stoker.layers.features import Tap
from stoker.models.draft import StepFeatures
from stoker.parallel.stages import Arrival, Stages

_NOTHING_TAPPED: Mapping[int, Tensor] = MappingProxyType({})


class StageTaps:
    """The taps of one rank. `layers` are those of the draft model, in ascending order; only the first stage has the model."""

    def __init__(self, stages: Stages, layers: Sequence[int]) -> None:
        self._stages = stages
        self.layers = [layer for layer in layers if stages.is_here(layer)]
        """Those of this stage, counted in the whole model."""

    def here(self, features: StepFeatures) -> list[Tap]:
        """Return the taps for the forward pass of this stage. Later stages send what they find to the first one."""
        stages = self._stages
        if stages.is_first:
            return [tap for tap in features.taps if stages.is_here(tap.layer)]
        return [Tap(layer - stages.first_layer, stages.send_feature) for layer in self.layers]

    def expect(
        self, features: StepFeatures, num_tokens: int, tapped: Mapping[int, Tensor] = _NOTHING_TAPPED
    ) -> Arrival:
        """Start to receive the features of a step from all stages. Called in the first stage, once per step. `tapped` has the
        hidden states of this stage's layers, if `here` was not used in the forward pass."""
        stages = self._stages
        arriving = {
            tap.layer: stages.receive_feature(num_tokens, tap.layer)
            for tap in features.taps
            if not stages.is_here(tap.layer)
        }

        def collect() -> Tensor:
            for tap in features.taps:
                if tap.layer in arriving:
                    tap.take(arriving[tap.layer]())
                elif tap.layer in tapped:
                    tap.take(tapped[tap.layer])
            return features.value()

        return collect
