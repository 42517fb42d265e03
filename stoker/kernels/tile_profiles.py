"""The profiles of the tiles of the matmuls of few rows (tile_model.py), by the kind of weight.

They were fitted on an H200 to 26 weight shapes of published models from 1B to 70B, at 1, 8, 32 and 64 rows (one row: 39
shapes up to 123B). The 64 x 64 tile of the library is fictitious. tests/kernels/test_tile_choice.py compares the choices
with the measurements, and `python -m bench run kernel_grid` with those of the GPU at hand.
"""

from __future__ import annotations

from stoker.kernels.tile_model import RowClass, SkinnyTile, TileProfile

# Bytes per value. 4-bit weights have a scale of two bytes per 32 values.
WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0, "blocks": 1.0, "int4": 0.5 + 2 / 32}

_QUANT_SPLITS = (1, 2, 4, 8)  # those that were measured

# Numbers of a profile: programs per multiprocessor; rates of the GPU, of a program and of a multiprocessor; microseconds
# of the start and per 1,000 partial sums; sharpness.
# fmt: off
PROFILES: dict[str, tuple[RowClass, ...]] = {
    "bf16": (
        RowClass(1, (
            TileProfile(SkinnyTile(8, 256, 4, 4), 11, 4.17, 0.0147, 0.157, 1.83, 0.0, 5.11),
            TileProfile(SkinnyTile(4, 512, 4, 4), 10, 5.89, 0.0107, 0.032, 2.09, 0.0, 18.5),
        ), splits=(1,)),
        RowClass(16, (
            TileProfile(SkinnyTile(64, 128, 4, 4, fetched=1), 2, 4.42, 0.07, 0.103, 1.38, 0.112, 2.11),
            TileProfile(SkinnyTile(64, 128, 4, 6, fetched=1), 1, 4.32, 0.0871, 0.0956, 1.49, 0.189, 2.59),
        )),
        RowClass(32, (
            TileProfile(SkinnyTile(64, 64, 4, 6, fetched=1), 3, 4.02, 0.0501, 0.115, 2.02, 0.123, 2.44),
            TileProfile(SkinnyTile(64, 128, 4, 4, fetched=1), 2, 4.29, 0.0694, 0.0878, 1.59, 0.146, 2.2),
            TileProfile(SkinnyTile(64, 128, 4, 6, fetched=1), 1, 4.05, 0.0753, 0.057, 1.59, 0.236, 4.46),
        )),
        RowClass(64, (
            TileProfile(SkinnyTile(64, 128, 4, 4, fetched=1), 1, 4.47, 0.0374, 0.278, 1.07, 0.349, 2.95),
            TileProfile(SkinnyTile(64, 128, 4, 6, fetched=1), 1, 4.66, 0.0975, 0.0393, 1.63, 0.337, 2.93),
            TileProfile(SkinnyTile(128, 128, 4, 3, fetched=1), 1, 4.53, 0.0491, 0.115, 2.28, 0.266, 2.64),
            TileProfile(SkinnyTile(256, 64, 8, 4, fetched=1), 1, 4.41, 0.0688, 0.874, 6.28, 0.241, 2.85),
        ), TileProfile(SkinnyTile(64, 64, 4, 1), 2, 3.66, 0.118, 0.395, 3.15, 0.0479, 2.73)),
    ),
    "fp8": (
        RowClass(16, (
            TileProfile(SkinnyTile(32, 128, 2, 6), 6, 5.3, 0.0162, 0.103, 2.49, 0.101, 1.41),
            TileProfile(SkinnyTile(32, 256, 2, 3), 6, 4.85, 0.0153, 0.113, 2.64, 0.0698, 1.44),
            TileProfile(SkinnyTile(32, 256, 2, 4), 4, 7.57, 0.0162, 0.183, 2.44, 0.107, 1.11),
        ), splits=_QUANT_SPLITS),
        RowClass(64, (
            TileProfile(SkinnyTile(64, 128, 4, 4), 2, 5.68, 0.0227, 0.0502, 1.99, 0.223, 1.22),
            TileProfile(SkinnyTile(64, 256, 4, 3), 1, 2.8, 0.0203, 0.0233, 2.03, 0.36, 4.57),
        ), splits=_QUANT_SPLITS),
    ),
    "blocks": (
        RowClass(16, (
            TileProfile(SkinnyTile(32, 128, 2, 3), 12, 5.42, 0.0119, 0.197, 2.32, 0.0585, 1.17),
        ), splits=_QUANT_SPLITS),
        RowClass(64, (
            TileProfile(SkinnyTile(64, 128, 4, 3), 2, 4.25, 0.0129, 0.0338, 1.59, 0.203, 2.2),
            TileProfile(SkinnyTile(128, 128, 4, 4), 2, 5.07, 0.0229, 0.0386, 3.12, 0.184, 1.39),
        ), splits=_QUANT_SPLITS),
    ),
    "int4": (
        RowClass(16, (
            TileProfile(SkinnyTile(64, 256, 4, 2), 6, 6.79, 0.0089, 0.0811, 2.16, 0.0564, 0.965),
            TileProfile(SkinnyTile(128, 256, 4, 2), 2, 16, 0.0158, 0.143, 1.93, 0.0524, 0.83),
            TileProfile(SkinnyTile(128, 256, 4, 3), 2, 54.7, 0.0491, 0.242, 2.37, 0.0748, 0.506),
        ), splits=_QUANT_SPLITS),
        RowClass(64, (
            TileProfile(SkinnyTile(64, 256, 4, 2), 3, 3.37, 0.00636, 0.179, 2.46, 0.143, 1.02),
            TileProfile(SkinnyTile(64, 256, 4, 3), 1, 1.9, 0.00827, 0.0628, 1.57, 0.331, 3.65),
            TileProfile(SkinnyTile(128, 256, 4, 2), 2, 431, 0.013, 5.21, 2.82, 0.168, 0.371),
            TileProfile(SkinnyTile(128, 256, 4, 4), 1, 2.77, 0.0251, 0.0125, 2.63, 0.251, 2.67),
        ), splits=_QUANT_SPLITS),
    ),
}
# fmt: on
